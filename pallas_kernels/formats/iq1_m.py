"""IQ1_M: 256 weights in 56 bytes, 1.75 bits a weight.   w = d * (2 sc + 1) * (v + r)

Eight weights at a time are a point of IQ1_S's GRID, v, with r = 1/8 or -1/8; sc in 0..7 is of 16 weights.

    qs 32 bytes: byte i is bits 7-0 of the number of the point of weights 8i .. 8i+7
    qh 16 bytes: nibble i, the lower of a byte first: bits 2-0 are bits 10-8 of the number of point i; bit 3
                 is 1 where its r is negative
    scales 4 u16: bits 3i .. 3i+2 of number g are the sc of weights 64g + 16i .., bits 15-12 are bits 4g .. of
                  d, a float16
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.codebooks import in_chunks, joined, odd_scales, ternary_points
from pallas_kernels.cpu import points
from pallas_kernels.cpu.vectors import NATURAL, Vectors
from pallas_kernels.encoding import column_weights, inverse
from pallas_kernels.formats.iq1_s import EIGHTHS, GRID, SHIFT, eighth
from pallas_kernels.formats.iq2_xxs import half_scale, nibbles

WEIGHTS = 256
BLOCK = np.dtype([("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4)])
NIBBLES = np.arange(0, 16, 4, dtype=np.uint16)
FACTOR = 1.1125  # ggml's, of d


def dequantize(block):
    lead = block["qs"].shape[:-1]
    d = (block["scales"] >> 12 << NIBBLES).sum(axis=-1, dtype=jnp.uint16)
    sc = block["scales"][..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    high = nibbles(block["qh"])
    number = block["qs"].astype(jnp.uint16) | (high & 7).astype(jnp.uint16) << 8
    v = jnp.asarray(GRID)[number] + eighth(high >> 3)[..., None]  # [..., 32, 8]
    scale = 2 * half_scale(jax.lax.bitcast_convert_type(d, jnp.float16), sc.reshape(*lead, 16))
    return (scale[..., None] * v.reshape(*lead, 16, 16)).reshape(*lead, 256)


def quantize(x):
    """Of each 16 weights scale, signs of r and points by ggml's search; scales in 3 bits, of the d that fits
    all weights."""
    square = x * x
    return in_chunks(_stored, x, square + square.mean(axis=-1, keepdims=True) / 256)


def quantize_weighted(x, importance):
    """`quantize`, with errors weighted by column."""
    return in_chunks(_stored, x, column_weights(x, importance, 2))


def _stored(x, weights):
    numbers, shifts, scales = ternary_points(x, weights, GRID, 16, 2, SHIFT)
    d, sc = odd_scales(scales, 7)
    v = jnp.asarray(GRID)[numbers].reshape(-1, 16, 2, 8) + shifts[..., None]
    q = (v.reshape(-1, 16, 16) * (2 * sc.astype(jnp.float32) + 1)[..., None]).reshape(x.shape)
    qx, qq = (weights * q * x).sum(axis=-1), (weights * q * q).sum(axis=-1)
    d = FACTOR * jnp.where(qq > 0, qx * inverse(qq), d)
    bits = jax.lax.bitcast_convert_type(d.astype(jnp.float16), jnp.uint16)
    high = (numbers >> 8) | (shifts.reshape(-1, 32) < 0).astype(jnp.int32) << 3
    packed = joined(sc.reshape(-1, 4, 4), 3).astype(jnp.uint16)
    return {
        "qs": numbers.astype(jnp.uint8),
        "qh": joined(high.reshape(-1, 16, 2), 4).astype(jnp.uint8),
        "scales": packed | (bits[..., None] >> NIBBLES) << 12,
    }


def _random_scales(key, shape, scale):
    d = jax.lax.bitcast_convert_type((scale / 7.200).astype(jnp.float16), jnp.uint16)  # as in IQ1_S
    return jax.random.bits(key, shape, jnp.uint16) & 0xFFF | (d[..., None] >> NIBBLES) << 12


RANDOM = {"scales": _random_scales}


def _vector_codes(load):
    """As IQ1_S has them."""
    high = points.each_part(load("qh"), [0, 4]) & 15
    v = (load("qs").words() | (high & 7).words() << 8).rows_of(EIGHTHS)
    r = -(high >> 3 << 1) + 1
    return [v[64 * p : 64 * p + 64] + r.take(np.repeat(np.arange(8 * p, 8 * p + 8), 8)) for p in range(4)]


def _vector_scales(load):
    from pallas_kernels.cpu.values import F16

    scales = load("scales")
    d = ((scales >> 12) << NIBBLES).sum().as_type(F16).float()
    return d.splat(16) * ((points.each_part(scales, [0, 3, 6, 9]) & 7).float() * 2.0 + 1.0) * 0.125


CPU = Vectors(NATURAL, group=16, codes=_vector_codes, scales=_vector_scales, zero=16)
