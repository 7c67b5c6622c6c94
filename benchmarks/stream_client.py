"""Many clients of a server of completions, in one process that does little else: for server.py.

    python benchmarks/stream_client.py < jobs.jsonl        a line of results for each job, when it has ended

A job is {"host", "port", "path", "bodies": [...]}: its requests are sent at once, each over a connection of
its own, and their streams are read to the end. A result has, for each request in order, the seconds from the
moment at which all are sent to every event with text, and the tokens that the server counted; `seconds` to
the end, and `cpu_s` of this process. No HTTP client: their parsers would be the limit. Ends with an error
where a server refuses a request or breaks off.
"""

import asyncio
import json
import sys
import time


class Stream(asyncio.Protocol):
    """One request, and its answer's events with the time of each."""

    def __init__(self, request: bytes):
        self._request, self._rest = request, b""
        self.times: list[float] = []
        self.tokens = 0
        self.done = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport) -> None:
        self.transport = transport

    def send(self) -> None:
        assert self.transport is not None
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._read(line, now)

    def _read(self, line: bytes, now: float) -> None:
        if line.startswith(b"HTTP/1.1 ") and not line.startswith(b"HTTP/1.1 200"):
            self._fail(line)
        elif line.startswith(b"data: [DONE]"):
            self._end()
        elif line.startswith(b"data: "):
            # Bodies are not parsed but for the last: that would be the limit with many clients.
            if b'"completion_tokens"' in line:
                body = json.loads(line[6:])
                self.tokens = body["usage"]["completion_tokens"]
                if not any(choice.get("text") for choice in body["choices"]):
                    return
            self.times.append(now)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(error or b"the server closed the connection")

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def _fail(self, reason: object) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(f"no whole answer: {reason!r}"))


async def crowd(job: dict) -> dict:
    loop, streams = asyncio.get_running_loop(), []
    for body in job["bodies"]:
        data = json.dumps(body).encode()
        head = f"POST {job['path']} HTTP/1.1\r\nHost: {job['host']}\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        streams.append(Stream(request))
        await loop.create_connection(lambda own=streams[-1]: own, job["host"], job["port"])
    began, cpu = time.perf_counter(), time.process_time()
    for stream in streams:
        stream.send()
    async with asyncio.timeout(job.get("timeout_s", 600)):
        await asyncio.gather(*(stream.done for stream in streams))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    for stream in streams:
        stream.transport.abort()
    times = [[at - began for at in stream.times] for stream in streams]
    return {"times": times, "tokens": [s.tokens for s in streams], "seconds": seconds, "cpu_s": cpu}


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(asyncio.run(crowd(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
