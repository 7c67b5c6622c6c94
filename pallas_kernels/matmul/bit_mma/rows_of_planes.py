"""Products of 2 to 4 rows in one launch, on the binary tensor cores: bits of weights and bits of activations,
as in bit_product.py, but that the 8 columns of the tensor core are shared by the rows.

Each row has C of them, 4 of two rows and 2 of more; M = 8 / C products one behind the other have all 8 planes
of all rows. Plane M c + i is column c of a row in product i:

    4 rows, column    0   1   2   3   4   5   6   7
    row               0   0   1   1   2   2   3   3
    planes            i  4+i  i  4+i  i  4+i  i  4+i        in product i = 0 .. 3

So a lane's counts, of columns 2 t and 2 t + 1, are of one row, and what follows the tensor cores is done for
all rows at once, not for one after another.

What is passed on (rows_product.py) of a row of a group, each word with a tag in bits 0 and 1, which the words
of planes have in place of their own:

    [row][c][word t of a plane][i]   words of planes
    [row][c][t]                      bits 0 and 1 of the M words of planes of that lane, from bit 2 on
    [row][4]                         float32: 2 s, - s sum_k q_k, sum_k x_k^2 before gamma, 0
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from pallas_kernels.gpu import lanes, memory, tensor_cores
from pallas_kernels.gpu.values import fma, integer, minimum, real, select, sum_of_squares
from pallas_kernels.matmul.bit_mma.bit_product import LaneColumns, bit_planes, over_lanes
from pallas_kernels.matmul.bit_mma.decode import GROUP
from pallas_kernels.matmul.bit_mma.rows_product import RowsProduct, Section

PLANES = 8
MOST_ROWS = 4  # of 5 on a row would have one column: more instructions than bytes take
WORDS = 32  # of planes of a row of a group


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


class RowsOfPlanes(RowsProduct):
    copies, most_tiles, most_products, apart = 2, 12, 48, 4

    @property
    def of_row(self) -> int:
        """C: columns of the tensor core that a row has."""
        return PLANES >> (self.rows - 1).bit_length()

    @property
    def words(self) -> int:
        return WORDS + 4 * self.of_row + 4

    @property
    def products(self) -> int:
        """M."""
        return PLANES // self.of_row

    @staticmethod
    def columns_of_lane(group) -> list[tuple]:
        return [(group * GROUP + lanes.thread() % 32, 32 * i) for i in range(4)]

    def quantize(self, group, row, load: Callable, gamma: Callable | None, tag) -> list:
        lane, count, columns = lanes.thread() % 32, self.products, self.columns_of_lane(group)
        weights = gamma(columns) if gamma else None
        x = load(columns)
        squares = lanes.warp_sum_real(sum_of_squares(x)) if self.normed else real(0)
        if weights:
            x = [v * w for v, w in zip(x, weights, strict=True)]
        (plane,), scale, sum_of_q = bit_planes(x, lane, PLANES)  # lane 4 p + t: word t of plane p
        p, t = lane // 4, lane % 4
        i, place = p % count, p // count * 4 + t
        lost, distance = (plane & 3) << integer(i) * 2 + 2, 4
        while distance < 4 * count:
            lost = lost | lanes.swapped(lost, distance)
            distance *= 2
        scale = memory.untagged(memory.tagged(scale, 0))  # as it is received
        of_row = select(lane == 0, scale * 2, select(lane == 1, -(scale * sum_of_q), squares))
        of_row = select(lane == 3, 0.0, of_row)
        begin = self.rows * WORDS
        return [
            (row * WORDS + place * count + i, plane & 0xFFFFFFFC | tag, None),
            (row * (4 * self.of_row) + begin + place, lost | tag, i == 0),
            (row * 4 + (begin + 4 * self.of_row * self.rows) + lane, memory.tagged(of_row, tag), lane < 4),
        ]

    def receive(self, me: LaneColumns, section: Section, load: Callable) -> Rows:
        of_row, count, last = 4 * self.of_row, self.products, self.rows - 1
        place, row, mine = me.lane % of_row, minimum(me.lane // of_row, last), self._row(me)
        of_group, begin = self.rows * self.words, self.rows * WORDS
        wanted = []
        for base, more in me.x_group.values():
            at = base * of_group
            wanted += [
                (at + row * WORDS + place * count, more * of_group, count),
                (at + row * of_row + place, more * of_group + begin, 1),
                (at + minimum(mine, last) * 4, more * of_group + begin + of_row * self.rows, 4),
            ]
        loaded = iter(load(wanted))
        # Of planes from M c on, which the lane's first column has, a row's other lanes count others.
        weight = real(integer(1) << integer(self._part(me)) * (2 * count))
        planes, scale, correction, squares = {}, {}, {}, real(0)
        for at in me.x_group:
            words, lost = [next(loaded) for _ in range(count)], next(loaded)
            planes[at] = [lanes.chosen_bits(word, lost >> 2 + 2 * i, 3) for i, word in enumerate(words)]
            double, minus, of_group_squares, _ = (memory.untagged(next(loaded)) for _ in range(4))
            scale[at] = double * me.count[at] * weight
            correction[at] = select(self._part(me) == 0, minus * me.count[at], 0.0)
            squares = fma(of_group_squares, me.count[at], squares) if self.normed else squares
        return Rows(planes, scale, correction, squares)

    def _row(self, me: LaneColumns):
        """Whose counts a lane has."""
        return me.t // (self.of_row // 2)

    def _part(self, me: LaneColumns):
        """Which of a row's columns, two each."""
        return me.t % (self.of_row // 2)

    def store_squares(self, me: LaneColumns, section: Section, x: Rows, scratch_smem):
        if self.normed:
            row = self._row(me)
            with lanes.when((me.g == 0) & (self._part(me) == 0) & (row < self.rows)):
                memory.store(x.squares, scratch_smem, row * self.busy + me.warp + self.sums)

    def multiply(self, me: LaneColumns, x: Rows, words: Callable, scales: Callable) -> dict:
        """{(u, m): [rows g, g + 8]} of the lane's row of x."""
        items = list(itertools.product(range(self.together), range(self.matrices)))
        y = {item: [real(0)] * 2 for item in items}
        top = 2 ** (2 * self.products - 1)
        top = select(self._part(me) == self.of_row // 2 - 1, -top, top)  # the highest plane is negative
        for p in range(self.per_warp):
            loaded = {(u, m): words(m, u, p) for u, m in items}
            for h, (u, m) in itertools.product((0, 1), items):
                a0, a1 = (lanes.element(loaded[u, m], 2 * h + r) for r in (0, 1))
                counts = [tensor_cores.count_common_bits(a0, a1, plane) for plane in x.planes[p, h]]
                d = lanes.halves(scales(m, u, p, h))
                for r in (0, 1):
                    low, high = ([c[2 * r + i] for c in counts] for i in (0, 1))
                    counted = in_powers_of_two([*low, *high[:-1]]) + high[-1] * top
                    product = fma(real(counted), x.scale[p, h], x.correction[p, h])
                    y[u, m][r] = fma(d[r], product, y[u, m][r])
        return y

    def store_sums(self, me: LaneColumns, section: Section, y: dict, scratch_smem):
        # Lanes of a row that is not there have the last one's sums, and store them once more: behind a
        # condition the compiler would put the products too, and have no registers for what they wait with.
        row, inside = minimum(self._row(me), self.rows - 1), me.warp * 16 + me.g
        if self.of_row > 2:
            summed = over_lanes(me.t, list(y.values()), self.of_row // 2)
            y = {at: [v] for at, v in zip(y, summed, strict=True)}
            inside = inside + me.t % 2 * 8
        for (u, m), sums in y.items():
            at = row * self.sums_of_row + self.place(section, u, m, 0) + inside
            for r, v in enumerate(sums):
                memory.store(v, scratch_smem, at + 8 * r)


def in_powers_of_two(terms: list):
    """sum_i 2^i terms[i], of neighbours first: the fewest that wait for each other."""
    shift = 1
    while len(terms) > 1:
        pairs = itertools.zip_longest(terms[::2], terms[1::2])
        terms = [a if b is None else (b << shift) + a for a, b in pairs]
        shift *= 2
    return terms[0]
