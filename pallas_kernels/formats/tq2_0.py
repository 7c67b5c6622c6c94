"""TQ2_0: 256 weights in 66 bytes, 2.0625 bits a weight.   w = d * (q - 1),  q in 0..2

    qs 64 bytes: bits 2t of byte 32h + b are weight 128h + 32t + b | d f16

The code 3 is no ternary weight; should a file hold it, it decodes to 2d, as in ggml.
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats.q2_0_g128 import RANDOM, SHIFTS, ternary_bytes

__all__ = ["BLOCK", "RANDOM", "WEIGHTS", "dequantize", "random_codes"]

WEIGHTS = 256
BLOCK = np.dtype([("qs", "u1", 64), ("d", "<f2")])


def dequantize(block):
    lead = block["d"].shape
    q = (block["qs"].reshape(*lead, 2, 1, 32) >> SHIFTS[:, None]) & 3  # [..., 2, 4, 32]
    q = q.reshape(*lead, 256).astype(jnp.float32)
    return block["d"].astype(jnp.float32)[..., None] * (q - 1)


def random_codes(key, lead):
    return {"qs": ternary_bytes(key, (*lead, 64))}
