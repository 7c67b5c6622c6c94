"""Routes, and what they share."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bonsai_jax.protocols import (
    anthropic_messages,
    openai,
    openai_chat,
    openai_completions,
    openai_embeddings,
    openai_responses,
)
from bonsai_jax.protocols.errors import RequestError
from bonsai_jax.server import (
    bodies,
    routes_anthropic,
    routes_embeddings,
    routes_models,
    routes_page,
    routes_tokens,
)
from bonsai_jax.server.answering import Answering
from bonsai_jax.server.door import Door
from bonsai_jax.server.responses import EventStream, json_response, unless_left
from bonsai_jax.server.service import Service

Endpoint = Callable[[Service, Request], Awaitable[Response]]

PROTOCOLS = {
    protocol.PATH: protocol
    for protocol in (openai_chat, openai_completions, openai_responses, anthropic_messages)
}
ERRORS = PROTOCOLS | {anthropic_messages.COUNT_PATH: anthropic_messages}  # who writes them; openai elsewhere
GETS: dict[str, Endpoint] = {
    "/": routes_page.page,
    "/v1/models": routes_models.models,
    "/v1/models/{name:path}": routes_models.model,
    "/health": routes_models.health,
    "/ready": routes_models.ready,
    "/tokenizer_info": routes_tokens.tokenizer_info,
    "/version": routes_models.version,
    "/openapi.json": routes_models.openapi_json,
    "/metrics": routes_models.own_metrics,
}
POSTS: dict[str, Endpoint] = {
    openai_embeddings.PATH: routes_embeddings.embeddings,
    anthropic_messages.COUNT_PATH: routes_anthropic.count_tokens,
    "/tokenize": routes_tokens.tokenize,
    "/detokenize": routes_tokens.detokenize,
    "/apply-template": routes_tokens.apply_template,
}


def app(service: Service) -> Starlette:
    """The ASGI application, which has no lifespan: whoever runs it closes the service afterwards."""

    def bound(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        async def call(request: Request) -> Response:
            return await endpoint(service, request)

        return call

    # The first are found first.
    posts = {path: answering(protocol) for path, protocol in PROTOCOLS.items()} | POSTS
    routes = [Route(path, bound(endpoint), methods=["POST"]) for path, endpoint in posts.items()]
    routes += [Route(path, bound(endpoint), methods=["GET"]) for path, endpoint in GETS.items()]
    paths = {*GETS, *posts}
    middleware = [Middleware(Door, service, ERRORS, openai, paths)]
    if service.settings.origins:
        origins = list(service.settings.origins)
        cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        middleware.insert(0, cors)
    errors = {HTTPException: _unrouted}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=errors)


def answering(protocol: Any) -> Endpoint:
    """The endpoint of a protocol: its answers, whole or as events."""

    async def endpoint(service: Service, request: Request) -> Response:
        body = await bodies.json_object(service, request)
        work = Answering(service, protocol, protocol.request(body), request.state.owner)
        request.state.usage = lambda: work.usage
        if work.request.stream:
            return EventStream(work.events(), protocol)
        return json_response(await unless_left(request.receive, work.whole()))

    return endpoint


async def _unrouted(request: Request, error: Exception) -> Response:
    """No such path, or not this method."""
    assert isinstance(error, HTTPException)
    reason = RequestError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return json_response(openai.error(reason), error.status_code, dict(error.headers or {}))
