"""Q4_0: 32 weights in 18 bytes, 4.5 bits a weight.   w = d * (q - 8),  q in 0..15

d f16 | qs 16 bytes: the low nibble of byte j is weight j, the high nibble weight j + 16
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tiles

WEIGHTS = 32
BLOCK = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
# q - 8 has mean -0.5 and root mean square 4.64; d has either sign, as in files, so that weights have mean 0
RANDOM = {"d": (-1 / 4.64, 1 / 4.64)}


def dequantize(block):
    q = jnp.concatenate([block["qs"] & 15, block["qs"] >> 4], axis=-1)
    d = block["d"].astype(jnp.float32)[..., None]
    return d * (q.astype(jnp.float32) - 8)
