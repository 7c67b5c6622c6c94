"""POST /v1/messages/count_tokens: how many tokens a prompt has."""

from starlette.requests import Request
from starlette.responses import Response

from bonsai_jax.protocols import anthropic_messages
from bonsai_jax.protocols.submit import prompt_ids
from bonsai_jax.server import bodies
from bonsai_jax.server.responses import json_response
from bonsai_jax.server.service import Service


async def count_tokens(service: Service, request: Request) -> Response:
    """{"messages": [...], "system": ..., "tools": [...]} -> {"input_tokens": N}"""
    own = anthropic_messages.prompt(await bodies.json_object(service, request))
    (ids,) = await service.in_thread(prompt_ids, own, service.model, service.defaults)
    return json_response({"input_tokens": len(ids)})
