"""Items of different lengths in batches of few shapes, because a program is compiled for each shape."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

NO_LIMIT = 2**31


class Sizes(NamedTuple):
    """The sizes that items are padded to: `per_octave` of them from one power of two to the next, all
    multiples of `least`."""

    least: int
    per_octave: int

    def padded(self, count: int) -> int:
        step = max(self.least, (1 << (count - 1).bit_length()) // 2 // self.per_octave)
        return -(-max(count, 1) // step) * step


class Shapes(NamedTuple):
    """The sizes of batches: a program is compiled for each number of rows and width that there is."""

    rows: Sizes
    widths: Sizes


ROWS = Sizes(1, 2)
FEW = Shapes(Sizes(1, 1), Sizes(16, 1))  # where strangers choose the lengths
ENOUGH_ROWS = 8  # for a program of their own


def batches(
    lengths: Sequence[int], tokens: int, widths: Sizes, *, rows: Sizes = ROWS, most_rows: int = NO_LIMIT
) -> Iterator[tuple[Int[np.ndarray, "items"], int, int]]:
    """Cut items into batches, the longest first: (numbers of items, rows, width) of each.

    tokens     most rows x width of a batch of several rows
    widths, rows   of batches
    most_rows  of a batch

    Full batches have a power of two of rows, so that few shapes of rows x width are asked of kernels. One
    that is not full leaves items of half its width for the next, if it has enough rows without them.
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    padded = np.array([widths.padded(length) for length in lengths], np.int64)[order]
    first = 0
    while first < len(order):
        width = int(padded[first])
        most = min(1 << max(0, (tokens // width).bit_length() - 1), most_rows)
        wide = int((padded[first:] > width // 2).sum())
        count = min(most, rows.padded(wide if wide >= ENOUGH_ROWS else len(order) - first))
        yield order[first : first + count], count, width
        first += count
