"""Inputs of folded weights (rotation.py), behind RMSNorm where there is one: normed, rotated and, for most
products, rounded, by one launch that reads them once (rotated_columns.py).

    n = H(s * P(gamma x)) / sqrt(mean(x^2) + eps): the norm's scalar commutes with all that is linear

Blocks of threads have whole rows, since float16 are scaled by a row's largest. Of few rows four warps have a
part, unless these are rounded for a GEMM. Then each block sums the squares of all of the row, or, where the
product norms its results (int_decode), of its part.
"""

import functools
import operator
from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import as_word, index, integer, real, select, sum_of_squares
from pallas_kernels.matmul import prologue
from pallas_kernels.matmul.bit_mma import activations
from pallas_kernels.matmul.bit_mma.product import GROUP
from pallas_kernels.matmul.bit_mma.weight_bytes import merged
from pallas_kernels.matmul.epilogue import inverse_rms
from pallas_kernels.matmul.int_mma.activations_float16 import WIDTH, scale_and_factor, whole_rows
from pallas_kernels.matmul.int_mma.rotated_columns import CHUNK, LANES, WORDS, RotatedColumns
from pallas_kernels.matmul.quantize_activations import largest_of_group, magic_words, packed_digits
from pallas_kernels.rotation import Rotation
from pallas_kernels.tiles import TILE_COLUMNS

MOST_WARPS = 20  # of a block: 100 registers are left to each lane
WARPS_OF_PART = 4


