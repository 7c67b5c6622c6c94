"""A program that is there stands in for one that would have to be compiled.

A program takes 2 to 5 s to compile. Three short answers one after another, by a decode program of one row,
are there in a tenth of a second, and so is a long prompt that is read in short chunks. But whoever asks for
the like again and again gains from the right program. So it is compiled once stand-ins have cost half a
second in all, by estimate: that is the most that a process loses for it, whatever it does later.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence

from pallas_kernels.device import platform

MOST_S = 0.5
ROWS_TWICE = 8  # a step of 1 + 8 rows takes about twice as long as a step of one row
# A step of one row takes about LEAST_S and the time to read the weights at this rate.
LEAST_S, CPU_BYTES_PER_S, GPU_BYTES_PER_S = 3e-4, 2e10, 2e12

_lost_s: dict[Hashable, float] = {}  # by the program that was not compiled
_LOCK = threading.Lock()


def steps(rows: int, answers: Sequence[int]) -> float:
    """The time that answers of these lengths take by a decode program of this many rows, in steps of one row:

    max(longest answer, sum of answers / rows) * (1 + rows / ROWS_TWICE)
    """
    longest = max(max(answers), sum(answers) / rows)  # they take turns where there are more than rows
    return longest * (1 + rows / ROWS_TWICE)


class StandIns:
    """Programs by their sizes: rows of decode, or the shape of a prefill.

    has         whether the program of a size need not be compiled
    program     what tells the program of a size from others
    step_bytes  of the weights that a step reads
    counts      what it is asked about runs now; else it is asked ahead of time
    """

    def __init__(
        self,
        has: Callable[[Hashable], bool],
        program: Callable[[Hashable], Hashable],
        step_bytes: int,
        counts: bool,
    ):
        self._has, self._program, self._counts = has, program, counts
        rate = CPU_BYTES_PER_S if platform() == "cpu" else GPU_BYTES_PER_S
        self._step_s = LEAST_S + step_bytes / rate

    def best[Size: Hashable](
        self, size: Size, others: Iterable[Size], cost: Callable[[Size], float]
    ) -> Size | None:
        """The size to run: this one if its program is there, or another that stands in for it. None: its own
        program should be compiled.

        cost   of a size, in steps of one row
        """
        if self._has(size):
            return size
        least = min(filter(self._has, others), key=cost, default=None)
        if least is None:
            return None
        more_s = max(0.0, cost(least) - cost(size)) * self._step_s
        return least if _lose(self._program(size), more_s, self._counts) else None


def _lose(program: Hashable, more_s: float, counts: bool) -> bool:
    """Whether there is so much time left to lose; then it counts as lost."""
    with _LOCK:
        lost_s = _lost_s.get(program, 0.0) + more_s
        if lost_s > MOST_S:
            return False
        if counts:
            _lost_s[program] = lost_s
        return True
