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
from pallas_kernels.gpu.values import as_real, as_word, integer, minimum, real, select, sum_of_squares
from pallas_kernels.rotation import Rotation

LANES = 32
CHUNK = LANES * LANES  # columns of a warp
PITCH = LANES + 4  # words of shared memory for a lane's row: 16 bytes of eight lanes meet no bank twice
WORDS = LANES * PITCH  # of shared memory for a warp


def words(rows: int, columns: int, warps: int) -> int:
    """Of shared memory, for so many warps of which each has chunks of so many rows."""
    return WORDS * min(warps, rows * -(-columns // CHUNK))


def refuses(rotation: Rotation, columns: int) -> str | None:
    """Why a warp cannot rotate so many columns, or None."""
    if rotation.axis is not None:
        return "the columns are split over devices"
    if rotation.block > CHUNK:
        return f"{rotation.block} values are transformed together; the kernel has up to {CHUNK}"
    if rotation.signs is not None and rotation.flips is None:
        return "its signs are no bits (Rotation.from_signs)"
    repeats, k_heads = rotation.heads or (1, 1)
    if columns % LANES or columns // (repeats * k_heads) % LANES:
        return f"{columns} columns, or those of a head, are no multiple of {LANES}"
    return None


@dataclasses.dataclass(frozen=True)
class RotatedColumns:
    """What a lane needs to know; gamma and flips may be None, which stands for ones.

    load_x       [(row, column)] -> x of each
    columns      of a row
    block, heads   of the Rotation
    norm_layer   of gamma, float32 [L, K]
    flips_gmem   of the Rotation: a word is what a lane needs of a chunk
    rotated_smem  float32 [words]
    slot         of this warp in it, from 0
    """

    load_x: Any
    columns: int
    flips_gmem: Any
    gamma_gmem: Any
    norm_layer: Any
    block: int
    heads: tuple[int, int] | None
    rotated_smem: Any
    slot: Any
    lane: Any

    def load(self, row, chunk) -> list:
        """Of chunk number `chunk` of a row gamma and x, 32 each, then the word of flips; 0 behind the row's
        end."""
        places = [self._place(chunk, j) for j in range(LANES)]
        gamma, flips = [], []
        if self.gamma_gmem is not None:  # first: x may have to be waited for
            gamma = [memory.load(self.gamma_gmem, self.norm_layer, source) for source, _ in places]
        if self.flips_gmem is not None:
            flips = [memory.load(self.flips_gmem, chunk * LANES + self.lane)]
        x = self.load_x([(row, source) for source, _ in places])
        x = [
            v if in_row is None else select(in_row, v, 0.0) for v, (_, in_row) in zip(x, places, strict=True)
        ]
        return [*gamma, *x, *flips]

    @property
    def nothing(self) -> list:
        """What `load` gives where there is nothing."""
        words = [integer(0)] * (self.flips_gmem is not None)
        return [real(0)] * (LANES * (1 + (self.gamma_gmem is not None))) + words

    def rotated(self, loaded: list) -> tuple[list, Any]:
        """(the lane's 32 neighbours: of the chunk those from 32 lane on; its sum of squares of x)."""
        first = LANES * (self.gamma_gmem is not None)
        gamma, x, flips = loaded[:first], loaded[first : first + LANES], loaded[-1]
        # Here, and not where they were loaded: what stands between would wait for them too.
        x = [as_real(lanes.opaque(as_word(v))) for v in x]
        squares = sum_of_squares(x)
        if self.gamma_gmem is not None:
            x = [v * g for v, g in zip(x, gamma, strict=True)]
        if self.flips_gmem is not None:
            x = [as_real(as_word(v) ^ (flips << 31 - j & 0x80000000)) for j, v in enumerate(x)]
        bits = self.block.bit_length() - 1
        _butterflies(x, range(0, bits - 5))
        first = self.slot * WORDS
        for j, v in enumerate(x):
            memory.store(v, self.rotated_smem, first + self.lane + j * PITCH)
        lanes.warp_barrier()
        at = first + self.lane * PITCH
        x = [v for i in range(0, LANES, 4) for v in memory.load_reals(4, self.rotated_smem, [at + i])]
        lanes.warp_barrier()
        _butterflies(x, range(0, min(bits, 5)))
        return [v * self.block**-0.5 for v in x], squares

    def _place(self, chunk, j: int) -> tuple[Any, Any]:
        """Where x has column 32 j + lane of a chunk, and whether the row has it (None: yes)."""
        first, in_row = chunk * CHUNK + j * LANES, None
        if self.columns % CHUNK:
            in_row = first < self.columns
            first = minimum(first, self.columns - LANES)
        if self.heads is not None:
            # [repeats, k heads, width] as it lies; [k heads, repeats, width] as it is wanted
            repeats, k_heads = self.heads
            width = self.columns // (repeats * k_heads)
            head, inside = first // width, first % width
            first = (head % repeats * k_heads + head // repeats) * width + inside
        return first + self.lane, in_row


def _butterflies(x: list, bits: range):
    """Stages of the transform along these bits of the numbers of a lane's values, in place."""
    for bit in bits:
        for i in range(len(x)):
            if not i >> bit & 1:
                a, b = x[i], x[i | 1 << bit]
                x[i], x[i | 1 << bit] = a + b, a - b
