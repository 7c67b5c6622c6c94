"""Products of 1 to 4 rows (product.py) on the binary tensor cores: bits of weights and bits of activations.
Packed weights are never unpacked. With q = sum_p 2^p b_p, the highest plane b_p negative,

    sum_k b_k q_k = sum_p 2^p popcount(b & b_p)

and `mma.m16n8k128 and.popc` counts 16 rows of weights against 8 planes at once, which the rows share.

Each row has C of the 8 columns of the tensor core: 8 of a single row, 4 of two rows and 2 of more. M = 8 / C
products, one after another, have all 8 planes of all rows. Plane M c + i is column c of a row in product i:

    4 rows, column    0   1   2   3   4   5   6   7
    row               0   0   1   1   2   2   3   3
    planes            i  4+i  i  4+i  i  4+i  i  4+i        in product i = 0 .. 3

So a lane's counts, of columns 2 t and 2 t + 1, are of one row, and what follows the tensor cores is done for
all rows at once, not for one after another. One row may also have 16 bits: two products of 8 planes.

What is passed on of a row of a group, each word with a tag in bits 0 and 1, which the words of planes have in
place of their own:

    [row][c][word t of a plane][i]   words of planes
    [row][c][t]                      bits 0 and 1 of the M words of planes of that lane, from bit 2 on
    [row][4]                         float32: 2 s, - s sum_k q_k, sum_k x_k^2 before gamma, 0
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from pallas_kernels.gpu import lanes, memory, tensor_cores
from pallas_kernels.gpu.values import (
    as_real,
    as_word,
    fma,
    integer,
    minimum,
    real,
    select,
    sum_of_squares,
    total,
)
from pallas_kernels.matmul.bit_mma.product import GROUP, LaneColumns, Product
from pallas_kernels.matmul.quantize_activations import largest_of_group

PLANES = 8
MOST_PLANE_ROWS = 4  # with 5, a row would have one column: more instructions than bytes take
PLANE_WORDS = 32  # of a row of a group
SUM, SUM_WORD = 1.5 * 2**23 + 2, 0x4B400002  # a float and its bits, of which a third is a whole number


@dataclasses.dataclass(frozen=True)
class Rows:
    """Activations of all rows, of which this warp has some groups.

    planes   {(p, h): the lane's word of each of the M products}
    scale, correction   {(p, h): of the row whose counts the lane has: y = d (counts * scale + correction)}
    squares  sum over this warp's groups, of that row, where the phase norms
    """

    planes: dict
    scale: dict
    correction: dict
    squares: Any


class PlaneProduct(Product):
    copies, most_tiles, most_products = 2, 12, 48

    @property
    def row_columns(self) -> int:
        """C: columns of the tensor core that a row has."""
        return PLANES >> (self.rows - 1).bit_length()

    @property
    def words(self) -> int:
        return PLANE_WORDS + 4 * self.row_columns + 4

    @property
    def products(self) -> int:
        """M."""
        return PLANES // self.row_columns

    @staticmethod
    def columns_of_lane(group) -> list[tuple]:
        at = group * GROUP + lanes.thread() % 32
        return [(at, 32 * i) for i in range(4)]

    def words_of_digit(self, row, packed, scale, squares, tag) -> list:
        lane, count = lanes.thread() % 32, self.products
        plane = plane_words(packed, lane)  # lane 4 p + t: word t of plane p
        sum_of_q = real(lanes.warp_sum(lanes.sum_of_bytes(packed, integer(0))))
        p, t = lane // 4, lane % 4
        i, place = p % count, p // count * 4 + t
        lost, distance = (plane & 3) << integer(i) * 2 + 2, 4
        while distance < 4 * count:
            lost = lost | lanes.swapped(lost, distance)
            distance *= 2
        statistic = select(lane == 0, scale * 2, select(lane == 1, -(scale * sum_of_q), squares))
        statistic = select(lane == 3, 0.0, statistic)
        begin = self.rows * PLANE_WORDS
        return [
            (row * PLANE_WORDS + place * count + i, plane & 0xFFFFFFFC | tag, None),
            (row * (4 * self.row_columns) + begin + place, lost | tag, i == 0),
            (
                row * 4 + (begin + 4 * self.row_columns * self.rows) + lane,
                memory.tagged(statistic, tag),
                lane < 4,
            ),
        ]

    def receive(self, me: LaneColumns, first_row, load: Callable) -> Rows:
        row_words, count, last = 4 * self.row_columns, self.products, self.rows - 1
        place, row, counted = me.lane % row_words, minimum(me.lane // row_words, last), self._row(me)
        group_words, begin = self.group_words, self.rows * PLANE_WORDS
        places = []
        for base, more in me.x_group.values():
            at = base * group_words
            places += [
                (at + row * PLANE_WORDS + place * count, more * group_words, count),
                (at + row * row_words + place, more * group_words + begin, 1),
                (at + minimum(counted, last) * 4, more * group_words + begin + row_words * self.rows, 4),
            ]
        loaded = iter(load(places))
        # Of planes from M c on, which the lane's first column has, a row's other lanes count others.
        weight = real(integer(1) << integer(self._part(me)) * (2 * count))
        planes, scale, correction, squares = {}, {}, {}, real(0)
        for at in me.x_group:
            words, lost = [next(loaded) for _ in range(count)], next(loaded)
            planes[at] = [lanes.chosen_bits(word, lost >> 2 + 2 * i, 3) for i, word in enumerate(words)]
            double, minus, group_squares, _ = (memory.untagged(next(loaded)) for _ in range(4))
            scale[at] = double * me.count[at] * weight
            correction[at] = select(self._part(me) == 0, minus * me.count[at], 0.0)
            squares = fma(group_squares, me.count[at], squares) if self.normed else squares
        return Rows(planes, scale, correction, squares)

    def own_columns(self, me: LaneColumns, load: Callable) -> dict:
        """For one row that each block quantizes itself: {(p, h, i): value} of this lane's columns, bit `lane`
        of word i of each of its warp's groups.

        load(columns) loads them all; a column is an index and a constant to be added.
        """
        columns = {
            (p, h, i): (base * GROUP + me.lane, GROUP * more + 32 * i)
            for (p, h), (base, more) in me.x_group.items()
            for i in range(4)
        }
        return dict(zip(columns, load(list(columns.values())), strict=True))

    def quantize_own(self, me: LaneColumns, x: dict, gamma: dict) -> Rows:
        """x and gamma as `own_columns`."""
        # Of planes 2 t and 2 t + 1 this lane sums the counts: 2 * 4^t times what `multiply` counts.
        weight = real(integer(2) << integer(me.t) * 2)
        first = me.t == 0
        planes, scale, correction, squares = {}, {}, {}, real(0)
        for p, h in me.x_group:
            values = [x[p, h, i] for i in range(4)]
            if self.normed:
                squares = fma(sum_of_squares(values), me.count[p, h], squares)
                values = [v * gamma[p, h, i] for i, v in enumerate(values)]
            planes[p, h], step, sum_of_q = bit_planes(values, me.lane, self.bits)
            step = step * me.count[p, h]
            scale[p, h] = step * weight
            correction[p, h] = select(first, -(step * sum_of_q), 0.0)
        return Rows(planes, scale, correction, lanes.warp_sum_real(squares) if self.normed else squares)

    def _row(self, me: LaneColumns):
        """The row whose counts a lane has."""
        return me.t // (self.row_columns // 2)

    def _part(self, me: LaneColumns):
        """Which two of a row's columns a lane counts."""
        return me.t % (self.row_columns // 2)

    def store_squares(self, me: LaneColumns, first_row, x: Rows, scratch_smem):
        if not self.normed:
            return
        if self.rows == 1:
            # All lanes have the same number and store it: past a condition the compiler moves no product.
            memory.store(x.squares, scratch_smem, me.warp + self.sums)
            return
        row = self._row(me)
        with lanes.when((me.g == 0) & (self._part(me) == 0) & (row < self.rows)):
            memory.store(x.squares, scratch_smem, row * self.busy + me.warp + self.sums)

    def multiply(self, me: LaneColumns, x: Rows, words: Callable, scales: Callable) -> dict:
        """{(u, m): [rows g, g + 8]} of the lane's row of x."""
        if self.rows > 1:
            return self._multiply(me, x, self.items(), words, scales)
        y = {}
        for item in self.items():
            y |= self._multiply(me, x, [item], words, scales)
        return y

    def _multiply(self, me: LaneColumns, x: Rows, items: list, words: Callable, scales: Callable) -> dict:
        """Some items of a round, together."""
        y = {item: [real(0)] * 2 for item in items}
        for p in range(self.per_warp):
            loaded = {(u, m): words(m, u, p) for u, m in items}
            for h, (u, m) in itertools.product((0, 1), items):
                a0, a1 = (lanes.element(loaded[u, m], 2 * h + r) for r in (0, 1))
                counts = self._weighted_counts(me, a0, a1, x.planes[p, h])
                d = lanes.halves(scales(m, u, p, h))
                for r, counted in enumerate(counts):
                    product = fma(counted, x.scale[p, h], x.correction[p, h])
                    y[u, m][r] = fma(d[r], product, y[u, m][r])
        return y

    def _weighted_counts(self, me: LaneColumns, a0, a1, planes: list) -> Iterable:
        """A lane's share of sum_p 2^p popcount(a & b_p) of rows g and g + 8, as float32: that of its columns,
        over 2^p of the first plane of them."""
        highest = self._part(me) == self.row_columns // 2 - 1  # the last plane there is negative
        if self.rows > 1:
            top = 2 ** (2 * self.products - 1)
            counts = [tensor_cores.count_common_bits(a0, a1, plane) for plane in planes]
            top = select(highest, -top, top)
            low_high = [[[c[2 * r + i] for c in counts] for i in (0, 1)] for r in (0, 1)]
            return (real(in_powers_of_two([*low, *high[:-1]]) + high[-1] * top) for low, high in low_high)
        return counts_of_row(highest, a0, a1, planes)

    def store_sums(self, me: LaneColumns, y: dict, scratch_smem):
        # Lanes of a row beyond the last have the last one's sums, and store them once more: behind a
        # condition the compiler would put the products too, and have no registers for what they wait with.
        row, inside = minimum(self._row(me), self.rows - 1), me.warp * 16 + me.g
        if self.row_columns > 2:
            summed = over_lanes(me.t, list(y.values()), self.row_columns // 2)
            y = {at: [v] for at, v in zip(y, summed, strict=True)}
            inside = inside + me.t % 2 * 8
        for (u, m), sums in y.items():
            at = row * self.row_sums + self.place(u, m, 0) + inside
            for r, v in enumerate(sums):
                memory.store(v, scratch_smem, at + 8 * r)


def counts_of_row(highest, a0, a1, planes: list) -> list:
    """A lane's share of sum_p 2^p popcount(a & b_p) of rows g and g + 8, as float32, where all 8 columns are
    one row's: that of its two planes, over 2^p of the first of them.

    highest  whether they are the last, of which the second is negative
    planes   the lane's word of each 8 planes, the lowest first
    """
    if len(planes) == 1:
        # Counts start so that their sum is the last bits of a float: no conversion, which would run at a
        # quarter of the speed.
        second, start = select(highest, -2, 2), select(highest, -SUM_WORD % 2**32, SUM_WORD // 3)
        c = tensor_cores.count_common_bits(a0, a1, planes[0], start)
        return [as_real(c[2 * r] + c[2 * r + 1] * second) - SUM for r in (0, 1)]
    counted = [integer(0)] * 2
    for byte, plane in enumerate(planes):
        c = tensor_cores.count_common_bits(a0, a1, plane)
        second = select(highest, -2, 2) if byte == len(planes) - 1 else 2
        counted = [n + (c[2 * r] + c[2 * r + 1] * second << 8 * byte) for r, n in enumerate(counted)]
    return [real(n) for n in counted]


def over_lanes(t, shares: list, count: int) -> list:
    """Sums over 2 or 4 neighbouring lanes of their shares of rows g and g + 8: of rows g in lanes of even t,
    of rows g + 8 in the others, so that half as many numbers are exchanged.

    All shares come before the first exchange, past which no compiler moves a product: so the latency of one
    is hidden behind the others.
    """
    odd = t % 2 == 1
    own, others = ([select(odd, y[r], y[1 - r]) for y in shares] for r in (1, 0))
    sums = [v + lanes.swapped(other, 1) for v, other in zip(own, others, strict=True)]
    return sums if count == 2 else [v + lanes.swapped(v, 2) for v in sums]


def bit_planes(x: list, lane, bits: int):
    """A warp's 128 activations (4 a lane) -> (planes, scale, sum of q as float32).

    planes   per 8 bits of q one word: lane 4 p + t holds word t of plane p, as the tensor core wants it
    """
    top = 2 ** (bits - 1) - 1
    largest = largest_of_group(x, lambda v: as_real(lanes.warp_max(as_word(v))))
    inverse = lanes.ratio(top, largest)
    q = [lanes.round_to_integer(v * inverse) for v in x]
    sum_of_q = total(q)
    planes = [plane_words(lanes.packed_bytes(q, byte), lane) for byte in range(bits // 8)]
    return planes, largest * (1 / top), real(lanes.warp_sum(sum_of_q))


def plane_words(packed, lane):
    """8 bits of a warp's 128 integers, a byte of 4 a lane -> word t of plane p in lane 4 p + t."""
    # It is bit p of the lanes' byte t. Transposed, lane 8 t + p holds it.
    source = integer(lane % 4 * 8 + lane // 4)
    return lanes.from_lane(lanes.transposed_bits(packed, lane), source)


def in_powers_of_two(terms: list):
    """sum_i 2^i terms[i], of neighbours first: the fewest that wait for each other."""
    shift = 1
    while len(terms) > 1:
        pairs = itertools.zip_longest(terms[::2], terms[1::2])
        terms = [a if b is None else (b << shift) + a for a, b in pairs]
        shift *= 2
    return terms[0]
