"""Rows to float16, each with a power of two, as a GEMM on tensor cores wants its activations; behind RMSNorm
where there is one.

    n = s a, but for a's rounding;  n = gamma x / sqrt(mean(x^2) + eps), or x itself

s brings a row's largest |a| into [1, 2). A block of threads has a row in its registers, so that it is read
once; XLA reads it for its largest, and again to round it.

A lane writes 16 bytes at a time, 8 neighbouring places of a row. In the order of columns they are 8
neighbouring columns. In the order of kq_prefill_sm90.py they are four pairs, each two of four neighbours: two
lanes load the same, and each keeps its half of it.

For a mixture of experts a row goes to several places, one for each expert of its token (experts/places.py).
"""

import functools
import operator

import jax
import jax.numpy as jnp

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import (
    as_real,
    as_word,
    greatest,
    index,
    integer,
    maximum,
    minimum,
    select,
    sum_of_squares,
    true,
)
from pallas_kernels.matmul import prologue
from pallas_kernels.matmul.epilogue import inverse_rms
from pallas_kernels.tiles import COLUMNS

WIDTH = 8  # places of a piece, which a lane has at a time: 16 bytes of float16


@functools.partial(jax.jit, static_argnames=("eps", "group", "rows"))
def activations_float16(
    x: jax.Array | prologue.Parts,
    gamma: jax.Array | None = None,
    layer: jax.Array | None = None,
    eps: float = 0.0,
    places: jax.Array | None = None,
    *,
    group: int | tuple[int, int] | None = None,
    rows: int | None = None,
) -> tuple[jax.Array, ...]:
    """float32 [M, K] -> (a float16 [M, K], s float32 [M]).

    x           or Parts: then their sum, float32 [M, K], is returned too
    gamma       float32 [L, K], of which gamma[layer] counts; None for no norm
    layer       int32 []; None for a stack of one
    group       a has kq_prefill_sm90's order of columns for groups of so many, 16 or 32, and zeros behind
                them up to a multiple of 256; None for the order that they have; (32, 16): a in the one and
                a in the other order are returned, and s
    places      int32 [M, copies]: row i is at places[i, :] of a and s, but for places below 0; where no row
                is they are undefined
    rows        M, where x has more; with places, rows of a and s

    K is a multiple of 8, or of the group.
    """
    m, columns = prologue.sizes(x, rows if places is None else None)
    width, held = columns, m if places is None or rows is None else rows
    orders = group if isinstance(group, tuple) else (group,)
    assert orders in ((None,), (16,), (32,), (32, 16)), orders
    if group is not None:
        width += -columns % COLUMNS
    warps = prologue.warps_of_block(m, width)
    rounded = jax.ShapeDtypeStruct((held, width), jnp.float16)
    results = {"a_gmem": rounded, **{"by_16_gmem": rounded for _ in orders[1:]}}
    results["scale_gmem"] = jax.ShapeDtypeStruct((held,), jnp.float32)
    if isinstance(x, prologue.Parts):
        results["sum_gmem"] = jax.ShapeDtypeStruct((m, columns), jnp.float32)
    return prologue.launch_rows(
        functools.partial(_round_row, columns=columns, width=width, warps=warps, eps=eps, group=orders[0]),
        x,
        m,
        gamma,
        layer,
        results,
        name="activations_float16",
        warps=warps,
        slots=2,
        places_gmem=places,
    )


