"""Inputs of folded weights (rotation.py), behind RMSNorm where there is one: normed, rotated and, for
kq_prefill_sm90.py, rounded, by one launch that reads them once.

    n = H(s * P(gamma x)) / sqrt(mean(x^2) + eps): the norm's scalar commutes with all that is linear

A warp has 1,024 neighbouring columns of a row, 32 a lane, and of their numbers' ten bits

    bits 5 to 9 in a lane      as loaded, 32 neighbours by a warp at a time: five stages of sums
    through shared memory      a row of 32 for each lane's
    bits 0 to 4 in a lane      five stages more; 32 neighbours of the result

so that no stage asks another lane. Blocks of threads have whole rows, where results are rounded by a row's
largest. Else, of few rows, four warps have a part, and each block sums the squares of all of the row.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import greatest, index, maximum, minimum, real, select, sum_of_squares
from pallas_kernels.matmul import prologue
from pallas_kernels.matmul.activations_float16 import WIDTH, power_of_two
from pallas_kernels.matmul.epilogue import inverse_rms
from pallas_kernels.rotation import Rotation
from pallas_kernels.tiles import COLUMNS

LANES = 32
CHUNK = LANES * LANES  # columns of a warp
PITCH = LANES + 4  # words of shared memory for a lane's row: 16 bytes of eight lanes meet no bank twice
MOST_WARPS = 20  # of a block: 100 registers are left to each lane
WARPS_OF_PART = 4


def refuses(rotation: Rotation, columns: int) -> str | None:
    """Why the kernel cannot rotate so many columns, or None."""
    if rotation.axis is not None:
        return "the columns are split over devices"
    if rotation.block > CHUNK:
        return f"{rotation.block} values are transformed together; the kernel has up to {CHUNK}"
    if columns % LANES or (rotation.heads and columns // _heads(rotation) % LANES):
        return f"{columns} columns, or those of a head, are no multiple of {LANES}"
    return None


@functools.partial(jax.jit, static_argnames=("eps", "group", "rounded"))
def activations_rotated(
    x: jax.Array,
    rotation: Rotation,
    gamma: jax.Array | None = None,
    layer: jax.Array | None = None,
    eps: float = 0.0,
    *,
    rounded: bool = False,
    group: int | None = None,
):
    """rotation(x), or rotation(rms_norm(x; gamma[layer], eps)): float32 [M, K] -> float32 [M, K].

    gamma    float32 [L, K]; None for no norm
    layer    int32 []; None for a stack of one
    rounded  instead (a float16 [M, K], s float32 [M]) of it, as activations_float16 makes them; `group` is
             its argument
    """
    rows, columns = x.shape
    places = columns + (-columns % COLUMNS if rounded and group is not None else 0)
    chunks, parts = -(-places // CHUNK), 1
    if not rounded and rows <= prologue.FEW_ROWS:
        warps, parts = WARPS_OF_PART, -(-chunks // WARPS_OF_PART)
    else:
        warps = -(-chunks // -(-chunks // MOST_WARPS))
        warps += -warps % 4
    results = {"n_gmem": jax.ShapeDtypeStruct((rows, columns), jnp.float32)}
    if rounded:
        results = {
            "a_gmem": jax.ShapeDtypeStruct((rows, places), jnp.float16),
            "scale_gmem": jax.ShapeDtypeStruct((rows,), jnp.float32),
        }
    return launch(
        functools.partial(
            _body, block=rotation.block, heads=rotation.heads, places=places, parts=parts, warps=warps,
            eps=eps, group=group,
        ),
        {
            "x_gmem": x,
            "signs_gmem": rotation.signs,
            "gamma_gmem": gamma,
            "layer_gmem": None if layer is None else jnp.asarray(layer, jnp.int32).reshape(1),
        },
        results,
        name="activations_rotated",
        blocks=rows * parts,
        threads=32 * warps,
        scratch={
            "turned_smem": plgpu.SMEM((warps * LANES * PITCH,), jnp.float32),
            "shared_smem": plgpu.SMEM((2, warps), jnp.float32),
        },
    )  # fmt: skip


def _body(
    x_gmem, signs_gmem, gamma_gmem, layer_gmem, *, turned_smem, shared_smem, block, heads, places, parts,
    warps, eps, group, n_gmem=None, a_gmem=None, scale_gmem=None,
):  # fmt: skip
    columns = x_gmem.type.shape[1]
    row, part = lanes.block() // parts, lanes.block() % parts
    thread = lanes.thread(kept=True)
    warp, lane = thread // LANES, thread % LANES
    chunks = -(-places // CHUNK)
    each = -(-chunks // (warps * parts))
    mine = [part * warps + warp + warps * i for i in range(each)]  # parts are of one chunk a warp
    norm_layer = 0 if layer_gmem is None or gamma_gmem is None else memory.load(layer_gmem, 0)
    here = lane + warp * (LANES * PITCH)
    there = lane * PITCH + warp * (LANES * PITCH)

    def transformed(chunk) -> list:
        """The lane's 32 neighbours of H(s * P(gamma x)), not yet divided, and the sum of its squares of x."""
        of = _Columns(chunk, lane, columns)
        x = of.load(lambda c, source: memory.load(x_gmem, row, source), heads)
        squares = sum_of_squares(x)
        if gamma_gmem is not None:
            gamma = of.load(lambda c, source: memory.load(gamma_gmem, norm_layer, source), heads)
            x = [v * g for v, g in zip(x, gamma, strict=True)]
        if signs_gmem is not None:
            signs = of.load(lambda c, source: memory.load(signs_gmem, c), heads)
            x = [v * s for v, s in zip(x, signs, strict=True)]
        bits = block.bit_length() - 1
        _butterflies(x, range(0, bits - 5))
        for j, v in enumerate(x):
            memory.store(v, turned_smem, here + j * PITCH)
        lanes.warp_barrier()
        x = [v for i in range(0, LANES, 4) for v in memory.load_reals(4, turned_smem, [there + i])]
        lanes.warp_barrier()
        _butterflies(x, range(0, min(bits, 5)))
        return [*x, squares]

    found = [
        lanes.choose(chunk < chunks, functools.partial(transformed, chunk), [real(0)] * (LANES + 1))
        for chunk in mine
    ]
    y = [values[:LANES] for values in found]
    factor = real(block**-0.5)
    if gamma_gmem is not None:
        squares = functools.reduce(operator.add, [values[LANES] for values in found])
        if parts > 1:
            squares = _squares_of_row(x_gmem, row, thread, 32 * warps)
        squares = prologue.OverWarps(lanes.warp_sum_real(squares), warp, shared_smem, slot=0)
        factor = factor * inverse_rms(squares.combined(operator.add), columns, eps)
    if n_gmem is not None:
        for chunk, values in zip(mine, y, strict=True):
            start = (chunk * LANES + lane) * LANES
            with lanes.when(start < columns):
                for i in range(0, LANES, 4):
                    memory.store_reals([v * factor for v in values[i : i + 4]], n_gmem, [row, start + i])
        return
    largest = greatest([abs(v) for values in y for v in values])
    largest = prologue.OverWarps(lanes.largest_of_warp(largest), warp, shared_smem, slot=1)
    scale, inverse = power_of_two(largest.combined(maximum) * factor)
    with lanes.when(thread == 0):
        memory.store(scale, scale_gmem, row)
    factor = factor * inverse
    for chunk, values in zip(mine, y, strict=True):
        start = (chunk * LANES + lane) * LANES
        a = [v * factor for v in values]
        with lanes.when(start < places):
            for first in range(0, LANES, WIDTH):
                at = [_column_of(first + i, group) for i in range(WIDTH)]
                pairs = [lanes.half_pair(a[at[i]], a[at[i + 1]]) for i in range(0, WIDTH, 2)]
                memory.store_halves(pairs, a_gmem, [row, start + first])


