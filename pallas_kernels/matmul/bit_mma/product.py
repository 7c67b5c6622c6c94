"""1-bit weights (Q1_0) times 1 to 24 rows of activations: what a block of threads does in a launch of its own
(decode_b1.py, decode_s8.py, decode_ring.py) and in a phase of a step in one launch (step/decode_layers.py).

An activation x is an integer q of 8 (or 16) bits times the scale s of its group of 128. A weight is
d (2 b - 1) with one bit b each and one d per group and row. So over a group

    sum_k w_k x_k = d (2 s sum_k b_k q_k - s sum_k q_k)

The sum of b q is exact. For up to 4 rows the binary tensor cores compute it (plane_product.py): weights are
never unpacked, but each plane of bits of the activations takes a product. For more rows the integer tensor
cores do (byte_product.py): the bits of weights become bytes once for all rows.

A block has `tiles` tiles of 16 rows of weights, as formats/q1_0.py lays them out. Its warps split the columns
between them, in pairs of groups, and their sums for a round of tiles meet in shared memory:

    per round: weights -> products -> sums of each warp -> shared memory -> sum over warps, 1 / rms,
               activation or residual -> out

Weights come from registers, from a ring of shared memory, or from the shared memory of a step. `multiply`
asks for them by tile, pair and group and does not know which it is.

No block of a step computes a whole group of 128 activations, and if every block quantized all rows, each
would repeat the work of the others. So from 2 rows on, one warp of some block takes each row of a group: it
waits for the 128 numbers, quantizes them, and passes them on:

    producers, float32 -> [row of a group: gamma, largest, integers, sums] -> all blocks, operands

Products that add to the residual stream (o and down) leave the addition to the warp that quantizes it next.
Their columns may be split over blocks too, because that warp can add several partial sums.

An integer of 16 bits is passed on as two of 8, q = 256 q_1 + q_0, in neighbouring rows of the tensor core
with scales of their own, 256 s and s. Who has a row's outputs adds up those of both (`digits`).
"""

import abc
import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from pallas_kernels.activations import SILU, Activation
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import (
    as_real,
    as_word,
    index,
    integer,
    minimum,
    real,
    select,
    sum_of_squares,
    total,
)
from pallas_kernels.matmul import epilogue
from pallas_kernels.matmul.quantize_activations import largest_of_group

GROUP = 128  # columns that share a scale, of weights and of activations
PAIR_BYTES, SCALE_BYTES = 2 * GROUP * 16 // 8, 2 * 16 * 2  # words and scales of a tile's pair of groups
MMA_COLUMNS = 8  # columns of the tensor core: rows of x in one product of bytes, planes in one of bits
MOST_ROWS = 3 * MMA_COLUMNS
TOPS = {1: 127, 2: 127 * 257}  # by digits: the largest integer whose digits are all within -128 .. 127
MOST_SUMS = 4752  # words of shared memory: tiles of a round have no more sums


class LaneColumns(NamedTuple):
    """A lane's position in its block, and the columns of its warp.

    pair         pairs of this warp; in place of pairs beyond the last, those of another warp
    scale_group  {(p, h): group of pair p}, as the weights' scales count them, with padding
    x_group      the same, clipped to the last that activations have: (index, constant to be added)
    count        {(p, h): 1.0, or 0.0 for a group that is another's or padding}
    """

    thread: Any
    warp: Any
    lane: Any
    g: Any
    t: Any
    pair: list
    scale_group: dict
    x_group: dict
    count: dict

    def shifted(self, pairs) -> "LaneColumns":
        """So many pairs further on, where weights and what quantize_rows makes have them."""
        scale_group = {at: group + pairs * 2 for at, group in self.scale_group.items()}
        return self._replace(pair=[pair + pairs for pair in self.pair], scale_group=scale_group)


