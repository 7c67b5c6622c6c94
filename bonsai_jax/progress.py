"""Bars on a terminal, for what takes a while."""

import contextlib
import sys
from collections.abc import Callable, Iterator

Progress = bool | Callable[[int, int], None]  # True: a bar; a function: called with how many are done and all


@contextlib.contextmanager
def bar(what: str) -> Iterator[Callable[..., None]]:
    """A bar on stderr, if that is a terminal, for as long as the block runs. Yields update(done, total), to
    which a note, such as a speed, may be added."""
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
def shown(progress: Progress, what: str) -> Iterator[Callable[..., None]]:
    """Yields update(done, total), as `progress` wants it, with a note or without."""
    if progress is True:
        with bar(what) as update:
            yield update
    else:
        yield lambda done, total, note="": progress(done, total) if progress else None
