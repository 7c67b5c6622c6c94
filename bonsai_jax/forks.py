"""A process that is forked from one in which XLA runs has none of XLA's threads: a device would never
answer."""

import functools
import os


def forked() -> bool:
    """Whether this process was forked from one that had called this."""
    return _first_process() != os.getpid()


def check() -> None:
    """Raise RuntimeError in a forked process."""
    if forked():
        raise RuntimeError(
            "this process was forked from one that uses bonsai_jax, and XLA's threads do not outlive a fork; "
            'start processes by spawning (multiprocessing.get_context("spawn")), or load models in them alone'
        )


@functools.cache
def _first_process() -> int:
    return os.getpid()
