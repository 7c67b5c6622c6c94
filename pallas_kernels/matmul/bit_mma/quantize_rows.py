"""Up to 8 rows of activations to integers, as decode_s8.py wants them: a launch of a block for each group of
128 columns; of what is normed also, group by group, products with a few more rows of plain numbers.

    x, or its parts -> their sum -> gamma x -> q = round(top / m  x), m the largest of a group;  sum of x^2
                                 -> (gamma x) W^T of the group, for 32 rows of W in each of some more blocks

A norm's 1 / rms commutes with all products, so it is for those who read them. The extra products are a delta
net's gates: each of the net's blocks would otherwise read x and two rows of W whole (delta/step.py).

A kernel that has made a group of a row itself stores it by `store_group`, and this launch is spared.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import fma, index, integer, minimum, real, select, sum_of_squares, total
from pallas_kernels.matmul.bit_mma.byte_product import coefficients
from pallas_kernels.matmul.bit_mma.product import GROUP, MMA_COLUMNS
from pallas_kernels.matmul.prologue import Parts
from pallas_kernels.matmul.quantize_activations import (
    MAGIC_WORD,
    largest_of_group,
    magic_words,
    packed_digits,
)

THREADS = 128
ROWS_OF_BLOCK = 32  # of W: a lane each, and each warp has 32 of the group's columns
WIDE = GROUP + 4  # words of a row of x in shared memory


class Quantized(NamedTuple):
    """Activations as integers, symmetric per group of 128: x, or gamma x, is s q.

    q        int32 [K / 128, bits / 8, 2, 32, 4]: for lane 4 g + t, byte b of words 0..3 of half 0 and 1:
             columns 32 t + 8 b + 0..3 and + 4..7 of row g; the digit of the lowest 8 bits first
    scales   float32 [K / 128, 8, 2]: each row's coefficients (byte_product.py); rows that are not there have
             0
    squares  float32 [K / 128, 8]: sum of x^2, without gamma
    """

    q: jax.Array
    scales: jax.Array
    squares: jax.Array


def results_of(columns: int, bits: int = 8) -> dict[str, jax.ShapeDtypeStruct]:
    """Of a launch that makes Quantized."""
    groups = columns // GROUP
    return {
        "q_gmem": jax.ShapeDtypeStruct((groups, bits // 8, 2, 32, 4), jnp.int32),
        "scales_gmem": jax.ShapeDtypeStruct((groups, MMA_COLUMNS, 2), jnp.float32),
        "squares_gmem": jax.ShapeDtypeStruct((groups, MMA_COLUMNS), jnp.float32),
    }


@functools.partial(jax.jit, static_argnames=("bits", "rows"))
def quantize_rows(
    x: jax.Array | Parts,
    layers: jax.Array,
    gamma: jax.Array | None,
    bits: int = 8,
    w: jax.Array | None = None,
    rows: int | None = None,
) -> tuple[Quantized, jax.Array | None, jax.Array | None]:
    """x, or x gamma[i] with gamma of float32 [L, K], as integers.

    x       float32 [rows or more, K], 1 to 8 rows, K a multiple of 128; or Parts
    layers  int32 [2 or more], the second is i
    bits    8 or 16
    w       float32, float16 or bfloat16 [L, N, K], of which w[i] is multiplied too
    rows    of x that count; None: all
    Returns Quantized; of Parts their sum, float32 [rows, K], else None; of w float32 [K / 128, rows, N],
    the products of gamma x of each group, else None.
    """
    *_, most, columns = (x.parts if isinstance(x, Parts) else x).shape
    rows = most if rows is None else rows
    groups = columns // GROUP
    results = results_of(columns, bits)
    if isinstance(x, Parts):
        results["sum_gmem"] = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
    more, scratch = 0, {}
    if w is not None:
        more = -(-w.shape[1] // ROWS_OF_BLOCK)
        results["products_gmem"] = jax.ShapeDtypeStruct((groups, rows, w.shape[1]), jnp.float32)
        words = MMA_COLUMNS * (WIDE + THREADS // 32 * ROWS_OF_BLOCK)
        scratch = {"shared_smem": plgpu.SMEM((words,), jnp.float32)}
    named = dict(
        zip(
            results,
            launch(
                functools.partial(_body, rows=rows, bits=bits),
                {
                    "x_gmem": x, "w_gmem": w, "gamma_gmem": gamma,
                    "layers_gmem": None if gamma is None and w is None else layers,
                },
                results,
                name="quantize_rows",
                blocks=groups * (1 + more),
                threads=THREADS,
                scratch=scratch,
            ),
            strict=True,
        )
    )  # fmt: skip
    quantized = Quantized(*(named[name] for name in results_of(columns, bits)))
    return quantized, named.get("sum_gmem"), named.get("products_gmem")


def _body(
    x_gmem, layers_gmem, gamma_gmem, w_gmem, q_gmem, scales_gmem, squares_gmem, sum_gmem=None,
    products_gmem=None, shared_smem=None, *, rows, bits,
):  # fmt: skip
    groups = q_gmem.type.shape[0]
    thread, block = integer(lanes.thread()), integer(lanes.block())
    group = block % groups if w_gmem is not None else block
    # 16 threads a row, 8 neighbouring columns each.
    row, part = thread // 16, thread % 16
    column = index(group * GROUP + part * 8)
    layer = None if layers_gmem is None else memory.load(layers_gmem, 1)

    def load(ref, *at):
        return [v for half in (0, 4) for v in memory.load_reals(4, ref, [*at, column + half])]

    def loaded():
        """x, and gamma x."""
        own = minimum(row, rows - 1)
        if isinstance(x_gmem, Parts):
            terms = [] if x_gmem.residual is None else [load(x_gmem.residual, own)]
            terms += [load(x_gmem.parts, s, own) for s in range(x_gmem.parts.type.shape[0])]
            x = [total(list(v)) for v in zip(*terms, strict=True)]
        else:
            x = load(x_gmem, own)
        if gamma_gmem is None:
            return x, x
        return x, [v * g for v, g in zip(x, load(gamma_gmem, layer), strict=True)]

    def quantize():
        x, scaled = loaded()
        if sum_gmem is not None:
            with lanes.when(row < rows):
                for half in (0, 4):
                    memory.store_reals(x[half : half + 4], sum_gmem, [row, column + half])
        _store_quantized(x, scaled, row, part, rows, bits, group, q_gmem, scales_gmem, squares_gmem)

    if w_gmem is None:
        quantize()
        return
    with lanes.when(block < groups):
        quantize()
    with lanes.when(block >= groups):
        first = (block // groups - 1) * ROWS_OF_BLOCK
        _multiply(loaded, w_gmem, layer, first, thread, group, rows, shared_smem, products_gmem)


def _store_quantized(x, scaled, row, part, rows, bits, group, q_gmem, scales_gmem, squares_gmem):
    """By the 16 threads of a row. Part c has byte c % 4 of the words of t = c / 4."""
    t, b = part // 4, part % 4
    squares = lanes.warp_sum_real(sum_of_squares(x), lanes=16)
    top = 2 ** (bits - 1) - 1
    largest = largest_of_group(scaled, lambda v: lanes.largest_of_warp(v, 16))
    q = magic_words(scaled, top, largest)
    sum_of_q = lanes.warp_sum_real(total(q) + -8 * MAGIC_WORD % 2**32, lanes=16)
    for digit, half in itertools.product(range(bits // 8), (0, 1)):
        (own,), word = packed_digits(q[4 * half :][:4], digit), integer(0)
        for lane in range(4):  # byte b of each of four lanes' words: one word of this lane
            other = lanes.from_quad(own, integer(lanes.thread()) % 32, lane)
            word = word | (other >> b * 8 & 0xFF) << 8 * lane
        memory.store(word, q_gmem, group, digit, half, row * 4 + t, b)
    with lanes.when(part == 0):
        scale = select(row < rows, largest * (1 / top), 0.0)
        at = [index(group), index(row)]
        for i, value in enumerate(coefficients(scale, real(sum_of_q))):
            memory.store(value, scales_gmem, *at, i)
        memory.store(squares, squares_gmem, *at)


def _multiply(loaded, w_gmem, layer, first, thread, group, rows, shared_smem, products_gmem):
    """This group's part of the products of all rows of x with rows first .. first + 31 of W: one for each
    lane, of 32 columns in each warp."""
    warp, lane = thread // 32, thread % 32
    count = w_gmem.type.shape[1]
    own = minimum(first + lane, count - 1)
    at = group * GROUP + warp * 32
    weights = [memory.load_reals(4, w_gmem, [layer, own, at + i]) for i in range(0, 32, 4)]
    _, scaled = loaded()
    for half in (0, 4):
        place = index(thread // 16 * WIDE + thread % 16 * 8 + half)
        memory.store_reals(scaled[half : half + 4], shared_smem, [place])
    lanes.block_barrier()
    sums = [real(0)] * rows
    for i, four in enumerate(weights):
        for row in range(rows):
            x = memory.load_reals(4, shared_smem, [index(warp * 32 + (row * WIDE + 4 * i))])
            for a, e in zip(x, four, strict=True):
                sums[row] = fma(a, e, sums[row])
    meet = lambda row, warp: index(lane + (warp * MMA_COLUMNS + row) * 32 + MMA_COLUMNS * WIDE)  # noqa: E731
    for row, value in enumerate(sums):
        memory.store(value, shared_smem, meet(row, warp))
    lanes.block_barrier()
    for begin in range(0, rows, THREADS // 32):
        row = minimum(warp + begin, rows - 1)
        value = total([memory.load(shared_smem, meet(row, w)) for w in range(THREADS // 32)])
        with lanes.when((warp + begin < rows) & (first + lane < count)):
            memory.store(value, products_gmem, group, row, first + lane)


def columns_of_lane(group) -> list[tuple]:
    """The columns that a lane has of a group of 128 that is a warp's, an index and a constant each."""
    lane = lanes.thread() % 32
    return [(group * GROUP + (lane // 8 * 32 + lane % 8), 8 * i) for i in range(4)]


def store_group(x: list, row, group, rows: int, q_gmem, scales_gmem, squares_gmem):
    """Round a group of a row to 8 bits and store it where `quantize_rows` does. A warp calls it; each lane
    gives the columns that `columns_of_lane` names. The bits are the same, but squares stay unset.
    The warp with row 0 also marks rows that are not there."""
    lane, top = integer(lanes.thread()) % 32, 127
    largest = largest_of_group(x, lanes.largest_of_warp)
    q = magic_words(x, top, largest)
    sum_of_q = lanes.warp_sum(total(q) + -4 * MAGIC_WORD % 2**32)
    (word,) = packed_digits(q, 0)
    memory.store(word, q_gmem, group, 0, lane % 8 // 4, integer(row) * 4 + lane // 8, lane % 4)
    with lanes.when(lane == 0):
        scale = largest * (1 / top)
        for i, value in enumerate(coefficients(scale, real(sum_of_q))):
            memory.store(value, scales_gmem, group, row, i)
        with lanes.when(integer(row) == 0):
            for other in range(rows, MMA_COLUMNS):
                for i in (0, 1):
                    memory.store(real(0), scales_gmem, group, other, i)
