"""BF16: one weight in 2 bytes, the upper half of a float32."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu.vectors import FLOATS, Vectors

WEIGHTS = 1
BLOCK = np.dtype([("w", jnp.dtype(jnp.bfloat16))])
RANDOM = {}


def dequantize(block):
    return block["w"].astype(jnp.float32)[..., None]


def quantize(x):
    # In integers, as ggml does it: round to nearest even, a NaN keeps its upper bits and becomes quiet.
    bits = jax.lax.bitcast_convert_type(x[..., 0], jnp.uint32)
    upper = bits >> 16
    rounded = (bits + 0x7FFF + (upper & 1)) >> 16
    upper = jnp.where((bits & 0x7FFFFFFF) > 0x7F800000, upper | 0x40, rounded)
    return {"w": jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)}


CPU = Vectors(FLOATS, group=64, codes=lambda load: [load("w").bfloat16()])
