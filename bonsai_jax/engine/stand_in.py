"""A decode program that is there stands in for one that would have to be compiled.

A program takes 2 to 5 s to compile. Three short answers one after another, by a program of one row, are there
in a tenth of a second, and so is one answer by a program of four. But whoever asks for as many answers again
gains from the right program. So it is compiled once stand-ins have cost half a second in all, by estimate:
that is the most that a process loses for it, whatever it does later.
"""

import threading
from collections.abc import Hashable, Sequence

from pallas_kernels.device import platform

MOST_S = 0.5
ROWS_TWICE = 8  # a step of so many more rows takes twice the time of one row, about
# A step of one row takes about this long, and what it needs to read the weights.
LEAST_S, CPU_BYTES_PER_S, GPU_BYTES_PER_S = 3e-4, 2e10, 2e12

_lost_s: dict[Hashable, float] = {}  # by the program that was not compiled
_LOCK = threading.Lock()


def steps(rows: int, answers: Sequence[int]) -> float:
    """How long answers of these lengths take by a program of so many rows, in steps of one row."""
    longest = max(max(answers), sum(answers) / rows)  # they take turns where there are more than rows
    return longest * (1 + rows / ROWS_TWICE)


def lose(program: Hashable, more_steps: float, step_bytes: int, *, counts: bool = True) -> bool:
    """Whether a stand-in costs less than there is left to lose.

    program     that it stands in for
    more_steps  of one row, that it takes longer
    step_bytes  of the weights that a step reads
    counts      it runs now; else it is asked about ahead of time
    """
    step_s = LEAST_S + step_bytes / (CPU_BYTES_PER_S if platform() == "cpu" else GPU_BYTES_PER_S)
    with _LOCK:
        lost_s = _lost_s.get(program, 0.0) + max(0.0, more_steps) * step_s
        if lost_s > MOST_S:
            return False
        if counts:
            _lost_s[program] = lost_s
        return True
