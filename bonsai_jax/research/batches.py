"""Items of different lengths in batches of few shapes, because a program is compiled for each shape."""

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int

LEAST_WIDTH, LEAST_ROWS = 4, 8
NO_LIMIT = 2**31


def padded_width(length: int) -> int:
    """The width that rows of this length are padded to: one of four in each octave, so that less than a fifth
    of a row is padding (12, 16, 20, 24, 28, 32, 40, 48, ...), at least 4."""
    step = max(LEAST_WIDTH, (1 << (length - 1).bit_length()) // 8)
    return -(-max(length, 1) // step) * step


def batches(
    lengths: Sequence[int], tokens: int, *, most_rows: int = NO_LIMIT, mixed: bool = True
) -> Iterator[tuple[Int[np.ndarray, "items"], int, int]]:
    """Cut items into batches, the longest first: (numbers of items, rows, width) of each.

    tokens     most rows x width of a batch of several rows
    most_rows  of a batch
    mixed      True: a batch takes as many items as it may, and pads the shorter ones. False: those of its
               width in a power of two of rows, 8 at least, and shorter ones in rows that would be empty
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    widths = np.array([padded_width(length) for length in lengths], np.int64)[order]
    first = 0
    while first < len(order):
        width = int(widths[first])
        most = min(max(1, tokens // width), most_rows)
        if mixed:
            rows = min(most, padded_width(len(order) - first))
        else:
            same = int((widths[first:] == width).sum())
            rows = min(most, max(LEAST_ROWS, 1 << (same - 1).bit_length()))
        yield order[first : first + rows], rows, width
        first += rows
