"""Products of 2 to 8 rows as phases of a decode step in one launch (decode_layers.py), on the integer tensor
cores: weights become bytes once for all rows, as in q1_decode_s8.py.

A group of 128 activations is not made by one block, so nobody who makes a part of it knows its largest; and
all blocks would quantize all rows if each did it for itself. So it is done between: a warp of some block has
a row of a group, waits for its 128 numbers, quantizes them, and passes them on.

    makers, float32 -> [row of a group: gamma, largest, integers, sums] -> all blocks, operands of a product

What is passed on for lane 4 g + t of those who multiply, of row g: 12 words, each with a tag in bits 0 and 1.
Column 32 t + 8 b + i of the group is code i of byte b.

    word i = 0 .. 7   codes i of bytes 0, 1 and 2, in bytes 1, 2 and 3
    word 8 .. 10      codes of byte 3, three to a word, in bytes 1, 2 and 3
    word 11           float32: s / 64 for t = 0, - s sum_k q_k for t = 1, sum_k x_k^2 before gamma for t = 2

in the order [group][words 0 .. 3, 4 .. 7, 8 .. 11][row][t][4], so that a warp reads 16 neighbouring bytes a
lane.
"""

import dataclasses
import itertools
from collections.abc import Callable

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import (
    as_real,
    as_word,
    fma,
    index,
    integer,
    minimum,
    real,
    select,
    sum_of_squares,
    total,
)
from pallas_kernels.matmul import epilogue
from pallas_kernels.matmul.q1_decode_b1 import GROUP, LaneColumns
from pallas_kernels.matmul.q1_decode_s8 import UNIT, bits_as_bytes, multiply_group
from pallas_kernels.matmul.quantize_activations import largest_of_group

MOST_ROWS = 8  # columns of the tensor core
TOP = 127
WORDS = 4 * 12  # that are passed on of a row of a group
MOST_SUMS = 4224  # words of shared memory: tiles of a round have no more sums
MOST_TILES = 8  # of a round, of both matrices: 4 sums a lane each


@dataclasses.dataclass(frozen=True)
class Rows:
    """Activations of all rows, of which this warp has some groups.

    words    {(p, h): the 12 that were passed on}
    codes    {(p, h): 8 words of four codes, as `multiply_group` takes them}
    """

    words: dict
    codes: dict


