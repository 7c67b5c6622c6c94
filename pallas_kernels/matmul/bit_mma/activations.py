"""Rows to whole numbers of 8 or 16 bits, as prefill_sm90.py wants its activations; behind RMSNorm where
there is one.

    x, or gamma x  ->  q = round(x top / m), m the largest |x| of a group of 128  ->  q = q0, or 256 q1 + q0
    s = m / top, with a norm times 1 / sqrt(mean(x^2) + eps);  x = s q, or rms_norm(x) = s q, but for rounding

The same numbers as in a decode step (plane_product.py). A block of threads has a row in its registers, so
that it is read once. Each warp has whole groups, whose largest it finds without the others: a lane loads 4
neighbouring columns of a group, 16 bytes, and four lanes exchange the bytes that they make of them, so that
each stores one word: place 16 (4 h + p) + 4 t + b of a group is column 32 t + 16 h + 4 b + p, as
group_sums.py makes bytes of bits.

The bytes lie in memory as wgmma wants them in shared memory: group by group, of a group row by row, and of
row m the 16 bytes of one h and p in place (4 h + p) ^ (m % 8) of 8 (what TMA calls a swizzle of 128
bytes). Scales of 16 rows are in the order in which a lane of wgmma's needs them: row 8 b + 2 t + e in place
4 t + 2 b + e.

A kernel that has made a group of a row itself stores it by `store_group`, and this launch is spared.
"""

import functools
import operator

import jax
import jax.numpy as jnp

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import index, integer, minimum, select
from pallas_kernels.matmul import prologue
from pallas_kernels.matmul.bit_mma.product import GROUP
from pallas_kernels.matmul.epilogue import inverse_rms
from pallas_kernels.matmul.quantize_activations import largest_of_group, magic_words, packed_digits

PIECE_BYTES = 16  # that lie side by side
TILE_TOKENS = 64  # of bit_prefill_sm90; fewer rows are padded to a multiple of 16


@functools.partial(jax.jit, static_argnames=("eps", "bits", "rows"))
def activations_int8(
    x: jax.Array | prologue.Parts,
    gamma: jax.Array | None = None,
    layer: jax.Array | None = None,
    eps: float = 0.0,
    *,
    bits: int = 8,
    rows: int | None = None,
) -> tuple[jax.Array, ...]:
    """float32 [M, K] -> (q int8 [bits / 8, G, M', 128], s / 64 float32 [bits / 8, G, M']), in the order
    above.

    x      or Parts: then their sum, float32 [M, K], is returned too
    gamma  float32 [L, K], of which gamma[layer] counts; None for no norm
    layer  int32 []; None for a stack of one
    bits   8 or 16
    rows   M, where x has more

    K is a multiple of 128. G is its groups, padded to 4 by zeros. M' is M padded to 64, or to 16 below that;
    what is behind M means nothing. q has the highest 8 bits first, signed; where there are others, they are
    unsigned. s has the factor 256 of the highest.
    """
    m, columns = prologue.sizes(x, rows)
    width = columns + -columns % (4 * GROUP)
    return prologue.launch_rows(
        _quantize_row, x, (m, columns), width, gamma, layer, results_of(m, columns, bits),
        name="activations_int8", eps=eps, bits=bits,
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
    *, columns, width, warps, eps, bits,
):  # fmt: skip
    row, thread = lanes.block(), integer(lanes.thread())
    warp, lane, count = thread // 32, thread % 32, columns // GROUP
    firsts = range(0, width // GROUP, warps)
    groups = [warp + first for first in firsts]
    in_row = [None if first + warps <= count else warp + first < count for first in firsts]
    # Four neighbouring lanes have the bytes of each other's words (_exchanged). Warps behind the row's end
    # load its last group.
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
    place = (lane // 4 % 2 * 4 + lane % 4 ^ m & 7) * PIECE_BYTES + lane // 8 * 4
    for values, group in zip(x, groups, strict=True):
        q, scale = _quantize(values, bits)
        scale = scale if norm is None else scale * norm
        with lanes.when(group < width // GROUP):
            for digit, word in enumerate(q):
                memory.store_bytes([word], q_gmem, [digit, index(group), row, place])
            with lanes.when(lane == 0):
                for digit in range(len(q)):
                    factor = 256.0 ** (len(q) - 1 - digit) / 64
                    memory.store(scale * factor, scale_gmem, digit, index(group), _place_of_scale(m))


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
    memory.store_bytes(words, q_gmem, [0, group, row, (lane % 8 ^ m & 7) * PIECE_BYTES + lane // 8 * 4])
    with lanes.when(lane == 0):
        memory.store(largest * (1 / top) * (1 / 64), scale_gmem, 0, group, _place_of_scale(m))


def _place_of_scale(m):
    """Of row m."""
    return index(m & 0xFFFFFFF1 | (m & 6) << 1 | (m & 8) >> 2)


def _quantize(x: list, bits: int):
    """A warp's activations, 4 of each lane -> (a word of q per 8 bits, the highest first, of bytes that are
    exchanged; scale)."""
    top = 2 ** (bits - 1) - 1
    largest = largest_of_group(x, lanes.largest_of_warp)
    q = magic_words(x, top, largest)
    words = [word for digit in reversed(range(bits // 8)) for word in packed_digits(q, digit)]
    return list(map(_exchanged, words)), largest * (1 / top)


def _exchanged(word):
    """Byte b of this lane's word is that of lane b of four neighbours which has this lane's number among
    them."""
    lane = integer(lanes.thread())
    for distance, low, high in ((1, 0x6240, 0x3715), (2, 0x5410, 0x3276)):
        # The lower lane of two keeps its bytes where it is the lower byte of two, and gets the other's there.
        selector = select((lane & distance) == 0, integer(low), integer(high))
        word = lanes.chosen_bytes(word, lanes.swapped(word, distance), selector)
    return word
