"""Q1_0: 128 weights in 18 bytes, 1.125 bits a weight.   w = d where the bit is 1, -d where it is 0

d f16 | qs 16 bytes: bit j % 8 (least significant first) of byte j / 8 is weight j
"""

import jax
import jax.numpy as jnp
import numpy as np

WEIGHTS = 128
BLOCK = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
RANDOM = {"d": 1.0}


def dequantize(block):
    lead = block["d"].shape
    bits = (block["qs"][..., None] >> np.arange(8, dtype=np.uint8)) & 1  # [..., 16, 8]
    d = block["d"].astype(jnp.float32)[..., None]
    return jnp.where(bits.reshape(*lead, 128) == 1, d, -d)


def quantize(x):
    """d = mean |x|, bit = x >= 0. The sum's order is XLA's: d may be an ulp away from another encoder's."""
    integer = jax.lax.bitcast_convert_type(x, jnp.int32)
    # x >= 0, or -0.0: compared as integers because XLA takes a negative denormal for zero
    bits = ((integer >= 0) | (integer == np.int32(-(2**31)))).reshape(*x.shape[:-1], 16, 8)
    qs = (bits.astype(jnp.uint8) << np.arange(8, dtype=np.uint8)).sum(axis=-1, dtype=jnp.uint8)
    return {"d": jnp.abs(x).mean(axis=-1).astype(jnp.float16), "qs": qs}
