"""F16: one weight in 2 bytes."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu.vectors import FLOATS, Vectors

WEIGHTS = 1
BLOCK = np.dtype([("w", "<f2")])
RANDOM = {}


def dequantize(block):
    return block["w"].astype(jnp.float32)[..., None]


def quantize(x):
    return {"w": x[..., 0].astype(jnp.float16)}


CPU = Vectors(FLOATS, group=64, codes=lambda load: [load("w").float()])
