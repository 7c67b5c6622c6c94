"""GET routes: what is served, and whether it is well."""

import datetime
from importlib import metadata
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from bonsai_jax.protocols.errors import RequestError
from bonsai_jax.server import openapi
from bonsai_jax.server.responses import json_response
from bonsai_jax.server.service import Service


async def models(service: Service, request: Request) -> Response:
    """GET /v1/models: the model and its adapters, in OpenAI's form, or Anthropic's to a client of theirs."""
    every = names(service)
    if "anthropic-version" in request.headers:
        data = [_anthropic(service, name) for name in every]
        return json_response({"data": data, "has_more": False, "first_id": every[0], "last_id": every[-1]})
    return json_response({"object": "list", "data": [_openai(service, name) for name in every]})


def names(service: Service) -> list[str]:
    """Of the model, and of the adapters that requests may name in its place."""
    return [service.settings.name, *service.engine.options.adapters]


async def model(service: Service, request: Request) -> Response:
    """GET /v1/models/NAME."""
    name = request.path_params["name"]
    if name not in names(service):
        served = ", ".join(map(repr, names(service)))
        raise RequestError(404, f"no model {name!r} is served, only {served}", param="model")
    form = _anthropic if "anthropic-version" in request.headers else _openai
    return json_response(form(service, name))


def _openai(service: Service, name: str) -> dict[str, Any]:
    own = {
        "id": name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "bonsai-jax",
        "context_length": service.defaults.most_tokens,
    }
    return own if name == service.settings.name else own | {"parent": service.settings.name}


def _anthropic(service: Service, name: str) -> dict[str, Any]:
    created = datetime.datetime.fromtimestamp(int(service.started), datetime.UTC)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


async def health(service: Service, request: Request) -> Response:
    """GET /health: 200 while the engine runs."""
    if service.engine.broken is not None:
        return json_response({"status": "failed", "reason": "the engine has failed; restart the server"}, 503)
    return json_response({"status": "ok"})


async def ready(service: Service, request: Request) -> Response:
    """GET /ready: 200 once every program is compiled, until the server shuts down."""
    if service.engine.broken is not None or service.draining or not service.ready:
        return json_response({"status": "not ready"}, 503, {"retry-after": "1"})
    return json_response({"status": "ready"})


async def version(service: Service, request: Request) -> Response:
    """GET /version."""
    return json_response({"version": _version()})


def _version() -> str:
    try:
        return metadata.version("bonsai-jax")
    except metadata.PackageNotFoundError:
        return "a checkout that is not installed"


async def openapi_json(service: Service, request: Request) -> Response:
    """GET /openapi.json."""
    return json_response(openapi.description(_version(), keys=bool(service.settings.keys)))


async def own_metrics(service: Service, request: Request) -> Response:
    """GET /metrics."""
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
