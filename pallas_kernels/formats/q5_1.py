"""Q5_1: 32 weights in 24 bytes, 6 bits a weight.   w = d * q + m,  q in 0..31

d f16 | m f16 | qh u32: bit j is bit 4 of weight j
              | qs 16 bytes: bits 0-3; the low nibble of byte j is weight j, the high nibble weight j + 16
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import tiles
from pallas_kernels.cpu.vectors import NIBBLES, Vectors
from pallas_kernels.encoding import affine_codes, weighted_affine_codes
from pallas_kernels.formats.q5_0 import SCALES, codes, packed, vector_codes
from pallas_kernels.formats.q5_k import WORDS

WEIGHTS = 32
BLOCK = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "<u4"), ("qs", "u1", 16)])
RANDOM = {"d": 1 / 9.23, "m": -15.5 / 9.23}  # q uniform on 0..31 has mean 15.5, standard deviation 9.23


def dequantize(block):
    d = block["d"].astype(jnp.float32)[..., None]
    m = block["m"].astype(jnp.float32)[..., None]
    return d * codes(block).astype(jnp.float32) + m


def quantize(x):
    """As Q4_1, with twice as many steps (ggml's quantize_row_q5_1_ref, to the bit)."""
    d, m, q = affine_codes(x, 31)
    return {"d": d, "m": m, **packed(q)}


def quantize_weighted(x, importance):
    """As Q4_1, with twice as many steps."""
    d, m, q = weighted_affine_codes(x, importance, 31)
    return {"d": d, "m": m, **packed(q)}


def tile(block):
    """Q5_K's words, and Q4_1's scales."""
    return {"words": WORDS.tiled(codes(block)), "scales": tiles.scale_words(block["d"], block["m"])}


def untile(tiled, shape):
    d, m = tiles.from_scale_words(tiled["scales"], shape)
    return {"d": d, "m": m, **packed(WORDS.untiled(tiled["words"], shape, WEIGHTS))}


LANES = tiles.Lanes(WORDS, signed=False, minimums=True, scales=SCALES)
CPU = Vectors(
    NIBBLES,
    group=32,
    codes=vector_codes,
    scales=lambda load: load("d").float(),
    minimums=lambda load: -load("m").float(),
)
