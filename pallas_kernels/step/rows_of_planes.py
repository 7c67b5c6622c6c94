"""Products of 2 rows in one launch, on the binary tensor cores: bits of weights and bits of activations,
as in q1_decode_b1.py.

What is passed on (rows_product.py) for lane 4 p + t of those who multiply: word t of plane p of a row of a
group, and a float32 of 14 bits of mantissa, each word with a tag in bits 0 and 1:

    word 0   bits 0 .. 23 of the plane, in bits 8 .. 31
    word 1   the float without its sign, in bits 10 .. 31; bits 24 .. 31 of the plane, in bits 2 .. 9

in the order [group][row][lane][2]. The float is the scale s; behind a norm, lanes of odd p have sum_k x_k^2
before gamma in its place.
"""

import itertools
from collections.abc import Callable

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import as_real, as_word, fma, integer, real, select, sum_of_squares
from pallas_kernels.matmul.q1_decode_b1 import (
    GROUP,
    LaneColumns,
    RowPlanes,
    bit_planes,
    weighted_counts,
)
from pallas_kernels.step.rows_product import RowsProduct, Section

MOST_ROWS = 2  # each takes as many instructions; of 3 rows on, bytes are faster (LOG.md)


class RowsOfPlanes(RowsProduct):
    words, side_by_side, at_once = 64, 2, True

    def quantize(self, group, row, load: Callable, gamma: Callable | None, tag) -> list:
        lane = lanes.thread() % 32
        columns = [(group * GROUP + lane, 32 * i) for i in range(4)]
        weights = gamma(columns) if gamma else None
        x = load(columns)
        squares = lanes.warp_sum_real(sum_of_squares(x)) if self.normed else None
        if weights:
            x = [v * w for v, w in zip(x, weights, strict=True)]
        (plane,), number, _ = bit_planes(x, lane, 8)
        if squares is not None:
            number = select(lane // 4 % 2 == 1, squares, number)
        rounded = as_word(number) + 0x100 << 1 & 0xFFFFFC00
        place = lane * 2 + row * 64
        return [
            (place, plane << 8 | tag, None),
            (place + 1, rounded | plane >> 24 << 2 | tag, None),
        ]

    def receive(self, me: LaneColumns, section: Section, load: Callable) -> list[RowPlanes]:
        of_group = self.rows * self.words
        wanted = [
            (base * of_group + me.lane * 2, more * of_group + row * 64)
            for base, more in me.x_group.values()
            for row in range(self.rows)
        ]
        loaded = load(wanted)
        weight, odd, every = real(integer(1) << integer(me.t) * 2), me.lane // 4 % 2 == 1, integer(0xFFFFFFFF)
        out = [RowPlanes({}, {}, {}, real(0)) for _ in range(self.rows)]
        for n, (at, row) in enumerate(itertools.product(me.x_group, range(self.rows))):
            low, high = loaded[2 * n : 2 * n + 2]
            plane = lanes.bytes_of(low, high >> 2, 0x4321)
            number = as_real(high >> 1 & 0x7FFFFE00)
            x = out[row]
            if self.normed:
                other = lanes.swapped(number, 4)
                squares = fma(select(odd, number, other), me.count[at], x.squares)
                x = out[row] = RowPlanes(x.planes, x.scale, x.correction, squares)
                number = select(odd, other, number)
            share = number * me.count[at] * weight
            x.planes[at], x.scale[at] = [plane], share * 2
            # sum_k q_k, of which each lane has its planes' share: as with weights that are all ones
            x.correction[at] = -(share * weighted_counts(me.t, every, every, [plane])[0])
        return out

    def store_squares(self, me: LaneColumns, section: Section, x: list[RowPlanes], scratch_smem):
        if self.normed:
            with lanes.when(me.lane == 0):
                for row, of_row in enumerate(x):
                    at = row * self.warps + self.sums
                    memory.store(of_row.squares, scratch_smem, me.warp + at)

    def multiply(self, me: LaneColumns, x: list[RowPlanes], words: Callable, scales: Callable) -> dict:
        """{(u, m): [row of x][row g, g + 8]}"""
        items = list(itertools.product(range(self.together), range(self.matrices)))
        y = {item: [[real(0)] * 2 for _ in range(self.rows)] for item in items}
        for p in range(self.per_warp):
            loaded = {(u, m): words(m, u, p) for u, m in items}
            for h, (u, m) in itertools.product((0, 1), items):
                a0, a1 = (lanes.element(loaded[u, m], 2 * h + r) for r in (0, 1))
                d = lanes.halves(scales(m, u, p, h))
                for of_row, sums in zip(x, y[u, m], strict=True):
                    counted = weighted_counts(me.t, a0, a1, of_row.planes[p, h])
                    for r in (0, 1):
                        product = fma(counted[r], of_row.scale[p, h], of_row.correction[p, h])
                        sums[r] = fma(d[r], product, sums[r])
        return y

    def store_sums(self, me: LaneColumns, section: Section, y: dict, scratch_smem):
        for (u, m), of_tile in y.items():
            for row, sums in enumerate(of_tile):
                sums = [lanes.warp_sum_real(v, lanes=4) for v in sums]
                with lanes.when(me.t == 0):
                    for r in (0, 1):
                        at = me.warp * 16 + (self.place(section, u, m, row) + 8 * r) + me.g
                        memory.store(sums[r], scratch_smem, at)
