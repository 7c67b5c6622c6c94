"""uvicorn's connections, which do not wait for ever, and spend little on each part of a stream."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 20.0  # in which the head of a request must arrive
CORKED = 2**16  # bytes that are not held back any longer


class Chunked(h11.Connection):
    """h11 checks each part of a body as if it were the first, which takes longer than to send it. Here parts
    of a chunked body are only framed (RFC 9112, 7.1)."""

    _is_chunked = False

    def send(self, event: h11.Event) -> bytes | None:  # pyrefly: ignore[bad-override] (its overloads)
        if self._is_chunked and type(event) is h11.Data:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        out = super().send(event)
        self._is_chunked = (
            isinstance(event, h11.Response) and b"\r\ntransfer-encoding: chunked" in (out or b"").lower()
        )
        return out


class Corked:
    """A transport that sends together what is written in one turn of the event loop, such as a head and the
    first part of a stream, or the last part and the end: each write of a socket is a system call."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop):
        self._transport, self._loop = transport, loop
        self._parts: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        if not data:
            return
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)
        self._size += len(data)
        if self._size > CORKED:  # so that the transport tells a fast writer to wait
            self._flush()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _flush(self) -> None:
        parts, self._parts, self._size = self._parts, [], 0
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))


class Connection(H11Protocol):
    """A connection that is closed when the head of a request does not arrive in time: uvicorn limits only the
    time between requests, and a head that never ends would hold its socket."""

    _closing: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.conn = Chunked(h11.SERVER)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.transport = Corked(transport, self.loop)  # pyrefly: ignore[bad-assignment] (what uvicorn uses)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()

    def _await_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._closing is None:
            self._closing = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
