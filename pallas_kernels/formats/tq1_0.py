"""TQ1_0: 256 weights in 54 bytes, 1.6875 bits a weight.   w = d * (q - 1),  q in 0..2

Five weights to a byte in base 3:

    qs 48 bytes: digit t of byte b is weight 32t + b (b < 32), of byte 32 + b weight 160 + 16t + b
    qh 4 bytes: digit t < 4 of byte b is weight 240 + 4t + b
    d f16

A byte is the fraction 0.q0 q1 q2 q3 q4 in base 3, times 256 and rounded up. Multiplied by 3, its carry is the
next digit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu.vectors import NATURAL, Vectors
from pallas_kernels.formats.q2_0_g128 import LANES, LEVELS, ternary, tile_codes, untile_codes

WEIGHTS = 256
BLOCK = np.dtype([("qs", "u1", 48), ("qh", "u1", 4), ("d", "<f2")])


def digits(packed, count):
    """The first `count` base-3 digits of bytes [..., B], digit by digit: uint16 [..., count * B]."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
    rest = packed[..., None, :] * powers  # [..., count, B], modulo 256
    carry = (rest.astype(jnp.uint16) * 3) >> 8
    return carry.reshape(*packed.shape[:-1], -1)


def dequantize(block):
    return block["d"].astype(jnp.float32)[..., None] * (_codes(block).astype(jnp.float32) - 1)


def quantize(x):
    """d = max |x|, q is x / d, rounded, plus 1 (ggml's quantize_row_tq1_0_ref, to the bit)."""
    d, q = ternary(x)
    return {**_packed(q.astype(jnp.uint16)), "d": d}


def _codes(block):
    """uint16 [..., WEIGHTS]: two thirds of qs, the rest of qs, then qh."""
    first, second = jnp.split(block["qs"], (2 * block["qs"].shape[-1] // 3,), axis=-1)
    return jnp.concatenate([digits(first, 5), digits(second, 5), digits(block["qh"], 4)], axis=-1)


def _random_bytes(count, key, shape, _):
    """Bytes of `count` base-3 digits, followed by zeros."""
    return _byte(jax.random.randint(key, shape, 0, 3**count, jnp.uint16) * 3 ** (5 - count))


# -1, 0, +1 have standard deviation 0.816
RANDOM = {"d": 1 / 0.816} | {
    name: functools.partial(_random_bytes, count) for name, count in (("qs", 5), ("qh", 4))
}


def packed(codes, count):
    """The inverse of `digits` for the bytes that encoders write: [..., count * B] -> uint8 [..., B]. (13 of
    the 256 bytes have no five digits of their own: `digits` reads the digits of a smaller byte, and `packed`
    returns that byte.)"""
    powers = np.array([81, 27, 9, 3, 1], np.uint16)[:count, None]
    v = codes.reshape(*codes.shape[:-1], count, -1).astype(jnp.uint16) * powers
    return _byte(v.sum(axis=-2, dtype=jnp.uint16))


def _byte(v):
    """The byte of five digits, which are given as a number, uint16 below 243."""
    return ((v * 256 + 242) // 243).astype(jnp.uint8)


def tile(block):
    """Blocks -> the tiles of Q2_0 (q2_0_g128.tile), 2.0625 bits a weight instead of the file's 1.6875: to
    decode base 3 would take longer than to read the larger tiles."""
    return tile_codes(_codes(block).astype(jnp.uint8), block["d"])


def untile(tiled, shape):
    q, d = untile_codes(tiled, shape)
    return {**_packed(q), "d": d}


def _packed(q):
    """The inverse of `_codes`."""
    weights = q.shape[-1]
    first, second, last = jnp.split(q, (5 * weights // 8, 15 * weights // 16), axis=-1)
    qs = jnp.concatenate([packed(first, 5), packed(second, 5)], axis=-1)
    return {"qs": qs, "qh": packed(last, 4)}


def vector_digits(packed, runs):
    """The digits of a vector of bytes, in the order of columns, in pieces of 64.

    runs  (first byte, number of bytes, digits per byte) of consecutive columns
    """
    places = [(first + b, 3**t) for first, count, digits in runs for t in range(digits) for b in range(count)]
    byte, power = np.array(places).T
    rest = packed.take(byte).words() * power & 255
    carry = (rest * 3 >> 8).low_bytes()
    return [carry[i : i + 64] for i in range(0, len(places), 64)]


def _vector_codes(load):
    return vector_digits(load("qs").then(load("qh")), [(0, 32, 5), (32, 16, 5), (48, 4, 4)])


CPU = Vectors(
    NATURAL, group=128, codes=_vector_codes, scales=lambda load: load("d").float().splat(2), zero=1, shares=4
)
