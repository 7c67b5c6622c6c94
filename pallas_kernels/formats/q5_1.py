"""Q5_1: 32 weights in 24 bytes, 6 bits a weight.   w = d * q + m,  q in 0..31

d f16 | m f16 | qh u32: bit j is bit 4 of weight j
              | qs 16 bytes: bits 0-3; the low nibble of byte j is weight j, the high nibble weight j + 16
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats.q5_0 import codes

WEIGHTS = 32
BLOCK = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "<u4"), ("qs", "u1", 16)])
RANDOM = {"d": 1 / 9.23, "m": -15.5 / 9.23}  # q uniform on 0..31 has mean 15.5, standard deviation 9.23


def dequantize(block):
    d = block["d"].astype(jnp.float32)[..., None]
    m = block["m"].astype(jnp.float32)[..., None]
    return d * codes(block).astype(jnp.float32) + m
