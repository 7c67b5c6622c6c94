"""bfloat16: 2 bytes a number, 8 bits of mantissa and float32's range."""

import jax.numpy as jnp

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
    from pallas_kernels.gpu import pairs

    return [[pairs.rounded_to_bfloat16(part)] for part in head], None


def pairs(stored):
    from pallas_kernels.gpu import lanes

    return [[word] for word in lanes.words(stored[0])]


def pairs_across(a, b):
    from pallas_kernels.gpu import lanes, pairs

    return [[word] for word in pairs.across(lanes.words(a[0]), lanes.words(b[0]))]
