"""Before a GEMM: a row of activations in the registers of a block of threads, normed where there is a norm,
so that it is read once. What activations_int8.py and activations_float16.py share; each has its own pieces of
a row, a list of float32 that a lane has at a time."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import select, sum_of_squares, total

MOST = 48  # float32 of a row that a lane has
# Rows of a decode step, at most, and what a lane then has: alone on a multiprocessor, a block has more lanes.
FEW_ROWS, MOST_OF_FEW = 64, 16
MOST_WARPS = 32


def warps_of_block(rows: int, places: int) -> int:
    """Enough for a row of so many places, in whole warpgroups."""
    most = MOST_OF_FEW if rows <= FEW_ROWS else MOST
    return min(MOST_WARPS, 4 * -(-places // (128 * most)))


class Parts(NamedTuple):
    """residual + parts[0] + parts[1] + .., which nobody has added yet.

    parts     float32 [splits, M or more, N], what each split of a product's columns has of its sums
    residual  float32 [M, N], or None
    """

    parts: Any
    residual: Any = None


def sizes(x: jax.Array | Parts, rows: int | None) -> tuple[int, int]:
    """(M, K) of x, or of its first rows."""
    *_, most, columns = (x.parts if isinstance(x, Parts) else x).shape
    return most if rows is None else rows, columns


def launch_rows(
    body: Callable,
    x: jax.Array | Parts,
    rows: int,
    gamma: jax.Array | None,
    layer: jax.Array | None,
    results: dict[str, jax.ShapeDtypeStruct],
    *,
    name: str,
    warps: int,
    slots: int,
    **operands: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """A block of threads a row. Refs of the body: x, gamma and layer (both perhaps None), the results, and
    shared, float32 [slots, warps], each _gmem but the last, _smem; and further operands by their names."""
    index = None if layer is None else jnp.asarray(layer, jnp.int32).reshape(1)
    return launch(
        body,
        {"x_gmem": x, "gamma_gmem": gamma, "layer_gmem": index, **operands},
        results,
        name=name,
        blocks=rows,
        threads=32 * warps,
        scratch={"shared_smem": plgpu.SMEM((slots, warps), jnp.float32)},
    )


def loaded_row(load: Callable[..., list[list]], store_sum: Callable, in_row: list, x_gmem, row) -> list[list]:
    """This lane's pieces of a row of x; of Parts their sum, in order, which is stored. Zeros where a piece is
    not in the row.

    load       (ref, indices of a row) -> this lane's pieces of it
    store_sum  (number of a piece, its values), for Parts
    in_row     whether each piece is; None where every lane's is
    """
    if isinstance(x_gmem, Parts):
        parts, residual = x_gmem
        terms = [load(parts, s, row) for s in range(parts.type.shape[0])]
        terms = terms if residual is None else [load(residual, row), *terms]
        x = [[total(list(v)) for v in zip(*piece, strict=True)] for piece in zip(*terms, strict=True)]
        for number, inside in enumerate(in_row):
            with contextlib.nullcontext() if inside is None else lanes.when(inside):
                store_sum(number, x[number])
    else:
        x = load(x_gmem, row)
    return [
        values if inside is None else [select(inside, v, 0.0) for v in values]
        for values, inside in zip(x, in_row, strict=True)
    ]


def gamma_and_squares(load: Callable, x: list[list], gamma_gmem, layer_gmem) -> tuple[list[list], Any]:
    """This lane's pieces of the layer's gamma, and the warp's sum of squares of x."""
    gamma = load(gamma_gmem, 0 if layer_gmem is None else memory.load(layer_gmem, 0))
    return gamma, lanes.warp_sum_real(sum_of_squares(flat(x)))


def flat(pieces: list[list]) -> list:
    return [v for values in pieces for v in values]


class OverWarps:
    """A float32 that each warp of a block has, on its way through a slot of shared memory."""

    def __init__(self, value, warp, shared_smem, slot: int):
        self.ref, self.slot = shared_smem, slot
        memory.store(value, shared_smem, slot, warp)

    def combined(self, combine: Callable):
        """Of all warps, in order; a barrier of the block."""
        lanes.block_barrier()
        first, *others = (memory.load(self.ref, self.slot, w) for w in range(self.ref.type.shape[1]))
        for value in others:
            first = combine(first, value)
        return first
