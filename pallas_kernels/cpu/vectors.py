"""How vector instructions of a CPU read rows of blocks as they lie: what a format's file says of itself."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

PIECE = 64  # bytes that are multiplied at a time: what the widest vectors hold

Load = Callable[[str], Any]  # a field's name -> cpu.values.Value, the field of a chunk's blocks as one vector


@dataclasses.dataclass(frozen=True)
class Vectors:
    """Codes and scales of a chunk: the next `columns.size` columns of a row, in whole blocks.

    w = scale (code - zero) - minimum

    columns   int [pieces, 64]: the column of the chunk that each byte of a piece is; four bytes from a
              multiple of 4 on are columns of the same group
    group     columns that share a scale, and that activations are rounded with
    codes     load -> pieces, each a vector of 64 bytes without a sign; or of float32 that are the weights
    scales    load -> float32 [columns / group], in the order of columns; None: `codes` are float32
    minimums  load -> the same; None: 0
    zero      the code of 0
    """

    columns: np.ndarray = dataclasses.field(repr=False)
    group: int
    codes: Callable[[Load], list]
    scales: Callable[[Load], Any] | None = None
    minimums: Callable[[Load], Any] | None = None
    zero: int = 0

    @property
    def width(self) -> int:
        """Columns of a chunk."""
        return self.columns.size

    @property
    def pieces(self) -> int:
        return len(self.columns)

    @property
    def groups(self) -> int:
        return self.width // self.group

    def group_of_lanes(self, piece: int) -> np.ndarray:
        """int [16]: of each four bytes of a piece."""
        return self.columns[piece, ::4] // self.group


NIBBLES = np.arange(128).reshape(4, 2, 16).swapaxes(0, 1).reshape(2, PIECE)  # of four blocks of 32
NATURAL = np.arange(256).reshape(4, PIECE)
QUARTERS = np.arange(256).reshape(2, 4, 32).swapaxes(0, 1).reshape(4, PIECE)  # two bits: of two halves
FLOATS = np.arange(PIECE).reshape(1, 4, 16).swapaxes(1, 2).reshape(1, PIECE)
