"""Masks of several answers, made while the device works: quick ones together at once, others in threads."""

import concurrent.futures
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable

from bonsai_jax.constraints.matcher import Matcher, Together

THREADS = 4, 16  # at least, so that a few slow masks do not hold up others, and at most
# CPU time of an answer's last mask up to which the next is made together with others', for which the loop
# waits. Usual ones take 10 to 400 us.
QUICK_S = 0.0005
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
        self._together: Together | None = None
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
        """Find what was started, or let threads find it where the mask before took long."""
        new, self._new = self._new, []
        quick = [work for work in new if work[1].find_s <= QUICK_S]
        slow = [work for work in new if work[1].find_s > QUICK_S]
        if slow:
            self._send(slow)
        if not quick:
            return
        if self._together is None:
            self._together = Together(min(os.cpu_count() or 1, self._most))
        errors = self._together.find([matcher for _, matcher, _ in quick])
        with self._changed:
            self._done += [(then, error) for (*_, then), error in zip(quick, errors, strict=True)]

    def _send(self, slow: list[Work]) -> None:
        if self._threads is None:
            self._threads = concurrent.futures.ThreadPoolExecutor(self._most, "bonsai-jax mask")
        with self._changed:
            self._running.update(number for number, *_ in slow)
        self._todo.extend(slow)
        for _ in range(min(self._most, len(slow))):
            self._threads.submit(self._find)

    def collect(self, wait_s: float) -> None:
        """Call `then` of the answers whose masks are made. It waits for others until wait_s after it first
        met them."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._running <= self._late, wait_s):
                self._late = set(self._running)
            done, self._done = self._done, []
        for then, error in done:
            then(error)

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
            error = _error(matcher)
            with self._changed:
                self._done.append((then, error))
                self._running.discard(number)
                self._late.discard(number)
                if self._running <= self._late or self._waits:  # else `collect` waits for more
                    self._changed.notify()


def _error(matcher: Matcher) -> Exception | None:
    """Have it find what may come next; the error, if there is one."""
    try:
        matcher.find()
    except Exception as error:
        return error
    return None
