"""Q4_1: 32 weights in 20 bytes, 5 bits a weight.   w = d * q + m,  q in 0..15

d f16 | m f16 | qs 16 bytes: the low nibble of byte j is weight j, the high nibble weight j + 16
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tiles

WEIGHTS = 32
BLOCK = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])
RANDOM = {"d": 1 / 4.61, "m": -7.5 / 4.61}  # q uniform on 0..15 has mean 7.5, standard deviation 4.61


def dequantize(block):
    q = jnp.concatenate([block["qs"] & 15, block["qs"] >> 4], axis=-1)
    d = block["d"].astype(jnp.float32)[..., None]
    m = block["m"].astype(jnp.float32)[..., None]
    return d * q.astype(jnp.float32) + m
