"""1-bit weights (Q1_0) among the products that share a ring (decode_block.py), on the binary tensor cores:
activations are planes of bits in shared memory, and packed weights are never unpacked.

The arithmetic and its numbers are bit_mma/plane_product.py's, of one row: 8 planes against 16 rows of weights
in one instruction. Further rows are multiplied one after another.

    x, 8 columns a lane, 256 a warp -> times gamma -> absmax of 128 columns -> q -> planes

    q      [digit of 8 bits, the lowest first][row of x, padded] of row_bytes: for each 256 columns, lane
           4 p + t and both groups of 128, word t of plane p
    stats  [step of 256 columns][row of x, padded][t]: of both groups what lane 4 g + t multiplies its counts
           by, and what it adds
"""

from typing import Any

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import as_real, as_value, as_word, fma, integer, minimum, real, select, total
from pallas_kernels.matmul.bit_mma.plane_product import counts_of_row
from pallas_kernels.matmul.bit_mma.product import GROUP
from pallas_kernels.matmul.int_mma.activations_shared import WarpActivations
from pallas_kernels.matmul.int_mma.decode_plan import PLANE_STATS
from pallas_kernels.matmul.quantize_activations import (
    MAGIC_WORD,
    largest_of_group,
    magic_words,
    packed_digits,
)
from pallas_kernels.tiles import TILE_COLUMNS

GROUP_LANES = GROUP // 8  # that have the columns of a group, 8 each
LANE_BYTES = 8  # of planes that a lane multiplies: a word of each of two groups


class PlaneActivations(WarpActivations):
    """The activations of one warp, which become planes."""

    def quantized(self, x: list) -> tuple[list, list]:
        """(per 8 bits of q the words that `_planes_of_quad` makes, [scale, sum of q] of the group)."""
        assert not self.rounded
        bits = self.sizes.bits
        top = 2 ** (bits - 1) - 1
        largest = largest_of_group(x, lambda v: lanes.largest_of_warp(v, GROUP_LANES))
        q = magic_words(x, top, largest)
        sum_of_q = lanes.warp_sum_real(total(q) + -8 * MAGIC_WORD % 2**32, GROUP_LANES)
        digits = [packed_digits(q, digit) for digit in range(bits // 8)]
        return [_planes_of_quad(digit, self.lane) for digit in digits], [largest * (1 / top), real(sum_of_q)]

    def store_step(self, step, row: int, words: list, group_stats: list, q, stats):
        lane, sizes = as_value(self.lane), self.sizes
        half, t, place = lane // GROUP_LANES, lane % GROUP_LANES // 4, lane % 4
        at = q + step * TILE_COLUMNS + row * sizes.row_bytes + (place * 4 + t) * LANE_BYTES + half * 4
        for digit, planes in enumerate(words):
            for first, word in zip((0, 4), planes, strict=True):
                begin = digit * sizes.padded * sizes.row_bytes + first * 4 * LANE_BYTES
                memory.store_shared([word], at, begin)
        scale, sum_of_q = group_stats
        with lanes.when(t == 0):
            # Of planes 2 t and 2 t + 1 lane t of a quad counts: 2 * 4^t times what `multiply` makes of them.
            weight = real(integer(2) << place * 2)
            added = select(place == 0, -(scale * sum_of_q), 0.0)
            at = stats + (step * sizes.padded + row) * PLANE_STATS + place * 16 + half * 8
            memory.store_shared([as_word(scale * weight), as_word(added)], at)


def _planes_of_quad(word_pair: list, lane) -> list:
    """Bytes of four neighbouring lanes' columns, 8 each in two words -> words of planes: lane i of the four
    has planes i and 4 + i, whose bit 8 b + j is that of column j of lane b."""
    low, high = (_transposed_fours(word) for word in word_pair)
    low, high = lanes.merged(low, high << 4, 0x0F0F0F0F), lanes.merged(low >> 4, high, 0x0F0F0F0F)
    planes = []
    for word in (low, high):  # byte i is plane i, or 4 + i, of the lane's own columns
        for distance, lower, upper in ((1, 0x6240, 0x3715), (2, 0x5410, 0x3276)):
            selector = select((integer(lane) & distance) == 0, lower, upper)
            word = lanes.chosen_bytes(word, lanes.swapped(word, distance), selector)
        planes.append(word)
    return planes


def _transposed_fours(word):
    """Bit 4 h + j of byte i to bit 4 h + i of byte j, for i and j below 4 (Warren 2012, 7-3)."""
    for distance, mask in ((7, 0x00AA00AA), (14, 0x0000CCCC)):
        moved = (word ^ word >> distance) & mask
        word = word ^ moved ^ moved << distance
    return word


class PlaneColumns:
    """This lane as word t of plane g of B, and as planes 2 t and 2 t + 1 of the result.

    neighbours, results   as in decode_columns.Columns: a quad's lanes have a share of each row of x
    """

    neighbours = 1

    def __init__(self, block: Any, q, stats):
        self.sizes = block.sizes
        assert self.sizes.chunks == 1
        first_step = minimum(block.first_step, self.sizes.steps - 1)  # of warps that have none too
        self.q = q + first_step * TILE_COLUMNS + block.lane * LANE_BYTES
        self.stats = stats + first_step * (self.sizes.padded * PLANE_STATS) + block.t * 16
        self.has_last = block.t == 3

    @property
    def results(self) -> int:
        return self.sizes.width

    def at_step(self, s) -> tuple[list, list]:
        """Of each row of x at a step of this warp: per 8 planes the words of both groups, and stats."""
        sizes = self.sizes
        at_q, at_stats = self.q + s * TILE_COLUMNS, self.stats + s * (sizes.padded * PLANE_STATS)
        planes = [
            [
                memory.load_shared(2, at_q, (digit * sizes.padded + row) * sizes.row_bytes)
                for digit in range(sizes.bits // 8)
            ]
            for row in range(sizes.rows)
        ]
        return planes, [memory.load_shared(4, at_stats, row * PLANE_STATS) for row in range(sizes.rows)]

    def multiply(self, words: dict, planes: list, stats: list, y: list):
        """y[0][rows g, g + 8][row of x] += this lane's share of the products of a tile's 256 columns."""
        (scales,) = words["scales"]
        for half, scale in enumerate(scales):
            a0, a1 = words["words"][2 * half :][:2]
            d = lanes.halves(scale)
            for row in range(self.sizes.rows):
                factor, added = map(as_real, stats[row][2 * half :][:2])
                counts = counts_of_row(self.has_last, a0, a1, [digit[half] for digit in planes[row]])
                for r, counted in enumerate(counts):
                    y[0][r][row] = fma(d[r], fma(counted, factor, added), y[0][r][row])