def _round_row(
    x_gmem, gamma_gmem, layer_gmem, places_gmem, a_gmem, scale_gmem, shared_smem, sum_gmem=None,
    by_16_gmem=None, *, columns, width, warps, eps, group,
):  # fmt: skip
    row, thread = lanes.block(), integer(lanes.thread())
    warp = index(thread // 32)
    pieces = [(thread + first, first) for first in range(0, width // WIDTH, 32 * warps)]

    def within(count):
        """Of a lane's pieces, whether they are among the row's first so many; None where every lane's is."""
        return [None if first + 32 * warps <= count else piece < count for piece, first in pieces]

    # Lanes behind the row's end load its last piece, and have zeros.
    in_row = within(columns // WIDTH)
    source = [
        piece if inside is None else minimum(piece, columns // WIDTH - 1)
        for (piece, _), inside in zip(pieces, in_row, strict=True)
    ]

    def load(ref, *row):
        if group is None:
            return [_load(ref, row, piece) for piece in source]
        return [_load_apart(ref, row, piece, group) for piece in source]

    n = prologue.row_of(load, x_gmem, row)
    if sum_gmem is not None:
        for values, piece, inside in zip(n, source, in_row, strict=True):
            with lanes.when(true() if inside is None else inside):
                for v, column in zip(values, _columns(piece, group), strict=True):
                    memory.store(v, sum_gmem, row, column)
    n = prologue.zeros_behind(n, in_row)
    if gamma_gmem is not None:
        gamma = prologue.gamma_of_layer(load, gamma_gmem, layer_gmem)
        squares = lanes.warp_sum_real(sum_of_squares(prologue.flat(n)))
        squares = prologue.OverWarps(squares, warp, shared_smem, slot=0)
        norm = inverse_rms(squares.combined(operator.add), columns, eps)
        n = [
            [g * (v * norm) for v, g in zip(values, of_piece, strict=True)]
            for values, of_piece in zip(n, gamma, strict=True)
        ]
    largest = greatest([abs(v) for v in prologue.flat(n)])
    largest = prologue.OverWarps(lanes.largest_of_warp(largest), warp, shared_smem, slot=1)
    scale, inverse = power_of_two(largest.combined(maximum))
    packed = []
    for values in n:
        a = [v * inverse for v in values]
        packed.append([lanes.half_pair(*a[i : i + 2]) for i in range(0, WIDTH, 2)])
    copies = [row]
    if places_gmem is not None:
        copies = [memory.load(places_gmem, row, j) for j in range(places_gmem.type.shape[1])]
    for copy in copies:
        here = true() if places_gmem is None else copy < 2**31  # below 0 is large: numbers have no sign
        with lanes.when(here & (thread == 0)):
            memory.store(scale, scale_gmem, copy)
        for pairs, (piece, _), inside in zip(packed, pieces, within(width // WIDTH), strict=True):
            written = {a_gmem: pairs}
            if by_16_gmem is not None:
                written[by_16_gmem] = _by_16(pairs, piece)
            with lanes.when(here if inside is None else here & inside):
                for ref, of_ref in written.items():
                    memory.store_halves(of_ref, ref, [copy, piece * WIDTH])


def power_of_two(largest) -> tuple:
    """(s, 1 / s) of a row's largest, as prefill.scaled_to_half."""
    exponent = as_word(largest) & 0x7F800000
    exponent = minimum(maximum(exponent, 27 << 23), 227 << 23)
    return as_real(exponent), as_real((254 << 23) - exponent)


def _load(ref, row, piece) -> list:
    """A piece of neighbouring columns, by 16-byte loads."""
    start = index(piece * WIDTH)
    return [v for first in range(0, WIDTH, 4) for v in memory.load_reals(4, ref, [*row, start + first])]


def _load_apart(ref, row, piece, group: int) -> list:
    """A piece of kq_prefill_sm90's order: piece 2 s + h of a group has columns 4 s + h and 4 s + h + 2 of
    each quarter of it."""
    start, second = _first_four(piece, group)
    values = []
    for t in range(4):
        four = memory.load_reals(4, ref, [*row, index(start) + group // 4 * t])
        values += [select(second == 1, four[i + 1], four[i]) for i in (0, 2)]
    return values


def _first_four(piece, group: int):
    """The first column of the first four that a piece has two of, and whether it is their second and last."""
    of_group = group // WIDTH
    number, q = piece // of_group, piece % of_group
    return number * group + q // 2 * 4, q % 2


def _by_16(pairs: list, piece) -> list:
    """Of a piece in the order of groups of 32, the same piece in that of 16. Pieces 2 s + h of 32 columns: pair
    t of the one order is of columns 8 t + 4 s + h and 2 more, of the other of 16 s + 4 t + h and 2 more."""
    second = piece % 4 // 2 == 1
    kept, given = ([select(second, pairs[i + a], pairs[i + b]) for i in (0, 1)] for a, b in ((2, 0), (0, 2)))
    taken = [lanes.swapped(pair, 2) for pair in given]
    return [select(second, *of) for k, t in zip(kept, taken, strict=True) for of in ((t, k), (k, t))]


def _columns(piece, group: int | None) -> list:
    """Of a piece's values, in their order."""
    if group is None:
        return [index(piece * WIDTH) + i for i in range(WIDTH)]
    start, second = _first_four(piece, group)
    return [index(start + second) + (group // 4 * t + i) for t in range(4) for i in (0, 2)]
