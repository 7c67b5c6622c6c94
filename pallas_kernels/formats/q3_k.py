"""Q3_K: 256 weights in 110 bytes, 3.4375 bits a weight.   w = d * (sc - 32) * (q - 4)

q in 0..7, sc in 0..63, laid out as

    hmask 32 bytes: bit t of byte b is bit 2 of weight 32t + b
    qs 64 bytes: bits 2t of byte 32h + b are bits 0-1 of weight 128h + 32t + b
    scales 12 bytes: sc of weights 16g .. 16g+15; bits 0-3 are the low (g < 8) or high nibble of byte g % 8,
                     bits 4-5 are bits 2(g / 4) of byte 8 + g % 4
    d f16
"""

import jax.numpy as jnp
import numpy as np

WEIGHTS = 256
BLOCK = np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])
RANDOM = {"d": 1 / 43.3}  # mean squares: 341.5 of sc - 32, 5.5 of q - 4; the product is 43.3^2


def dequantize(block):
    lead = block["d"].shape
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    low = (block["qs"].reshape(*lead, 2, 1, 32) >> shifts) & 3  # [..., 2, 4, 32]
    high = (block["hmask"][..., None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # [..., 8, 32]
    q = (low.reshape(*lead, 16, 16) | (high.reshape(*lead, 16, 16) << 2)).astype(jnp.float32) - 4

    nibbles, pairs = block["scales"][..., :8], block["scales"][..., 8:]
    low = jnp.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
    high = ((pairs[..., None, :] >> shifts) & 3).reshape(*lead, 16)
    scale = block["d"].astype(jnp.float32)[..., None] * ((low | (high << 4)).astype(jnp.float32) - 32)
    return (scale[..., None] * q).reshape(*lead, 256)
