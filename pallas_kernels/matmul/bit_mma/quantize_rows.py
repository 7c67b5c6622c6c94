"""Activations of up to 8 rows to integers in the order in which lanes of decode_s8.py read them: a launch
of its own, so that not every multiprocessor reads all rows as float32."""

import functools
import itertools

import jax
import jax.numpy as jnp

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import index, integer, minimum, real, select, sum_of_squares, total
from pallas_kernels.matmul.bit_mma.byte_product import UNIT
from pallas_kernels.matmul.bit_mma.product import GROUP
from pallas_kernels.matmul.quantize_activations import (
    MAGIC_WORD,
    largest_of_group,
    magic_words,
    packed_digits,
)

ROWS = 8  # columns of the tensor core


@functools.partial(jax.jit, static_argnames="bits")
def quantize_rows(
    x: jax.Array, layers: jax.Array, gamma: jax.Array | None, bits: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantize activations, symmetric per group of 128: x, or x gamma[i] with gamma of float32 [L, K].

    x       float32 [rows, K], 1 to 8 rows; K a multiple of 128
    layers  int32 [2 or more], the second is i
    Returns q int32 [K / 128, bits / 8, 2, 32, 4] (for lane 4 g + t, byte b of words 0..3 of half 0 and 1:
    columns 32 t + 8 b + 0..3 and + 4..7 of row g; the digit of the lowest 8 bits first), scales float32
    [K / 128, 8, 2] (s / 64 and -s sum q of each row) and squares float32 [K / 128, 8] (sum of x^2). Rows that
    are not there have scales of 0.
    """
    rows, columns = x.shape
    groups, digits = columns // GROUP, bits // 8
    return launch(
        functools.partial(_quantize_group, rows=rows, bits=bits),
        {"x_gmem": x, "layers_gmem": None if gamma is None else layers, "gamma_gmem": gamma},
        {
            "q_gmem": jax.ShapeDtypeStruct((groups, digits, 2, 32, 4), jnp.int32),
            "scales_gmem": jax.ShapeDtypeStruct((groups, ROWS, 2), jnp.float32),
            "squares_gmem": jax.ShapeDtypeStruct((groups, ROWS), jnp.float32),
        },
        name="quantize_rows",
        blocks=groups,
        threads=128,
    )


def _quantize_group(x_gmem, layers_gmem, gamma_gmem, q_gmem, scales_gmem, squares_gmem, *, rows, bits):
    thread, group = integer(lanes.thread()), integer(lanes.block())
    # 16 threads a row, 8 neighbouring columns each: part c has byte c % 4 of the words of t = c / 4.
    row, part = thread // 16, thread % 16
    t, b = part // 4, part % 4
    column = index(group * GROUP + part * 8)

    def load(ref, row):
        return [v for half in (0, 4) for v in memory.load_reals(4, ref, [row, column + half])]

    x = load(x_gmem, minimum(row, rows - 1))
    squares = lanes.warp_sum_real(sum_of_squares(x), lanes=16)
    if gamma_gmem is not None:
        gamma = load(gamma_gmem, memory.load(layers_gmem, 1))
        x = [v * w for v, w in zip(x, gamma, strict=True)]
    top = 2 ** (bits - 1) - 1
    largest = largest_of_group(x, lambda v: lanes.largest_of_warp(v, 16))
    q = magic_words(x, top, largest)
    sum_of_q = lanes.warp_sum_real(total(q) + -8 * MAGIC_WORD % 2**32, lanes=16)
    for digit, half in itertools.product(range(bits // 8), (0, 1)):
        (mine,), word = packed_digits(q[4 * half :][:4], digit), integer(0)
        for lane in range(4):  # byte b of each of four lanes' words: one word of this lane
            other = lanes.from_quad(mine, thread % 32, lane)
            word = word | (other >> b * 8 & 0xFF) << 8 * lane
        memory.store(word, q_gmem, group, digit, half, row * 4 + t, b)
    with lanes.when(part == 0):
        scale = select(row < rows, largest * (1 / top), 0.0)
        at = [index(group), index(row)]
        memory.store(scale * (2 / UNIT), scales_gmem, *at, 0)
        memory.store(-(scale * real(sum_of_q)), scales_gmem, *at, 1)
        memory.store(squares, squares_gmem, *at)
