"""Progress on a terminal: bars, and a line while something takes seconds."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

from bonsai_jax import arguments

Progress = bool | Callable[[int, int], None]  # True: a bar; a function: called as progress(done, total)


@contextlib.contextmanager
def bar(what: str) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr while the block runs, if stderr is a terminal. Yields update(done, total,
    note); the note, such as a speed, may be left out."""
    if not sys.stderr.isatty():
        yield lambda done, total, note="": None
        return
    from rich import console, progress

    with progress.Progress(console=console.Console(stderr=True), transient=True) as display:
        task = display.add_task(what, total=None)
        yield lambda done, total, note="": display.update(
            task, completed=done, total=total, description=f"{what} {note}".strip()
        )


@contextlib.contextmanager
def notice(text: str) -> Iterator[None]:
    """A line on stderr while the block runs, if stderr is a terminal. It costs no import."""
    if not sys.stderr.isatty():
        yield
        return
    print(text, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def shown(progress: Progress, what: str) -> Iterator[Callable[..., None]]:
    """Yields update(done, total, note), which reports to `progress`; the note may be left out."""
    if not isinstance(progress, bool | None):
        arguments.function("progress", progress)
    if progress is True:
        with bar(what) as update:
            yield update
    else:
        yield lambda done, total, note="": progress(done, total) if progress else None


@contextlib.contextmanager
def said_after(seconds: float, what: str) -> Iterator[None]:
    """Print a line to stderr if the block takes longer than this."""
    timer = threading.Timer(seconds, lambda: print(f"bonsai-jax: {what} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
