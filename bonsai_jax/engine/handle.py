"""What `Engine.submit` returns: the pieces of a request's answers, for threads and for asyncio."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from typing import Any

from bonsai_jax import forks
from bonsai_jax.arguments import number
from bonsai_jax.engine.answers import Output, Piece, output
from bonsai_jax.engine.wakes import Wakes

LOOK_S = 0.2  # how often a reader looks by itself whether something has come (Handle._wait)


class Handle:
    """A request that is running or waiting.

        for piece in handle: ...          pieces of all n answers (Piece.index), as they come
        async for piece in handle: ...
        handle.result()                   waits for the whole answer; await handle does too
        handle.results()                  waits for all n answers
        handle.cancel()                   ends them with the text so far; a signal handler may call it

    Each raises RuntimeError with the reason if the engine fails. Any number of threads and tasks may read;
    each sees every piece. When the last of them leaves before the end, by a `break`, an exception, or because
    its task was cancelled or ran out of time (asyncio.wait_for), the request is cancelled.
    """

    def __init__(self, n: int, prompt_tokens: int, wakes: Wakes | None = None):
        self.n, self.prompt_tokens = n, prompt_tokens
        self._wakes = Wakes() if wakes is None else wakes
        self.cancel_answers: Callable[[], None] = lambda: None
        self._pieces: list[Piece] = []
        self._unfinished = set(range(n))
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._readers = 0
        self._tasks: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []  # what wakes asyncio's

    def __iter__(self) -> Iterator[Piece]:
        forks.check()
        seen = 0
        with self._reading():
            while True:
                with self._changed:
                    self._wait(lambda: len(self._pieces) > seen or self.done)  # noqa: B023 (called at once)
                    new, over = self._pieces[seen:], self.done
                yield from new
                seen += len(new)
                if over:
                    self._raise()
                    return

    async def __aiter__(self) -> AsyncGenerator[Piece]:
        news, at = asyncio.Event(), 0
        with self._reading((asyncio.get_running_loop(), news)):
            while True:
                news.clear()
                with self._changed:
                    new, over = self._pieces[at:], self.done
                for piece in new:
                    yield piece
                at += len(new)
                if over:
                    self._raise()
                    return
                await news.wait()

    def __await__(self) -> Generator[Any, None, Output]:
        return self._whole().__await__()

    @property
    def done(self) -> bool:
        return not self._unfinished or self._error is not None

    def result(self, timeout_s: float | None = None) -> Output:
        """The answer. Raises TimeoutError after timeout_s, and ValueError where there are several."""
        if self.n != 1:
            raise ValueError(f"{self.n} answers were asked for: results() has them all")
        return self.results(timeout_s)[0]

    def results(self, timeout_s: float | None = None) -> list[Output]:
        """All answers, in order of their seeds. Raises TimeoutError after timeout_s."""
        forks.check()
        if timeout_s is not None:
            timeout_s = number("timeout_s", timeout_s, 0)
            timeout_s = None if timeout_s > threading.TIMEOUT_MAX else timeout_s
        with self._changed:
            self._readers += 1
            done = self._wait(lambda: self.done, timeout_s)
            self._readers -= 1
        if not done:
            raise TimeoutError(f"{len(self._unfinished)} answers are not finished after {timeout_s} s")
        self._raise()
        return [
            output([piece for piece in self._pieces if piece.index == i], self.prompt_tokens)
            for i in range(self.n)
        ]

    def cancel(self) -> None:
        """End all answers with the text so far. Requests that have already finished are unaffected."""
        self.cancel_answers()
        with self._changed:
            unfinished = sorted(self._unfinished)
        for index in unfinished:
            self.add(Piece("", [], "cancelled", index=index))

    def add(self, piece: Piece | Exception) -> None:
        """Called by the engine's thread with a piece of an answer, or with the reason why none will come."""
        with self._changed:
            if isinstance(piece, Exception):
                self._error = self._error if self.done else piece
            elif piece.index in self._unfinished:  # pieces after a cancel are dropped
                self._pieces.append(piece)
                if piece.finish_reason is not None:
                    self._unfinished.remove(piece.index)
            self._changed.notify_all()
            for loop, news in self._tasks:
                self._wakes.set(loop, news)

    def _wait(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait, with the lock, until the condition holds. False: it does not after timeout_s.

        A signal handler that calls `cancel` may run in this thread after the look and before the wait: its
        notice reaches nobody. So each wait is short, and the next look sees what it did.
        """
        ends = None if timeout_s is None else time.monotonic() + timeout_s
        while not condition():
            left = LOOK_S if ends is None else min(LOOK_S, ends - time.monotonic())
            if left <= 0:
                return False
            self._changed.wait(left)
        return True

    @contextlib.contextmanager
    def _reading(self, task: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None) -> Iterator[None]:
        """Counts a reader; a task is told of news by its event. The last one to leave before the end
        cancels."""
        tasks = [] if task is None else [task]
        with self._changed:
            self._readers += 1
            self._tasks += tasks
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                for own in tasks:
                    self._tasks.remove(own)
                deserted = not self._readers and not self.done
            if deserted:
                self.cancel()

    async def _whole(self) -> Output:
        async for _ in self:
            pass
        return self.result()

    def _raise(self) -> None:
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
