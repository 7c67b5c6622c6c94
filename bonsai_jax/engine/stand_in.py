"""A program that is there stands in for one that would have to be compiled.

A program takes 2 to 5 s to compile. Three short answers one after another, by a decode program of one row,
are there in a tenth of a second, and so is a long prompt that is read in short chunks. But whoever asks for
the like again gains from the right program. So it is compiled the third time that it is asked for, or once
stand-ins have cost half a second, by estimate, which may be a fifth of what they do cost. A call that has to
wait for one program has the others that it asks for compiled, too.
"""

import heapq
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence

from pallas_kernels.device import platform

MOST_TIMES, MOST_S = 2, 0.5  # for one program, in this process
ROWS_TWICE = 8  # a step of 1 + 8 rows takes about twice as long as a step of one row
# A step of one row takes about LEAST_S and the time to read the weights at this rate.
LEAST_S, CPU_BYTES_PER_S, GPU_BYTES_PER_S = 3e-4, 2e10, 2e12

# By the program that was not compiled: how often another stood in for it, and what that has cost, in seconds.
_lost: dict[Hashable, tuple[int, float]] = {}
_LOCK = threading.Lock()


def steps(rows: int, answers: Sequence[int]) -> float:
    """The time that answers of these lengths take by a decode program of this many rows, in steps of one row:

    the last answer's end * (1 + rows / ROWS_TWICE)

    where each answer takes the row that is free first.
    """
    ends = [0] * rows
    for length in answers:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends) * (1 + rows / ROWS_TWICE)


class StandIns:
    """The programs of one call of `generate` or `stream` by their sizes: rows of decode, or the shape of a
    prefill.

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
        self._times: dict[Hashable, int] = {}  # of each program before this call
        self._compiles = False

    def best[Size: Hashable](
        self, size: Size, others: Iterable[Size], cost: Callable[[Size], float]
    ) -> Size | None:
        """The size to run: this one if its program is there or should be compiled by now, or another that
        stands in for it. None: no program is there.

        cost   of a size, in steps of one row
        """
        if self._has(size):
            return size
        least = min(filter(self._has, others), key=cost, default=None)
        if least is None:
            return None
        more_s = max(0.0, cost(least) - cost(size)) * self._step_s
        return least if self._lose(self._program(size), more_s) else size

    def _lose(self, program: Hashable, more_s: float) -> bool:
        """Whether another program may stand in for this one once more; then that counts."""
        with _LOCK:
            times, lost_s = _lost.get(program, (0, 0.0))
            times, lost_s = self._times.setdefault(program, times) + 1, lost_s + more_s
            if lost_s > MOST_S or (more_s > 0 and (times > MOST_TIMES or self._compiles)):
                self._compiles = True
                return False
            if self._counts:
                _lost[program] = times, lost_s
            return True
