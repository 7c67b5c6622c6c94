"""Rows to whole numbers of 8 or 16 bits, as prefill_sm90.py wants its activations; behind RMSNorm where
there is one.

    x, or gamma x  ->  q = round(x top / m), m the largest |x| of a group of 128  ->  q = q0, or 256 q1 + q0
    s = m / top, with a norm times 1 / sqrt(mean(x^2) + eps);  x = s q, or rms_norm(x) = s q, but for rounding

The same numbers as in a decode step (plane_product.py). A block of threads has a row in its registers, so
that it is read once. Each warp has whole groups, whose largest it finds without the others: a lane loads 4
neighbouring columns of a group, 16 bytes, and lanes exchange the bytes that they make of them, so that each
stores one word. weight_bytes.py has the order of a group's columns.

The bytes lie in memory as wgmma wants them in shared memory: group by group, of a group row by row, and of
row m piece j, of 16 bytes, in place j ^ (m % 8) of 8 (what TMA calls a swizzle of 128 bytes). Scales of 16
rows are in the order in which a lane of wgmma's needs them: row 8 b + 2 t + e in place 4 t + 2 b + e.

A kernel that has made a group of a row itself stores it by `store_group`, and this launch is spared.
"""

import functools
import operator

import jax
import jax.numpy as jnp

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import index, integer, minimum
from pallas_kernels.matmul import prologue
from pallas_kernels.matmul.activations_rotated import Form, Row
from pallas_kernels.matmul.bit_mma.product import GROUP
from pallas_kernels.matmul.bit_mma.weight_bytes import SIGNS, Encoding, merged
from pallas_kernels.matmul.epilogue import inverse_rms
from pallas_kernels.matmul.quantize_activations import largest_of_group, magic_words, packed_digits
from pallas_kernels.matmul.rotated_columns import LANES

PIECE_BYTES = 16  # that lie side by side
TILE_TOKENS = 64  # of bit_prefill_sm90; fewer rows are padded to a multiple of 16


@functools.partial(jax.jit, static_argnames=("eps", "bits", "rows", "encoding"))
def activations_int8(
    x: jax.Array | prologue.Parts,
    gamma: jax.Array | None = None,
    layer: jax.Array | None = None,
    eps: float = 0.0,
    *,
    bits: int = 8,
    rows: int | None = None,
    encoding: Encoding = SIGNS,
) -> tuple[jax.Array, ...]:
    """float32 [M, K] -> (q int8 [bits / 8, G, M', 128], s / 64 float32 [bits / 8, G, M']), in the order
    above.

    x         or Parts: then their sum, float32 [M, K], is returned too
    gamma     float32 [L, K], of which gamma[layer] counts; None for no norm
    layer     int32 []; None for a stack of one
    bits      8 or 16
    rows      M, where x has more
    encoding  of the weights, whose order of columns the activations follow

    K is a multiple of 128. G is its groups, padded to 4 by zeros. M' is M padded to 64, or to 16 below that;
    what is behind M means nothing. q has the highest 8 bits first, signed; where there are others, they are
    unsigned. s has the factor 256 of the highest.
    """
    m, columns = prologue.sizes(x, rows)
    width = columns + -columns % (4 * GROUP)
    return prologue.launch_rows(
        _quantize_row, x, (m, columns), width, gamma, layer, results_of(m, columns, bits),
        name="activations_int8", eps=eps, bits=bits, encoding=encoding,
    )  # fmt: skip


