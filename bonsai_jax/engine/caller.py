"""Dispatches in the thread of their caller, for generate and stream."""

import concurrent.futures
from collections import deque
from collections.abc import Callable
from typing import Any


class Caller:
    """An executor that works in the thread of its caller, when a result is needed or on `catch_up`. So a
    first token can be read before the decode steps that follow it are compiled."""

    class Result(concurrent.futures.Future):
        def __init__(self, caller: "Caller"):
            super().__init__()
            self.caller = caller

        def result(self, timeout: float | None = None) -> Any:
            self.caller.catch_up(until=self)
            return super().result(timeout)

    def __init__(self):
        self._work: deque[tuple[Caller.Result, Callable]] = deque()

    def submit(self, run: Callable) -> "Caller.Result":
        result = self.Result(self)
        self._work.append((result, run))
        return result

    def catch_up(self, until: "Caller.Result | None" = None) -> None:
        while self._work and not (until is not None and until.done()):
            result, run = self._work.popleft()
            try:
                result.set_result(run())
            except Exception as error:
                result.set_exception(error)

    def shutdown(self) -> None:
        self._work.clear()
