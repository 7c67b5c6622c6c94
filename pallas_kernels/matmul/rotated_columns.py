"""A warp's part of the rotation of folded weights' inputs (rotation.py): H(s * P(gamma x)) of 1,024
neighbouring columns of a row, 32 a lane. Of the ten bits of their numbers a lane has

    bits 5 to 9      as loaded, 32 neighbours by a warp at a time: five stages of sums
    bits 0 to 4      through shared memory, a row of 32 to each lane: five stages more, and 32 neighbours of
                     the result

so that no stage asks another lane.
"""

import dataclasses
from typing import Any

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import minimum, select, sum_of_squares
from pallas_kernels.rotation import Rotation

LANES = 32
CHUNK = LANES * LANES  # columns of a warp
PITCH = LANES + 4  # words of shared memory for a lane's row: 16 bytes of eight lanes meet no bank twice
WORDS = LANES * PITCH  # of shared memory for a warp


def refuses(rotation: Rotation, columns: int) -> str | None:
    """Why a warp cannot rotate so many columns, or None."""
    if rotation.axis is not None:
        return "the columns are split over devices"
    if rotation.block > CHUNK:
        return f"{rotation.block} values are transformed together; the kernel has up to {CHUNK}"
    repeats, k_heads = rotation.heads or (1, 1)
    if columns % LANES or columns // (repeats * k_heads) % LANES:
        return f"{columns} columns, or those of a head, are no multiple of {LANES}"
    return None


@dataclasses.dataclass(frozen=True)
class RotatedColumns:
    """What a lane needs to know; refs may be None, which stands for ones.

    load_x       [(row, column)] -> x of each
    columns      of a row
    block, heads   of the Rotation
    norm_layer   of gamma, float32 [L, K]
    turned_smem  float32, WORDS for each warp
    slot         of this warp in it, from 0
    """

    load_x: Any
    columns: int
    signs_gmem: Any
    gamma_gmem: Any
    norm_layer: Any
    block: int
    heads: tuple[int, int] | None
    turned_smem: Any
    slot: Any
    lane: Any

    def load(self, row, chunk) -> list:
        """x, gamma and signs of chunk number `chunk` of a row, flat: 32 of each, 0 behind the row's end."""
        places = [self._places(chunk, j) for j in range(LANES)]
        found = self.load_x([(row, source) for _, source, _ in places])
        found = [
            v if here is None else select(here, v, 0.0) for v, (*_, here) in zip(found, places, strict=True)
        ]
        if self.gamma_gmem is not None:
            found += [memory.load(self.gamma_gmem, self.norm_layer, source) for _, source, _ in places]
        if self.signs_gmem is not None:
            found += [memory.load(self.signs_gmem, column) for column, *_ in places]
        return found

    @property
    def loaded(self) -> int:
        """Values that `load` gives."""
        return LANES * (1 + (self.gamma_gmem is not None) + (self.signs_gmem is not None))

    def rotated(self, loaded: list) -> tuple[list, Any]:
        """(the lane's 32 neighbours: of the chunk those from 32 lane on; its sum of squares of x)."""
        x, *factors = (loaded[i : i + LANES] for i in range(0, len(loaded), LANES))
        squares = sum_of_squares(x)
        for of in factors:
            x = [v * f for v, f in zip(x, of, strict=True)]
        bits = self.block.bit_length() - 1
        _butterflies(x, range(0, bits - 5))
        first = self.slot * WORDS
        for j, v in enumerate(x):
            memory.store(v, self.turned_smem, first + self.lane + j * PITCH)
        lanes.warp_barrier()
        at = first + self.lane * PITCH
        x = [v for i in range(0, LANES, 4) for v in memory.load_reals(4, self.turned_smem, [at + i])]
        lanes.warp_barrier()
        _butterflies(x, range(0, min(bits, 5)))
        return [v * self.block**-0.5 for v in x], squares

    def _places(self, chunk, j: int) -> tuple[Any, Any, Any]:
        """Of column 32 j + lane of a chunk: its number, where x has it, whether the row has it (None: yes)"""
        first, here = chunk * CHUNK + j * LANES, None
        if self.columns % CHUNK:
            here = first < self.columns
            first = minimum(first, self.columns - LANES)
        column = first + self.lane
        if self.heads is None:
            return column, column, here
        # [repeats, k heads, width] as it lies; [k heads, repeats, width] as it is wanted
        repeats, k_heads = self.heads
        width = self.columns // (repeats * k_heads)
        head, inside = first // width, first % width
        return column, (head % repeats * k_heads + head // repeats) * width + inside + self.lane, here


def _butterflies(x: list, bits: range):
    """Stages of the transform along these bits of the numbers of a lane's values, in place."""
    for bit in bits:
        for i in range(len(x)):
            if not i >> bit & 1:
                a, b = x[i], x[i | 1 << bit]
                x[i], x[i | 1 << bit] = a + b, a - b
