"""Q5_K: 256 weights in 176 bytes, 5.5 bits a weight.   w = d * sc * q - dmin * m

q in 0..31, sc and m in 0..63, laid out as

    d f16 | dmin f16 | scales 12 bytes: as in Q4_K
    qh 32 bytes: bit g of byte b is bit 4 of weight 32g + b
    qs 128 bytes: bits 0-3; the low nibble of byte 32h + b is weight 64h + b, the high nibble 64h + 32 + b
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import tiles
from pallas_kernels.formats.q4_k import lane_scales_mins, scales_mins, tile_scales_mins, untile_scales_mins

WEIGHTS = 256
BLOCK = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)])
# sc and m: mean 31.5, mean square 1333.5, variance 341.25; q: 15.5, 325.5. Mean 0 takes dmin = 15.5 d, and
# then variance / d^2 = 1333.5 * 325.5 - (31.5 * 15.5)^2 + 15.5^2 * 341.25 = 526.9^2
RANDOM = {"d": 1 / 526.9, "dmin": 15.5 / 526.9}


def dequantize(block):
    lead = block["d"].shape
    qs = block["qs"].reshape(*lead, 4, 32)
    low = jnp.stack([qs & 15, qs >> 4], axis=-2).reshape(*lead, 8, 32)
    high = (block["qh"][..., None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # [..., 8, 32]
    q = (low | (high << 4)).astype(jnp.float32)
    scale, minimum = scales_mins(block)
    return (scale[..., None] * q - minimum[..., None]).reshape(*lead, 256)
