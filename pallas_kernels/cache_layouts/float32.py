"""float32: 4 bytes a number, exact. Tensor cores multiply it as the sum of two bfloat16, which has 16 of its
24 bits of mantissa."""

import jax.numpy as jnp

from pallas_kernels import gpu

DTYPE = jnp.dtype(jnp.float32)
OPERAND = jnp.bfloat16
PREFILL = None


def rotate(x):
    return x


def quantize(x):
    return x.astype(DTYPE)


def dequantize(stored):
    return stored.astype(jnp.float32)


# attention/decode.py: bfloat16 has float32's range.
WEIGHT_EXPONENT = 0


def in_range(query, count):
    return query, None


def split(x, y):
    return gpu.pairs.split_bfloat16(x, y)


def load(pages, at):
    return [gpu.memory.load_stored(8, pages, at)]


def load_scale(pages, at):
    return None


def store(stored, pages, at):
    gpu.memory.store_stored(stored[0], pages, at)


def store_scale(scale, pages, at):
    pass


def rotate_lanes(head, distances):
    return head


def narrow(head, distances):
    return [[gpu.lanes.real_vector(part)] for part in head], None


def pairs(stored):
    x = gpu.lanes.reals(stored[0])
    return [split(*x[i : i + 2]) for i in range(0, 8, 2)]


def pairs_across(a, b):
    return [split(x, y) for x, y in zip(gpu.lanes.reals(a[0]), gpu.lanes.reals(b[0]), strict=True)]
