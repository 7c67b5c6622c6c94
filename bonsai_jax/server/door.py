"""What every request passes: who may ask, what an error looks like, and a line in the log.

Safe by default: a page of another origin is refused, and, where no key is needed, so is a page under a name
that somebody else's DNS points to this machine.
"""

import hashlib
import hmac
import ipaddress
import logging
import secrets
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bonsai_jax.protocols.errors import RequestError
from bonsai_jax.server.responses import ClientLeft, error_response
from bonsai_jax.server.service import Service

OPEN = {"/", "/health", "/ready"}  # without a key
LEFT = 499  # in the log: the client did not wait for the answer

log = logging.getLogger("bonsai_jax.server")


class Door:
    """ASGI middleware.

    protocols   by path; `otherwise` writes the errors of all other paths
    paths       that metrics name
    """

    def __init__(
        self, app: ASGIApp, service: Service, protocols: dict[str, Any], otherwise: Any, paths: set[str]
    ):
        self._app, self._service = app, service
        self._protocols, self._otherwise, self._paths = protocols, otherwise, paths
        self._keys = [_digest(key) for key in service.settings.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, id = time.perf_counter(), 0, secrets.token_hex(8)
        scope.setdefault("state", {})["owner"] = ""

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(raw=message["headers"])
                headers["x-request-id"] = headers["request-id"] = (
                    id  # as OpenAI's and Anthropic's clients look
                )
            try:
                await send(message)
            except Exception as error:  # uvicorn has answered itself: the end of the body was no HTTP
                raise ClientLeft from error

        try:
            try:
                self._check(scope)
                await self._app(scope, receive, noting)
            except ClientLeft:
                status = LEFT
            except Exception as error:
                if not isinstance(error, RequestError):
                    log.exception("%s %r failed (request %s)", scope["method"], scope["path"], id)
                    error = RequestError(500, f"the server failed; its log has the reason (request {id})")
                if not status:  # else the answer has begun, and is broken off
                    protocol = self._protocols.get(scope["path"], self._otherwise)
                    await error_response(protocol, error)(scope, receive, noting)
        finally:
            self._note(scope, status or LEFT, time.perf_counter() - began, id)

    def _check(self, scope: Scope) -> None:
        """Raises RequestError for a request that may not pass."""
        headers, settings = Headers(scope=scope), self._service.settings
        host, origin = headers.get("host", ""), headers.get("origin")
        allowed = {origin, "*"} & {*settings.origins}
        if origin is not None and origin.partition("://")[2] != host and not allowed:
            raise RequestError(403, f"pages of {origin!r} may not use this server; see --cors")
        if settings.local and not self._keys and not _is_local(host):
            raise RequestError(
                403, f"this server is not called {host!r}; to be reached by other names, it needs --api-key"
            )
        if self._keys and scope["path"] not in OPEN:
            own = self._key(headers)
            if own is None:
                raise RequestError(401, "no valid API key was given: send one as 'Authorization: Bearer KEY'")
            if not settings.share_prefixes:
                scope["state"]["owner"] = own.hex()

    def _key(self, headers: Headers) -> bytes | None:
        """The digest of the request's key; None: it has no valid one."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        own = _digest(given)
        valid = sum(hmac.compare_digest(own, key) for key in self._keys)  # in the same time for all
        return own if valid else None

    def _note(self, scope: Scope, status: int, seconds: float, id: str) -> None:
        path = scope["path"] if scope["path"] in self._paths else "other"
        self._service.metrics.requests.labels(path, str(status)).inc()
        self._service.metrics.request_s.labels(path).observe(seconds)
        usage, client = scope["state"].get("usage"), scope.get("client") or ("?",)
        tokens = ""
        if usage is not None:
            own = usage()
            tokens = f", {own.prompt_tokens} ({own.cached_tokens} cached) + {own.new_tokens} tokens"
        quiet = path == "other" or scope["method"] == "GET"
        level = logging.DEBUG if quiet else logging.INFO
        log.log(
            level, "%s %s %d %.3f s%s, %s, %s", scope["method"], path, status, seconds, tokens, client[0], id
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _is_local(host: str) -> bool:
    """Whether a Host header names this machine: an address, or localhost."""
    name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    if name.lower() == "localhost" or not name:
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")) is not None
    except ValueError:
        return False
