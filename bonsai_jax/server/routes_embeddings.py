"""POST /v1/embeddings."""

from typing import Any, cast

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from bonsai_jax.engine.prompts import encode
from bonsai_jax.protocols import openai_embeddings
from bonsai_jax.protocols.answers import Usage
from bonsai_jax.protocols.errors import FieldError
from bonsai_jax.protocols.openai_embeddings import EmbeddingRequest
from bonsai_jax.protocols.submit import TOO_LONG, check_size
from bonsai_jax.research.embeddings import embed_ids
from bonsai_jax.server import bodies
from bonsai_jax.server.responses import json_response, unless_left
from bonsai_jax.server.service import Service

TEXTS_AT_ONCE = 64  # then other requests come in between, and it matters whether the client has left


async def embeddings(service: Service, request: Request) -> Response:
    """Whole texts are read one request at a time, beside the engine."""
    asked = openai_embeddings.request(await bodies.json_object(service, request))
    return await unless_left(request.receive, _answer(service, request, asked))


async def _answer(service: Service, request: Request, asked: EmbeddingRequest) -> Response:
    hidden = service.model.config.hidden
    if asked.dimensions not in (None, hidden):
        raise FieldError("dimensions", f"this model's vectors have {hidden}, no other number; leave it out")
    pooling = asked.pooling or service.settings.pooling
    with service.admitted(1):
        texts = await service.in_thread(_encoded, service, asked)
        tokens, vectors = sum(map(len, texts)), []
        request.state.usage = lambda: Usage(tokens, 0)
        service.metrics.prompt_tokens.inc(tokens)
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            vectors.append(await service.read(embed_ids, texts[first : first + TEXTS_AT_ONCE], pooling))
    body = await service.in_thread(
        openai_embeddings.whole, asked, np.concatenate(vectors), service.settings.name, pooling, tokens
    )
    return json_response(body)


def _encoded(service: Service, asked: EmbeddingRequest) -> list[list[int]]:
    """Token ids of each text. Raises FieldError."""
    most, texts = service.model.run.context, []
    for one in asked.inputs:
        check_size("input", service.model.tokenizer, [one], most)
        texts.append(_ids(service, one))
        if len(texts[-1]) > most:
            message = f"a text has {len(texts[-1])} tokens, and the context {most}"
            raise FieldError("input", message, code=TOO_LONG)
    return texts


def _ids(service: Service, one: Any) -> list[int]:
    try:
        return cast(list[int], encode(service.model, one))
    except ValueError as error:
        raise FieldError("input", str(error)) from None
