"""Q8_0: 32 weights in 34 bytes, 8.5 bits a weight.   w = d * q,  q in -128..127

d f16 | qs 32 signed bytes
"""

import jax
import jax.numpy as jnp
import numpy as np

WEIGHTS = 32
BLOCK = np.dtype([("d", "<f2"), ("qs", "i1", 32)])
RANDOM = {"d": 1 / 73.9}  # q uniform on -128..127 has mean -0.5, standard deviation 73.9


def dequantize(block):
    d = block["d"].astype(jnp.float32)[..., None]
    return d * block["qs"].astype(jnp.float32)


def quantize(x):
    # As ggml does it: q from the float32 d, halves away from zero; only then is d rounded.
    d = jnp.abs(x).max(axis=-1, keepdims=True) / 127
    inverse = jnp.where(d == 0, 0, 1 / d)
    q = jax.lax.round(x * inverse, jax.lax.RoundingMethod.AWAY_FROM_ZERO)
    return {"d": d[..., 0].astype(jnp.float16), "qs": q.astype(jnp.int8)}
