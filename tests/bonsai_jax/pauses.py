"""A process whose engine pauses where a test says, so that no test depends on how fast an answer comes.

The environment variable PAUSE_AFTER names a file. While a test has a number of tokens in it, the engine does
nothing once an answer has so many tokens, except that it cancels requests. 0: it does not read the prompt.
"""

import os
import time
from pathlib import Path
from unittest import mock

from bonsai_jax.engine.loop import Loop

turn = Loop.turn


def _paused(loop: Loop) -> bool:
    try:
        after = int(Path(os.environ["PAUSE_AFTER"]).read_text() or 0)
    except FileNotFoundError:
        return False
    return any(len(request.said) >= after for request in loop.answers)


def turn_unless_paused(loop: Loop) -> bool:
    if not _paused(loop):
        return turn(loop)
    time.sleep(0.01)
    return True  # there is work left


def main():
    from bonsai_jax.cli import main as bonsai_jax_main

    with mock.patch.object(Loop, "turn", turn_unless_paused):
        bonsai_jax_main()
