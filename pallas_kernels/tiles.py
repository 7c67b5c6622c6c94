"""The layout that the "int" kernels read, and what they need to know about a format (`Lanes`).

A tile has 16 rows and 256 columns; the share of each lane is contiguous. `mma.m16n8k32 s8` multiplies 16 rows
with one scale group at a time (for groups of 16 it is m16n8k16, or m16n8k32 for two groups). Lane 4 g + t
holds rows g and g + 8 and columns (group / 4) t .. of each group. The tensor core's own order separates the
halves of a group, but the order of columns within a group is free, as long as activations use the same.

       columns of a group of 32    0..3  4..7 | 8..11 12..15 | 16..19 20..23 | 24..27 28..31
       row g      lane 4 g + t     A0    A2     t = 1          t = 2           t = 3
       row g + 8                   A1    A3
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import packing

TILE_ROWS, TILE_COLUMNS = 16, 256
ONES = 0x01010101  # a 1 in each byte of a word
Word = Any  # an MLIR i32
Real = Any  # an MLIR float32


class Integers(NamedTuple):
    """One lane's integers of a scale group.

    words  A0, A1, A2, A3 of the picture; for a group of 16 only A0, A1
    mask   the bits of each byte that belong to this group
    """

    words: Sequence[Word]
    mask: int = 0xFF


class Scales(NamedTuple):
    """Scales of eight groups, w = scale byte - minimum, in lane 4 g + t: float32, [rows g, g + 8][groups 2 t,
    2 t + 1].

    minimum  None in a format without minimums
    fetch    (a lane of the same quad, a number of the same parity as that lane's t) -> that lane's [scale,
             minimum]; None: kernels fetch each number from that lane
    """

    scale: list[list[Real]]
    minimum: list[list[Real]] | None = None
    fetch: Callable[[Word, int], list[list[list[Real]]]] | None = None


class WholeScales(NamedTuple):
    """Scales (and minimums) that are an integer times a float of the row, in lane 4 g + t. Both lists have an
    entry for scales and, in formats with minimums, one for these.

    rows    float32, [kind][rows g, g + 8]
    eights  words of signed bytes, [each eight groups][kind]: byte 2 r + h belongs to row g + 8 r and group
            2 t + h; the float of that row times this byte is the scale or minimum of `Scales`
    """

    rows: list[list[Real]]
    eights: list[list[Word]]


class Arrangement(NamedTuple):
    """Rows of a matrix cut into tiles, and these into r and g (row 8 r + g); columns cut into steps, and
    these into more axes; all in the order in which lanes want them.

    cut    {name: size} of the axes of a step's columns
    order  all axes of a tile, by name
    """

    cut: dict[str, int]
    order: Sequence[str]

    def tiled(self, x: jax.Array) -> jax.Array:
        """[*lead, N, K] -> [*lead, tiles, steps, *order]. Partial tiles are filled with zeros."""
        *lead, n, k = x.shape
        step = math.prod(self.cut.values())
        x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, -n % TILE_ROWS), (0, -k % step)])
        x = x.reshape(*lead, -(-n // TILE_ROWS), 2, 8, -(-k // step), *self.cut.values())
        return _transposed(x, ["tile", "r", "g", "step", *self.cut], ["tile", "step", *self.order])

    def untiled(self, x: jax.Array, shape: tuple[int, int], axes: int) -> jax.Array:
        """The inverse: [*lead, *shape]. x has so many axes behind those of tiles and steps."""
        *lead, tiles, steps = x.shape[: x.ndim - axes]
        sizes = {"r": 2, "g": 8, **self.cut}
        x = x.reshape(*lead, tiles, steps, *(sizes[name] for name in self.order))
        x = _transposed(x, ["tile", "step", *self.order], ["tile", "r", "g", "step", *self.cut])
        return x.reshape(*lead, tiles * TILE_ROWS, -1)[..., : shape[0], : shape[1]]


def _transposed(x: jax.Array, axes: list[str], to: list[str]) -> jax.Array:
    lead = x.ndim - len(axes)
    return x.transpose(*range(lead), *(lead + axes.index(name) for name in to))


@dataclasses.dataclass(frozen=True)
class Words:
    """How a tile's integers are packed into vectors of four words. A codebook is a subclass with methods of
    its own.

    group   columns that share a scale, 32 or 16
    layout  bytes that share the bits of neighbouring groups (packing.py), which are its digits. A vector has
            the four words of such a byte (A0 to A3), for groups of 16 two words of one run of groups and two
            of the next
    units   the value of 1 in the bytes of even and of odd groups, a power of two. Kernels that make float16
            weights divide the bytes by it and multiply the scales, which would else underflow
    """

    group: int
    layout: str
    units: tuple[int, int] = (1, 1)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(groups of a run, its bytes, runs that share vectors)"""
        return len({*self.layout} - {" "}), len(self.layout.split()), 32 // self.group

    @property
    def arrangement(self) -> Arrangement:
        groups, parts, runs = self.sizes
        each = TILE_COLUMNS // (self.group * groups * runs)
        cut = {"i": each, "run": runs, "byte": parts, "t": 4, "half": self.group // 16}
        return Arrangement(cut, ("i", "byte", "g", "t", "run", "half", "r"))

    def tiled(self, codes: jax.Array) -> jax.Array:
        """uint8 [*lead, N, blocks, WEIGHTS] -> uint32 [*lead, N / 16, K / 256, vectors, 32 lanes, 4]."""
        *lead, blocks, weights = codes.shape
        codes = codes.reshape(*lead, blocks * weights)
        codes = jnp.pad(codes, [(0, 0)] * len(lead) + [(0, -blocks * weights % TILE_COLUMNS)])
        words = jax.lax.bitcast_convert_type(codes.reshape(*lead, -1, 4), jnp.uint32)
        runs = packing.pack(words.reshape(*lead, -1, self.sizes[0], self.group // 4), self.layout, ONES)
        words = self.arrangement.tiled(runs.reshape(*lead, -1))
        return words.reshape(*words.shape[:-7], -1, 32, 4)

    def untiled(self, words: jax.Array, shape: tuple[int, int], weights: int) -> jax.Array:
        """The inverse for matrices of this shape: uint8 [*lead, N, blocks, weights]."""
        columns = words.shape[-4] * math.prod(self.arrangement.cut.values())
        words = self.arrangement.untiled(words, (shape[0], columns), axes=3)
        *lead, _ = words.shape
        runs = packing.unpack(words.reshape(*lead, -1, self.sizes[1], self.group // 4), self.layout, ONES)
        codes = jax.lax.bitcast_convert_type(runs, jnp.uint8).reshape(*lead, -1)
        return codes[..., : shape[1]].reshape(*lead, -1, weights)

    def integers(self, vectors: list[list[Word]]) -> list[Integers]:
        """The lane's vectors -> the Integers of each group of the tile. In each vector rows g and g + 8
        alternate: kernels may put row g of another matrix in place of row g + 8."""
        groups, parts, runs = self.sizes
        out = []
        for i in range(0, len(vectors), parts):
            for run in range(runs):
                words = [vector[4 // runs * run :][: 4 // runs] for vector in vectors[i : i + parts]]
                integers = [
                    [self._integers(w, group) for group in range(groups)] for w in zip(*words, strict=True)
                ]
                out += map(Integers, zip(*integers, strict=True), map(self._mask, range(groups)))
        return out

    def _integers(self, words: Sequence[Word], group: int) -> Word:
        """Four of a group, from a word of each byte: pieces are shifted to their places and merged."""
        from pallas_kernels.gpu import lanes

        merged, above = None, 0
        for byte, left, code, right, _ in packing.pieces(self.layout):
            if code == group:
                piece = _shifted(words[byte], self._low(group) + right - left)
                merged = piece if merged is None else lanes.merged(merged, piece, above * ONES)
                above = 0x100 - (1 << self._low(group) + right)
        return merged

    def _mask(self, group: int) -> int:
        return (1 << self.layout.count(str(group))) - 1 << self._low(group)

    def _low(self, group: int) -> int:
        return self.units[group % 2].bit_length() - 1


def _shifted(word: Word, left: int) -> Word:
    return word << left if left > 0 else word >> -left if left else word


@dataclasses.dataclass(frozen=True)
class Lanes:
    """How a lane reads its share of a tile: all that the "int" kernels need to know about a format.

    words         how integers lie in the field "words", and how a lane gets them from there
    signed        whether the bytes are signed
    minimums      whether a minimum is subtracted
    scales        {field: the lane's words, or vectors of four}, the lane's number -> Scales or WholeScales of
                  each eight groups
    whole_scales  whether these are WholeScales, for groups of 16 only: int_decode then sums integers of 32
                  columns before it multiplies by a float
    half_scales   the same fields -> [groups 2 t, 2 t + 1 of each eight][rows g, g + 8][scale times unit,
                  -minimum (if any)], each twice in a word, as float16. None: kernels round `scales`. Faster
                  where scales are made from integers: float16 instructions work on two at a time

    Kernels call the functions while they are traced, with MLIR values; `pallas_kernels.gpu.lanes` has the
    operations. The functions import it themselves, because only GPUs need it.
    """

    words: Words
    signed: bool
    minimums: bool
    scales: Callable[[dict[str, Any], Word], list[Scales] | WholeScales]
    whole_scales: bool = False
    half_scales: Callable[[dict[str, Any]], list[list[list[Word]]]] | None = None

    @property
    def group(self) -> int:
        """Columns that share a scale, 32 or 16."""
        return self.words.group

    @property
    def activation_group(self) -> int:
        """Columns of activations that share a scale, in kernels that quantize them by groups."""
        return 2 * self.group if self.whole_scales else self.group


BYTES, NIBBLES = Words(32, "00000000"), Words(32, "11110000", units=(1, 16))


def lane_scales(values: jax.Array, group: int) -> jax.Array:
    """One value per row and scale group, [*lead, N, K / group] -> [*lead, N / 16, K / 256, 256 / group / 8,
    32 lanes, 2, 2]: for each 8 groups, lane 4 g + t holds rows g and g + 8 (first of the last two axes) of
    groups 2 t and 2 t + 1."""
    values = _scales(group).tiled(values)
    return values.reshape(*values.shape[:-4], 32, 2, 2)


def from_lane_scales(values: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """The inverse of `lane_scales` for matrices of this shape: [*lead, N, K / group]."""
    group = TILE_COLUMNS // (8 * values.shape[-4])
    return _scales(group).untiled(values, (shape[0], shape[1] // group), axes=4)


def _scales(group: int) -> Arrangement:
    return Arrangement({"u": TILE_COLUMNS // group // 8, "t": 4, "h": 2}, "ugtrh")


def scale_words(*values: jax.Array) -> jax.Array:
    """float16 [*lead, N, K / 32] -> uint32 [*lead, N / 16, K / 256, 32 lanes, 2 words of each]: `lane_scales`
    of groups of 32, two in a word."""
    return jnp.concatenate([bits(lane_scales(v, 32))[..., 0, :, :] for v in values], axis=-1)


def from_scale_words(words: jax.Array, shape: tuple[int, int]) -> list[jax.Array]:
    """The inverse of `scale_words`: each float16 [*lead, N, K / 32]."""
    values = jnp.split(halves(words)[..., None, :, :, :], words.shape[-1] // 2, axis=-2)
    return [from_lane_scales(v, shape) for v in values]


def byte_words(values: jax.Array) -> jax.Array:
    """8 bits [*lead, N, blocks, groups of 16] -> uint32 [*lead, N / 16, K / 256, 32 lanes, 2]: `lane_scales`
    of groups of 16, four in a word."""
    words = lane_scales(values.reshape(*values.shape[:-2], -1), 16)
    words = jax.lax.bitcast_convert_type(words.reshape(*words.shape[:-2], 4), jnp.uint32)
    return words.swapaxes(-1, -2)


def from_byte_words(words: jax.Array, shape: tuple[int, int], dtype=jnp.uint8) -> jax.Array:
    """The inverse of `byte_words` for blocks of 256: [*lead, N, K / 256, 16]."""
    values = jax.lax.bitcast_convert_type(words.swapaxes(-1, -2), dtype)
    values = from_lane_scales(values.reshape(*values.shape[:-1], 2, 2), shape)
    return values.reshape(*values.shape[:-1], -1, 16)


def lane_rows(values: jax.Array, columns: int = TILE_COLUMNS) -> jax.Array:
    """One value per row and `columns` columns (64, 128 or 256), [*lead, N, K / columns] -> [*lead, N / 16, K
    / 256, 8 c, 2] with c = 256 / columns: rows g and g + 8 on the last axis. The values for lane 4 g + t,
    which has groups 2 t and 2 t + 1 of 32 columns, are at (4 g + t) // (4 / c)."""
    values = _rows(TILE_COLUMNS // columns).tiled(values)
    return values.reshape(*values.shape[:-3], -1, 2)


def from_lane_rows(values: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """The inverse of `lane_rows`: [*lead, N, K / columns]."""
    count = values.shape[-2] // 8
    return _rows(count).untiled(values, (shape[0], shape[1] * count // TILE_COLUMNS), axes=2)


def _rows(count: int) -> Arrangement:
    return Arrangement({"c": count}, "gcr")


def bits(halves: jax.Array) -> jax.Array:
    """float16 [..., 2] -> uint32 [...], the first in the low half."""
    return jax.lax.bitcast_convert_type(halves, jnp.uint32)


def halves(words: jax.Array) -> jax.Array:
    """uint32 [...] -> float16 [..., 2], the inverse of `bits`."""
    return jax.lax.bitcast_convert_type(words, jnp.float16)
