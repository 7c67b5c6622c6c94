"""Masks of several answers at once, made in threads while the device works."""

import concurrent.futures
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable

from bonsai_jax.constraints.compiled import Matcher

THREADS = 4, 16  # at least, so that a few slow masks do not hold up others, and at most
# One thread makes 32 usual masks in this time; several would wait for each other, as they share the GIL.
ALONE_S = 0.0005
Then = Callable[[Exception | None], None]
Work = tuple[int, Matcher, Then]


class Masks:
    """Runs Matcher.find of many answers. All but `_find` is for one thread.

    pending   answers whose masks are not collected yet
    """

    def __init__(self):
        least, most = THREADS
        self._most = min(max(least, os.cpu_count() or 1), most)
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        self._numbers = itertools.count()
        self._new: list[Work] = []  # since the last `send`
        self._todo: deque[Work] = deque()
        self._changed = threading.Condition()  # of these:
        self._running: set[int] = set()
        self._late: set[int] = set()  # those for which `collect` does not wait any more
        self._done: list[tuple[Then, Exception | None]] = []
        self._waits = False  # for any mask

    @property
    def pending(self) -> int:
        return len(self._new) + len(self._running) + len(self._done)

    def start(self, matcher: Matcher, then: Then) -> None:
        """Find what may come next for this answer, after `send`. `collect` calls `then` with None, or with
        the error."""
        self._new.append((next(self._numbers), matcher, then))

    def send(self) -> None:
        """Let threads take what was started."""
        new, self._new = self._new, []
        if not new:
            return
        if self._threads is None:
            self._threads = concurrent.futures.ThreadPoolExecutor(self._most, "bonsai-jax mask")
        with self._changed:
            self._running.update(number for number, *_ in new)
        self._todo.extend(new)
        self._threads.submit(self._find)

    def collect(self, wait_s: float) -> None:
        """Call `then` of the answers whose masks are made. It waits for others until wait_s after it first
        met them, and has more threads make them if one is not soon done."""
        made = lambda: self._running <= self._late  # noqa: E731
        with self._changed:
            if not self._changed.wait_for(made, min(ALONE_S, wait_s)):
                self._share()
                if not self._changed.wait_for(made, max(0.0, wait_s - ALONE_S)):
                    self._late = set(self._running)
            done, self._done = self._done, []
        for then, error in done:
            then(error)

    def _share(self) -> None:
        assert self._threads is not None
        for _ in range(min(self._most - 1, len(self._todo))):
            self._threads.submit(self._find)

    def wait(self, wait_s: float) -> None:
        """Wait for a mask, but no longer than this."""
        with self._changed:
            self._waits = True
            self._changed.wait_for(lambda: self._done or not self._running, wait_s)
            self._waits = False

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _find(self) -> None:
        """In a thread: take one after another, until none is left."""
        while True:
            try:
                number, matcher, then = self._todo.popleft()
            except IndexError:
                return
            error = None
            try:
                matcher.find()
            except Exception as failure:
                error = failure
            with self._changed:
                self._done.append((then, error))
                self._running.discard(number)
                self._late.discard(number)
                if self._running <= self._late or self._waits:  # else `collect` waits for more
                    self._changed.notify()
