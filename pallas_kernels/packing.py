"""Codes of some bits in bytes or words.

A layout is a text with a digit per bit, the highest first: the code that the bit belongs to; blanks separate
bytes. A code with bits in several places has its highest bits in the first of them.

    11110000                      two codes of 4 bits, the first in the low bits
    00000033 11111133 22222233    four codes of 6 bits; the fourth in what three bytes have free
"""

import collections
import functools
import itertools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Piece(NamedTuple):
    """So many bits of a code, from bit `right` on, are a byte's from bit `left` on."""

    byte: int
    left: int
    code: int
    right: int
    bits: int


@functools.cache
def pieces(layout: str) -> list[Piece]:
    """All of a layout, in its order."""
    rest, out = collections.Counter(layout), []
    for byte, digits in enumerate(layout.split()):
        left = len(digits)
        for digit, run in itertools.groupby(digits):
            bits = len(list(run))
            left, rest[digit] = left - bits, rest[digit] - bits
            out.append(Piece(byte, left, int(digit), rest[digit], bits))
    return out


def pack(codes: jax.Array, layout: str, ones: int = 1) -> jax.Array:
    """Unsigned integers [..., codes, n] -> [..., bytes, n]. With `ones` of 0x01010101 each uint32 has four
    codes, and then four bytes."""
    packed = collections.defaultdict(list)
    for byte, left, code, right, bits in pieces(layout):
        mask = codes.dtype.type(ones * ((1 << bits) - 1))
        packed[byte].append((codes[..., code, :] >> right & mask) << left)
    return jnp.stack([functools.reduce(operator.or_, packed[byte]) for byte in sorted(packed)], axis=-2)


def unpack(packed: jax.Array, layout: str, ones: int = 1) -> jax.Array:
    """The inverse of `pack`."""
    codes = collections.defaultdict(list)
    for byte, left, code, right, bits in pieces(layout):
        mask = packed.dtype.type(ones * ((1 << bits) - 1))
        codes[code].append((packed[..., byte, :] >> left & mask) << right)
    return jnp.stack([functools.reduce(operator.or_, codes[code]) for code in sorted(codes)], axis=-2)


def codes(packed: jax.Array, bits: int) -> jax.Array:
    """uint8 [..., bytes] -> uint8 [..., 8 / bits * bytes], as most of ggml's formats pack codes of 1, 2 or 4
    bits: the lowest bits of all bytes, then the next bits of all bytes, and so on."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (packed[..., None, :] >> shifts & (1 << bits) - 1).reshape(*packed.shape[:-1], -1)


def packed(codes: jax.Array, bits: int) -> jax.Array:
    """The inverse of `codes`. It reduces no axis, so that XLA fuses it with the operations around it."""
    parts = codes.reshape(*codes.shape[:-1], 8 // bits, -1)
    return functools.reduce(operator.or_, (parts[..., i, :] << bits * i for i in range(8 // bits)))
