"""A command of ours in a terminal of its own: what it shows on the screen, and keys that are pressed."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pyte

from tests.bonsai_jax.command_line import ROOT

# The terminal becomes the one that controls the process, so that Ctrl-C interrupts it.
START = (
    "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "from bonsai_jax.cli import main; sys.argv[0] = 'bonsai-jax'; main()"
)
CTRL_C, CTRL_D, ALT_ENTER, UP = "\x03", "\x04", "\x1b\r", "\x1b[A"


class Terminal:
    """bonsai-jax in a window of columns x rows.

    bytes_written  everything that it wrote to the terminal so far
    """

    def __init__(self, *arguments, columns=80, rows=40, **environment):
        self.master, slave = pty.openpty()
        self.screen = pyte.Screen(columns, rows)
        self.screen.write_process_input = self.type  # answers to questions such as "where is the cursor?"
        self._stream, self.bytes_written = pyte.ByteStream(self.screen), b""
        self._size(columns, rows)
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "", "LINES": "", **environment},
        )
        os.close(slave)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.master)

    def type(self, keys):
        os.write(self.master, keys.encode())

    def paste(self, text):
        self.type(f"\x1b[200~{text}\x1b[201~")

    def resize(self, columns, rows=40):
        self.screen.resize(rows, columns)
        self._size(columns, rows)  # the process receives SIGWINCH

    @property
    def text(self):
        """The screen's lines, without blanks at their ends."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def wait(self, pattern, timeout_s=120):
        """Read until the pattern is on the screen. Returns the match."""
        return self._read(lambda: re.search(pattern, self.text, re.MULTILINE), repr(pattern), timeout_s)

    def exit_status(self, timeout_s=120):
        """Read until the process has ended."""
        self._read(lambda: self.process.poll() is not None, "the end", timeout_s)
        return self.process.wait()

    def _read(self, condition, expected, timeout_s):
        ends = time.monotonic() + timeout_s
        while not (result := condition()):
            assert time.monotonic() < ends, f"no {expected} on the screen:\n{self.text}"
            if select.select([self.master], [], [], 0.05)[0]:
                try:
                    new = os.read(self.master, 65536)
                except OSError:  # the process has ended
                    new = b""
                self.bytes_written += new
                self._stream.feed(new)
                if not new:
                    self.process.wait(ends - time.monotonic())
                    ends = time.monotonic()  # nothing more will come
        return result

    def _size(self, columns, rows):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
