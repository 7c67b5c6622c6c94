"""What the CPU kernel needs to know about a format: how vector instructions read rows of its blocks."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

PIECE = 64  # bytes that are multiplied at a time: the widest vectors

Load = Callable[
    [str], Any
]  # a field's name -> cpu.values.Value: the field of a chunk's blocks, as one vector


@dataclasses.dataclass(frozen=True)
class Vectors:
    """Codes and scales of a chunk: the next `columns.size` columns of a row, in whole blocks.

    w = scale (code - zero) - minimum

    columns   int [pieces, 64]: the column of each byte of each piece, within the chunk. Each aligned four
              bytes belong to the same group
    group     columns that share a scale. Activations are quantized in the same groups, or in `shares` of them
    codes     load -> pieces, each a vector of 64 unsigned bytes; or of float32, which are the weights
    scales    load -> float32 [columns / group], in the order of columns; None: `codes` returns float32
    minimums  load -> float32 [columns / group]; None: 0
    zero      the code of 0
    shares    equal parts of a group whose activations are quantized apart, for groups of more than 32
              columns. A share's sum of 127 times codes has 16 bits: codes of 32 columns are 8 or less
    """

    columns: np.ndarray = dataclasses.field(repr=False)
    group: int
    codes: Callable[[Load], list]
    scales: Callable[[Load], Any] | None = None
    minimums: Callable[[Load], Any] | None = None
    zero: int = 0
    shares: int = 1

    @property
    def width(self) -> int:
        """Columns in a chunk."""
        return self.columns.size

    @property
    def pieces(self) -> int:
        return len(self.columns)

    @property
    def groups(self) -> int:
        return self.width // self.group

    def lane_groups(self, piece: int) -> np.ndarray:
        """int [16]: the group of each four bytes of a piece."""
        return self.columns[piece, ::4] // self.group

    def lane_shares(self, piece: int) -> np.ndarray:
        """int [16]: the share of each four bytes of a piece, numbered from group to group.

        Of a group's neighbouring lanes in each piece: so pieces with the same groups have the same shares,
        and their products are added up before a lane is scaled.
        """
        groups = self.lane_groups(piece)
        first, lanes = np.unique(groups, return_index=True, return_counts=True)[1:]
        number = np.arange(len(groups)) - np.repeat(first, lanes)
        return groups * self.shares + number * self.shares // np.repeat(lanes, lanes)

    @property
    def column_shares(self) -> np.ndarray:
        """int [width]: the share of each column."""
        out = np.empty(self.width, int)
        for p, columns in enumerate(self.columns):
            out[columns] = np.repeat(self.lane_shares(p), 4)
        return out


# Columns of chunks whose blocks have: low and high nibbles of 16 bytes (four blocks), codes in natural order,
# 2-bit codes of 32 bytes (two times), float32 by vectors of every fourth.
NIBBLES = np.arange(128).reshape(4, 2, 16).swapaxes(0, 1).reshape(2, PIECE)
NATURAL = np.arange(256).reshape(4, PIECE)
QUARTERS = np.arange(256).reshape(2, 4, 32).swapaxes(0, 1).reshape(4, PIECE)
FLOATS = np.arange(PIECE).reshape(1, 4, 16).swapaxes(1, 2).reshape(1, PIECE)