@functools.partial(jax.jit, static_argnames=("eps", "group", "rounded"))
def activations_rotated(
    x: jax.Array,
    rotation: Rotation,
    gamma: jax.Array | None = None,
    layer: jax.Array | None = None,
    eps: float = 0.0,
    *,
    rounded: Literal["float16", "int8", "words"] | None = None,
    group: int | None = None,
):
    """rotation(x), or rotation(rms_norm(x; gamma[layer], eps)): float32 [M, K] -> float32 [M, K].

    gamma    float32 [L, K]; None for no norm
    layer    int32 []; None for a stack of one
    rounded  instead of it what a product reads. "float16": (a float16, s float32), as activations_float16
             makes them; `group` is its argument. "int8": (q int8, s float32), as activations_int8 makes them
             for ternary weights. "words": int32 [M, K / 2], decode.Rounded with a scale for 32 columns: they
             stand for gamma x, rotated, and the product divides by the norm
    """
    rows, columns = x.shape
    whole = {"float16": TILE_COLUMNS if group is not None else 1, "int8": 4 * GROUP, "words": 1, None: 1}
    places = columns + -columns % whole[rounded]
    chunks, parts = -(-places // CHUNK), 1
    if rounded in (None, "words") and rows <= prologue.FEW_ROWS:
        warps, parts = WARPS_OF_PART, -(-chunks // WARPS_OF_PART)
    else:
        warps = -(-chunks // -(-chunks // MOST_WARPS))
        warps += -warps % 4
    results = {"n_gmem": jax.ShapeDtypeStruct((rows, columns), jnp.float32)}
    if rounded == "words":
        results = {"words_gmem": jax.ShapeDtypeStruct((rows, columns // 2), jnp.int32)}
    if rounded == "int8":
        results = activations.results_of(rows, columns)
    if rounded == "float16":
        stored = rows if group is None else whole_rows(rows)
        results = {
            "a_gmem": jax.ShapeDtypeStruct((stored, places), jnp.float16),
            "scale_gmem": jax.ShapeDtypeStruct((stored,), jnp.float32),
        }
    return launch(
        functools.partial(
            _body, block=rotation.block, heads=rotation.heads, places=places, parts=parts, warps=warps,
            eps=eps, group=group,
        ),
        {
            "x_gmem": x,
            "flips_gmem": rotation.flips,
            "gamma_gmem": gamma,
            "layer_gmem": None if layer is None else jnp.asarray(layer, jnp.int32).reshape(1),
        },
        results,
        name="activations_rotated",
        blocks=rows * parts,
        threads=32 * warps,
        scratch={
            "rotated_smem": plgpu.SMEM((warps * WORDS,), jnp.float32),
            "shared_smem": plgpu.SMEM((2, warps), jnp.float32),
        },
    )  # fmt: skip


def _body(
    x_gmem, flips_gmem, gamma_gmem, layer_gmem, *, rotated_smem, shared_smem, block, heads, places, parts,
    warps, eps, group, n_gmem=None, a_gmem=None, q_gmem=None, scale_gmem=None, words_gmem=None,
):  # fmt: skip
    columns = x_gmem.type.shape[1]
    row, part = lanes.block() // parts, lanes.block() % parts
    thread = lanes.thread(reuse=True)
    warp, lane = thread // LANES, thread % LANES
    chunks = -(-places // CHUNK)
    own_chunks = [part * warps + warp + warps * i for i in range(-(-chunks // (warps * parts)))]
    norm_layer = 0 if layer_gmem is None or gamma_gmem is None else memory.load(layer_gmem, 0)
    warp_columns = RotatedColumns(
        functools.partial(memory.load_each, x_gmem), columns, flips_gmem, gamma_gmem, norm_layer, block,
        heads, rotated_smem, warp, lane,
    )  # fmt: skip

    def rotate(chunk):
        n, squares = warp_columns.rotated(warp_columns.load(row, chunk))
        return [*n, squares]

    rotated = [
        lanes.choose(chunk < chunks, functools.partial(rotate, chunk), [real(0)] * (LANES + 1))
        for chunk in own_chunks
    ]
    if words_gmem is not None:
        for chunk, (*values, squares) in zip(own_chunks, rotated, strict=True):
            with lanes.when(chunk < chunks):
                _store_words(values, squares, row, (chunk * LANES + lane) * LANES, columns, words_gmem)
        return
    n, squares = [values[:LANES] for values in rotated], None
    if gamma_gmem is not None:
        if parts > 1:
            squares = _squares_of_row(x_gmem, row, thread, 32 * warps)
        else:
            squares = functools.reduce(operator.add, [values[LANES] for values in rotated])
        squares = lanes.warp_sum_real(squares)
    if a_gmem is None:
        factor = None
        if squares is not None:
            (squares,) = prologue.over_warps(shared_smem, warp, (squares, operator.add))
            factor = inverse_rms(squares, columns, eps)
        for chunk, values in zip(own_chunks, n, strict=True):
            start = (chunk * LANES + lane) * LANES
            if q_gmem is not None:
                _store_integers(values, factor, row, start, places, q_gmem, scale_gmem)
                continue
            values = values if factor is None else [v * factor for v in values]
            with lanes.when(start < columns):
                for i in range(0, LANES, 4):
                    memory.store_reals(values[i : i + 4], n_gmem, [row, start + i])
        return
    scale, factor = scale_and_factor(prologue.flat(n), squares, warp, shared_smem, columns, eps)
    with lanes.when(thread == 0):
        memory.store(scale, scale_gmem, row)
    for chunk, values in zip(own_chunks, n, strict=True):
        start = (chunk * LANES + lane) * LANES
        a = [v * factor for v in values]
        with lanes.when(start < places):
            for first in range(0, LANES, WIDTH):
                at = [_column_of(first + i, group) for i in range(WIDTH)]
                pairs = [lanes.half_pair(a[at[i]], a[at[i + 1]]) for i in range(0, WIDTH, 2)]
                memory.store_halves(pairs, a_gmem, [row, start + first])


def _store_words(values: list, squares, row, start, columns: int, words_gmem):
    """A lane's 32 neighbouring columns as int_decode reads them. `squares`, of the lane's x, are of other
    columns than these; the chunk's first lane stores those of all."""
    largest = largest_of_group(values, lambda v: v)
    q = packed_digits(magic_words(values, 127, largest, fused=True), 0)
    scale, nothing = as_word(largest * (1 / 127)), memory.tagged(real(0), 0)
    squares = select(lanes.thread() % LANES == 0, lanes.warp_sum_real(squares), 0.0)
    with lanes.when(start < columns):
        for eight in range(LANES // 8):
            words = [*q[2 * eight : 2 * eight + 2], scale, nothing if eight else memory.tagged(squares, 0)]
            memory.store_words(words, words_gmem, [row, start // 2 + 4 * eight])


def _store_integers(values: list, factor, row, start, places: int, q_gmem, scale_gmem):
    """A lane's 32 neighbouring columns in 8 bits, by the largest of its group's four lanes."""
    lane, m, top = integer(lanes.thread()) % LANES, integer(row), 127
    largest = largest_of_group(values, lambda v: lanes.largest_of_warp(v, GROUP // LANES))
    # Columns 8 t + 4 h + (2 u + c) of 32 number 2 f + p (weight_bytes.py).
    words = [merged(word, 2) for word in packed_digits(magic_words(values, top, largest), 0)]
    group, p, f = index(integer(start) // GROUP), lane % 2, lane // 2 % 2
    with lanes.when(start < places):
        for h in (0, 1):
            place = activations.place_of_piece(4 * h + 2 * p + f, m)
            memory.store_bytes(words[h::2], q_gmem, [0, group, row, place])
        with lanes.when(lane % (GROUP // LANES) == 0):
            scale = largest * (1 / top)
            scale = scale if factor is None else scale * factor
            memory.store(scale * (1 / 64), scale_gmem, 0, group, activations.place_of_scale(m))


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
