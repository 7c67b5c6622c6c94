"""Codes of 1, 2 or 4 bits in bytes, as most of ggml's formats pack them: the codes in a byte belong to
weights that are a number of bytes apart."""

import functools
import operator

import jax
import numpy as np


def codes(packed: jax.Array, bits: int) -> jax.Array:
    """uint8 [..., bytes] -> uint8 [..., 8 / bits * bytes]: the lowest bits of all bytes, then the next bits
    of all bytes, and so on."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (packed[..., None, :] >> shifts & (1 << bits) - 1).reshape(*packed.shape[:-1], -1)


def packed(codes: jax.Array, bits: int) -> jax.Array:
    """The inverse of `codes`. It reduces no axis, so that XLA fuses it with the operations around it."""
    parts = codes.reshape(*codes.shape[:-1], 8 // bits, -1)
    return functools.reduce(operator.or_, (parts[..., i, :] << bits * i for i in range(8 // bits)))
