"""POST /tokenize, /detokenize, /apply-template: what the tokenizer makes of a text, a chat or token ids, as
llama-server has them."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from bonsai_jax.protocols import fields, openai_chat, openai_messages
from bonsai_jax.protocols.errors import FieldError
from bonsai_jax.protocols.submit import check_size, roles
from bonsai_jax.server import bodies
from bonsai_jax.server.responses import json_response
from bonsai_jax.server.service import Service

TOKENIZE = {"content": fields.text, "add_special": fields.truth, "parse_special": fields.truth}
TEMPLATE = {"chat_template_kwargs": openai_chat.variables, "tools": openai_chat.TOOLS["tools"]}


async def tokenize(service: Service, request: Request) -> Response:
    """{"content": TEXT, "add_special": false, "parse_special": true} -> {"tokens": [...]}"""
    given = await _given(service, request, TOKENIZE, "content")
    tokenizer, special = service.model.tokenizer, given.get("add_special", False)
    # Longer texts are no prompts of this model, and a tokenizer takes 100 bytes of memory for a character.
    check_size("content", tokenizer, [given["content"]], service.defaults.most_tokens)

    def encoded() -> list[int]:
        parse = given.get("parse_special", True)
        return tokenizer.encode(given["content"], add_special=special, parse_special=parse)

    return json_response({"tokens": await _called(service, "content", encoded)})


async def detokenize(service: Service, request: Request) -> Response:
    """{"tokens": [...]} -> {"content": TEXT}"""
    given = await _given(service, request, {"tokens": fields.ids}, "tokens")
    tokenizer = service.model.tokenizer
    text = await _called(service, "tokens", lambda: tokenizer.decode(given["tokens"], skip_special=False))
    return json_response({"content": text})


async def apply_template(service: Service, request: Request) -> Response:
    """{"messages": [...]} -> {"prompt": TEXT}, the text that a chat becomes."""
    known = TEMPLATE | {"messages": openai_messages.check(strict=False)}
    given = await _given(service, request, known, "messages")
    variables = service.settings.template | given.get("chat_template_kwargs", {})
    tokenizer = service.model.tokenizer

    def applied() -> str:
        messages, tools = roles(tokenizer, given["messages"]), given.get("tools")
        return tokenizer.apply_chat_template(messages, tools=tools, **variables)

    return json_response({"prompt": await _called(service, "messages", applied)})


async def _given(service: Service, request: Request, known: dict[str, Any], needed: str) -> dict[str, Any]:
    body = await bodies.json_object(service, request)
    given = fields.read(body, known, strict=False, path=request.url.path)
    if needed not in given:
        raise FieldError(needed, "missing")
    return given


async def _called(service: Service, where: str, function: Any) -> Any:
    """The function's result, of a thread. Its ValueError is about the field `where`."""
    try:
        return await service.in_thread(function)
    except ValueError as error:
        raise FieldError(where, str(error)) from None
