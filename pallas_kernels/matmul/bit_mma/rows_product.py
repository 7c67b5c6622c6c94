"""Products of 2 to 24 rows as phases of a decode step in one launch (decode_layers.py).

A group of 128 activations is not made by one block, so nobody who makes a part of it knows its largest; and
all blocks would quantize all rows if each did it for itself. So it is done between: a warp of some block has
a row of a group, waits for its 128 numbers, quantizes them, and passes them on.

    makers, float32 -> [row of a group: gamma, largest, integers, sums] -> all blocks, operands of a product

So o and down, which add to the residual stream, leave that to whoever quantizes it next, and their columns
may be shared out to blocks too: who adds has the sums of several.

2 to 4 rows are multiplied by the binary tensor cores (rows_of_planes.py), which need no unpacking of weights
but products for the planes of all rows, more rows by the integer ones (rows_of_bytes.py). Here is what both
have: tiles of a round, whose sums meet in shared memory.
"""

import abc
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from pallas_kernels.activations import SILU, Activation
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.matmul import epilogue
from pallas_kernels.matmul.bit_mma.bit_product import LaneColumns
from pallas_kernels.matmul.bit_mma.decode import GROUP

WIDTH = 8  # columns of the tensor core
MOST_ROWS = 3 * WIDTH
MOST_SUMS = 4752  # words of shared memory: tiles of a round have no more sums


class Section(NamedTuple):
    """Rows that are multiplied with each weight at once: `rows` from `first` on, of which the last may not be
    there."""

    first: Any
    rows: int


@dataclasses.dataclass(frozen=True)
class RowsProduct(abc.ABC):
    """One phase: rows of activations times the tiles of one matrix, or of two for SwiGLU, that a block has.
    Sizes as in bit_product.BitProduct; its methods are called while a kernel is traced.

    splits      parts of the columns: a block has one, and `columns` and `pairs` are of it. So all blocks read
                as much less of what is passed on; their sums go to who adds them to the residual stream
    copies      of what is passed on, each for as many blocks: all want the same lines at once
    most_tiles  of a round, of both matrices and each eight rows: so few have their sums in registers
    most_products  of a round, of a tile with a group and eight rows each, where it is less: they are straight
                code, and all of a layer's has to stay near the multiprocessor
    apart       words between rows' sums, so that rows that are stored together lie in other banks
    """

    copies: ClassVar[int]
    most_tiles: ClassVar[int]
    most_products: ClassVar[int]
    apart: ClassVar[int]

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
    activation: Activation = SILU

    @property
    @abc.abstractmethod
    def words(self) -> int:
        """That are passed on of a row of a group."""

    @property
    def per_warp(self) -> int:
        return -(-self.pairs // self.warps)

    @property
    def groups(self) -> int:
        """Of all splits."""
        return self.splits * self.columns // GROUP

    @property
    def section_rows(self) -> int:
        """Of each section."""
        return self.rows

    @property
    def together(self) -> int:
        """Tiles of a round: their sums meet in shared memory. Of more than 16 rows one: registers."""
        room = MOST_SUMS // (self.matrices * self.section_rows * self.sums_of_row)
        if self.section_rows > 2 * WIDTH:
            return 1
        of_tile = self.matrices * -(-self.section_rows // WIDTH)
        products = 2 * self.per_warp * of_tile
        most = max(1, min(self.tiles, room, self.most_tiles // of_tile, self.most_products // products))
        return -(-self.tiles // -(-self.tiles // most))

    @property
    def sums_of_row(self) -> int:
        return self.busy * 16 + self.apart

    @property
    def busy(self) -> int:
        """Warps that have columns."""
        return -(-self.pairs // self.per_warp)

    def busy_warps(self, me: LaneColumns):
        """For `with`: what they alone do."""
        return contextlib.nullcontext() if self.busy == self.warps else lanes.when(me.warp < self.busy)

    @property
    def sums(self) -> int:
        return self.together * self.matrices * self.section_rows * self.sums_of_row

    @property
    def scratch(self) -> int:
        """float32 of shared memory: sums of a round, then squares [rows, warps]."""
        return self.sums + self.rows * self.busy

    def place(self, section: Section, u, m, row):
        """Where the sums of a tile of a round, a matrix and a row of a section begin."""
        return ((u * self.matrices + m) * section.rows + row) * self.sums_of_row

    def my_outputs(self, me: LaneColumns, section: Section, first, first_tile) -> list:
        """This thread's outputs of the round from tile `first` on: (whether it is there, u, row of the
        section, index within the tile, n, row of all)."""
        out, threads = [], self.warps * 32
        for begin in range(0, self.together * section.rows * 16, threads):
            at = me.thread + begin
            inside, row, u = at % 16, at // 16 % section.rows, at // (16 * section.rows)
            tile = first + u
            valid = (u < self.together) & (tile < self.tiles) & (first_tile + tile < self.n_tiles)
            of_all = row + section.first
            if section.rows < self.rows:
                valid = valid & (of_all < self.rows)
            out.append((valid, u, row, inside, (first_tile + tile) * 16 + inside, of_all))
        return out

    def outputs(self, section: Section, scratch_smem, mine: list, store: Callable, norms: list | None = None):
        """Behind a block barrier: store(i, row of all, n, y) for each of my_outputs; norms: of each, where
        they are known."""
        for i, (valid, u, row, inside, n, of_all) in enumerate(mine):
            with lanes.when(valid):
                places = [self.place(section, u, m, row) + inside for m in range(self.matrices)]
                y = [self._over_warps(scratch_smem, at, 16) for at in places]
                norm = norms[i] if norms else self.norm(scratch_smem, of_all)
                store(i, of_all, n, epilogue.output(y, norm, self.activation))

    def norm(self, scratch_smem, row):
        """Of a row, behind a block barrier; None where the phase norms nothing."""
        if not self.normed:
            return None
        squares = self._over_warps(scratch_smem, row * self.busy + self.sums, 1)
        return epilogue.inverse_rms(squares, self.columns, self.eps)

    def _over_warps(self, scratch_smem, at, stride: int):
        return epilogue.over_warps(lambda w: memory.load(scratch_smem, at + w * stride), self.busy)

    @staticmethod
    @abc.abstractmethod
    def columns_of_lane(group) -> list[tuple]:
        """Which of a group's a lane has that quantizes it: an index and a constant each."""

    @abc.abstractmethod
    def quantize(self, group, row, load: Callable, gamma: Callable | None, tag) -> list[tuple]:
        """By a warp, a row of a group: (place among the group's words, word, condition or None) of each word.

        load, gamma   columns (an index and a constant each) -> float32 of x and, behind a norm, its weights
        """

    @abc.abstractmethod
    def receive(self, me: LaneColumns, section: Section, load: Callable) -> Any:
        """This warp's groups of a section's rows, when they are there; load: places (an index, a constant and
        how many words from there) -> words."""

    @abc.abstractmethod
    def store_squares(self, me: LaneColumns, section: Section, x: Any, scratch_smem):
        """Behind a norm, each row's sum of squares over this warp's groups."""

    @abc.abstractmethod
    def multiply(self, me: LaneColumns, x: Any, words: Callable, scales: Callable) -> dict:
        """This warp's sums of a round, by (tile u, matrix m). words(m, u, p) is a tile's vector of a pair,
        scales(m, u, p, h) its scales of a group."""

    @abc.abstractmethod
    def store_sums(self, me: LaneColumns, section: Section, y: dict, scratch_smem):
        """Where `outputs` finds them."""
