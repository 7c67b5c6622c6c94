"""Q4_K: 256 weights in 144 bytes, 4.5 bits a weight.   w = d * sc * q - dmin * m

q in 0..15, sc and m in 0..63, laid out as

    d f16 | dmin f16
    scales 12 bytes: sc and m of weights 32g .. 32g+31

        byte      bits 7-6             bits 5-0
        0..3      bits 5-4 of sc[4+i]  sc[i]
        4..7      bits 5-4 of m[4+i]   m[i]
        8..11     bits 7-4: bits 3-0 of m[4+i], bits 3-0: bits 3-0 of sc[4+i]

    qs 128 bytes: the low nibble of byte 32h + b is weight 64h + b, the high nibble weight 64h + 32 + b
"""

import jax.numpy as jnp
import numpy as np

WEIGHTS = 256
BLOCK = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)])
# sc and m: mean 31.5, mean square 1333.5, variance 341.25; q: 7.5, 77.5. Mean 0 takes dmin = 7.5 d, and then
# variance / d^2 = 1333.5 * 77.5 - (31.5 * 7.5)^2 + 7.5^2 * 341.25 = 258.3^2
RANDOM = {"d": 1 / 258.3, "dmin": 7.5 / 258.3}


def scales_mins(block):
    """d * sc and dmin * m of the 8 groups, each float32 [..., 8] and exact (Q5_K has the same)."""
    a, b, c = jnp.split(block["scales"], 3, axis=-1)
    sc = jnp.concatenate([a & 63, (c & 15) | (a >> 6 << 4)], axis=-1)
    m = jnp.concatenate([b & 63, (c >> 4) | (b >> 6 << 4)], axis=-1)
    d = block["d"].astype(jnp.float32)[..., None]
    dmin = block["dmin"].astype(jnp.float32)[..., None]
    return d * sc.astype(jnp.float32), dmin * m.astype(jnp.float32)


def dequantize(block):
    lead = block["d"].shape
    qs = block["qs"].reshape(*lead, 4, 32)
    q = jnp.stack([qs & 15, qs >> 4], axis=-2).reshape(*lead, 8, 32)  # [..., 4, 2, 32] before
    scale, minimum = scales_mins(block)
    return (scale[..., None] * q.astype(jnp.float32) - minimum[..., None]).reshape(*lead, 256)
