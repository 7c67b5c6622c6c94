"""Before a GEMM: a row of activations in the registers of a block of threads, normed where there is a norm,
so that it is read once. What activations_int8.py and activations_float16.py share; each has its own pieces of
a row, a list of float32 that a lane has at a time."""

import contextlib
import functools
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
FEW_ROWS, MOST_OF_FEW = 64, 8
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
    size: tuple[int, int],
    width: int,
    gamma: jax.Array | None,
    layer: jax.Array | None,
    results: dict[str, jax.ShapeDtypeStruct],
    *,
    name: str,
    operands: dict[str, jax.Array | None] | None = None,
    **settings: Any,
) -> Any:
    """A block of threads for each of the rows of `size`, (M, K), with `width` places. What the body gets by
    name: refs of x, gamma and layer (both perhaps None), of the results, of the sum if x is Parts, and of
    shared, float32 [2, warps], each _gmem but the last, _smem; refs of further operands; columns, width,
    warps, and the settings."""
    rows, columns = size
    warps = warps_of_block(rows, width)
    if isinstance(x, Parts):
        results = {**results, "sum_gmem": jax.ShapeDtypeStruct(size, jnp.float32)}
    index = None if layer is None else jnp.asarray(layer, jnp.int32).reshape(1)
    return launch(
        functools.partial(body, columns=columns, width=width, warps=warps, **settings),
        {"x_gmem": x, "gamma_gmem": gamma, "layer_gmem": index, **(operands or {})},
        results,
        name=name,
        blocks=rows,
        threads=32 * warps,
        scratch={"shared_smem": plgpu.SMEM((2, warps), jnp.float32)},
    )


def pieces_of_lane(thread, count: int, warps: int) -> list[tuple[Any, int]]:
    """Of so many pieces of a row the numbers of a lane's, each with the number of the block's first lane."""
    return [(thread + first, first) for first in range(0, count, 32 * warps)]


def within(pieces: list[tuple[Any, int]], warps: int, count: int) -> list:
    """Of a lane's pieces, whether they are among the row's first so many; None where every lane's is."""
    return [None if first + 32 * warps <= count else piece < count for piece, first in pieces]


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


def times_gamma(load: Callable, x: list[list], gamma_gmem, layer_gmem) -> tuple[list[list], Any]:
    """This lane's pieces of x times the layer's gamma, and the warp's sum of squares of x; without gamma
    (x, None)."""
    if gamma_gmem is None:
        return x, None
    gamma = load(gamma_gmem, 0 if layer_gmem is None else memory.load(layer_gmem, 0))
    squares = lanes.warp_sum_real(sum_of_squares(flat(x)))
    return [[v * w for v, w in zip(*piece, strict=True)] for piece in zip(x, gamma, strict=True)], squares


def flat(pieces: list[list]) -> list:
    return [v for values in pieces for v in values]


def over_warps(shared_smem, warp, *values: tuple[Any, Callable]) -> list:
    """Of each (value that each warp of a block has, how two are combined) that of all warps, in order: one
    barrier of the block."""
    for slot, (value, _) in enumerate(values):
        memory.store(value, shared_smem, slot, warp)
    lanes.block_barrier()
    warps = range(shared_smem.type.shape[1])
    return [
        functools.reduce(combine, [memory.load(shared_smem, slot, w) for w in warps])
        for slot, (_, combine) in enumerate(values)
    ]
