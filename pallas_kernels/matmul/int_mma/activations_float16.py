"""Rows to float16, each with a power of two, as a GEMM on tensor cores wants its activations; behind RMSNorm
where there is one.

    n = s a, but for a's rounding;  n = gamma x / sqrt(mean(x^2) + eps), or x itself

s brings a row's largest |a| into [1, 2). A block of threads has a row in its registers, so that it is read
once; XLA reads it for its largest, and again to round it.

A lane reads 8 neighbouring columns and writes 8 neighbouring places of a row, 16 bytes. In the order of
prefill_sm90.py the places are four pairs, each two of four neighbours; lanes exchange rounded pairs.

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
    true,
)
from pallas_kernels.matmul import prologue
from pallas_kernels.matmul.activations_rotated import Form, Row
from pallas_kernels.matmul.epilogue import inverse_rms
from pallas_kernels.tiles import TILE_COLUMNS

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
    """float32 [M, K] -> (a float16 [M, K], s float32 [M]), with `group` [M', K'] and [M'].

    x           or Parts: then their sum, float32 [M, K], is returned too
    gamma       float32 [L, K], of which gamma[layer] counts; None for no norm
    layer       int32 []; None for a stack of one
    group       a has int_prefill_sm90's order of columns for groups of so many, 16 or 32, and zeros behind
                them up to a multiple of 256, K'; M' is M padded to a multiple of 8 (`whole_rows`), and what
                is behind M means nothing. None for the order that they have; (32, 16): a in the one and a in
                the other order are returned, and s
    places      int32 [M, copies]: row i is at places[i, :] of a and s, but for places below 0; where no row
                is they are undefined
    rows        M, where x has more; with places, rows of a and s

    K is a multiple of 8, or of the group.
    """
    m, columns = prologue.sizes(x, rows if places is None else None)
    width, stored = columns, m if places is None or rows is None else rows
    orders = group if isinstance(group, tuple) else (group,)
    assert orders in ((None,), (16,), (32,), (32, 16)), orders
    if group is not None:
        width, stored = columns + -columns % TILE_COLUMNS, whole_rows(stored)
    rounded = jax.ShapeDtypeStruct((stored, width), jnp.float16)
    results = {"a_gmem": rounded}
    if len(orders) > 1:
        results["by_16_gmem"] = rounded
    results["scale_gmem"] = jax.ShapeDtypeStruct((stored,), jnp.float32)
    return prologue.launch_rows(
        _round_row, x, (m, columns), width, gamma, layer, results, name="activations_float16",
        operands={"places_gmem": places}, eps=eps, orders=orders,
    )  # fmt: skip


def whole_rows(rows: int) -> int:
    """So many rows, padded as TMA counts them: by 8."""
    return rows + -rows % 8


def _round_row(
    x_gmem, gamma_gmem, layer_gmem, places_gmem, a_gmem, scale_gmem, shared_smem, sum_gmem=None,
    by_16_gmem=None, *, columns, width, warps, eps, orders,
):  # fmt: skip
    row, thread = lanes.block(), integer(lanes.thread())
    warp = index(thread // 32)
    pieces = prologue.pieces_of_lane(thread, width // WIDTH, warps)

    # Lanes behind the row's end load its last piece, and have zeros.
    in_row = prologue.within(pieces, warps, columns // WIDTH)
    source = [
        piece if inside is None else minimum(piece, columns // WIDTH - 1)
        for (piece, _), inside in zip(pieces, in_row, strict=True)
    ]

    def load(ref, *row):
        return [_load(ref, row, piece) for piece in source]

    def store_sum(number, values):
        for i in range(0, WIDTH, 4):
            memory.store_reals(values[i : i + 4], sum_gmem, [row, index(source[number] * WIDTH) + i])

    n = prologue.loaded_row(load, store_sum, in_row, x_gmem, row)
    n, squares = prologue.times_gamma(load, n, gamma_gmem, layer_gmem)
    scale, factor = scale_and_factor(prologue.flat(n), squares, warp, shared_smem, columns, eps)
    packed = [_in_orders([v * factor for v in values], orders) for values in n]
    copies = [row]
    if places_gmem is not None:
        copies = [memory.load(places_gmem, row, j) for j in range(places_gmem.type.shape[1])]
    exists = prologue.within(pieces, warps, width // WIDTH)
    for copy in copies:
        has_place = true() if places_gmem is None else copy < 2**31  # below 0 is large: numbers have no sign
        with lanes.when(has_place & (thread == 0)):
            memory.store(scale, scale_gmem, copy)
        for pairs, (piece, _), inside in zip(packed, pieces, exists, strict=True):
            with lanes.when(has_place if inside is None else has_place & inside):
                for ordered, ref in zip(pairs, (a_gmem, by_16_gmem), strict=False):
                    memory.store_halves(ordered, ref, [copy, piece * WIDTH])


@functools.cache
def rotated_form(group: int | None) -> Form:
    """Rotated rows (matmul/activations_rotated.py) as `activations_float16` returns them, for its `group`."""

    def results(rows: int, _, places: int) -> dict[str, jax.ShapeDtypeStruct]:
        stored = rows if group is None else whole_rows(rows)
        return {
            "a_gmem": jax.ShapeDtypeStruct((stored, places), jnp.float16),
            "scale_gmem": jax.ShapeDtypeStruct((stored,), jnp.float32),
        }

    store = functools.partial(_store_rotated, group=group)
    return Form(results, store, multiple=1 if group is None else TILE_COLUMNS)


def _store_rotated(row: Row, a_gmem, scale_gmem, *, group: int | None):
    n = [piece.values for piece in row.pieces]
    squares = row.squares_of_warp()
    scale, factor = scale_and_factor(
        prologue.flat(n), squares, row.warp, row.shared_smem, row.columns, row.eps
    )
    with lanes.when(row.thread == 0):
        memory.store(scale, scale_gmem, row.number)
    for piece in row.pieces:
        a = [v * factor for v in piece.values]
        with lanes.when(piece.start < row.places):
            for first in range(0, len(a), WIDTH):
                at = [_column_of(first + i, group) for i in range(WIDTH)]
                pairs = [lanes.half_pair(a[at[i]], a[at[i + 1]]) for i in range(0, WIDTH, 2)]
                memory.store_halves(pairs, a_gmem, [row.number, piece.start + first])


def _column_of(place: int, group: int | None) -> int:
    """Which of 32 neighbouring columns stands at a place, in the order for groups of 16 or 32 columns."""
    if group is None:
        return place
    number, within = divmod(place, group)
    piece, i = divmod(within, WIDTH)  # piece 2 s + h
    return number * group + group // 4 * (i // 2) + piece // 2 * 4 + piece % 2 + i % 2 * 2


def scale_and_factor(n: list, squares, warp, shared_smem, columns: int, eps: float) -> tuple:
    """(s of a row, a / n) of a lane's n before the norm; squares: of the warp's x, None without a norm."""
    largest = lanes.largest_of_warp(greatest([abs(v) for v in n])), maximum
    if squares is None:
        (largest,) = prologue.over_warps(shared_smem, warp, largest)
        return _power_of_two(largest)
    largest, squares = prologue.over_warps(shared_smem, warp, largest, (squares, operator.add))
    norm = inverse_rms(squares, columns, eps)
    scale, inverse = _power_of_two(largest * norm)
    return scale, norm * inverse


def _power_of_two(largest) -> tuple:
    """(s, 1 / s) of a row's largest, as prefill.scaled_to_half."""
    exponent = as_word(largest) & 0x7F800000
    exponent = minimum(maximum(exponent, 27 << 23), 227 << 23)
    return as_real(exponent), as_real((254 << 23) - exponent)


def _load(ref, row, piece) -> list:
    """A piece of neighbouring columns, by 16-byte loads."""
    start = index(piece * WIDTH)
    return [v for first in range(0, WIDTH, 4) for v in memory.load_reals(4, ref, [*row, start + first])]


def _in_orders(a: list, orders) -> list[list]:
    """A lane's 8 columns as pairs of float16, in each of the orders (None, 16 or 32).

    Of four lanes t has columns 8 t .. 8 t + 7, as pairs (4 s + h, 4 s + h + 2). Lane 2 s + h has in groups of
    32 pair (s, h) of each lane; in groups of 16 each two lanes do so: lane h has both pairs h of each."""
    if orders == (None,):
        return [[lanes.half_pair(*a[i : i + 2]) for i in range(0, WIDTH, 2)]]
    pairs = [lanes.half_pair(a[4 * s + h], a[4 * s + h + 2]) for s in (0, 1) for h in (0, 1)]
    by_16 = _exchanged(pairs[0::2], pairs[1::2], 1)
    return [by_16 if order == 16 else _exchanged(by_16[0::2], by_16[1::2], 2) for order in orders]


def _exchanged(first: list, second: list, distance: int) -> list:
    """Of two lanes whose numbers differ in the bit `distance` the lower gets both lanes' `first`, its own
    before the other's, the upper both lanes' `second`."""
    upper = integer(lanes.thread()) // distance % 2 == 1
    own = [select(upper, b, a) for a, b in zip(first, second, strict=True)]
    other = [select(upper, a, b) for a, b in zip(first, second, strict=True)]
    taken = [lanes.swapped(v, distance) for v in other]
    lower = [select(upper, t, k) for k, t in zip(own, taken, strict=True)]
    return lower + [select(upper, k, t) for k, t in zip(own, taken, strict=True)]
