"""Event loops that an engine tells of news: once for all answers of a step, as each wake is a system call."""

import asyncio
import contextlib
import threading
from collections.abc import Iterable, Iterator


class Wakes:
    """Sets asyncio's events from other threads.

    with wakes.together():       in one thread at a time
        wakes.set(loop, event)   each loop is woken once, when the block ends; outside of a block, at once
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._together = False
        self._waiting: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}

    def set(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
        """Have this loop set an event of its own. A loop that is closed has no reader, and is left alone."""
        with self._lock:
            if self._together:
                self._waiting.setdefault(loop, []).append(event)
                return
        _wake(loop, (event,))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        self._together = True
        try:
            yield
        finally:
            with self._lock:
                self._together, waiting, self._waiting = False, self._waiting, {}
            for loop, events in waiting.items():
                _wake(loop, events)


def _wake(loop: asyncio.AbstractEventLoop, events: Iterable[asyncio.Event]) -> None:
    with contextlib.suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(_set, events)


def _set(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        event.set()
