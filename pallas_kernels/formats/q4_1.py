"""Q4_1: 32 weights in 20 bytes, 5 bits a weight.   w = d * q + m,  q in 0..15

d f16 | m f16 | qs 16 bytes: the low nibble of byte j is weight j, the high nibble weight j + 16
"""

import functools

import jax.numpy as jnp
import numpy as np

from pallas_kernels import packing, tiles
from pallas_kernels.cpu.vectors import NIBBLES, Vectors
from pallas_kernels.encoding import affine_codes, weighted_affine_codes
from pallas_kernels.formats.q4_0 import codes, nibbles
from pallas_kernels.formats.q8_0 import lane_scales

WEIGHTS = 32
BLOCK = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])
RANDOM = {"d": 1 / 4.61, "m": -7.5 / 4.61}  # q uniform on 0..15 has mean 7.5, standard deviation 4.61


def dequantize(block):
    d = block["d"].astype(jnp.float32)[..., None]
    m = block["m"].astype(jnp.float32)[..., None]
    return d * codes(block).astype(jnp.float32) + m


def quantize(x):
    """m is the least number and d a 15th of the range; q is (x - m) / d, rounded (ggml's
    quantize_row_q4_1_ref, to the bit)."""
    d, m, q = affine_codes(x, 15)
    return {"d": d, "m": m, "qs": packing.packed(q, 4)}


def quantize_weighted(x, importance):
    """d and m by ggml's search with weighted squares, and the codes that it fitted."""
    d, m, q = weighted_affine_codes(x, importance, 15)
    return {"d": d, "m": m, "qs": packing.packed(q, 4)}


def tile(block):
    """Q4_0's words, and for the lane's rows and groups two words of d, then two of m."""
    scales = tiles.scale_words(block["d"], block["m"])
    return {"words": tiles.NIBBLES.tiled(codes(block)), "scales": scales}


def untile(tiled, shape):
    d, m = tiles.from_scale_words(tiled["scales"], shape)
    qs = packing.packed(tiles.NIBBLES.untiled(tiled["words"], shape, WEIGHTS), 4)
    return {"d": d, "m": m, "qs": qs}


SCALES = functools.partial(lane_scales, units=(1, 16))
LANES = tiles.Lanes(tiles.NIBBLES, signed=False, minimums=True, scales=SCALES)
CPU = Vectors(
    NIBBLES,
    group=32,
    codes=nibbles,
    scales=lambda load: load("d").float(),
    minimums=lambda load: -load("m").float(),
)
