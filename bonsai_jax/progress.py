"""Bars on a terminal, for what takes a while."""

import contextlib
import sys
from collections.abc import Callable, Iterator

Progress = bool | Callable[[int, int], None]  # True: a bar; a function: called with how many are done and all


@contextlib.contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, if that is a terminal, for as long as the block runs. Yields update(done, total)."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich import console, progress

    with progress.Progress(console=console.Console(stderr=True), transient=True) as display:
        task = display.add_task(what, total=None)
        yield lambda done, total: display.update(task, completed=done, total=total)


@contextlib.contextmanager
def shown(progress: Progress, what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields update(done, total), as `progress` wants it."""
    if progress is True:
        with bar(what) as update:
            yield update
    else:
        yield progress or (lambda done, total: None)
