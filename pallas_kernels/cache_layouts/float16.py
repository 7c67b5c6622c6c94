"""float16: 2 bytes a number, 11 bits of mantissa. What is beyond 65504 is stored as that."""

import jax.numpy as jnp

from pallas_kernels import gpu
from pallas_kernels.cache_layouts.bfloat16 import (
    dequantize,
    load,
    load_scale,
    pairs,
    pairs_across,
    pairs_transposed,
    rotate,
    rotate_lanes,
    store,
    store_scale,
)

DTYPE = jnp.dtype(jnp.float16)
OPERAND = jnp.float16
PREFILL = "float16"
LARGEST = 65504.0


def quantize(x):
    return jnp.clip(x, -LARGEST, LARGEST).astype(DTYPE)


# attention/decode.py. Numbers have all their bits from 2^-14 to 2^16, and none below 2^-24. So weights are
# multiplied as numbers of at most 2^15, where those of 2^-39 still count, and queries with a largest number
# of 1 to 2, of which the pair lacks 2^-25.
WEIGHT_EXPONENT = 15
EXPONENT_BITS = 0xFF << 23  # of a float32


def in_range(query, count):
    largest = gpu.values.greatest([abs(v) for part in query for v in part])
    exponent = gpu.values.as_word(gpu.lanes.largest_of_warp(largest, count)) & EXPONENT_BITS
    inverse = gpu.values.as_real(gpu.values.integer(2 * 127 << 23) - exponent)
    return [[v * inverse for v in part] for part in query], gpu.values.as_real(exponent)


def split(x, y):
    high = gpu.lanes.half_pair(x, y)
    first, second = gpu.lanes.halves(high)
    return [high, gpu.lanes.half_pair(x - first, y - second)]


def narrow(head, distances):
    def words(part):
        return [gpu.lanes.half_pair(*part[i : i + 2], saturated=True) for i in range(0, 8, 2)]

    return [[gpu.lanes.half_vector(words(part))] for part in head], None
