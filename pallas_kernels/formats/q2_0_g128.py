"""Q2_0 of 128 (older PrismML): 128 weights in 34 bytes, 2.125 bits a weight.   w = d * (q - 1),  q in 0..2

    d f16 | qs 32 bytes: bits 2(j % 4) of byte j / 4 are weight j

The code 3 is no ternary weight; should a file hold it, it decodes to 2d, as the formula says.
"""

import jax
import jax.numpy as jnp
import numpy as np

WEIGHTS = 128
BLOCK = np.dtype([("d", "<f2"), ("qs", "u1", 32)])
RANDOM = {"d": 1 / 0.816}  # -1, 0, +1 have standard deviation 0.816
SHIFTS = np.arange(0, 8, 2, dtype=np.uint8)


def dequantize(block):
    q = (block["qs"][..., None] >> SHIFTS) & 3  # [..., bytes, 4]
    q = q.reshape(*block["d"].shape, -1).astype(jnp.float32)
    return block["d"].astype(jnp.float32)[..., None] * (q - 1)


def random_codes(key, lead):
    return {"qs": ternary_bytes(key, (*lead, 32))}


def ternary_bytes(key, shape):
    """Random bytes of four 2-bit codes, each 0, 1 or 2."""
    v = jax.random.randint(key, (*shape, 1), 0, 81, jnp.uint8)
    q = v // np.array([1, 3, 9, 27], np.uint8) % 3
    return (q << SHIFTS).sum(axis=-1, dtype=jnp.uint8)
