"""JSON, and streams of events that end when the client leaves."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bonsai_jax.protocols.answers import ServerEvent
from bonsai_jax.protocols.errors import RequestError

STILL_WORKING_S = 15.0  # without an event, before a comment is sent that keeps proxies from giving up
STALLED_S = 60.0  # that a client may take to read what is sent
BODIES_FULL = "bodies_full"  # the code of an error
COMMENT = b": still working\n\n"


class ClientLeft(Exception):
    """Nobody is there to read the answer."""


def json_response(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON in ASCII: a text may have half a character, which UTF-8 cannot write."""
    return Response(json.dumps(body), status, headers, "application/json")


def error_response(protocol: Any, error: RequestError) -> Response:
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    if error.status in (408, 413) or error.code == BODIES_FULL:  # the rest of the body is not read
        headers["connection"] = "close"
    return json_response(protocol.error(error), error.status, headers)


async def unless_left[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of work. If the client leaves first the work is cancelled. Raises ClientLeft."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. An error before the first event has a status of its own (`errors` writes it)."""

    def __init__(self, events: AsyncGenerator[list[ServerEvent]], errors: Any):
        self._events, self._errors = events, errors
        super().__init__(
            b"", 200, {"cache-control": "no-cache", "x-accel-buffering": "no"}, "text/event-stream"
        )
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_left(receive, self._send(scope, receive, send))
        finally:
            with contextlib.suppress(RuntimeError):  # it is being closed
                await self._events.aclose()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = _Writer(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        waking = asyncio.ensure_future(writer.keep_awake())
        failure = None
        try:
            async for events in self._events:
                if events:
                    await writer.write(b"".join([event.encode() for event in events]))
        except RequestError as error:
            failure = error
        finally:
            waking.cancel()
            await asyncio.gather(waking, return_exceptions=True)
        if failure is not None and not writer.started:
            await error_response(self._errors, failure)(scope, receive, send)
            return
        if failure is not None:  # only comments were sent
            await writer.write(ServerEvent(self._errors.error(failure)).encode())
        await writer.write(b"", more=False)


class _Writer:
    """Sends a body in parts. start: the message before the first."""

    def __init__(self, send: Send, start: dict[str, Any]):
        self._send, self._start, self.started = send, start, False
        self._lock, self._written_at = asyncio.Lock(), time.monotonic()

    async def write(self, data: bytes, more: bool = True) -> None:
        """Raises ClientLeft where nobody reads."""
        try:
            async with self._lock, asyncio.timeout(STALLED_S):
                if not self.started:
                    self.started = True
                    await self._send(self._start)
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
                self._written_at = time.monotonic()
        except (TimeoutError, OSError):
            raise ClientLeft from None

    async def keep_awake(self) -> None:
        """Write a comment whenever nothing else was written for a while, so that no proxy gives up."""
        while True:
            left = self._written_at + STILL_WORKING_S - time.monotonic()
            if left <= 0:
                await self.write(COMMENT)
            else:
                await asyncio.sleep(left)
