"""Weights of 1 bit and ternary ones as bytes, the first operand of prefill_sm90.py's multiplications.

wgmma takes this operand from registers, 64 rows x 32 columns of bytes at a time, and lane 4 g + t of warp w
holds of it rows 16 w + g and 16 w + g + 8 and columns 4 t .. 4 t + 3 and 16 + 4 t .. 16 + 4 t + 3. In the
tiles of both kinds of formats the same lane has 32 columns of a group of 128, of the same rows. The order of
columns within a group is free, as long as the activations follow it. So every lane makes bytes of its own
words, and nothing is exchanged. Byte e of a row's register j is place 16 j + 4 t + e of a group:

    Signs     column 32 t + 16 h + 4 e + p,      j = 4 h + p
    Ternary   column 32 (2 f + p) + 8 t + 4 h + 2 u + c,   j = 4 h + 2 p + u,   e = 2 c + f

Bytes come from a table of a row's b, from which `prmt` chooses four at a time: each nibble of its selector
names one of eight bytes; the highest bit of a nibble has to be 0.
"""

import dataclasses
from typing import Any

import jax

from pallas_kernels.gpu import lanes
from pallas_kernels.gpu.values import integer, select


@dataclasses.dataclass(frozen=True)
class Signs:
    """Q1_0 (formats/q1_0.py): a word of bits for each row and group, +-b."""

    @staticmethod
    def row_words(vectors: list[list], group: int, row: int) -> list:
        """This lane's words of a row (0: g, 1: g + 8) and a group, of the vectors of a pair of groups."""
        return [vectors[0][2 * group + row]]

    @staticmethod
    def scale_places(g, group: int) -> list:
        """Where the words of a pair's scales have the float16 d of rows g and g + 8: one for each table."""
        return [g + 8 * group]

    @staticmethod
    def tables(b: list) -> list:
        """A number, in the lowest byte of a word -> words of -b and b: the byte that three bits of an index
        choose of two words is b where bit 0, 1 or 2 of it is 1."""
        (b,) = b
        less = 0 - b
        return [
            (word := lanes.bytes_of(less, b, 0x4040), word),
            (word := lanes.bytes_of(less, b, 0x4400), word),
            (lanes.bytes_of(less, b, 0x0000), lanes.bytes_of(less, b, 0x4444)),
        ]

    @staticmethod
    def registers(words: list, tables: list) -> list:
        """A row's words of a group -> its 8 registers. A bit is a weight's sign: the four bytes of a register
        have the bits of four nibbles."""
        (word,), (by_0, by_1, by_2) = words, tables
        nibbles = word & 0x77777777, word >> 1 & 0x77777777  # with their bits 0 to 2, and with 1 to 3
        row = []
        for shift in (0, 16):
            low, high = (v >> shift if shift else v for v in nibbles)
            each = (low, by_0), (low, by_1), (low, by_2), (high, by_2)
            # pyrefly: ignore[bad-argument-count]
            row += [lanes.chosen_bytes(*table, selector) for selector, table in each]
        return row

    @staticmethod
    def piece(lane) -> tuple[Any, Any]:
        """(j, t) of the lane that has, of a warp's group of activations, columns 4 lane .. 4 lane + 3."""
        return lane // 4 % 2 * 4 + lane % 4, lane // 8

    @staticmethod
    def exchanged(word):
        """The word of `piece`, of the bytes that this lane and others have made of their columns: byte b is
        that of lane b of four neighbours which has this lane's number among them."""
        lane = integer(lanes.thread())
        for distance, low, high in ((1, 0x6240, 0x3715), (2, 0x5410, 0x3276)):
            # The lower lane of two keeps its bytes where it is the lower byte of two, and gets the other's
            # there.
            selector = select((lane & distance) == 0, integer(low), integer(high))
            word = lanes.chosen_bytes(word, lanes.swapped(word, distance), selector)
        return word


SIGNS = Signs()


@dataclasses.dataclass(frozen=True)
class Ternary:
    """Formats with the tiles of formats/q2_0_g128.py: two words of 2-bit codes for each row and group, -b, 0
    and b. The code 3, which no encoder writes, is taken for 0.

    scales  of a row in 256 columns: 1, 2 or 4
    """

    scales: int

    @staticmethod
    def row_words(vectors: list[list], group: int, row: int) -> list:
        """As of `Signs`: those of h = 0 and 1."""
        return vectors[group][row::2]

    def scale_places(self, g, group: int) -> list:
        """As of `Signs`; 64 columns may have a d of their own."""
        each = max(1, self.scales // 2)
        return [g * self.scales + (group * self.scales // 2 + i) for i in range(each)]

    @staticmethod
    def tables(b: list) -> list:
        """b of the first and the second 64 columns -> (word, word), whose first three bytes are -b, 0, b."""

        def table(b):
            return lanes.bytes_of(0 - b, lanes.bytes_of(b, integer(0), 0x4044), 0x5650)

        each = [table(v) for v in b]
        return [each[0], each[-1]]

    @staticmethod
    def registers(words: list, tables: list) -> list:
        """As of `Signs`. Of the nibbles of a word every second is of the first 64 columns, and has two codes
        (p) of neighbouring 32."""
        (first, second), row = tables, []
        for word in words:
            for codes in (word, word >> 2):
                codes = codes & 0x33333333 | 0x40404040
                row += [lanes.chosen_bytes(first, second, v) for v in (codes, codes >> 16)]
        return row

    @staticmethod
    def piece(lane) -> tuple[Any, Any]:
        """As of `Signs`."""
        return lane % 2 * 4 + lane // 8 % 2 * 2 + lane // 16, lane // 2 % 4

    @staticmethod
    def exchanged(word):
        """As of `Signs`."""
        return merged(word, 16)


def merged(word, distance: int):
    """Two lanes at a distance have f = 0 and f = 1 of the same t, h and p, each a word of four columns
    (u, c): `Ternary`'s word of u = 0 for the one and of u = 1 for the other."""
    lane = integer(lanes.thread())
    selector = select((lane & distance) == 0, integer(0x5140), integer(0x3726))
    return lanes.chosen_bytes(word, lanes.swapped(word, distance), selector)


Encoding = Signs | Ternary


def words_and_scales(w) -> tuple[jax.Array, jax.Array]:
    """The fields of a tiled matrix."""
    return w.fields["words"], w.fields["scales" if "scales" in w.fields else "d"]


def encoding_of(words: jax.Array, scales: jax.Array) -> Encoding:
    """Of these fields, [.., tiles, .., 32, 4] and [.., scales of a tile]."""
    return SIGNS if words.ndim == scales.ndim + 1 else Ternary(scales.shape[-1] // 8)