class _Columns:
    """A lane's columns of a chunk, as loaded: 32 j + lane."""

    def __init__(self, chunk, lane, columns: int):
        self.chunk, self.lane, self.columns = chunk, lane, columns

    def load(self, load, heads) -> list:
        """load(column, where x has it) of each; 0 behind the row's end."""
        whole = self.columns % CHUNK == 0
        return [
            load(*self._places(j, heads))
            if whole
            else select(self._first(j) < self.columns, load(*self._places(j, heads)), 0.0)
            for j in range(LANES)
        ]

    def _first(self, j: int):
        return self.chunk * CHUNK + j * LANES

    def _places(self, j: int, heads) -> tuple[Any, Any]:
        first = self._first(j)
        if self.columns % CHUNK:
            first = minimum(first, self.columns - LANES)
        if heads is None:
            return first + self.lane, first + self.lane
        # [repeats, k heads, width] as it lies; [k heads, repeats, width] as it is wanted
        repeats, k_heads = heads
        width = self.columns // (repeats * k_heads)
        head, inside = first // width, first % width
        source = (head % repeats * k_heads + head // repeats) * width + inside
        return first + self.lane, source + self.lane


def _heads(rotation: Rotation) -> int:
    repeats, k_heads = rotation.heads or (1, 1)
    return repeats * k_heads


def _butterflies(x: list, bits: range):
    """Stages of the transform along these bits of the numbers of a lane's values, in place."""
    for bit in bits:
        for i in range(len(x)):
            if not i >> bit & 1:
                a, b = x[i], x[i | 1 << bit]
                x[i], x[i | 1 << bit] = a + b, a - b


def _squares_of_row(x_gmem, row, thread, threads: int):
    """This thread's part of them."""
    columns, squares = x_gmem.type.shape[1], real(0)
    for first in range(0, columns, 4 * threads):
        at = thread * 4 + first
        inside = at < columns
        x = memory.load_reals(4, x_gmem, [row, select(inside, at, index(0))])
        squares = squares + select(inside, sum_of_squares(x), 0.0)
    return squares


def _column_of(place: int, group: int | None) -> int:
    """Which of 32 neighbouring columns is at a place of the order that activations_float16 has."""
    if group is None:
        return place
    number, within = divmod(place, group)
    piece, i = divmod(within, WIDTH)  # piece 2 s + h
    return number * group + group // 4 * (i // 2) + piece // 2 * 4 + piece % 2 + i % 2 * 2