@dataclasses.dataclass(frozen=True)
class Product(abc.ABC):
    """Rows of activations times a block's tiles of one matrix, or of two (gate and up). Its methods are
    called while a kernel is traced.

    rows, columns      of the activations; a row's digits are as many rows
    n_tiles, pairs     of the matrix: tiles of 16 rows, pairs of groups of 128 columns
    warps, tiles       of a block
    splits       parts of the columns: a block has one, and `columns` and `pairs` are those of one part, so
                 that each block reads less of what is passed on
    bits         of an activation, 8 or 16; where activations are passed on, of each of its digits, 8
    digits       neighbouring rows that are one row's digits, the lowest first, where they are passed on
    round_tiles  tiles of a round whose weights are in registers; None: weights are in shared memory, and a
                 round has as many tiles as there is room for (`together`)

    Of each kind of product:
    copies         of what is passed on, each for as many blocks, because all read the same lines at once
    most_tiles     of a round, counting both matrices and each eight rows: their sums stay in registers
    most_products  of a round, each a tile times a group of eight rows: they are straight-line code, and the
                   code of a whole layer has to stay in the instruction cache
    """

    copies: ClassVar[int]
    most_tiles: ClassVar[int]
    most_products: ClassVar[int]

    rows: int
    columns: int
    n_tiles: int
    pairs: int
    warps: int
    tiles: int
    splits: int = 1
    matrices: int = 1
    normed: bool = False
    eps: float = 0.0
    bits: int = 8
    digits: int = 1
    activation: Activation = SILU
    round_tiles: int | None = None

    @property
    @abc.abstractmethod
    def words(self) -> int:
        """Words that are passed on for a row of a group."""

    @property
    def x_rows(self) -> int:
        """Rows of x. `rows` counts each of their digits."""
        return self.rows // self.digits

    @property
    def group_words(self) -> int:
        """Words that are passed on for all rows of a group."""
        return self.rows * self.words

    @property
    def passed_words(self) -> int:
        """Words that are passed on."""
        return self.groups * self.group_words

    @property
    def per_warp(self) -> int:
        """Pairs of a warp."""
        return -(-self.pairs // self.warps)

    @property
    def groups(self) -> int:
        """Groups of all splits."""
        return self.splits * self.columns // GROUP

    @property
    def section_rows(self) -> int:
        """Rows of a section: those that each weight is multiplied with at once. The last may have fewer."""
        return self.rows

    @property
    def together(self) -> int:
        """Tiles of a round, whose sums meet in shared memory. With more than 16 rows there are registers for
        one."""
        if self.round_tiles is not None:
            return self.round_tiles
        room = MOST_SUMS // (self.matrices * self.section_rows * self.row_sums)
        if self.section_rows > 2 * MMA_COLUMNS:
            return 1
        each = self.matrices * -(-self.section_rows // MMA_COLUMNS)
        products = 2 * self.per_warp * each
        most = max(1, min(self.tiles, room, self.most_tiles // each, self.most_products // products))
        return -(-self.tiles // -(-self.tiles // most))

    @property
    def busy(self) -> int:
        """Warps that multiply: those that have columns, or all where weights are in registers, for which a
        branch would leave less room."""
        return -(-self.pairs // self.per_warp) if self.round_tiles is None else self.warps

    def busy_warps(self, me: LaneColumns):
        """For `with`: code that only these warps run."""
        return contextlib.nullcontext() if self.busy == self.warps else lanes.when(me.warp < self.busy)

    @property
    def row_sums(self) -> int:
        """Words of shared memory for a tile's sums of one row. Rows that are stored together lie in different
        banks."""
        return self.busy * 16 + (4 if self.rows > 1 else 0)

    @property
    def stored_rows(self) -> int:
        """Rows of a section for whose sums there is shared memory."""
        return self.section_rows

    @property
    def sums(self) -> int:
        return self.together * self.matrices * self.stored_rows * self.row_sums

    @property
    def scratch(self) -> int:
        """float32 of shared memory: sums of a round, then squares [rows, warps]."""
        return self.sums + self.rows * self.busy

    def items(self) -> list[tuple[int, int]]:
        """(tile u, matrix m) of a round."""
        return list(itertools.product(range(self.together), range(self.matrices)))

    def lane_columns(self) -> LaneColumns:
        thread = lanes.thread()
        warp, lane = thread // 32, thread % 32
        g, t = lane // 4, lane % 4
        first, groups = self.per_warp * warp, self.columns // GROUP
        # Where every warp has as many whole pairs, addresses differ by constants alone.
        even = self.per_warp * self.warps * 2 == groups
        pair, scale_group, x_group, count = [], {}, {}, {}
        for p in range(self.per_warp):
            own = first + p
            # In place of a pair beyond the last another's words are read, not all the last one's: all
            # blocks do.
            pair.append(own if even else index(integer(own) % self.pairs))
            for h in (0, 1):
                scale_group[p, h] = pair[p] * 2 + h
                if even:
                    x_group[p, h], count[p, h] = (first * 2, 2 * p + h), real(1)
                else:
                    x_group[p, h] = (minimum(scale_group[p, h], groups - 1), 0)
                    count[p, h] = select(own * 2 + h < groups, 1.0, 0.0)
        return LaneColumns(thread, warp, lane, g, t, pair, scale_group, x_group, count)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block's tiles of one matrix: the words of all, then the scales of all."""
        return self.tiles * self.pairs * (PAIR_BYTES + SCALE_BYTES)

    def parts_of_tiles(self, weights: tuple, source, address, first) -> list[tuple]:
        """What a block's tiles from `first` on have in shared memory, tile `source` of a stack (refs of words
        and scales) and those behind it: (address, ref, its first element, bytes of a tile) of words and of
        scales."""
        parts, begins = [], (0, self.tiles * self.pairs * PAIR_BYTES)
        for ref, each, begin in zip(weights, (PAIR_BYTES, SCALE_BYTES), begins, strict=True):
            to, size = address + begin, self.pairs * each
            if not isinstance(first, int) or first:
                to = integer(first * size) + to
            parts.append((to, ref, source * (size // 4), size))
        return parts

    def copy_to_shared(self, weights: tuple, source, count, address, first, mbarrier):
        """By one thread: copy `count` tiles, from tile `source` of a stack (refs of words and scales) on, to
        the block's tiles from `first` on, which begin at an address of shared memory."""
        for to, ref, at, size in self.parts_of_tiles(weights, source, address, first):
            memory.copy_to_shared(to, ref, at, integer(count * size), mbarrier)

    def shared_words(self, smem, begin, tile, pair, lane):
        """The lane's vector of a pair of groups, from tiles that begin at a word of shared memory."""
        return memory.load_vector(
            4, smem, [(tile * self.pairs + pair) * (PAIR_BYTES // 4) + lane * 4 + begin]
        )

    def shared_scales(self, smem, begin, tile, group, g):
        """The float16 scales of rows g and g + 8 of a group, from the same tiles."""
        at = (tile * (2 * self.pairs) + group) * (SCALE_BYTES // 8) + g
        return memory.load(smem, at + (begin + self.tiles * self.pairs * (PAIR_BYTES // 4)))

    def place(self, u, m, row):
        """Where the sums of a tile of a round, a matrix and a row of a section begin."""
        return ((u * self.matrices + m) * self.stored_rows + row) * self.row_sums

    def outputs(self, me: LaneColumns, first_row, first, first_tile) -> list:
        """This thread's outputs in the section that begins at `first_row` and the round that begins at tile
        `first` of the block, whose own tiles begin at `first_tile`: (whether the output exists, u, row within
        the section, index within the tile, n, row). Rows count once, not each of their digits."""
        out, threads, rows = [], self.warps * 32, self.section_rows // self.digits
        for begin in range(0, self.together * rows * 16, threads):
            at = me.thread + begin
            inside, row, u = at % 16, at // 16 % rows, at // (16 * rows)
            tile = first + u
            valid = (u < self.together) & (tile < self.tiles) & (first_tile + tile < self.n_tiles)
            x_row = row + (first_row if self.digits == 1 else first_row // self.digits)
            if rows < self.x_rows:
                valid = valid & (x_row < self.x_rows)
            out.append((valid, u, row, inside, (first_tile + tile) * 16 + inside, x_row))
        return out

    def finish(self, scratch_smem, outputs: list, store: Callable, norms=None, changed=None):
        """After a block barrier: call store(i, row, n, y) for each of `outputs`; norms: 1 / rms of each, if
        already known; changed(i, n, sums of each matrix): sums that take their place."""
        for i, (valid, u, row, inside, n, x_row) in enumerate(outputs):
            with lanes.when(valid):
                y = [self._sum(scratch_smem, u, m, row, inside) for m in range(self.matrices)]
                y = y if changed is None else changed(i, n, y)
                norm = norms[i] if norms else self.norm(scratch_smem, x_row)
                store(i, x_row, n, epilogue.output(y, norm, self.activation))

    def _sum(self, scratch_smem, u, m, row, inside):
        """An output's sum over all warps and the row's digits."""
        first = row if self.digits == 1 else row * self.digits
        places = [self.place(u, m, first + d) + inside for d in range(self.digits)]
        return total([self._over_warps(scratch_smem, at, 16) for at in places])

    def norm(self, scratch_smem, row):
        """1 / rms of a row, after a block barrier; None where nothing is normed."""
        if not self.normed:
            return None
        row = row if self.digits == 1 else row * self.digits
        squares = self._over_warps(scratch_smem, row * self.busy + self.sums, 1)
        return epilogue.inverse_rms(squares, self.splits * self.columns, self.eps)

    def _over_warps(self, scratch_smem, at, stride: int):
        return epilogue.over_warps(lambda w: memory.load(scratch_smem, at + w * stride), self.busy)

    @staticmethod
    @abc.abstractmethod
    def columns_of_lane(group) -> list[tuple]:
        """The columns of a group that a lane of the quantizing warp has: an index and a constant each."""

    @abc.abstractmethod
    def words_of_digit(self, row, packed, scale, squares, tag) -> list[tuple]:
        """By a warp: the words that are passed on of one of the tensor core's rows.

        packed   the integers of this lane's four columns, int8 in one word, the first column's lowest
        scale    of its numbers
        squares  of the row's x
        Returns (place among the group's words, word, condition or None) for each word.
        """

    def quantize(self, row, x: list, gamma: list | None, tag) -> list[tuple]:
        """By a warp: quantize a row of a group, of which x and gamma (None without a norm) are this lane's
        columns. Returns what `words_of_digit` does, of all of its digits."""
        x, squares = self.gamma_and_squares(x, gamma)
        largest = largest_of_group(x, lambda v: as_real(lanes.warp_max(as_word(v))))
        top = TOPS[self.digits]
        inverse = lanes.ratio(top, largest)
        q = [lanes.round_to_integer(v * inverse) for v in x]
        scale, words = memory.untagged(memory.tagged(largest * (1 / top), 0)), []  # as it is received
        for digit in range(self.digits):
            if digit:
                q = [v + 128 for v in q]  # what the signed low digit has taken
            own = row if self.digits == 1 else row * self.digits + digit
            packed = lanes.packed_bytes(q, digit)
            words += self.words_of_digit(own, packed, scale * 256.0**digit, squares, tag)
        return words

    def gamma_and_squares(self, x: list, gamma: list | None) -> tuple[list, Any]:
        """x gamma, and the sum of x^2 over a warp's group."""
        squares = lanes.warp_sum_real(sum_of_squares(x)) if self.normed else real(0)
        return [v * w for v, w in zip(x, gamma, strict=True)] if gamma else x, squares

    @abc.abstractmethod
    def receive(self, me: LaneColumns, first_row, load: Callable) -> Any:
        """Wait for this warp's groups of the section that begins at `first_row`; load: places (an index, a
        constant and how many words from there) -> words."""

    @abc.abstractmethod
    def store_squares(self, me: LaneColumns, first_row, x: Any, scratch_smem):
        """Store each row's sum of squares over this warp's groups, if x is normed."""

    @abc.abstractmethod
    def multiply(self, me: LaneColumns, x: Any, words: Callable, scales: Callable) -> dict:
        """This warp's sums of a round, by (tile u, matrix m). words(m, u, p) is a tile's vector of a
        pair, scales(m, u, p, h) its scales of a group."""

    @abc.abstractmethod
    def store_sums(self, me: LaneColumns, y: dict, scratch_smem):
        """Store this warp's sums where `finish` reads them."""