@dataclasses.dataclass(frozen=True)
class RowsProduct:
    """One phase: rows of activations times the tiles of one matrix, or of two for SwiGLU, that a block has.
    Sizes as in q1_decode_b1.BitProduct; its methods are called while a kernel is traced."""

    rows: int
    columns: int
    n_tiles: int
    pairs: int
    warps: int
    tiles: int
    matrices: int = 1
    normed: bool = False
    eps: float = 0.0

    @property
    def per_warp(self) -> int:
        return -(-self.pairs // self.warps)

    @property
    def groups(self) -> int:
        return self.columns // GROUP

    @property
    def together(self) -> int:
        """Tiles of a round: their sums meet in shared memory."""
        room = MOST_SUMS // (self.matrices * self.rows * self._sums_of_row)
        most = min(self.tiles, room, MOST_TILES // self.matrices)
        return -(-self.tiles // -(-self.tiles // most))

    @property
    def _sums_of_row(self) -> int:
        return self.warps * 16 + 4  # 4: rows that are stored together lie in other banks

    @property
    def _sums(self) -> int:
        return self.together * self.matrices * self.rows * self._sums_of_row

    @property
    def scratch(self) -> int:
        """float32 of shared memory: sums of a round, then squares [rows, warps]."""
        return self._sums + self.rows * self.warps

    def quantize(self, group, row, load: Callable, gamma: Callable | None, tag) -> list:
        """By a warp, a row of a group: [(place among the words of the group, word, condition)].

        load    [4 columns, an index and a constant] -> their float32
        gamma   the same of the norm's weights, or None
        """
        lane = integer(lanes.thread() % 32)
        t, i = lane // 8, lane % 8
        columns = [(group * GROUP + index(t * 32 + i), 8 * b) for b in range(4)]
        weights = gamma(columns) if gamma else None
        x = load(columns)
        squares = lanes.warp_sum_real(sum_of_squares(x)) if self.normed else real(0)
        if weights:
            x = [v * w for v, w in zip(x, weights, strict=True)]
        largest = largest_of_group(x, lambda v: as_real(lanes.warp_max(as_word(v))))
        inverse = lanes.ratio(TOP, largest)
        q = [lanes.round_to_integer(v * inverse) for v in x]
        sum_of_q = real(lanes.warp_sum(total(q)))
        word = lanes.packed_bytes(q, 0)
        mine, last = word << 8 | tag, word >> 24
        for more, shift in ((0, 8), (1, 16), (2, 24)):
            code = lanes.from_lane(last, lane + more) if more else last
            extra = code << shift if not more else extra | code << shift
        scale = as_real(memory.tagged(largest * (1 / TOP), 0))  # as it is received
        of_row = select(t == 0, scale * (2 / UNIT), select(t == 1, -(scale * sum_of_q), squares))
        of_row = select(t == 3, 0.0, of_row)
        is_last = i == 7
        place = lambda v, at: index(v * (16 * self.rows) + t * 4 + at) + row * 16  # noqa: E731
        return [
            (place(i // 4, i % 4), mine, None),
            (
                place(integer(2), select(is_last, 3, i // 3)),
                select(is_last, memory.tagged(of_row, tag), extra | tag),
                is_last | (i % 3 == 0),
            ),
        ]

    def receive(self, me: LaneColumns, load: Callable) -> Rows:
        """This warp's groups of all rows, when they are there.

        load    [(place, constant)] of 4 words each, among all that is passed on -> words
        """
        row = minimum(me.g, self.rows - 1)
        of_lane = row * 16 + me.t * 4
        of_group = self.rows * WORDS
        wanted = [
            (base * of_group + of_lane, more * of_group + v * (16 * self.rows))
            for base, more in me.x_group.values()
            for v in range(3)
        ]
        loaded = load(wanted)
        words = {at: loaded[12 * n : 12 * n + 12] for n, at in enumerate(me.x_group)}
        codes = {
            at: [lanes.bytes_of(w[i], w[8 + i // 3], 0x5321 + 0x1000 * (i % 3)) for i in range(8)]
            for at, w in words.items()
        }
        return Rows(words, codes)

    def store_squares(self, me: LaneColumns, x: Rows, scratch_smem):
        if self.normed:
            squares = real(0)
            for at, words in x.words.items():
                squares = fma(memory.untagged(words[11]), me.count[at], squares)
            with lanes.when((me.t == 2) & (me.g < self.rows)):
                memory.store(squares, scratch_smem, me.g * self.warps + me.warp + self._sums)

    def multiply(self, me: LaneColumns, x: Rows, words: Callable, scales: Callable) -> dict:
        """This warp's sums of a round, {(u, m): [row g, g + 8][row of x 2 t, 2 t + 1]}; words(m, u, p) is a
        tile's vector of a pair, scales(m, u, p, h) its scales of a group."""
        items = list(itertools.product(range(self.together), range(self.matrices)))
        y = {item: [[real(0)] * 2 for _ in range(2)] for item in items}
        sources = [integer(me.t * 8 + of) for of in (0, 1, 4, 5)]
        for p in range(self.per_warp):
            loaded = {(u, m): words(m, u, p) for u, m in items}
            for h in (0, 1):
                stats = [as_real(lanes.from_lane(x.words[p, h][11], source)) for source in sources]
                stats = [v * me.count[p, h] for v in stats]
                for u, m in items:
                    bits = [bits_as_bytes(lanes.element(loaded[u, m], 2 * h + r)) for r in (0, 1)]
                    sums = multiply_group(bits, [x.codes[p, h]])
                    d = lanes.halves(scales(m, u, p, h))
                    for r, c in itertools.product((0, 1), (0, 1)):
                        product = fma(sums[2 * r + c], stats[2 * c], stats[2 * c + 1])
                        y[u, m][r][c] = fma(d[r], product, y[u, m][r][c])
        return y

    def _place(self, u, m, row):
        return ((u * self.matrices + m) * self.rows + row) * self._sums_of_row

    def store_sums(self, me: LaneColumns, y: dict, scratch_smem):
        for c in (0, 1):
            row = me.t * 2 + c
            with lanes.when(row < self.rows):
                for (u, m), of_tile in y.items():
                    for r in (0, 1):
                        at = row * self._sums_of_row + self._place(u, m, 0) + me.warp * 16 + me.g + 8 * r
                        memory.store(of_tile[r][c], scratch_smem, at)

    def my_outputs(self, me: LaneColumns, first, first_tile) -> list:
        """This thread's outputs of the round from tile `first` on: (whether it is there, u, row, index within
        the tile, n)."""
        out, threads = [], self.warps * 32
        for begin in range(0, self.together * self.rows * 16, threads):
            at = me.thread + begin
            inside, row, u = at % 16, at // 16 % self.rows, at // (16 * self.rows)
            tile = first + u
            valid = (u < self.together) & (tile < self.tiles) & (first_tile + tile < self.n_tiles)
            out.append((valid, u, row, inside, (first_tile + tile) * 16 + inside))
        return out

    def outputs(self, scratch_smem, mine: list, store: Callable):
        """Behind a block barrier: store(i, row, n, y) for each of my_outputs."""

        def over_warps(at, stride):
            return epilogue.over_warps(lambda w: memory.load(scratch_smem, at + w * stride), self.warps)

        for i, (valid, u, row, inside, n) in enumerate(mine):
            with lanes.when(valid):
                y = [over_warps(self._place(u, m, row) + inside, 16) for m in range(self.matrices)]
                norm = None
                if self.normed:
                    squares = over_warps(row * self.warps + self._sums, 1)
                    norm = epilogue.inverse_rms(squares, self.columns, self.eps)
                store(i, row, n, epilogue.finished(y, norm))
