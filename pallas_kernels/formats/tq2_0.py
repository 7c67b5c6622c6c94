"""TQ2_0: 256 weights in 66 bytes, 2.0625 bits a weight.   w = d * (q - 1),  q in 0..2

    qs 64 bytes: bits 2t of byte 32h + b are weight 128h + 32t + b | d f16

The code 3 is no ternary weight; should a file hold it, it decodes to 2d, as in ggml.
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import packing
from pallas_kernels.cpu.vectors import QUARTERS, Vectors
from pallas_kernels.formats.q2_0_g128 import (
    LANES,
    LEVELS,
    RANDOM,
    ternary,
    tile_codes,
    two_bits,
    untile_codes,
)

WEIGHTS = 256
BLOCK = np.dtype([("qs", "u1", 64), ("d", "<f2")])


def dequantize(block):
    return block["d"].astype(jnp.float32)[..., None] * (_codes(block).astype(jnp.float32) - 1)


def _codes(block):
    """uint8 [..., 256]."""
    lead = block["d"].shape
    return packing.codes(block["qs"].reshape(*lead, 2, 32), 2).reshape(*lead, 256)


def tile(block):
    """Blocks -> the tiles of Q2_0 (q2_0_g128.tile), one d for their 256 columns."""
    return tile_codes(_codes(block), block["d"])


def untile(tiled, shape):
    q, d = untile_codes(tiled, shape)
    return {"qs": _packed(q), "d": d}


def quantize(x):
    """As TQ1_0 (ggml's quantize_row_tq2_0_ref, to the bit)."""
    d, q = ternary(x)
    return {"qs": _packed(q), "d": d}


def _packed(q):
    """The inverse of `_codes`."""
    lead = q.shape[:-1]
    return packing.packed(q.reshape(*lead, 2, 128), 2).reshape(*lead, 64)


CPU = Vectors(
    QUARTERS, group=128, codes=two_bits, scales=lambda load: load("d").float().splat(2), zero=1, shares=4
)
