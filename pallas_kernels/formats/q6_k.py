"""Q6_K: 256 weights in 210 bytes, 6.5625 bits a weight.   w = d * sc * (q - 32)

q in 0..63, sc in -128..127, laid out as

    ql 128 bytes: bits 0-3; the low nibble of byte 64h + b is weight 128h + b, the high nibble 128h + 64 + b
    qh 64 bytes: bits 2t of byte 32h + b are bits 4-5 of weight 128h + 32t + b
    scales 16 signed bytes: sc of weights 16g .. 16g+15
    d f16
"""

import jax.numpy as jnp
import numpy as np

WEIGHTS = 256
BLOCK = np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])
RANDOM = {"d": 1 / 1366}  # mean squares: 5461.5 of sc, 341.5 of q - 32; the product is 1366^2


def dequantize(block):
    lead = block["d"].shape
    ql = block["ql"].reshape(*lead, 2, 64)
    low = jnp.stack([ql & 15, ql >> 4], axis=-2).reshape(*lead, 16, 16)  # [..., 2, 2, 64] before
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (block["qh"].reshape(*lead, 2, 1, 32) >> shifts) & 3  # [..., 2, 4, 32]
    q = (low | (high.reshape(*lead, 16, 16) << 4)).astype(jnp.float32) - 32
    scale = block["d"].astype(jnp.float32)[..., None] * block["scales"].astype(jnp.float32)
    return (scale[..., None] * q).reshape(*lead, 256)
