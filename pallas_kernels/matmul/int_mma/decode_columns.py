"""What a lane of int_decode multiplies its weights by, and what it makes of the products (decode.py has the
picture)."""

from typing import Any

from pallas_kernels.gpu import lanes, memory, tensor_cores
from pallas_kernels.gpu.values import as_real, fma, integer, minimum, real, select
from pallas_kernels.matmul.int_mma import bytes as int_bytes
from pallas_kernels.matmul.int_mma import decode_plan as int_decode_plan
from pallas_kernels.tiles import TILE_COLUMNS


class Columns:
    """This lane as column g of B: a slot of groups and a row of x. As columns 2 t and 2 t + 1 of the result:
    a slot, and two rows (or, for one row, two slots).

    sizes, format_lanes   the product, and the format's tiles.Lanes
    q, stats    addresses of what activations_shared.py has made
    neighbours  lanes of a quad whose slots are the same
    results     sums that a lane has of a row of weights
    """

    def __init__(self, block: Any, q, stats):
        self.sizes, self.format_lanes = block.sizes, block.format_lanes
        width, group = self.sizes.width, self.format_lanes.group
        slot, row = block.g // width, block.g % width
        row_begin, slot_begin = row * self.sizes.row_bytes, slot * (width * group)
        first_step = minimum(block.first_step, self.sizes.steps - 1)  # of warps that have none too
        self.q = q + first_step * TILE_COLUMNS + row_begin + slot_begin + block.t * (group // 4)
        # Factors 1 and 0 that ptxas does not know: unpacking keeps the units of logic busy, not of products.
        self.in_slot = [
            lanes.opaque(select(slot == s, 1, 0)) if self.sizes.slots > 1 else None
            for s in range(self.sizes.slots)
        ]
        self.stat_words = int_decode_plan.stat_words(self.format_lanes, self.sizes.bits)
        # Groups of activations, of which each is of `shared_by` groups of weights; how many a step has.
        shared_by = self.format_lanes.activation_group // group
        self.groups = TILE_COLUMNS // self.format_lanes.activation_group
        if width == 1:
            self.neighbours, at = 1, block.t * (2 // shared_by)
        else:
            result = block.t * 2
            self.neighbours, slot = width // 2, result // width
            at = slot * (width // shared_by * width) + result % width
        warp_begin = first_step * (self.groups * width * 4 * self.stat_words)
        self.stats = stats + warp_begin + at * (4 * self.stat_words)
        # The lane of this quad that has the scales of groups 2 n and 2 n + 1 of this lane's slot.
        quad = block.t // self.neighbours * self.neighbours
        self.quad = [(block.lane & 0xFFFFFFFC) + (quad + n) for n in range(self.neighbours)]
        self.lane = block.lane
        # One row of a warp's only step is the same for all its tiles; more would take too many registers.
        self.reused: dict[tuple[str, int], list] = {}
        if self.sizes.per_warp == self.sizes.width == self.sizes.bits // 8 == 1:
            for u in range(TILE_COLUMNS // (8 * group)):
                self.reused["operands", u] = self.operands(u, 0, 0, 0, self.q)
                self.reused["stats", u] = self.stats_of(u, 0, 0, self.stats)

    @property
    def results(self) -> int:
        return 2

    def at_step(self, s) -> tuple:
        """q and stats at a step of this warp."""
        stats_bytes = self.groups * self.sizes.width * 4 * self.stat_words
        return self.q + s * TILE_COLUMNS, self.stats + s * stats_bytes

    def multiply(self, words: dict, at_q, at_stats, y: list):
        """y += products of a tile's 256 columns; y[chunk][rows g, g + 8][results]."""
        for u, unit in enumerate(int_bytes.units(self.format_lanes, words, self.lane)):
            self.multiply_unit(unit, u, at_q, at_stats, y)

    def multiply_unit(self, unit: int_bytes.Unit, u: int, at_q, at_stats, y: list):
        sizes, width, scales = self.sizes, self.sizes.width, unit.scales
        for j in range(width):
            if self.neighbours > 1 and j % 2 == 0:  # here, and not for all j before: fewer registers
                scales = unit.fetch(self.quad[j // 2], j // 2)
            for chunk in range(sizes.chunks):
                sums = _joined(self.sums_of_groups(unit.a, u, j, chunk, at_q))
                stats = self.stats_of(u, j, chunk, at_stats)
                for r in (0, 1):
                    for c in (0, 1):
                        h = c if width == 1 else j % 2
                        step, *sum_of_x = map(as_real, stats[c])
                        value = fma(scales[0][r][h] * real(sums[2 * r + c]), step, y[chunk][r][c])
                        if self.format_lanes.minimums:
                            value = fma(-scales[1][r][h], sum_of_x[0], value)
                        y[chunk][r][c] = value

    def stats_of(self, u: int, j: int, chunk: int, at_stats) -> list:
        """stat_words of what is in set j of unit u and a chunk of rows, for each result."""
        if ("stats", u) in self.reused:
            return self.reused["stats", u]
        group = (u * 8 + j) * self.format_lanes.group // self.format_lanes.activation_group
        each, count = self.stat_words, self.stat_words * self.results
        at = (chunk * self.sizes.steps * self.groups + group) * self.sizes.width * 4 * each
        words = []
        for first in range(0, count, 4):
            words += memory.load_shared(min(4, count), at_stats, at + 4 * first)
        return [words[k : k + each] for k in range(0, count, each)]

    def operands(self, u: int, j: int, chunk: int, digit: int, at_q) -> list:
        """B of set j of unit u, of a chunk of rows: of each slot, zero in the columns of others."""
        if ("operands", u) in self.reused:
            return self.reused["operands", u]
        sizes, group = self.sizes, self.format_lanes.group
        at = (u * 8 + j) * group + (digit * sizes.padded + chunk * sizes.width) * sizes.row_bytes
        words = memory.load_shared(group // 16, at_q, at)
        return [words if own is None else [word * own for word in words] for own in self.in_slot]

    def sums_of_groups(self, a: list, u: int, j: int, chunk: int, at_q) -> list:
        """Integer products of set j of unit u's groups, one in each slot, with a chunk of rows: of each digit
        s32, [rows g, g + 8][columns 2 t, 2 t + 1]."""
        slots, width, sums = self.sizes.slots, self.sizes.width, []
        together = min(slots, 32 // self.format_lanes.group)  # slots in one instruction
        for digit in range(self.sizes.bits // 8):  # the second is the high one
            b, c = self.operands(u, j, chunk, digit, at_q), [integer(0)] * 4
            for first in range(0, slots, together):
                some = range(first, first + together)
                a_s = [word for s in some for word in a[width * s + j]]
                b_s = [word for s in some for word in b[s]]
                c = tensor_cores.multiply_bytes(a_s, b_s, c, self.format_lanes.signed)
            sums.append(c)
        return sums


class WholeColumns(Columns):
    """Columns of a format with WholeScales: groups 2 i and 2 i + 1 share a scale of activations. Of the two,

        sum = scale 2 i (sum_k q_k q'_k of 2 i) + scale 2 i + 1 (the same of 2 i + 1)

    and the sum for minimums are whole numbers; only they are multiplied by what the row and the activations
    have. For one row the two groups are a lane's two columns of the result.
    """

    @property
    def results(self) -> int:
        return 1 if self.sizes.width == 1 else 2

    def multiply(self, words: dict, at_q, at_stats, y: list):
        rows, units = int_bytes.whole_units(self.format_lanes, words, self.lane)
        for u, unit in enumerate(units):
            for pair in range(self.neighbours):
                scale = unit.words
                if self.neighbours > 1:
                    scale = [lanes.from_lane(word, self.quad[pair]) for word in scale]
                for chunk in range(self.sizes.chunks):
                    sums = self.sums_of_pair(unit.a, u, pair, chunk, at_q)
                    stats = self.stats_of(u, 2 * pair, chunk, at_stats)
                    for r in (0, 1):
                        for c in range(self.results):
                            step, *sums_of_x = stats[c]
                            dots = [self.dot(digit[r][c], scale[0], r, unit.largest) for digit in sums]
                            value = _real(dots) * rows[0][r]
                            if self.format_lanes.minimums:
                                x = sums_of_x[: len(sums)]
                                less = [lanes.dot_of_halves(word, scale[1], 2 * r) for word in x]
                                value = fma(-_real(less), rows[1][r], value)
                            y[chunk][r][c] = fma(value, as_real(step), y[chunk][r][c])

    def sums_of_pair(self, a: list, u: int, pair: int, chunk: int, at_q) -> list:
        """Of each digit [rows g, g + 8][results]: sums of a pair's two groups."""
        if self.sizes.width == 1:
            digits = self.sums_of_groups(a, u, 0, chunk, at_q)
            return [[[(c[2 * r], c[2 * r + 1])] for r in (0, 1)] for c in digits]
        even, odd = (self.sums_of_groups(a, u, 2 * pair + h, chunk, at_q) for h in (0, 1))
        return [
            [[(one[2 * r + c], two[2 * r + c]) for c in (0, 1)] for r in (0, 1)]
            for one, two in zip(even, odd, strict=True)
        ]

    def dot(self, pair: tuple, scale, r: int, largest: int):
        """The sums of a pair's two groups times their bytes of a word of scales."""
        even, odd = pair
        if largest * 128 * self.format_lanes.group < 2**15:
            return lanes.dot_of_halves(lanes.bytes_of(even, odd, 0x5410), scale, 2 * r)
        first, second = (lanes.signed_byte_word(scale, 2 * r + h) for h in (0, 1))
        return even * first + odd * second


def _joined(digits: list) -> list:
    """Of whole numbers by digits, the numbers."""
    low, *high = digits
    return [a + (b << 8) for a, b in zip(low, high[0], strict=True)] if high else low


def _real(digits: list):
    """A whole number by its digits as float32."""
    low, *high = map(real, digits)
    return fma(high[0], 256.0, low) if high else low
