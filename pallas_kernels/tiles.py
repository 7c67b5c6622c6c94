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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

TILE_ROWS, TILE_COLUMNS = 16, 256
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


@dataclasses.dataclass(frozen=True)
class Lanes:
    """How a lane reads its share of a tile: all that the "int" kernels need to know about a format.

    group         columns that share a scale, 32 or 16
    signed        whether the bytes are signed
    minimums      whether a minimum is subtracted
    units         the value of 1 in the bytes of even and of odd groups, a power of two. Kernels that make
                  float16 weights divide the bytes by it and multiply the scales, which would else underflow
    integers      the lane's vectors of "words" -> the Integers of each group of the tile. Codebooks are
                  looked up here. In each vector of four, rows g and g + 8 alternate: kernels may put row g of
                  another matrix in place of row g + 8
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

    group: int
    signed: bool
    minimums: bool
    integers: Callable[[list[list[Word]]], list[Integers]]
    scales: Callable[[dict[str, Any], Word], list[Scales] | WholeScales]
    whole_scales: bool = False
    units: tuple[int, int] = (1, 1)
    half_scales: Callable[[dict[str, Any]], list[list[list[Word]]]] | None = None

    @property
    def activation_group(self) -> int:
        """Columns of activations that share a scale, in kernels that quantize them by groups."""
        return 2 * self.group if self.whole_scales else self.group


def lane_words(codes: jax.Array, group: int) -> jax.Array:
    """uint8 [*lead, N, K] -> uint32 [*lead, N / 16, K / 256, 256 / group, 32 lanes, group / 8]. Partial tiles
    are filled with zeros. The last axis is A0, A1, A2, A3 of the picture (A0, A1 for groups of 16)."""
    codes = _padded(codes, TILE_COLUMNS)
    *lead, n, k = codes.shape
    tiles, steps = n // TILE_ROWS, k // TILE_COLUMNS
    codes = codes.reshape(*lead, tiles, 2, 8, steps, TILE_COLUMNS // group, 4, group // 16, 4)
    words = jax.lax.bitcast_convert_type(codes, jnp.uint32)  # tile, r, g, step, group, t, half
    words = _transposed(words, len(lead), (0, 3, 4, 2, 5, 6, 1))
    return words.reshape(*lead, tiles, steps, TILE_COLUMNS // group, 32, group // 8)


def from_lane_words(words: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """The inverse of `lane_words` for matrices of this shape: uint8 [*lead, N, K]."""
    *lead, tiles, steps, groups, _, parts = words.shape
    words = words.reshape(*lead, tiles, steps, groups, 8, 4, parts // 2, 2)
    words = _transposed(words, len(lead), (0, 6, 3, 1, 2, 4, 5))
    codes = jax.lax.bitcast_convert_type(words, jnp.uint8)
    return codes.reshape(*lead, tiles * TILE_ROWS, steps * TILE_COLUMNS)[..., : shape[0], : shape[1]]


def nibble_words(codes: jax.Array) -> jax.Array:
    """4-bit codes, uint8 [*lead, N, K], in groups of 32 -> uint32 [*lead, N / 16, K / 256, 4, 32 lanes, 4]:
    vector v has group 2 v in its low nibbles and group 2 v + 1 in its high nibbles."""
    words = lane_words(codes, 32)
    return words[..., 0::2, :, :] | words[..., 1::2, :, :] << 4


def from_nibble_words(words: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """The inverse of `nibble_words`: uint8 [*lead, N, K]."""
    words = jnp.stack([words & 0x0F0F0F0F, words >> 4 & 0x0F0F0F0F], axis=-3)
    return from_lane_words(words.reshape(*words.shape[:-4], 8, 32, 4), shape)


def nibble_integers(vectors: list[list[Word]]) -> list[Integers]:
    """`Lanes.integers` for `nibble_words`: the code in even groups, 16 times the code in odd ones, which
    saves a shift."""
    return [Integers(vector, mask) for vector in vectors for mask in (0x0F, 0xF0)]


def quarter_words(codes: jax.Array) -> jax.Array:
    """2-bit codes, uint8 [*lead, N, K], in groups of 32 -> uint32 [*lead, N / 16, K / 256, 2, 32 lanes, 4]:
    vector v has group 4 v + i in bits 2 i and 2 i + 1 of its bytes."""
    words = lane_words(codes, 32)
    first, second, third, fourth = (words[..., i::4, :, :] << 2 * i for i in range(4))
    return first | second | third | fourth


def from_quarter_words(words: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """The inverse of `quarter_words`: uint8 [*lead, N, K]."""
    words = jnp.stack([words >> 2 * i & 0x03030303 for i in range(4)], axis=-3)
    return from_lane_words(words.reshape(*words.shape[:-4], 8, 32, 4), shape)


def quarter_integers(vectors: list[list[Word]]) -> list[Integers]:
    """`Lanes.integers` for `quarter_words`: 1, 4, 16 and 64 times the code in each four groups."""
    return [Integers(vector, mask) for vector in vectors for mask in (0x03, 0x0C, 0x30, 0xC0)]


def lane_scales(values: jax.Array, group: int) -> jax.Array:
    """One value per row and scale group, [*lead, N, K / group] -> [*lead, N / 16, K / 256, 256 / group / 8,
    32 lanes, 2, 2]: for each 8 groups, lane 4 g + t holds rows g and g + 8 (first of the last two axes) of
    groups 2 t and 2 t + 1."""
    values = _padded(values, TILE_COLUMNS // group)
    *lead, n, groups = values.shape
    tiles, steps, units = n // TILE_ROWS, groups * group // TILE_COLUMNS, TILE_COLUMNS // group // 8
    values = values.reshape(*lead, tiles, 2, 8, steps, units, 4, 2)
    values = _transposed(values, len(lead), (0, 3, 4, 2, 5, 1, 6))
    return values.reshape(*lead, tiles, steps, units, 32, 2, 2)


def from_lane_scales(values: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """The inverse of `lane_scales`: [*lead, N, K / group]."""
    *lead, tiles, steps, units, _, _, _ = values.shape
    values = values.reshape(*lead, tiles, steps, units, 8, 4, 2, 2)
    values = _transposed(values, len(lead), (0, 5, 3, 1, 2, 4, 6))
    groups = shape[1] * units * 8 // TILE_COLUMNS
    return values.reshape(*lead, tiles * TILE_ROWS, steps * units * 8)[..., : shape[0], :groups]


def scale_words(values: jax.Array) -> jax.Array:
    """float16 [*lead, N, K / 32] -> uint32 [*lead, N / 16, K / 256, 32 lanes, 2]: `lane_scales` of groups of
    32, two in a word."""
    return bits(lane_scales(values, 32))[..., 0, :, :]


def from_scale_words(words: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """The inverse of `scale_words`: float16 [*lead, N, K / 32]."""
    return from_lane_scales(halves(words)[..., None, :, :, :], shape)


def lane_rows(values: jax.Array, columns: int = TILE_COLUMNS) -> jax.Array:
    """One value per row and `columns` columns (64, 128 or 256), [*lead, N, K / columns] -> [*lead, N / 16, K
    / 256, 8 c, 2] with c = 256 / columns: rows g and g + 8 on the last axis. The values for lane 4 g + t,
    which has groups 2 t and 2 t + 1 of 32 columns, are at (4 g + t) // (4 / c)."""
    count = TILE_COLUMNS // columns
    values = _padded(values, count)
    *lead, n, across = values.shape
    values = values.reshape(*lead, n // TILE_ROWS, 2, 8, across // count, count)
    values = _transposed(values, len(lead), (0, 3, 2, 4, 1))
    return values.reshape(*values.shape[:-3], 8 * count, 2)


def from_lane_rows(values: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """The inverse of `lane_rows`: [*lead, N, K / columns]."""
    *lead, tiles, steps, words, _ = values.shape
    values = values.reshape(*lead, tiles, steps, 8, words // 8, 2)
    values = _transposed(values, len(lead), (0, 4, 2, 1, 3))
    across = shape[1] * (words // 8) // TILE_COLUMNS
    return values.reshape(*lead, tiles * TILE_ROWS, steps * words // 8)[..., : shape[0], :across]


def bits(halves: jax.Array) -> jax.Array:
    """float16 [..., 2] -> uint32 [...], the first in the low half."""
    return jax.lax.bitcast_convert_type(halves, jnp.uint32)


def halves(words: jax.Array) -> jax.Array:
    """uint32 [...] -> float16 [..., 2], the inverse of `bits`."""
    return jax.lax.bitcast_convert_type(words, jnp.float16)


def _padded(x: jax.Array, columns: int) -> jax.Array:
    """Zeros up to whole tiles: rows to 16, the last axis to `columns`."""
    *lead, n, k = x.shape
    return jnp.pad(x, [(0, 0)] * len(lead) + [(0, -n % TILE_ROWS), (0, -k % columns)])


def _transposed(x: jax.Array, lead: int, order: tuple[int, ...]) -> jax.Array:
    return x.transpose(*range(lead), *(lead + axis for axis in order))