def results_of(rows: int, columns: int, bits: int = 8) -> dict[str, jax.ShapeDtypeStruct]:
    """What `activations_int8` returns."""
    shape = (
        bits // 8,
        -(-columns // (4 * GROUP)) * 4,
        rows + -rows % (TILE_TOKENS if rows > TILE_TOKENS else 16),
    )
    return {
        "q_gmem": jax.ShapeDtypeStruct((*shape, GROUP), jnp.int8),
        "scale_gmem": jax.ShapeDtypeStruct(shape, jnp.float32),
    }


def _quantize_row(
    x_gmem, gamma_gmem, layer_gmem, q_gmem, scale_gmem, shared_smem, sum_gmem=None,
    *, columns, width, warps, eps, bits, encoding,
):  # fmt: skip
    row, thread = lanes.block(), integer(lanes.thread())
    warp, lane, count = thread // 32, thread % 32, columns // GROUP
    firsts = range(0, width // GROUP, warps)
    groups = [warp + first for first in firsts]
    in_row = [None if first + warps <= count else warp + first < count for first in firsts]
    # Lanes have bytes of each other's words (`exchanged`). Warps behind the row's end load its last group.
    starts = [index(minimum(group, count - 1) * GROUP + lane * 4) for group in groups]

    def load(ref, *row):
        return [memory.load_reals(4, ref, [*row, start]) for start in starts]

    def store_sum(number, values):
        memory.store_reals(values, sum_gmem, [row, starts[number]])

    x = prologue.loaded_row(load, store_sum, in_row, x_gmem, row)
    x, squares = prologue.times_gamma(load, x, gamma_gmem, layer_gmem)
    norm = None
    if squares is not None:
        (squares,) = prologue.over_warps(shared_smem, warp, (squares, operator.add))
        norm = inverse_rms(squares, columns, eps)
    m = integer(row)
    piece, t = encoding.piece(lane)
    place = place_of_piece(piece, m) + t * 4
    for values, group in zip(x, groups, strict=True):
        q, scale = _quantize(values, bits)
        scale, q = scale if norm is None else scale * norm, [encoding.exchanged(word) for word in q]
        with lanes.when(group < width // GROUP):
            for digit, word in enumerate(q):
                memory.store_bytes([word], q_gmem, [digit, index(group), row, place])
            with lanes.when(lane == 0):
                for digit in range(len(q)):
                    factor = 256.0 ** (len(q) - 1 - digit) / 64
                    memory.store(scale * factor, scale_gmem, digit, index(group), place_of_scale(m))


def columns_of_lane(group) -> list[tuple]:
    """The columns that a lane has of a group of 128 that is a warp's, an index and a constant each."""
    lane = lanes.thread() % 32
    return [(group * GROUP + (lane // 8 * 32 + lane // 4 % 2 * 16 + lane % 4), 4 * i) for i in range(4)]


def store_group(x: list, row, group, q_gmem, scale_gmem):
    """By a warp: a group of a row, of which its lanes have `columns_of_lane`, in 8 bits, to where
    `activations_int8` has it, with the same bits."""
    lane, m, top = integer(lanes.thread()) % 32, integer(row), 127
    largest = largest_of_group(x, lanes.largest_of_warp)
    words = packed_digits(magic_words(x, top, largest), 0)
    memory.store_bytes(words, q_gmem, [0, group, row, place_of_piece(lane % 8, m) + lane // 8 * 4])
    with lanes.when(lane == 0):
        memory.store(largest * (1 / top) * (1 / 64), scale_gmem, 0, group, place_of_scale(m))


def place_of_piece(piece, m):
    """Of row m, in a group's bytes."""
    return (piece ^ m & 7) * PIECE_BYTES


def place_of_scale(m):
    """Of row m."""
    return index(m & 0xFFFFFFF1 | (m & 6) << 1 | (m & 8) >> 2)


def _quantize(x: list, bits: int):
    """A warp's activations, 4 of each lane -> (a word of q per 8 bits, the highest first; scale)."""
    top = 2 ** (bits - 1) - 1
    largest = largest_of_group(x, lanes.largest_of_warp)
    q = magic_words(x, top, largest)
    words = [word for digit in reversed(range(bits // 8)) for word in packed_digits(q, digit)]
    return words, largest * (1 / top)


def _store_rotated(row: Row, q_gmem, scale_gmem):
    """A lane's 32 neighbouring columns in 8 bits, by the largest of its group's four lanes."""
    norm, lane, m, top = row.norm(), integer(lanes.thread()) % LANES, integer(row.number), 127
    for piece in row.pieces:
        largest = largest_of_group(piece.values, lambda v: lanes.largest_of_warp(v, GROUP // LANES))
        # Columns 8 t + 4 h + (2 u + c) of 32 number 2 f + p (weight_bytes.py).
        words = [merged(word, 2) for word in packed_digits(magic_words(piece.values, top, largest), 0)]
        group, p, f = index(integer(piece.start) // GROUP), lane % 2, lane // 2 % 2
        with lanes.when(piece.start < row.places):
            for h in (0, 1):
                place = place_of_piece(4 * h + 2 * p + f, m)
                memory.store_bytes(words[h::2], q_gmem, [0, group, row.number, place])
            with lanes.when(lane % (GROUP // LANES) == 0):
                scale = largest * (1 / top)
                scale = scale if norm is None else scale * norm
                memory.store(scale * (1 / 64), scale_gmem, 0, group, place_of_scale(m))


# Rotated rows (matmul/activations_rotated.py) as `activations_int8` returns them for ternary weights.
ROTATED_INTEGERS = Form(
    lambda rows, columns, _: results_of(rows, columns), _store_rotated, multiple=4 * GROUP
)
