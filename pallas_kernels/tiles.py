"""The layout that the "int" kernels read, tiles of 16 rows x 256 columns with each lane's share in its own
order, and what they ask of a format (`Lanes`).

`mma.m16n8k32 s8` (m16n8k16 where scales change every 16 columns, or m16n8k32 for two such groups) multiplies
16 rows with one scale group at a time. Of a group, lane 4 g + t holds rows g and g + 8, columns (group / 4)
t ..: the tensor core's own order has the group's halves apart, but the order of columns within a group is
free, as long as activations use the same.

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
Word = Any  # an i32 of MLIR
Real = Any  # a float32 of MLIR


class Integers(NamedTuple):
    """The integers of one scale group, as lane 4 g + t holds them.

    words  four for a group of 32, two for one of 16, in the order A0, A1 (, A2, A3) of the picture
    mask   the bits of each byte that are the group's own
    """

    words: Sequence[Word]
    mask: int = 0xFF


class Scales(NamedTuple):
    """What bytes of eight groups are worth, w = scale byte - minimum, for lane 4 g + t: float32, [rows g, g +
    8][groups 2 t, 2 t + 1].

    minimum  None in a format without minimums
    of_lane  (another lane of the same quad, its number in a quad or one of the same parity) -> [scale,
             minimum] as that lane has them; None: each number is fetched from there
    """

    scale: list[list[Real]]
    minimum: list[list[Real]] | None = None
    of_lane: Callable[[Word, int], list[list[list[Real]]]] | None = None


class WholeScales(NamedTuple):
    """Scales (and minimums) that are whole numbers times numbers of the row, for lane 4 g + t: float32 and
    words of signed bytes, scale first, then minimum in formats that have it.

    rows    of each kind [rows g, g + 8]
    eights  of each eight groups, of each kind a word: byte 2 r + h is of row g + 8 r and group 2 t + h. A
            number of the row times this byte is a scale or minimum as in Scales
    """

    rows: list[list[Real]]
    eights: list[list[Word]]


@dataclasses.dataclass(frozen=True)
class Lanes:
    """How a lane reads its share of a tile: all that the "int" kernels ask of a format.

    group        columns that share a scale, 32 or 16
    signed       whether the bytes are
    minimums     whether something is subtracted
    units        of even and of odd groups, what 1 is in their bytes, a power of two: where weights are made
                 in float16 it goes from the bytes to the scales, so that these are not too small for it
    integers     the lane's vectors of "words" -> of each group of the tile its Integers. Codebooks are looked
                 up here. In every vector of four, rows g and g + 8 take turns, so that a lane may also hold
                 row g of one matrix and row g of another
    scales       {field: the lane's words, or vectors of four}, the lane's number -> of each eight groups
                 their Scales, or WholeScales
    whole_scales  whether they are WholeScales, which only groups of 16 can have. int_decode then adds whole
                 numbers of 32 columns before it multiplies by anything else
    half_scales  the same fields -> [groups 2 t, 2 t + 1 of each eight][rows g, g + 8][scale times unit,
                 -minimum (if there is one)], each a pair of the same float16. None: `scales`, rounded. Worth
                 having where they are made of integers, as float16 does two at a time

    The functions are called while a kernel is traced, with MLIR values; `pallas_kernels.gpu.lanes` has what
    can be done with them. They import it themselves, because only GPUs need it.
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
        """Columns of activations that share a scale where a kernel quantizes them by groups."""
        return 2 * self.group if self.whole_scales else self.group


def lane_words(codes: jax.Array, group: int) -> jax.Array:
    """uint8 [*lead, N, K] -> uint32 [*lead, N / 16, K / 256, 256 / group, 32 lanes, group / 8], zeros where
    N or K are no whole tiles. The last axis is A0, A1, A2, A3 of the picture (A0, A1 for groups of 16)."""
    codes = _padded(codes, TILE_COLUMNS)
    *lead, n, k = codes.shape
    tiles, steps = n // TILE_ROWS, k // TILE_COLUMNS
    codes = codes.reshape(*lead, tiles, 2, 8, steps, TILE_COLUMNS // group, 4, group // 16, 4)
    words = jax.lax.bitcast_convert_type(codes, jnp.uint32)  # tile, r, g, step, group, t, half
    words = _transposed(words, len(lead), (0, 3, 4, 2, 5, 6, 1))
    return words.reshape(*lead, tiles, steps, TILE_COLUMNS // group, 32, group // 8)


def codes_of(words: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """The inverse of `lane_words` for matrices of this shape: uint8 [*lead, N, K]."""
    *lead, tiles, steps, groups, _, parts = words.shape
    words = words.reshape(*lead, tiles, steps, groups, 8, 4, parts // 2, 2)
    words = _transposed(words, len(lead), (0, 6, 3, 1, 2, 4, 5))
    codes = jax.lax.bitcast_convert_type(words, jnp.uint8)
    return codes.reshape(*lead, tiles * TILE_ROWS, steps * TILE_COLUMNS)[..., : shape[0], : shape[1]]


def nibble_words(codes: jax.Array) -> jax.Array:
    """Codes of 4 bits, uint8 [*lead, N, K], in groups of 32 -> uint32 [*lead, N / 16, K / 256, 4, 32 lanes,
    4]: vector v has group 2 v in its low nibbles and group 2 v + 1 in its high ones."""
    words = lane_words(codes, 32)
    return words[..., 0::2, :, :] | words[..., 1::2, :, :] << 4


def nibbles_of(words: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """The inverse of `nibble_words`: uint8 [*lead, N, K]."""
    words = jnp.stack([words & 0x0F0F0F0F, words >> 4 & 0x0F0F0F0F], axis=-3)
    return codes_of(words.reshape(*words.shape[:-4], 8, 32, 4), shape)


def nibble_integers(vectors: list[list[Word]]) -> list[Integers]:
    """`Lanes.integers` of `nibble_words`: the code in even groups, 16 times it in odd ones, which saves the
    shift."""
    return [Integers(vector, mask) for vector in vectors for mask in (0x0F, 0xF0)]


def quarter_words(codes: jax.Array) -> jax.Array:
    """Codes of 2 bits, uint8 [*lead, N, K], in groups of 32 -> uint32 [*lead, N / 16, K / 256, 2, 32 lanes,
    4]: vector v has group 4 v + i in bits 2 i and 2 i + 1 of its bytes."""
    words = lane_words(codes, 32)
    first, second, third, fourth = (words[..., i::4, :, :] << 2 * i for i in range(4))
    return first | second | third | fourth


def quarters_of(words: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """The inverse of `quarter_words`: uint8 [*lead, N, K]."""
    words = jnp.stack([words >> 2 * i & 0x03030303 for i in range(4)], axis=-3)
    return codes_of(words.reshape(*words.shape[:-4], 8, 32, 4), shape)


def quarter_integers(vectors: list[list[Word]]) -> list[Integers]:
    """`Lanes.integers` of `quarter_words`: 1, 4, 16 and 64 times the code in each four groups."""
    return [Integers(vector, mask) for vector in vectors for mask in (0x03, 0x0C, 0x30, 0xC0)]


def lane_scales(values: jax.Array, group: int) -> jax.Array:
    """One value a row and scale group, [*lead, N, K / group] -> [*lead, N / 16, K / 256, 256 / group / 8, 32
    lanes, 2, 2]: of each 8 groups, lane 4 g + t holds rows g and g + 8 (first axis) of groups 2 t and 2 t +
    1."""
    values = _padded(values, TILE_COLUMNS // group)
    *lead, n, groups = values.shape
    tiles, steps, units = n // TILE_ROWS, groups * group // TILE_COLUMNS, TILE_COLUMNS // group // 8
    values = values.reshape(*lead, tiles, 2, 8, steps, units, 4, 2)
    values = _transposed(values, len(lead), (0, 3, 4, 2, 5, 1, 6))
    return values.reshape(*lead, tiles, steps, units, 32, 2, 2)


def scales_of(values: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """The inverse of `lane_scales`: [*lead, N, K / group]."""
    *lead, tiles, steps, units, _, _, _ = values.shape
    values = values.reshape(*lead, tiles, steps, units, 8, 4, 2, 2)
    values = _transposed(values, len(lead), (0, 5, 3, 1, 2, 4, 6))
    groups = shape[1] * units * 8 // TILE_COLUMNS
    return values.reshape(*lead, tiles * TILE_ROWS, steps * units * 8)[..., : shape[0], :groups]


def lane_rows(values: jax.Array, columns: int = TILE_COLUMNS) -> jax.Array:
    """One value a row and `columns` (64, 128 or 256), [*lead, N, K / columns] -> [*lead, N / 16, K / 256, 8
    c, 2] with c = 256 / columns: of rows g and g + 8, the values of the columns where lane 4 g + t has groups
    of 32 number 2 t and 2 t + 1 are at (4 g + t) // (4 / c)."""
    count = TILE_COLUMNS // columns
    values = _padded(values, count)
    *lead, n, across = values.shape
    values = values.reshape(*lead, n // TILE_ROWS, 2, 8, across // count, count)
    values = _transposed(values, len(lead), (0, 3, 2, 4, 1))
    return values.reshape(*values.shape[:-3], 8 * count, 2)


def rows_of(values: jax.Array, shape: tuple[int, int]) -> jax.Array:
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
