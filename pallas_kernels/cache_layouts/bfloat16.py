"""bfloat16: 2 bytes a number, 8 bits of mantissa and float32's range."""

import jax.numpy as jnp

from pallas_kernels import gpu
from pallas_kernels.cache_layouts.float32 import (
    WEIGHT_EXPONENT,
    dequantize,
    in_range,
    load,
    load_scale,
    rotate,
    rotate_lanes,
    split,
    store,
    store_scale,
)

DTYPE = jnp.dtype(jnp.bfloat16)
OPERAND = jnp.bfloat16
PREFILL = "bfloat16"


def quantize(x):
    return x.astype(DTYPE)


def narrow(head, distances):
    return [[gpu.pairs.rounded_to_bfloat16(part)] for part in head], None


def pairs(stored):
    return [[word] for word in gpu.lanes.words(stored[0])]


def pairs_transposed(word):
    return [word]


def pairs_across(a, b):
    return [[word] for word in gpu.pairs.across(gpu.lanes.words(a[0]), gpu.lanes.words(b[0]))]
