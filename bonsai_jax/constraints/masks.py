"""Masks of several answers at once, made in threads while the device works."""

import concurrent.futures
import os
import threading
from collections import deque
from collections.abc import Callable

from bonsai_jax.constraints.compiled import Matcher

THREADS = 4, 16  # at least, so that a few slow masks do not hold up others, and at most
Then = Callable[[Exception | None], None]


class Masks:
    """Runs Matcher.find of many answers. All but `_find` is for one thread.

    pending   answers whose masks are not collected yet
    """

    def __init__(self):
        self.pending = 0
        least, most = THREADS
        self._most = min(max(least, os.cpu_count() or 1), most)
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        self._todo: deque[tuple[Matcher, Then]] = deque()
        self._started = 0  # since the last `send`
        self._changed = threading.Condition()
        self._running = 0
        self._done: list[tuple[Then, Exception | None]] = []

    def start(self, matcher: Matcher, then: Then) -> None:
        """Find what may come next for this answer, after `send`. `collect` calls `then` with None, or with
        the error."""
        self.pending += 1
        self._started += 1
        self._todo.append((matcher, then))

    def send(self) -> None:
        """Let threads take what was started."""
        if not self._started:
            return
        if self._threads is None:
            self._threads = concurrent.futures.ThreadPoolExecutor(self._most, "bonsai-jax mask")
        with self._changed:
            self._running += self._started
        for _ in range(min(self._most, self._started)):
            self._threads.submit(self._find)
        self._started = 0

    def collect(self, wait_s: float) -> None:
        """Call `then` of the answers whose masks are made. Those that are not after wait_s are left for the
        next call."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running, wait_s)
            done, self._done = self._done, []
        self.pending -= len(done)
        for then, error in done:
            then(error)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _find(self) -> None:
        """In a thread: take one after another, until none is left."""
        while True:
            try:
                matcher, then = self._todo.popleft()
            except IndexError:
                return
            error = None
            try:
                matcher.find()
            except Exception as failure:
                error = failure
            with self._changed:
                self._done.append((then, error))
                self._running -= 1
                if not self._running:
                    self._changed.notify()
