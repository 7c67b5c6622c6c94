"""Where the arrays of constrained steps lie on a GPU.

XLA runs a step as a CUDA graph, and compares the addresses of its arrays with those of the graph's last run.
Where one has moved it writes the graph again: 1.5 ms of the host's time for the 250 launches in which 32 rows
read a token (LOG.md, "A CUDA graph is written anew where an array has moved").
"""

import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bonsai_jax.engine.programs import Call

RETURNED = 1 << 16  # bytes; a draw returns less, unless many log-probabilities are asked for


class Places:
    """Keeps arrays where they are.

    sent   most bytes that a draw is sent
    """

    def __init__(self, sent: int):
        self._guard = _make_room(sent + RETURNED)
        # By program: the arrays of its last call, and where they are.
        self._kept: dict[Hashable, tuple[list[np.ndarray], list[jax.Array]]] = {}

    def arrays(self, call: Call) -> list[jax.Array]:
        """A call's arrays where those of its program's last call were. Most are the same as these: rows and
        their pages."""
        arrays = [np.asarray(array) for array in call.arrays]
        if call.program not in self._kept:
            self._kept[call.program] = [], [jnp.zeros(array.shape, array.dtype) for array in arrays]
        sent, places = self._kept[call.program]
        if not sent or not all(map(np.array_equal, sent, arrays)):
            written: list[Any] = [_written(*pair) for pair in zip(places, arrays, strict=True)]
            self._kept[call.program] = arrays, written
        return self._kept[call.program][1]


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
