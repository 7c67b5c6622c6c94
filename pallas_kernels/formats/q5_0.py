"""Q5_0: 32 weights in 22 bytes, 5.5 bits a weight.   w = d * (q - 16),  q in 0..31

d f16 | qh u32: bit j is bit 4 of weight j
      | qs 16 bytes: bits 0-3; the low nibble of byte j is weight j, the high nibble weight j + 16
"""

import functools

import jax.numpy as jnp
import numpy as np

from pallas_kernels import packing, tiles
from pallas_kernels.cpu.vectors import NIBBLES, Vectors
from pallas_kernels.encoding import (
    column_weights,
    inverse,
    product,
    rounded_between,
    signed_absmax,
    signed_fit,
    tenths,
)
from pallas_kernels.formats.q5_k import WORDS
from pallas_kernels.formats.q8_0 import lane_scales

WEIGHTS = 32
BLOCK = np.dtype([("d", "<f2"), ("qh", "<u4"), ("qs", "u1", 16)])
# q - 16 has mean -0.5 and root mean square 9.25; d has either sign, as in files, so that weights have mean 0
RANDOM = {"d": (-1 / 9.25, 1 / 9.25)}


def codes(block):
    """The 5-bit codes, uint8 [..., 32] (shared with Q5_1)."""
    high = (block["qh"][..., None] >> np.arange(32, dtype=np.uint32)) & 1
    return packing.codes(block["qs"], 4) | (high.astype(jnp.uint8) << 4)


def packed(q):
    """The inverse of `codes`: {"qh", "qs"}."""
    high = (q >> 4).astype(jnp.uint32) << np.arange(32, dtype=np.uint32)
    return {"qh": high.sum(axis=-1, dtype=jnp.uint32), "qs": packing.packed(q & 15, 4)}


def quantize(x):
    """As Q4_0, with twice as many codes (ggml's quantize_row_q5_0_ref, to the bit)."""
    d = signed_absmax(x) / -16
    q = jnp.minimum(jnp.trunc(product(x, inverse(d)[..., None]) + 16.5), 31).astype(jnp.uint8)
    return {"d": d.astype(jnp.float16), **packed(q)}


def quantize_weighted(x, importance):
    """As Q4_0, with twice as many codes."""
    weights = column_weights(x, importance, 1, axes=2)
    d, q = signed_fit(x, weights, rounded_between(-16, 15), tenths(16))
    return {"d": d.astype(jnp.float16), **packed((q + 16).astype(jnp.uint8))}


def dequantize(block):
    d = block["d"].astype(jnp.float32)[..., None]
    return d * (codes(block).astype(jnp.float32) - 16)


def tile(block):
    """Q5_K's words of q - 16, which as 8 times it is a signed byte, and Q8_0's scales."""
    return {"words": WORDS.tiled(codes(block) ^ 16), "scales": tiles.scale_words(block["d"])}


def untile(tiled, shape):
    (d,) = tiles.from_scale_words(tiled["scales"], shape)
    return {"d": d, **packed(WORDS.untiled(tiled["words"], shape, WEIGHTS) ^ 16)}


SCALES = functools.partial(lane_scales, units=WORDS.units)
LANES = tiles.Lanes(WORDS, signed=True, minimums=False, scales=SCALES)


def vector_codes(load):
    """The codes of four blocks (shared with Q5_1)."""
    high = load("qh").halves()
    qs = load("qs")
    low, high = (high[i::2].bits().bytes(16, 0) for i in (0, 1))
    return [(qs & 15) | low, (qs >> 4) | high]


CPU = Vectors(NIBBLES, group=32, codes=vector_codes, scales=lambda load: load("d").float(), zero=16)
