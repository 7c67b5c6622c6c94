"""Lines about the program, such as "compiling decode of 1 row ...", shown below an answer while it comes."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol


class Output(Protocol):
    def note(self, text: str | None) -> None: ...


class Notes:
    """What the program is doing now, for `progress.lines_shown_by`. It is not shown at the prompt, where
    nobody waits for the program."""

    def __init__(self):
        self._lock = threading.Lock()
        self._text: str | None = None
        self._output: Output | None = None

    def show(self, text: str | None) -> None:
        """Any thread calls this; None: it is done."""
        with self._lock:
            self._text = text
            if self._output is not None:
                self._output.note(text)

    @contextlib.contextmanager
    def below(self, output: Output) -> Iterator[None]:
        """Show it on this output while the block runs."""
        with self._lock:
            self._output = output
            output.note(self._text)
        try:
            yield
        finally:
            with self._lock:
                self._output = None
                output.note(None)
