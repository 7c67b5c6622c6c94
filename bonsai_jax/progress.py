"""Progress on a terminal and in notebooks: bars, and a line while something takes seconds."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from bonsai_jax import arguments

Progress = bool | Callable[[int, int], None]  # True: a bar; a function: called as progress(done, total)

REDRAW_S, BAR_WIDTH = 0.2, 30  # in a notebook


@contextlib.contextmanager
def bar(what: str) -> Iterator[Callable[..., None]]:
    """A progress bar while the block runs: on stderr, if that is a terminal, or below the cell of a notebook.
    Yields update(done, total, note); the note, such as a speed, may be left out, and total is 0 where it is
    not known."""
    if _in_notebook():
        yield _notebook_bar(what)
        return
    if not sys.stderr.isatty():
        yield lambda done, total, note="": None
        return
    from rich import console, progress

    with progress.Progress(console=console.Console(stderr=True), transient=True) as display:
        task = display.add_task(what, total=None)
        yield lambda done, total, note="": display.update(
            task, completed=done, total=total or None, description=f"{what} {note}".strip()
        )


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process. Its stderr is no terminal."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and type(ipython.get_ipython()).__name__ == "ZMQInteractiveShell"


def _notebook_bar(what: str) -> Callable[..., None]:
    """update(done, total, note) of a line of text below the cell. (The bars of rich need ipywidgets.)"""
    from IPython.display import display  # pyrefly: ignore[missing-import]

    line: Any = display({"text/plain": what}, raw=True, display_id=True)
    drawn_at = 0.0

    def update(done: int, total: int, note: str = "") -> None:
        nonlocal drawn_at
        if time.monotonic() - drawn_at < REDRAW_S and done != total:
            return
        drawn_at = time.monotonic()
        full = round(BAR_WIDTH * done / total) if total else 0
        bar = f"[{'#' * full}{'-' * (BAR_WIDTH - full)}] {done:,} of {total:,}" if total else f"{done:,}"
        line.update({"text/plain": f"{what} {note} {bar}".replace("  ", " ")}, raw=True)

    return update


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


def print_line(text: str | None) -> None:
    """A line of ours on stderr; None: nothing."""
    if text is not None:
        print(f"bonsai-jax: {text}", file=sys.stderr, flush=True)


_show: Callable[[str | None], None] = print_line  # as sys.stderr: one for the process, see `lines_shown_by`


@contextlib.contextmanager
def lines_shown_by(show: Callable[[str | None], None]) -> Iterator[None]:
    """While the block runs, `say` calls show(text) instead of printing a line to stderr. For a program that
    draws on the terminal itself. Any thread may call it."""
    global _show
    before, _show = _show, show
    try:
        yield
    finally:
        _show = before


def say(text: str | None) -> None:
    """Print a line to stderr about what the program does now (see `lines_shown_by`); None: it is done."""
    _show(text)


@contextlib.contextmanager
def said_after(seconds: float, what: str) -> Iterator[None]:
    """`say` what the block does if it takes longer than this."""
    done = threading.Event()

    def watch() -> None:
        if not done.wait(seconds):
            show = _show  # the one that shows the line also takes it away
            show(f"{what} ...")
            done.wait()
            show(None)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()
