"""Products of 5 to 24 rows in one launch, on the integer tensor cores: weights become bytes once for all
rows, as in decode_s8.py; where a warp has no registers for all rows' activations, once for each eight.

What is passed on (rows_product.py) for lane 4 g + t of those who multiply, of row g or g + 8: 12 words, each
with a tag in bits 0 and 1. Column 32 t + 8 b + i of the group is integer i of byte b.

    word i = 0 .. 7   integers i of bytes 0, 1 and 2, in bytes 1, 2 and 3
    word 8 .. 10      integers of byte 3, three to a word, in bytes 1, 2 and 3
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
from pallas_kernels.matmul.bit_mma.bit_product import LaneColumns
from pallas_kernels.matmul.bit_mma.byte_product import UNIT, bits_as_bytes, multiply_group
from pallas_kernels.matmul.bit_mma.decode import GROUP
from pallas_kernels.matmul.bit_mma.rows_product import WIDTH, RowsProduct, Section
from pallas_kernels.matmul.quantize_activations import largest_of_group

TOP = 127
KEPT_WORDS = 9  # of a group, of each eight rows, while they are multiplied
MOST_KEPT = 112


@dataclasses.dataclass(frozen=True)
class Rows:
    """Activations of eight rows, of which this warp has some groups.

    words    {(p, h): the 12 that were passed on}
    integers  {(p, h): 8 words of four, as `multiply_group` takes them}
    """

    words: dict
    integers: dict


class RowsOfBytes(RowsProduct):
    copies, most_tiles, most_products, apart = 1, 8, 24, 4

    @property
    def words(self) -> int:
        return 48

    @staticmethod
    def columns_of_lane(group) -> list[tuple]:
        lane = integer(lanes.thread() % 32)
        return [(group * GROUP + index(lane // 8 * 32 + lane % 8), 8 * b) for b in range(4)]

    @property
    def section_rows(self) -> int:
        eights, of_eight = -(-self.rows // WIDTH), KEPT_WORDS * 2 * self.per_warp
        if of_eight * eights <= MOST_KEPT:
            return self.rows
        sections = -(-eights // max(1, min(2, MOST_KEPT // of_eight)))
        return min(self.rows, WIDTH * -(-eights // sections))

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

    def receive(self, me: LaneColumns, section: Section, load: Callable) -> list[Rows]:
        of_group = self.rows * self.words
        wanted = []
        for first in _eights(section):
            row = minimum(me.g + (section.first + first), self.rows - 1)
            of_lane = row * 16 + me.t * 4
            wanted += [
                (base * of_group + of_lane, more * of_group + v * (16 * self.rows), 4)
                for base, more in me.x_group.values()
                for v in range(3)
            ]
        loaded, out = load(wanted), []
        for at in range(0, len(loaded), 12 * len(me.x_group)):
            words = {key: loaded[at + 12 * n :][:12] for n, key in enumerate(me.x_group)}
            integers = {
                key: [lanes.bytes_of(w[i], w[8 + i // 3], 0x5321 + 0x1000 * (i % 3)) for i in range(8)]
                for key, w in words.items()
            }
            out.append(Rows(words, integers))
        return out

    def store_squares(self, me: LaneColumns, section: Section, x: list[Rows], scratch_smem):
        if not self.normed:
            return
        for first, rows in zip(_eights(section), x, strict=True):
            squares = real(0)
            for at, words in rows.words.items():
                squares = fma(memory.untagged(words[11]), me.count[at], squares)
            row = me.g + (section.first + first)
            with lanes.when((me.t == 2) & (row < self.rows)):
                memory.store(squares, scratch_smem, row * self.busy + me.warp + self.sums)

    def multiply(self, me: LaneColumns, x: list[Rows], words: Callable, scales: Callable) -> dict:
        """{(u, m): [eight of the rows][row g, g + 8][row of x 2 t, 2 t + 1]}"""
        items = list(itertools.product(range(self.together), range(self.matrices)))
        y = {item: [[[real(0)] * 2 for _ in range(2)] for _ in x] for item in items}
        sources = [integer(me.t * 8 + of) for of in (0, 1, 4, 5)]
        for p in range(self.per_warp):
            loaded = {(u, m): words(m, u, p) for u, m in items}
            for h in (0, 1):
                stats = [[as_real(lanes.from_lane(of.words[p, h][11], s)) for s in sources] for of in x]
                stats = [[v * me.count[p, h] for v in of] for of in stats]
                for u, m in items:
                    bits = [bits_as_bytes(lanes.element(loaded[u, m], 2 * h + r)) for r in (0, 1)]
                    sums = [multiply_group(bits, [of.integers[p, h]]) for of in x]
                    d = lanes.halves(scales(m, u, p, h))
                    for i, r, c in itertools.product(range(len(x)), (0, 1), (0, 1)):
                        product = fma(sums[i][2 * r + c], stats[i][2 * c], stats[i][2 * c + 1])
                        y[u, m][i][r][c] = fma(d[r], product, y[u, m][i][r][c])
        return y

    def store_sums(self, me: LaneColumns, section: Section, y: dict, scratch_smem):
        for (i, first), c in itertools.product(enumerate(_eights(section)), (0, 1)):
            row = me.t * 2 + (first + c)
            with lanes.when(row < section.rows):
                for (u, m), of_tile in y.items():
                    for r in (0, 1):
                        at = self.place(section, u, m, 0) + me.warp * 16 + me.g + 8 * r
                        memory.store(of_tile[i][r][c], scratch_smem, row * self.sums_of_row + at)


def _eights(section: Section) -> range:
    """The first row of each eight, within the section."""
    return range(0, section.rows, WIDTH)
