"""Products of 3 to 8 rows in one launch, on the integer tensor cores: weights become bytes once for all rows,
as in q1_decode_s8.py.

What is passed on (rows_product.py) for lane 4 g + t of those who multiply, of row g: 12 words, each with a
tag in bits 0 and 1. Column 32 t + 8 b + i of the group is code i of byte b.

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
from pallas_kernels.matmul.q1_decode_b1 import GROUP, LaneColumns
from pallas_kernels.matmul.q1_decode_s8 import UNIT, bits_as_bytes, multiply_group
from pallas_kernels.matmul.quantize_activations import largest_of_group
from pallas_kernels.step.rows_product import RowsProduct

TOP = 127


@dataclasses.dataclass(frozen=True)
class Rows:
    """Activations of all rows, of which this warp has some groups.

    words    {(p, h): the 12 that were passed on}
    codes    {(p, h): 8 words of four codes, as `multiply_group` takes them}
    """

    words: dict
    codes: dict


class RowsOfBytes(RowsProduct):
    copies, most_tiles, apart = 1, 8, 4

    @property
    def words(self) -> int:
        return 48

    @staticmethod
    def columns_of_lane(group) -> list[tuple]:
        lane = integer(lanes.thread() % 32)
        return [(group * GROUP + index(lane // 8 * 32 + lane % 8), 8 * b) for b in range(4)]

    def quantize(self, group, row, load: Callable, gamma: Callable | None, tag) -> list:
        lane = integer(lanes.thread() % 32)
        t, i, columns = lane // 8, lane % 8, self.columns_of_lane(group)
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
        row = minimum(me.g, self.rows - 1)
        of_lane = row * 16 + me.t * 4
        of_group = self.rows * self.words
        wanted = [
            (base * of_group + of_lane, more * of_group + v * (16 * self.rows), 4)
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
                memory.store(squares, scratch_smem, me.g * self.busy + me.warp + self.sums)

    def multiply(self, me: LaneColumns, x: Rows, words: Callable, scales: Callable) -> dict:
        """{(u, m): [row g, g + 8][row of x 2 t, 2 t + 1]}"""
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

    def store_sums(self, me: LaneColumns, y: dict, scratch_smem):
        for c in (0, 1):
            row = me.t * 2 + c
            with lanes.when(row < self.rows):
                for (u, m), of_tile in y.items():
                    for r in (0, 1):
                        at = row * self.sums_of_row + self.place(u, m, 0) + me.warp * 16 + me.g + 8 * r
                        memory.store(of_tile[r][c], scratch_smem, at)
