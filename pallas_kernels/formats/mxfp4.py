"""MXFP4 (OCP microscaling): 32 weights in 17 bytes, 4.25 bits a weight.   w = 2^(e - 128) * v(q),  q in 0..15

    q      0  1  2  3  4  5  6   7     8 to 15 are the same below 0
    v(q)   0  1  2  3  4  6  8  12

e u8 | qs 16 bytes: the low nibble of byte j is weight j, the high nibble weight j + 16

v is twice the four-bit float of one sign bit, two of exponent and one of mantissa.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import packing
from pallas_kernels.cpu.vectors import NIBBLES, Vectors

WEIGHTS = 32
BLOCK = np.dtype([("e", "u1"), ("qs", "u1", 16)])
# v(q) for q > 0 is its fraction in [1, 2), as float32 has it with the leading 1, times 2^POWER.
FRACTION = np.array([0, 2, 2, 3, 2, 3, 2, 3], np.uint32) << 22
POWER = np.array([0, 0, 1, 1, 2, 2, 3, 3], np.int32)


def dequantize(block):
    """Computed from the bits of float32, because XLA flushes the smallest numbers (e = 0 and 1) to zero."""
    q = packing.codes(block["qs"], 4)
    fraction = jnp.asarray(FRACTION)[q & 7]
    exponent = block["e"].astype(jnp.int32)[..., None] - 1 + jnp.asarray(POWER)[q & 7]
    normal = (exponent << 23).astype(jnp.uint32) + (fraction & 0x7FFFFF)
    small = fraction >> (1 - jnp.minimum(exponent, 1)).astype(jnp.uint32)
    bits = jnp.where(exponent > 0, jnp.where(exponent < 255, normal, 0x7F800000), small)
    bits = jnp.where(fraction == 0, 0, bits | (q >> 3).astype(jnp.uint32) << 31)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _random_e(key, shape, scale):
    """One of the two powers of two around scale / 5.852, drawn so that the weights have the right mean square
    (v has root mean square 5.852)."""
    bits = jax.random.bits(key, shape, jnp.uint8)
    exponent = jnp.log2(scale / 5.852)
    below = jnp.floor(exponent)
    share = (4 ** (exponent - below) - 1) / 3  # of the larger one, whose square is four times as large
    return (below + 128 + (bits < 256 * share)).astype(jnp.uint8)


RANDOM = {"e": _random_e}


def _vector_codes(load):
    """Codes are v(q) + 12."""
    v = [0, 1, 2, 3, 4, 6, 8, 12]
    table = [12 + sign * value for sign in (1, -1) for value in v]
    qs = load("qs")
    return [codes.looked_up(table) for codes in (qs & 15, qs >> 4)]


CPU = Vectors(
    NIBBLES,
    group=32,
    codes=_vector_codes,
    scales=lambda load: (load("e").words() << 7).bfloat16() * 0.5,  # 2^(e - 127) / 2
    zero=12,
)
