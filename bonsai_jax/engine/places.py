"""Where the arrays of constrained steps lie on a GPU.

XLA runs a step as a CUDA graph, and compares the addresses of its arrays with those of the graph's last run.
Where one has moved it writes the graph again: 1.5 ms of the host's time for the 250 launches in which 32 rows
read a token (LOG.md, "A CUDA graph is written anew where an array has moved").
"""

import functools
from collections.abc import Hashable

import jax
import numpy as np

from bonsai_jax.engine.programs import Call

RETURNED = 1 << 16  # bytes; a draw returns less, unless many log-probabilities are asked for


class Places:
    """Keeps arrays where they are.

    sent   most bytes that a draw is sent, for its masks
    """

    def __init__(self, sent: int):
        self._guard = _make_room(sent + RETURNED)
        # By program: the arrays of its last call, and where they are.
        self._sent: dict[Hashable, list[np.ndarray]] = {}
        self._kept: dict[Hashable, list[jax.Array]] = {}

    def arrays(self, call: Call) -> list[jax.Array]:
        """A call's arrays where those of its program's last call were. Most are the same as these: rows and
        their pages."""
        program, arrays = call.program, [np.asarray(array) for array in call.arrays]
        if program not in self._kept:
            self._kept[program] = [jax.device_put(array, may_alias=False) for array in arrays]
        elif not all(map(np.array_equal, self._sent[program], arrays)):
            pairs = zip(self._kept[program], arrays, strict=True)
            self._kept[program] = [_written(place, array) for place, array in pairs]
        self._sent[program] = arrays
        return self._kept[program]


def _make_room(size: int) -> jax.Array:
    """Leave a free piece of memory of this many bytes on the device, for as long as what it returns lives.

    XLA's allocator takes the smallest free piece that is large enough. Without a piece for what a draw is
    sent and returns, this would be cut from the large one, at whose beginning a read has its workspace, which
    would move.
    """
    room, guard = (jax.block_until_ready(jax.device_put(np.zeros(size, np.uint8))) for _ in range(2))
    room.delete()
    return guard


@functools.partial(jax.jit, donate_argnums=0)
def _written(place: jax.Array, array: jax.Array) -> jax.Array:
    """The array, in the memory of another."""
    return place.at[...].set(array)
