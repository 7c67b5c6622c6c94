"""Masks of several answers at once, made in threads while the device works."""

import concurrent.futures
import os
import threading
from collections.abc import Callable

from bonsai_jax.constraints.compiled import Matcher

MOST_THREADS = 16


class Masks:
    """Runs Matcher.find of many answers. `start` and `collect` are for one thread.

    pending   answers whose masks are not collected yet
    """

    def __init__(self):
        self.pending = 0
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        self._changed = threading.Condition()
        self._running = 0
        self._done: list[tuple[Callable[[Exception | None], None], Exception | None]] = []

    def start(self, matcher: Matcher, then: Callable[[Exception | None], None]) -> None:
        """Find what may come next for this answer. `collect` calls `then` with None, or with the error."""
        self.pending += 1
        if self._threads is None:
            count = min(MOST_THREADS, os.cpu_count() or 1)
            self._threads = concurrent.futures.ThreadPoolExecutor(count, "bonsai-jax mask")
        with self._changed:
            self._running += 1
        self._threads.submit(self._find, matcher, then)

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

    def _find(self, matcher: Matcher, then: Callable[[Exception | None], None]) -> None:
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
