"""What all routes share: the engine, its limits, and who is being answered."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Concatenate

from bonsai_jax.engine import Engine
from bonsai_jax.model import Model
from bonsai_jax.protocols.errors import RequestError
from bonsai_jax.protocols.submit import Defaults
from bonsai_jax.research.batches import FEW
from bonsai_jax.research.reading import Reader
from bonsai_jax.server.metrics import Metrics
from bonsai_jax.server.settings import Settings

THREADS = 4  # that encode prompts, render templates and read large bodies


class Service:
    """One model being served. Its methods are for the event loop's thread.

    ready     every program is compiled
    draining  no new request is answered
    answers   running or waiting
    body_bytes   of bodies that are arriving
    """

    def __init__(self, engine: Engine, settings: Settings):
        self.engine, self.settings = engine, settings
        self.ready = self.draining = False
        self.answers = 0
        self.started = time.time()
        self.metrics = Metrics(engine)
        self.defaults = Defaults(
            engine.most_tokens, settings.sampling, settings.max_new_tokens, settings.template,
            places=engine.saves_states, clip=True,
        )  # fmt: skip
        self.body_bytes = 0
        self._reader = Reader(engine.model, shapes=FEW)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="bonsai-jax server")
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="bonsai-jax reader")

    @property
    def model(self) -> Model:
        """The engine's, with the weights that it has now."""
        return self.engine.model

    async def in_thread[**P, T](self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that takes time without holding up the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: function(*args, **kwargs))

    async def read[**P, T](
        self, function: Callable[Concatenate[Reader, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a function of a Reader, for embeddings and echoes, beside the engine. In one thread, as the
        Reader has one cache, which it makes for the first. Raises RequestError after timeout_s."""
        loop, own = asyncio.get_running_loop(), self._reader

        def work() -> T:
            own.use(self.model)
            return function(own, *args, **kwargs)

        try:
            async with asyncio.timeout(self.settings.timeout_s):
                return await loop.run_in_executor(self._reading, work)
        except TimeoutError:
            message = f"the texts were not read within {self.settings.timeout_s:g} s"
            raise RequestError(503, message, code="timeout", retry_after_s=10) from None

    @contextlib.contextmanager
    def admitted(self, answers: int) -> Iterator[None]:
        """Count answers of a request while it is answered. Raises RequestError if there are too many."""
        settings = self.settings
        if answers > settings.max_answers:
            raise RequestError(
                400,
                f"n: {answers} answers are asked for, n for each prompt; this server gives "
                f"{settings.max_answers} at most",
                param="n",
            )
        if self.draining:
            raise RequestError(503, "the server is shutting down", retry_after_s=10)
        rows = self.engine.options.max_batch_size
        if self.answers >= rows + settings.max_queue:
            message = (
                f"{self.answers} answers are running or waiting, and the server takes no more; try later"
            )
            raise RequestError(429, message, code="queue_full", retry_after_s=1)
        self.answers += answers
        try:
            yield
        finally:
            self.answers -= answers

    def close(self) -> None:
        """Cancel what is running, and free the device's memory."""
        self.engine.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._reading.shutdown(wait=True, cancel_futures=True)
        self._reader.close()
