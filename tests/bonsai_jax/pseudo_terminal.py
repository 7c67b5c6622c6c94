"""A command of ours in a terminal of its own: what it shows on the screen, and keys that are pressed."""

import abc
import contextlib
import fcntl
import os
import pty
import re
import select
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import pyte

from tests.bonsai_jax.command_line import ROOT

# The terminal becomes the one that controls the process, so that Ctrl-C interrupts it.
TAKE_TERMINAL = "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
START = "import sys; from {module} import main; sys.argv[0] = 'bonsai-jax'; main()"
CTRL_C, CTRL_D, CTRL_L, CTRL_U, ALT_ENTER, UP = "\x03", "\x04", "\x0c", "\x15", "\x1b\r", "\x1b[A"


class Window(abc.ABC):
    """bonsai-jax in a window of a terminal. A subclass starts it, and sends keys to it.

    folder  where it runs. `pause` and `go_on` decide how far its answers get (pauses.py)
    """

    text: str  # the screen's lines, without blanks at their ends

    def __init__(self, folder: Path):
        self.folder = folder
        self._pause_file = folder / "pause_after"

    @abc.abstractmethod
    def type(self, keys): ...

    @abc.abstractmethod
    def update(self):
        """Wait a moment for output. False: nothing more will come."""

    def environment(self, more):
        return {
            "PYTHONPATH": str(ROOT),
            "PAUSE_AFTER": str(self._pause_file),
            "COLUMNS": "",
            "LINES": "",
            **more,
        }

    def pause(self, tokens):
        """Answers stop after so many tokens."""
        begun = self._pause_file.with_suffix(".new")
        begun.write_text(str(tokens))
        begun.rename(self._pause_file)

    def go_on(self):
        self._pause_file.unlink()

    def wait(self, pattern, timeout_s=120):
        """Read until the pattern is on the screen. Returns the match."""
        return self._read(lambda: re.search(pattern, self.text, re.MULTILINE), repr(pattern), timeout_s)

    def _read(self, condition, expected, timeout_s=120):
        ends, more = time.monotonic() + timeout_s, True
        while not (result := condition()):
            assert more and time.monotonic() < ends, f"no {expected} on the screen:\n{self.text}"
            more = self.update()
        return result


class Terminal(Window):
    """A window of columns x rows that pyte draws.

    pauses         whether `pause` can be used
    bytes_written  everything that it wrote to the terminal so far
    """

    def __init__(self, *arguments, folder=ROOT, pauses=False, columns=80, rows=40, **environment):
        super().__init__(folder)
        self.master, slave = pty.openpty()
        self.screen = pyte.Screen(columns, rows)
        self.screen.write_process_input = self.type  # answers to questions such as "where is the cursor?"
        self._stream, self.bytes_written = pyte.ByteStream(self.screen), b""
        self._size(columns, rows)
        module = "tests.bonsai_jax.pauses" if pauses else "bonsai_jax.cli"
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL + START.format(module=module), *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=folder,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", **self.environment(environment)},
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
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def exit_status(self, timeout_s=120):
        """Read until the process has ended."""
        self._read(lambda: self.process.poll() is not None, "the end", timeout_s)
        return self.process.wait()

    def update(self):
        if not select.select([self.master], [], [], 0.05)[0]:
            return True
        try:
            new = os.read(self.master, 65536)
        except OSError:  # the process has ended
            new = b""
        self.bytes_written += new
        self._stream.feed(new)
        if not new:
            self.process.wait(60)
        return bool(new)

    def _size(self, columns, rows):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


class Tmux(Window):
    """A window of tmux, on a server of its own, with `pause`."""

    def __init__(self, *arguments, folder, pauses=True, columns=80, rows=40, **environment):
        super().__init__(folder)
        assert pauses
        self._sockets = tempfile.TemporaryDirectory(prefix="tmux")  # a socket's path must be short
        self._status, self._screen = folder / "exit_status", ""
        start = START.format(module="tests.bonsai_jax.pauses")
        command = shlex.join([sys.executable, "-c", start, *map(str, arguments)])
        variables = [f"{name}={value}" for name, value in self.environment(environment).items()]
        # Ctrl-C reaches the shell too, which would then end with the command.
        command = (
            f"trap : INT; env {shlex.join(variables)} {command}; echo $? > {self._status.name}; sleep 600"
        )
        self._tmux(
            *("-f", os.devnull, "new-session", "-d", "-x", columns, "-y", rows, "-c", folder, "sh", "-c"),
            command,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(subprocess.CalledProcessError):  # it ends by itself where nothing started
            self._tmux("kill-server")
        self._sockets.cleanup()

    def type(self, keys):
        self._tmux("send-keys", "-H", *(f"{byte:x}" for byte in keys.encode()))

    def paste(self, text):
        self._tmux("set-buffer", text)
        self._tmux("paste-buffer", "-p", "-r")  # bracketed, line breaks as they are

    def resize(self, columns, rows=40):
        self._tmux("resize-window", "-x", columns, "-y", rows)

    @property
    def text(self):
        return self._screen

    def exit_status(self, timeout_s=120):
        self._read(self._status.exists, "the end", timeout_s)
        return int(self._status.read_text())

    def update(self):
        time.sleep(0.05)
        screen = self._tmux("capture-pane", "-p")
        self._screen = "\n".join(line.rstrip() for line in screen.split("\n")).rstrip()
        return True

    def _tmux(self, *arguments):
        command = ["tmux", "-S", f"{self._sockets.name}/socket", *map(str, arguments)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
