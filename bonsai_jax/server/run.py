"""A server from start to end: a socket, an engine, uvicorn, signals."""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import logging
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import uvicorn

from bonsai_jax.engine import Engine
from bonsai_jax.server.app import app
from bonsai_jax.server.connections import Connection
from bonsai_jax.server.service import Service
from bonsai_jax.server.settings import Settings

SWITCH_S = 0.0005  # after which a waiting thread gets the GIL: the engine's may have a step to dispatch
KEEP_ALIVE_S = 75  # a connection without a request: longer than clients keep theirs

log = logging.getLogger("bonsai_jax.server")


def bound(host: str, port: int) -> socket.socket:
    """A socket at this address, to which nobody can connect yet. port 0: any that is free. Raises ValueError
    where the address is in use or none of this machine."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        own = socket.socket(family, kind, protocol)  # asyncio turns Nagle's algorithm off if it sees TCP
    except OSError as error:
        raise ValueError(f"--host {host}: {error.strerror}") from None
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        own.bind(address)
    except OSError as error:
        own.close()
        raise ValueError(
            f"--host {host} --port {port}: {error.strerror}; give another --port, or 0"
        ) from None
    return own


def url(own: socket.socket) -> str:
    host, port = own.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def page_url(own: socket.socket) -> str:
    """What to open in a browser of this machine: 0.0.0.0 stands for all of its addresses, and is none."""
    return url(own).replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


class Server(uvicorn.Server):
    """uvicorn, which SIGTERM and SIGINT end in good order: running requests are answered first. The second
    signal ends them too."""

    def __init__(self, service: Service, grace_s: float):
        self._service = service
        config = uvicorn.Config(
            app(service), http=Connection, ws="none", log_config=None, access_log=False,
            server_header=False, proxy_headers=False,
            lifespan="off", timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=math.ceil(grace_s),
        )  # fmt: skip
        super().__init__(config)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().serve(sockets)
        finally:
            self._service.close()

    async def begun(self, own: socket.socket) -> asyncio.Future[None]:
        """Serve at this socket. Returns once requests, and signals, are taken; the future ends with the
        server."""
        serving = asyncio.ensure_future(self.serve(sockets=[own]))
        while not (self.started or serving.done()):
            await asyncio.sleep(0.005)
        return serving

    def end(self) -> None:
        """Answer what is running, and take no more."""
        self.force_exit = self.should_exit
        self.should_exit = self._service.draining = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # pyrefly: ignore[bad-override]
        """Without uvicorn's end, which raises the signal again: a server that drained has ended well."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {one: signal.signal(one, lambda *_: self.end()) for one in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)


def serve(
    engine: Engine,
    settings: Settings,
    own: socket.socket,
    *,
    compile: bool = True,
    grace_s: float = 30.0,
    tell: Callable[[str], None] = print,
) -> None:
    """Serve an engine's model at a bound socket until SIGTERM or SIGINT, in a process that does nothing else.

    compile   compile every program at the start; requests are taken meanwhile, and wait
    grace_s   seconds that running requests have to end after the signal
    tell      called with a line when the server answers, and when it is warm
    """

    async def run() -> None:
        service, place = Service(engine, settings), url(own)
        server = Server(service, grace_s)
        serving = await server.begun(own)
        tell(f"serving {settings.name} at {place} with a page to chat: {page_url(own)}")
        warming = asyncio.ensure_future(warm(service, compile, tell))
        warming.add_done_callback(lambda _: _freeze())
        try:
            await serving
        finally:
            warming.cancel()
            await asyncio.gather(warming, return_exceptions=True)

    sys.setswitchinterval(SWITCH_S)
    asyncio.run(run())


def _freeze() -> None:
    """Exempt all objects that exist from Python's garbage collection, which else walks those of jax and the
    tokenizer again and again: 0.1 s in which no thread runs. For a process that serves until it ends."""
    gc.collect()
    gc.freeze()


async def warm(service: Service, compile: bool, tell: Callable[[str], None]) -> None:
    """Compile every program, if asked to. From then on the server is ready. Programs for constraints, which
    not everybody uses, come afterwards, while it serves."""
    began = time.perf_counter()
    if compile:
        try:
            samplers = service.settings.sampling.chained
            await service.in_thread(functools.partial(service.engine.warmup, samplers=samplers))
        except Exception as error:
            if not service.draining:
                log.error("warming up failed: %s", error)
            return
    service.ready = True
    tell(f"ready after {time.perf_counter() - began:.1f} s" if compile else "ready")
    if compile:
        with contextlib.suppress(RuntimeError):  # the engine was closed
            service.engine.compile_constrained()


@dataclasses.dataclass(frozen=True)
class Running:
    """A server in a thread of this process. url: without /v1."""

    url: str
    service: Service


@contextlib.contextmanager
def running(
    engine: Engine, settings: Settings = Settings(), *, port: int = 0, grace_s: float = 10.0
) -> Iterator[Running]:
    """A server of an engine's model beside a notebook or a test, at 127.0.0.1.

        with server.running(bj.Engine(model)) as running:
            client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none")

    port      0: any that is free
    grace_s   seconds that running requests have to end when the block ends; then the engine is closed
    """
    service = Service(engine, settings)
    service.ready = True  # a program is compiled when a request first needs it
    server, own = Server(service, grace_s), bound("127.0.0.1", port)
    place, started = url(own), threading.Event()

    async def run() -> None:
        serving = await server.begun(own)
        started.set()
        await serving

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="bonsai-jax server")
    thread.start()
    started.wait()
    try:
        yield Running(place, service)
    finally:
        server.end()
        thread.join()
