"""Q4_0: 32 weights in 18 bytes, 4.5 bits a weight.   w = d * (q - 8),  q in 0..15

d f16 | qs 16 bytes: the low nibble of byte j is weight j, the high nibble weight j + 16
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
from pallas_kernels.formats.q8_0 import lane_scales

WEIGHTS = 32
BLOCK = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
# q - 8 has mean -0.5 and root mean square 4.64; d has either sign, as in files, so that weights have mean 0
RANDOM = {"d": (-1 / 4.64, 1 / 4.64)}


def codes(block):
    """uint8 [..., 32] (shared with Q4_1)."""
    return packing.codes(block["qs"], 4)


def dequantize(block):
    return block["d"].astype(jnp.float32)[..., None] * (codes(block).astype(jnp.float32) - 8)


def quantize(x):
    """d is the number furthest from 0 over -8, so that this number has a code of its own; q is x / d + 8.5
    without its fraction (ggml's quantize_row_q4_0_ref, to the bit)."""
    d = signed_absmax(x) / -8
    q = jnp.minimum(jnp.trunc(product(x, inverse(d)[..., None]) + 8.5), 15).astype(jnp.uint8)
    return {"d": d.astype(jnp.float16), "qs": packing.packed(q, 4)}


def quantize_weighted(x, importance):
    """d by ggml's search with weighted squares, and the codes that it fitted."""
    weights = column_weights(x, importance, 1, axes=2)
    d, q = signed_fit(x, weights, rounded_between(-8, 7), tenths(8))
    return {"d": d.astype(jnp.float16), "qs": packing.packed((q + 8).astype(jnp.uint8), 4)}


def tile(block):
    """Blocks -> {"words": vectors of two groups, "scales": the lane's float16} (pallas_kernels/tiles.py)."""
    return {"words": tiles.NIBBLES.tiled(codes(block)), "scales": tiles.scale_words(block["d"])}


def untile(tiled, shape):
    qs = packing.packed(tiles.NIBBLES.untiled(tiled["words"], shape, WEIGHTS), 4)
    (d,) = tiles.from_scale_words(tiled["scales"], shape)
    return {"d": d, "qs": qs}


# 8 is subtracted from every q: the minimum is 8 d.
SCALES = functools.partial(lane_scales, units=(1, 16), zero=8.0)
LANES = tiles.Lanes(tiles.NIBBLES, signed=False, minimums=True, scales=SCALES)


def nibbles(load):
    """The codes of four blocks (shared with Q4_1)."""
    qs = load("qs")
    return [qs & 15, qs >> 4]


CPU = Vectors(NIBBLES, group=32, codes=nibbles, scales=lambda load: load("d").float(), zero=8)
