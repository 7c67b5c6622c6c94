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


async def unless_left[T](
    receive: Receive, work: Coroutine[Any, Any, T], *signs: Coroutine[Any, Any, None]
) -> T:
    """The result of work. If the client leaves first the work is cancelled. Raises ClientLeft.

    signs  each ends when the client does not seem to be there
    """
    working = asyncio.ensure_future(work)
    leaving = [asyncio.ensure_future(sign) for sign in (_left(receive), *signs)]
    try:
        await asyncio.wait({working, *leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        for task in (working, *leaving):
            task.cancel()
        await asyncio.gather(working, *leaving, return_exceptions=True)


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
        writer = _Writer(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            failure = await unless_left(receive, self._written(writer), writer.stalled())
        finally:
            with contextlib.suppress(RuntimeError):  # it is being closed
                await self._events.aclose()
        if failure is not None:
            await error_response(self._errors, failure)(scope, receive, send)

    async def _written(self, writer: "_Writer") -> RequestError | None:
        """Write all events. Returns the error that came before the first of them."""
        try:
            async for events in self._events:
                if events:
                    await writer.write(b"".join([event.encode() for event in events]))
        except RequestError as error:
            if not writer.started:
                return error
            await writer.write(ServerEvent(self._errors.error(error)).encode())  # only comments were sent
        await writer.write(b"", more=False)
        return None


class _Writer:
    """Sends a body in parts. start: the message before the first."""

    def __init__(self, send: Send, start: dict[str, Any]):
        self._send, self._start, self.started = send, start, False
        self._lock, self._writing, self._at = asyncio.Lock(), False, time.monotonic()

    async def write(self, data: bytes, more: bool = True) -> None:
        """Waits while the client does not read. Raises ClientLeft where it is gone."""
        async with self._lock:
            self._at, self._writing = time.monotonic(), True
            try:
                if not self.started:
                    self.started = True
                    await self._send(self._start)
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
            except OSError:
                raise ClientLeft from None
            self._writing = False

    async def stalled(self) -> None:
        """Write a comment whenever nothing else was written for a while, so that no proxy gives up. Returns
        when the client has read nothing for STALLED_S: a timer for each write would cost more than the
        write."""
        while True:
            limit = STALLED_S if self._writing else STILL_WORKING_S
            left = self._at + limit - time.monotonic()
            if left > 0:
                await asyncio.sleep(min(left, STALLED_S))
            elif self._writing:
                return
            else:
                try:
                    async with asyncio.timeout(STALLED_S):
                        await self.write(COMMENT)
                except TimeoutError:
                    return
