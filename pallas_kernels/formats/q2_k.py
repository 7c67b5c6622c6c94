"""Q2_K: 256 weights in 84 bytes, 2.625 bits a weight.   w = d * sc * q - dmin * m

q in 0..3, sc and m in 0..15, laid out as

    scales 16 bytes: the low nibble of byte g is sc, the high nibble m of weights 16g .. 16g+15
    qs 64 bytes: bits 2t of byte 32h + b are weight 128h + 32t + b
    d f16 | dmin f16
"""

import jax.numpy as jnp
import numpy as np

WEIGHTS = 256
BLOCK = np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")])
# sc and m: mean 7.5, mean square 77.5, variance 21.25; q: 1.5, 3.5. Mean 0 takes dmin = 1.5 d, and then
# variance / d^2 = 77.5 * 3.5 - (7.5 * 1.5)^2 + 1.5^2 * 21.25 = 13.87^2
RANDOM = {"d": 1 / 13.87, "dmin": 1.5 / 13.87}


def dequantize(block):
    lead = block["d"].shape
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    q = (block["qs"].reshape(*lead, 2, 1, 32) >> shifts) & 3  # [..., 2, 4, 32]
    q = q.reshape(*lead, 16, 16).astype(jnp.float32)
    scale = block["d"].astype(jnp.float32)[..., None] * (block["scales"] & 15).astype(jnp.float32)
    minimum = block["dmin"].astype(jnp.float32)[..., None] * (block["scales"] >> 4).astype(jnp.float32)
    return (scale[..., None] * q - minimum[..., None]).reshape(*lead, 256)
