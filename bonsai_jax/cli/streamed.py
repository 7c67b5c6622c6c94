"""Text on stdout as it comes, and lines about the program on stderr, which keep out of its lines."""

import contextlib
import re
import sys
import threading
from collections.abc import Iterator

from bonsai_jax.progress import lines_shown_by, print_line

COLOR = re.compile(r"\x1b\[[\d;]*m")


class Streamed:
    """Where stdout and stderr are a terminal, a line such as "compiling decode of 1 row ..." waits for the
    end of the line of text that is being written. If its work is done before, it is not shown."""

    def __init__(self):
        self._lock = threading.Lock()
        self._one_screen = sys.stdout.isatty() and sys.stderr.isatty()
        self._within_a_line = False
        self._waiting: str | None = None

    def write(self, text: str) -> None:
        with self._lock:
            print(text, end="", flush=True)
            if visible := COLOR.sub("", text):
                self._within_a_line = not visible.endswith("\n")
            self._show()

    def say(self, line: str | None) -> None:
        """Any thread calls this; None: the work is done."""
        with self._lock:
            self._waiting = line
            self._show()

    def _show(self) -> None:
        if not (self._one_screen and self._within_a_line):
            print_line(self._waiting)
            self._waiting = None

    @contextlib.contextmanager
    def lines_between(self) -> Iterator[None]:
        """While the block runs, `progress.say` calls `say`."""
        with lines_shown_by(self.say):
            yield
