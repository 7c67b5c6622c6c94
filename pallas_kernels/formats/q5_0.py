"""Q5_0: 32 weights in 22 bytes, 5.5 bits a weight.   w = d * (q - 16),  q in 0..31

d f16 | qh u32: bit j is bit 4 of weight j
      | qs 16 bytes: bits 0-3; the low nibble of byte j is weight j, the high nibble weight j + 16
"""

import jax.numpy as jnp
import numpy as np

WEIGHTS = 32
BLOCK = np.dtype([("d", "<f2"), ("qh", "<u4"), ("qs", "u1", 16)])
# q - 16 has mean -0.5 and root mean square 9.25; d has either sign, as in files, so that weights have mean 0
RANDOM = {"d": (-1 / 9.25, 1 / 9.25)}


def codes(block):
    """The 5-bit codes, uint8 [..., 32] (Q5_1 has the same)."""
    low = jnp.concatenate([block["qs"] & 15, block["qs"] >> 4], axis=-1)
    high = (block["qh"][..., None] >> np.arange(32, dtype=np.uint32)) & 1
    return low | (high.astype(jnp.uint8) << 4)


def dequantize(block):
    d = block["d"].astype(jnp.float32)[..., None]
    return d * (codes(block).astype(jnp.float32) - 16)
