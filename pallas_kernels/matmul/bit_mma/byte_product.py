"""Products of 4 to 24 rows (product.py) on the integer tensor cores: the bits of a word become bytes once for
all rows; where a warp has no registers for all rows' activations, once for each eight.

As formats/q1_0.py tiles weights, lane 4 g + t has word t of rows g and g + 8 of a group, bit 8 b + i of it
being column 32 t + 8 b + i. `word << 7 - i & 0x80808080` is therefore what mma.m16n8k32 wants as four
neighbouring k of a row, a 1 being 128, if the activations' columns are taken in the same order. A column of
the tensor core is a row of x.

Sums I of 128 b q begin at F_0 = 2^21, so that F = F_0 + I is positive and below 2^23, and its bits are a
float32 as they are: F 2^-149, a subnormal number, which an fma takes as fast as others. So of a group

    2 s sum_k b_k q_k - s sum_k q_k = F s / 64 - s (F_0 / 64 + sum_k q_k)

is one fma (`coefficients`). To round what is subtracted costs 0.01 s at most, to round x about 2 s.

In a step, 12 words are passed on to each lane 4 g + t that multiplies row g or g + 8 of x, each with a tag in
bits 0 and 1. Column 32 t + 8 b + i of the group is integer i of byte b.

    word i = 0 .. 7   integers i of bytes 0, 1 and 2, in bytes 1, 2 and 3
    word 8 .. 10      integers of byte 3, three to a word, in bytes 1, 2 and 3
    word 11           float32: the coefficients for t = 0 and 1, sum_k x_k^2 before gamma for t = 2

in the order [group][words 0 .. 3, 4 .. 7, 8 .. 11][row][t][4], so that a warp reads 16 neighbouring bytes a
lane.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable

from pallas_kernels.gpu import lanes, memory, tensor_cores
from pallas_kernels.gpu.values import as_real, fma, index, integer, minimum, real, select
from pallas_kernels.matmul.bit_mma.product import GROUP, MMA_COLUMNS, LaneColumns, Product

FIRST = 2**21  # F_0
UNIT = 128  # a 1 of the weights
# The factor of a coefficient, so that neither it nor sums leave the range of float32: exact for groups of
# activations whose largest is between 2^-50 and 2^60.
COEFFICIENT = 2.0**80
SUM = COEFFICIENT * 2.0**-149  # the factor of sums
GROUP_WORDS = 48  # that are passed on of a row of a group
# Of a group of each eight rows a lane has so many words while they are multiplied, and at most in all:
REGISTER_WORDS, MOST_REGISTERS = 9, 112


@dataclasses.dataclass(frozen=True)
class Eight:
    """Activations of eight rows, of which this warp has some groups, as they have been passed on.

    words   {(p, h): the 12 words}
    fours   {(p, h): 8 words of four integers}
    """

    words: dict
    fours: dict

    def integers(self, p: int, h: int) -> list:
        """As `multiply_group` takes them; there is one byte of each."""
        return [self.fours[p, h]]

    def coefficients(self, me: LaneColumns, p: int, h: int) -> list:
        """Both of row 2 t of the eight, then of row 2 t + 1."""
        sources = [integer(me.t * 8 + lane) for lane in (0, 1, 4, 5)]
        values = [as_real(lanes.from_lane(self.words[p, h][11], source)) for source in sources]
        return [v * me.count[p, h] for v in values]


class ByteProduct(Product):
    copies, most_tiles, most_products, words = 1, 8, 24, GROUP_WORDS

    @staticmethod
    def columns_of_lane(group) -> list[tuple]:
        lane = integer(lanes.thread() % 32)
        at = group * GROUP + index(lane // 8 * 32 + lane % 8)
        return [(at, 8 * b) for b in range(4)]

    @property
    def section_rows(self) -> int:
        eights, each = -(-self.rows // MMA_COLUMNS), REGISTER_WORDS * 2 * self.per_warp
        if each * eights <= MOST_REGISTERS:
            return self.rows
        sections = -(-eights // max(1, min(2, MOST_REGISTERS // each)))
        return min(self.rows, MMA_COLUMNS * -(-eights // sections))

    @property
    def stored_rows(self) -> int:
        """Where weights are in registers, whole eights: past a condition the compiler would move the
        products, too, and keep all that they wait for in registers (of 5 rows 254 a lane, of 8 rows 178)."""
        whole_eights = -(-self.section_rows // MMA_COLUMNS) * MMA_COLUMNS
        return self.section_rows if self.round_tiles is None else whole_eights

    def _eights(self) -> range:
        """The first row of each eight, within a section."""
        return range(0, self.section_rows, MMA_COLUMNS)

    def words_of_digit(self, row, packed, scale, squares, tag) -> list:
        lane = integer(lanes.thread() % 32)
        t, i = lane // 8, lane % 8
        sum_of_q = real(lanes.warp_sum(lanes.sum_of_bytes(packed, integer(0))))
        first, last = packed << 8 | tag, packed >> 24
        for more, shift in ((0, 8), (1, 16), (2, 24)):
            code = lanes.from_lane(last, lane + more) if more else last
            extra = code << shift if not more else extra | code << shift
        factor, added = coefficients(scale, sum_of_q)
        statistic = select(t == 0, factor, select(t == 1, added, squares))
        statistic = select(t == 3, 0.0, statistic)
        is_last = i == 7
        place = lambda v, at: index(v * (16 * self.rows) + t * 4 + at) + row * 16  # noqa: E731
        return [
            (place(i // 4, i % 4), first, None),
            (
                place(integer(2), select(is_last, 3, i // 3)),
                select(is_last, memory.tagged(statistic, tag), extra | tag),
                is_last | (i % 3 == 0),
            ),
        ]

    def receive(self, me: LaneColumns, first_row, load: Callable) -> list[Eight]:
        group_words = self.group_words
        places = []
        for first in self._eights():
            row = minimum(me.g + (first_row + first), self.rows - 1)
            place = row * 16 + me.t * 4
            places += [
                (base * group_words + place, more * group_words + v * (16 * self.rows), 4)
                for base, more in me.x_group.values()
                for v in range(3)
            ]
        loaded, out = load(places), []
        for at in range(0, len(loaded), 12 * len(me.x_group)):
            words = {key: loaded[at + 12 * n :][:12] for n, key in enumerate(me.x_group)}
            fours = {
                key: [lanes.bytes_of(w[i], w[8 + i // 3], 0x5321 + 0x1000 * (i % 3)) for i in range(8)]
                for key, w in words.items()
            }
            out.append(Eight(words, fours))
        return out

    def store_squares(self, me: LaneColumns, first_row, x: list[Eight], scratch_smem):
        if not self.normed:
            return
        for first, eight in zip(self._eights(), x, strict=True):
            squares = real(0)
            for at, words in eight.words.items():
                squares = fma(memory.untagged(words[11]), me.count[at], squares)
            row = me.g + (first_row + first)
            with lanes.when((me.t == 2) & (row < self.rows)):
                memory.store(squares, scratch_smem, row * self.busy + me.warp + self.sums)

    def multiply(self, me: LaneColumns, x: list, words: Callable, scales: Callable) -> dict:
        """{(u, m): [eight of the rows][row g, g + 8][row of x 2 t, 2 t + 1]}, times SUM; x: of each eight
        rows an `Eight`, or decode_s8.SharedRows."""
        items = self.items()
        y = {item: [[[real(0)] * 2 for _ in range(2)] for _ in x] for item in items}
        for p in range(self.per_warp):
            loaded = {(u, m): words(m, u, p) for u, m in items}
            for h in (0, 1):
                integers = [eight.integers(p, h) for eight in x]
                factors = [eight.coefficients(me, p, h) for eight in x]
                for u, m in items:
                    bits = [bits_as_bytes(lanes.element(loaded[u, m], 2 * h + r)) for r in (0, 1)]
                    sums = [multiply_group(bits, q) for q in integers]
                    d = lanes.halves(scales(m, u, p, h))
                    for i, r, c in itertools.product(range(len(x)), (0, 1), (0, 1)):
                        factor, product = factors[i][2 * c : 2 * c + 2]
                        for digit, digit_sums in reversed([*enumerate(sums[i])]):  # so that none is spilled
                            F = digit_sums[2 * r + c]
                            power = factor * 256.0**digit if digit else factor
                            product = fma(F - as_real(integer(FIRST)) if digit else F, power, product)
                        y[u, m][i][r][c] = fma(d[r], product, y[u, m][i][r][c])
        return y

    def store_sums(self, me: LaneColumns, y: dict, scratch_smem):
        for (i, first), c in itertools.product(enumerate(self._eights()), (0, 1)):
            row = me.t * 2 + (first + c)
            are_some = first + MMA_COLUMNS > self.stored_rows
            with lanes.when(row < self.section_rows) if are_some else contextlib.nullcontext():
                for (u, m), tile_sums in y.items():
                    for r in (0, 1):
                        at = self.place(u, m, 0) + me.warp * 16 + me.g + 8 * r
                        memory.store(tile_sums[i][r][c] * (1 / SUM), scratch_smem, row * self.row_sums + at)


def coefficients(scale, sum_of_q) -> tuple:
    """By what F of a group of a row is multiplied, and what is added then. scale: s."""
    return scale * (2 / UNIT * COEFFICIENT), -(scale * (sum_of_q + FIRST * 2 / UNIT)) * SUM


def multiply_group(bits: list, q: list) -> list:
    """16 rows of bits, as bytes, times 8 rows of x: for each digit four F, where tensor_cores.multiply_bytes
    has its sums.

    bits  of rows g and g + 8 eight words
    q     per 8 bits of the integers, the lowest first, eight words; the last are signed
    """

    def product(integers: list, signed: bool, sums: list, first: int) -> list:
        """Of the even bits, or the odd ones."""
        for i in (first, first + 4):
            a = [bits[r][k] for k in (i, i + 2) for r in (0, 1)]
            sums = tensor_cores.multiply_bytes(a, [integers[i], integers[i + 2]], sums, False, signed)
        return sums

    out = []
    for digit, integers in enumerate(q):
        product_of = functools.partial(product, integers, digit == len(q) - 1)
        even = product_of([integer(FIRST // 2)] * 4, 0)
        out.append([as_real(v) for v in product_of([v + v for v in even], 1)])
    return out


def bits_as_bytes(word) -> list:
    """Bits i, 8 + i, 16 + i and 24 + i of a word as bytes, for i = 0 .. 7: a 1 is 64 where i is even, else
    128. So two masks share a shift, to the left, for which there are more units than to the right."""
    return [(word << 6 - i // 2 * 2 if i < 6 else word) & (0x40404040 << i % 2) for i in range(8)]
