"""Activations to integers in shared memory, for decode.py: each warp makes those that it multiplies.

    x, 4 / rows (8 / rows, if rounded) steps of 256 columns at once, 8 columns of each row a lane
        -> times gamma, squares added up -> absmax of a scale group -> q, signed, of 8 or 16 bits

    q      [digit of 8 bits, the lowest first][row of x, padded] of row_bytes: a byte a column
    stats  [chunk of `width` rows][scale group][row in the chunk]: the scale, float32; where the format
           subtracts something also the sum of x as rounded, float32, or for tiles.WholeScales of each digit
           the sums of q over the group's halves, two s16

The loads of one pass are on their way while the pass before it is worked on. Passes behind a warp's last step
are done again, and count nothing. Behind a matrix's last column are weights of 0, in scale groups of their
own: lanes that have these take the last eight columns again.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import (
    as_real,
    as_value,
    as_word,
    index,
    integer,
    minimum,
    real,
    select,
    sum_of_squares,
)
from pallas_kernels.matmul.activations_rotated import Form, Row
from pallas_kernels.matmul.int_mma import decode_plan as int_decode_plan
from pallas_kernels.matmul.quantize_activations import largest_of_group, magic_words, packed_digits
from pallas_kernels.matmul.rotated_columns import CHUNK, LANES, RotatedColumns
from pallas_kernels.tiles import TILE_COLUMNS, Lanes


class WarpActivations(NamedTuple):
    """The activations of one warp, as one of its lanes sees them; what is Any is an MLIR value.

    load_x        [(row, column)] -> of each 8 float32 from that column on, or, where they are `rounded`
                  already, the words that `rounded_words` makes of them
    rounded       whether they are
    gamma_gmem    float32 [L, K], of which it takes norm_layer; None without a norm, or where rounded
    share         the warp's steps of 256 columns (decode_ring.Share)
    format_lanes  the format's tiles.Lanes
    """

    load_x: Callable[[list], list[list]]
    rounded: bool
    gamma_gmem: jax.Array | None
    norm_layer: Any
    share: Any
    sizes: int_decode_plan.IntegerProduct
    format_lanes: Lanes
    lane: Any

    @property
    def at_once(self) -> int:
        """Steps of a pass. 8 rounded columns take half of the registers of 8 float32."""
        most = max(1, (8 if self.rounded else 4) // self.sizes.rows)
        return -(-self.sizes.per_warp // -(-self.sizes.per_warp // most))

    @property
    def places(self) -> list[tuple[int, int]]:
        """(step, row) of a pass, in order."""
        return [(u, row) for u in range(self.at_once) for row in range(self.sizes.rows)]

    def steps_at(self, s) -> list:
        """The steps of the pass at this warp's step s; behind the last, the last."""
        return [
            minimum(as_value(self.share.first_step) + s + u, self.sizes.steps - 1)
            for u in range(self.at_once)
        ]

    def columns(self, step: list) -> list:
        """Of steps, the first of this lane's columns."""
        first = [self._first_column(v) for v in step]
        if self.sizes.columns % TILE_COLUMNS:
            first = [minimum(column, self.sizes.columns - 8) for column in first]
        return [index(column) for column in first]

    def counts(self, s, step):
        """Whether this lane's columns of the warp's step s, which is `step`, are some of the matrix, and not
        taken before."""
        own = s < self.share.own_steps
        if self.sizes.columns % TILE_COLUMNS == 0:
            return own
        return own & (self._first_column(step) < self.sizes.columns)

    def _first_column(self, step):
        return step * TILE_COLUMNS + as_value(self.lane) * 8

    def load(self, s):
        """Begin to load the pass at this warp's step s: (steps, {(step, row): 8 values}, gammas of steps)."""
        step = self.steps_at(s)
        column = self.columns(step)
        gammas = []
        if self.gamma_gmem is not None:  # first: x may have to be waited for
            gammas = eights(self.gamma_gmem, [(self.norm_layer, c) for c in column])
        x = self.load_x([(row, column[u]) for u, row in self.places])
        return step, dict(zip(self.places, x, strict=True)), gammas

    def store(self, first_pass, q, stats) -> list:
        """Quantize all of it, from load(0) on, to the addresses q and stats. Returns of each row this lane's
        sum of squares, 0 without a norm."""
        at_once = self.at_once

        def one_pass(s, carry):
            """Load the next while this one is worked on."""
            s = integer(s)
            squares, now = carry[: self.sizes.rows], self._as_pass(s - at_once, carry[self.sizes.rows :])
            following = self.load(s)
            squares = self.store_pass(squares, s - at_once, now, q, stats)
            return squares + _flat_pass(following)

        start = [real(0)] * self.sizes.rows + _flat_pass(first_pass)
        carry = lanes.loop(at_once, self.sizes.per_warp, at_once, start, one_pass)
        last = integer(-(-self.sizes.per_warp // at_once) * at_once - at_once)
        now = self._as_pass(last, carry[self.sizes.rows :])
        return self.store_pass(carry[: self.sizes.rows], last, now, q, stats)

    def _as_pass(self, s, values):
        """As `load` had it, from _flat_pass."""
        each = 4 if self.rounded else 8
        values = [values[k : k + each] for k in range(0, len(values), each)]
        x = dict(zip(self.places, values, strict=False))
        return self.steps_at(s), x, values[len(x) :]

    def store_pass(self, squares, s, passes, q, stats) -> list:
        """Quantize the pass at step s, as `load` returns it; returns `squares` and its own added."""
        step, x, gammas = passes
        for u in range(self.at_once):
            for row in range(self.sizes.rows):
                v, counts = x[u, row], self.counts(s + u, step[u])
                if self.rounded:
                    low, high, scale, x_squares = v
                    squares[row] = squares[row] + select(counts, memory.untagged(x_squares), 0.0)
                    words = [[low, high]]
                    group_stats = _stats(words, as_real(scale), self.format_lanes)
                else:
                    if gammas:
                        squares[row] = squares[row] + select(counts, sum_of_squares(v), 0.0)
                        v = [a * b for a, b in zip(v, gammas[u], strict=True)]
                    words, group_stats = self.quantized(v)
                self.store_step(step[u], row, words, group_stats, q, stats)
        return squares

    def quantized(self, x: list) -> tuple[list, list]:
        """Words and stats of this lane's 8 columns."""
        return _quantize(x, self.format_lanes, self.sizes.bits)

    def store_step(self, step, row: int, words: list, group_stats: list, q, stats):
        """Store what `quantized` made of a row's step."""
        lane, group, sizes = as_value(self.lane), self.format_lanes.activation_group, self.sizes
        stat_words = int_decode_plan.stat_words(self.format_lanes, sizes.bits)
        groups = sizes.steps * TILE_COLUMNS // group
        at = q + step * TILE_COLUMNS + lane * 8 + row * sizes.row_bytes
        for digit, pair in enumerate(words):
            memory.store_shared(pair, at, digit * sizes.padded * sizes.row_bytes)
        chunk, inside = divmod(row, sizes.width)
        with lanes.when(lane % (group // 8) == 0):
            at_group = step * (TILE_COLUMNS // group) + lane // (group // 8)
            at = stats + at_group * (sizes.width * 4 * stat_words)
            at = at + (chunk * groups * sizes.width + inside) * 4 * stat_words
            padding = group_stats[:1] * (len(group_stats) == 3)
            memory.store_shared(group_stats + padding, at)

    def barrier(self):
        """Behind it `store` is seen by those that multiply."""
        lanes.warp_barrier()


def eights(ref, places: list) -> list[list]:
    """8 neighbouring float32 of a ref from each (row, column) on."""
    return [[v for half in (0, 4) for v in memory.load_reals(4, ref, [row, at + half])] for row, at in places]


def rounded_eights(ref, places: list) -> list[list]:
    """Of 8 neighbours from each (row, column) on what `rounded_words` has made, in a ref of its words."""
    return [memory.load_words(4, ref, [row, at // 2]) for row, at in places]


def _flat_pass(loaded) -> list:
    _, x, gammas = loaded
    return [v for values in [*x.values(), *gammas] for v in values]


class RotatedActivations(NamedTuple):
    """The activations of a block, rotated: a warp makes whole chunks of 1,024 columns, and others read them.

    rotated  the warp's rotation
    """

    rotated: RotatedColumns
    sizes: int_decode_plan.IntegerProduct
    format_lanes: Lanes
    warp: Any
    lane: Any

    @property
    def items(self) -> int:
        """Chunks of all rows."""
        return self.sizes.rows * -(-self.sizes.columns // CHUNK)

    def load(self, _):
        """Begin to load all of this warp's items: of each its row, its chunk and whether there is one."""
        loaded = []
        for first in range(0, self.items, self.sizes.plan.warps):
            item = index(self.warp) + first
            row, chunk, exists = item % self.sizes.rows, item // self.sizes.rows, item < self.items
            load = functools.partial(self.rotated.load, row, chunk)
            loaded.append((row, chunk, exists, lanes.choose(exists, load, self.rotated.nothing)))
        return loaded

    def store(self, items, q, stats) -> list:
        """As WarpActivations has it; squares are of the block's rows, whichever warp sums them."""
        squares = [real(0)] * self.sizes.rows
        for row, chunk, exists, loaded in items:

            def one(row=row, chunk=chunk, loaded=loaded):
                n, x_squares = self.rotated.rotated(loaded)
                words, group_stats = _quantize(n, self.format_lanes, self.sizes.bits)
                group, groups = integer(chunk * 32) + self.lane, self.sizes.columns // 32
                at = q + group * 32 + integer(row) * self.sizes.row_bytes
                with lanes.when(group < groups):
                    for digit, eight in enumerate(words):
                        place = digit * self.sizes.padded * self.sizes.row_bytes
                        memory.store_shared(eight[:4], at, place)
                        memory.store_shared(eight[4:], at, place + 16)
                    at = _stats_begin(stats, group, integer(row), groups, self.sizes.width, len(group_stats))
                    memory.store_shared(group_stats, at)
                return [x_squares]

            (x_squares,) = lanes.choose(exists, one, [real(0)])
            squares = [s + select(row == r, x_squares, 0.0) for r, s in enumerate(squares)]
        return squares

    def barrier(self):
        lanes.block_barrier()


def _stats_begin(stats, group, row, groups: int, width: int, words: int):
    """Where the stats of a scale group of a row begin."""
    return stats + ((row // width * groups + group) * width + row % width) * (4 * words)


def _quantize(x, format_lanes: Lanes, bits: int):
    """Neighbouring lanes' 8 activations each -> (words, stats), the stats in the first of a group's lanes.
    Or, of a lane that has a whole group, all of it.

    words   per 8 bits of q, the lowest first, two words of signed bytes, or eight
    stats   words of a group, as the module says
    """
    top = 127 if bits == 8 else 127 * 257  # the largest whose digits are both within -128..127
    lanes_of_group = format_lanes.activation_group // len(x)
    largest = largest_of_group(x, lambda v: lanes.largest_of_warp(v, lanes_of_group))
    q = magic_words(x, top, largest, fused=True)
    words = []
    for digit in range(bits // 8):
        if digit:
            q = [v + 128 for v in q]  # what the signed low digit has taken
        words.append(packed_digits(q, digit))
    return words, _stats(words, largest * (1 / top), format_lanes)


def _stats(words: list, scale, format_lanes: Lanes) -> list:
    """Of _quantize's words and their group's scale."""
    lanes_of_group = format_lanes.activation_group // (4 * len(words[0]))
    if not format_lanes.minimums:
        return [as_word(scale)]
    sums = [
        functools.reduce(lambda so_far, w: lanes.sum_of_bytes(w, so_far), four, integer(0)) for four in words
    ]
    if format_lanes.whole_scales:
        halves = [lanes.warp_sum_real(v, lanes_of_group // 2) for v in sums]
        pairs = [lanes.bytes_of(v, lanes.swapped(v, lanes_of_group // 2), 0x5410) for v in halves]
        return [as_word(scale), *pairs]
    low, *high = sums
    total = lanes.warp_sum_real(low + (high[0] << 8) if high else low, lanes_of_group)
    return [as_word(scale), as_word(scale * real(total))]


def _largest_of_lanes(x, group: int):
    """`lanes.largest_of_warp` of numbers that are not below 0, in one instruction for all 32."""
    return as_real(lanes.warp_max(as_word(x))) if group == 32 else lanes.largest_of_warp(x, group)


def rounded_words(x, factor, group: int, is_halved=None) -> list:
    """A warp's neighbouring activations, one a lane -> of each 8, in the first of their lanes: two words of
    signed bytes q, their group's scale, and the sum of x^2, float32.

    x factor = q scale; factor: a norm's gamma, or None for 1; group: columns that share a scale, or half as
    many where `is_halved`, a value of the whole warp's
    """
    squares = x * x
    x = x if factor is None else x * factor

    def largest_of_lanes(v):
        whole = _largest_of_lanes(v, group)
        return whole if is_halved is None else select(is_halved, lanes.largest_of_warp(v, group // 2), whole)

    largest = largest_of_group([x], largest_of_lanes)
    (q,) = magic_words([x], 127, largest, fused=True)
    lane = integer(lanes.thread())
    word = (q & 0xFF) << (lane % 4) * 8
    for distance in (1, 2):
        word = word | lanes.swapped(word, distance)
    return [word, lanes.swapped(word, 4), as_word(largest * (1 / 127)), lanes.warp_sum_real(squares, 8)]


def _store_rotated(row: Row, words_gmem):
    """A lane has a whole group of 32 columns. The first lane of a chunk stores the sum of squares of all."""
    is_first, nothing = lanes.thread() % LANES == 0, memory.tagged(real(0), 0)
    for piece in row.pieces:
        with lanes.when(piece.exists):
            largest = largest_of_group(piece.values, lambda v: v)
            q = packed_digits(magic_words(piece.values, 127, largest, fused=True), 0)
            scale = as_word(largest * (1 / 127))
            squares = memory.tagged(select(is_first, lanes.warp_sum_real(piece.squares), 0.0), 0)
            with lanes.when(piece.start < row.columns):
                for eight in range(LANES // 8):
                    words = [*q[2 * eight : 2 * eight + 2], scale, nothing if eight else squares]
                    memory.store_words(words, words_gmem, [row.number, piece.start // 2 + 4 * eight])


# Rotated rows (matmul/activations_rotated.py) as decode.Rounded, with a scale for 32 columns. They stand for
# gamma x, rotated: the product that reads them divides by the norm.
ROTATED_WORDS = Form(
    lambda rows, columns, _: {"words_gmem": jax.ShapeDtypeStruct((rows, columns // 2), jnp.int32)},
    _store_rotated,
    by_parts=True,
)
