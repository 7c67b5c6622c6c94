"""Sizes of the low-rank changes beside a step's products (low_rank.py), known before it is traced."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

# Of one change, by its type: a lane has a row of B of gate and one of up in its registers.
MOST_RANK = {"float32": 32, "bfloat16": 64, "float16": 64}


class Change(NamedTuple):
    """A change of some rows of a matrix; of rank 0: these rows have none."""

    start: int
    rows: int
    rank: int
    scale: float = 1.0
    dtype: str = ""


@dataclasses.dataclass(frozen=True)
class Changes:
    """Those beside qkv, o, gate, up and down, by their first rows; () beside a matrix that has none."""

    matrices: tuple[tuple[Change, ...], ...]

    def __bool__(self) -> bool:
        return any(self.matrices)

    def refuses(self, rows: int) -> str | None:
        """Why no step of so many rows can have them, or None."""
        each = [change for changes in self.matrices for change in changes]
        if each and rows > 1:
            return f"with an adapter it is for one row; there are {rows}"
        dtypes = sorted({change.dtype for change in each})
        if len(dtypes) > 1 or not set(dtypes) <= set(MOST_RANK):
            return f"an adapter is {' and '.join(dtypes)}; the kernel has one of {', '.join(MOST_RANK)}"
        for change in each:
            most = MOST_RANK[change.dtype]
            if change.rank % 4 or not 0 < change.rank <= most:
                return f"an adapter's rank is {change.rank}; the kernel has multiples of 4 up to {most}"
        return None


NO_CHANGES = Changes(((),) * 5)


class Piece(NamedTuple):
    """Rows of a matrix with one change, or between two. The ranks of a product's changes are numbered, one
    change after the other: the piece's begin at `begin`."""

    change: Change
    begin: int

    @property
    def start(self) -> int:
        return self.change.start

    @property
    def end(self) -> int:
        return self.begin + self.change.rank


@dataclasses.dataclass(frozen=True)
class Beside:
    """The changes beside a phase's product: of each of its matrices pieces that have all rows."""

    matrices: tuple[tuple[Piece, ...], ...]

    @property
    def ranks(self) -> int:
        """Of all changes."""
        return self.matrices[-1][-1].end

    @property
    def fours(self) -> list[int]:
        """By matrix, of its largest rank."""
        return [max(piece.change.rank for piece in pieces) // 4 for pieces in self.matrices]

    @property
    def varies(self) -> bool:
        """Whether some rows of the product need other ranks than others."""
        return len(self.matrices) == 1 and len(self.matrices[0]) > 1

    def needed(self, first: int, last: int) -> int:
        """How many ranks rows first .. last need."""
        if not self.varies:
            return self.ranks
        inside = [p for p in self.matrices[0] if p.start <= last and first < p.start + p.change.rows]
        return inside[-1].end - inside[0].begin


def beside(matrices: Sequence[tuple[Change, ...]], rows: int) -> Beside:
    """Those of a product, whose matrices have so many rows each."""
    number, out = 0, []
    for changes in matrices:
        pieces, end = [], 0
        for change in (*changes, Change(rows, 0, 0)):
            if change.start > end:
                pieces.append(Piece(Change(end, change.start - end, 0), number))
            if change.rows:
                pieces.append(Piece(change, number))
            number, end = number + change.rank, change.start + change.rows
        out.append(tuple(pieces))
    return Beside(tuple(out))
