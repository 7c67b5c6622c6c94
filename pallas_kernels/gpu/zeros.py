"""Zeros at the speed of memory: XLA's own kernel has less than half of it (LOG.md)."""

import functools
import math

import jax

from pallas_kernels import device
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import integer

THREADS = 256
BLOCKS = 8  # for each multiprocessor
STORES = 8  # of each thread, in a turn of its block
PIECE_BYTES = 16  # of a store


def fits(shape: tuple[int, ...], dtype) -> bool:
    """Whether `zeros` makes such an array on the default device."""
    able = int(device.platform().removeprefix("sm_")) >= 80  # Mosaic asks for these
    return able and dtype.kind != "b" and math.prod(shape) * dtype.itemsize % PIECE_BYTES == 0


@functools.partial(jax.jit, static_argnums=(0, 1))
def zeros(shape: tuple[int, ...], dtype) -> jax.Array:
    """As jnp.zeros, for whole pieces of 16 bytes."""
    each = PIECE_BYTES // dtype.itemsize
    pieces = math.prod(shape) // each
    blocks = min(-(-pieces // (STORES * THREADS)), BLOCKS * device.multiprocessors())
    result = jax.ShapeDtypeStruct((pieces, each), dtype)
    body = functools.partial(_body, blocks=blocks)
    return launch(body, {}, {"out": result}, name="zeros", blocks=blocks, threads=THREADS).reshape(shape)


def _body(out, *, blocks: int):
    pieces, each = out.type.shape
    nothing = lanes.vector_of([integer(0)] * 4, out.type.element_type, each // 4)

    def turn(first, _):
        for store in range(STORES):
            piece = lanes.thread() + first + store * THREADS
            with lanes.when(piece < pieces):
                memory.store_stored(nothing, out, [piece, 0])
        return []

    turn_pieces = STORES * THREADS
    lanes.loop(lanes.block() * turn_pieces, pieces, blocks * turn_pieces, [], turn)
