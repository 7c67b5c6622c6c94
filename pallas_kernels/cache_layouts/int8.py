"""int8: a byte a number, times a scale of each token and head: half of float16's bytes, and 2 of the scale.

    x = scale n,  scale = bfloat16(largest |x| / 127),  n = round(x / scale)

bfloat16 has float32's range, and numbers up to 127 (1 + 2^-9) of it still round to 127: none is clipped. A
scale is as coarse as a head's largest number, and keys have dimensions that are many times the others: so
queries and keys are rotated, which spreads them (benchmarks/LOG.md).
"""

import jax
import jax.numpy as jnp

from pallas_kernels import gpu
from pallas_kernels.cache_layouts.float16 import WEIGHT_EXPONENT, in_range, split
from pallas_kernels.rotation import hadamard

DTYPE = {"numbers": jnp.dtype(jnp.int8), "scales": jnp.dtype(jnp.bfloat16)}
OPERAND = jnp.float16
PREFILL = "float16"
LARGEST = 127


def rotate(x):
    return hadamard(x, x.shape[-1] & -x.shape[-1])  # the largest power of two that divides it


@jax.custom_jvp
def quantize(x):
    # XLA leaves out a rounding to bfloat16 and back on GPUs: numbers would be divided by what is not stored.
    scales = jax.lax.reduce_precision(jnp.abs(x).max(-1) / LARGEST, exponent_bits=8, mantissa_bits=7)
    scale = scales[..., None]
    numbers = jnp.where(scale > 0, jnp.round(x / scale), 0).astype(jnp.int8)
    return {"numbers": numbers, "scales": scales.astype(jnp.bfloat16)}


@quantize.defjvp
def _derivative(primals, tangents):
    raise NotImplementedError(
        "keys and values of int8 have no derivative, because they are rounded to integers; take it with a "
        "cache of float32, float16 or bfloat16"
    )


def dequantize(stored):
    return stored["numbers"].astype(jnp.float32) * stored["scales"].astype(jnp.float32)[..., None]


def rotate_lanes(head, distances):
    """The butterflies of `hadamard`, one for each bit of a dimension's number: those of the place in a part,
    of the part, and of the lane."""
    x = [v for part in head for v in part]
    factor = len(x) ** -0.5
    for distance in distances:
        factor *= 2**-0.5
        sign = gpu.values.select((gpu.values.integer(gpu.lanes.thread()) & distance) == 0, 1.0, -1.0)
        x = [gpu.lanes.swapped(v, distance) + sign * v for v in x]
    stride = 1
    while stride < len(x):
        x = [x[i] + x[i + stride] if i & stride == 0 else x[i - stride] - x[i] for i in range(len(x))]
        stride *= 2
    return [[v * factor for v in x[i : i + 8]] for i in range(0, len(x), 8)]


def load(pages, at):
    return [gpu.memory.load_stored(8, pages["numbers"], at)]


def load_scale(pages, at):
    return gpu.memory.load_stored(1, pages["scales"], at)


def store(stored, pages, at):
    gpu.memory.store_stored(stored[0], pages["numbers"], at)


def store_scale(scale, pages, at):
    gpu.memory.store_stored(gpu.pairs.rounded_to_bfloat16([scale]), pages["scales"], at)


def narrow(head, distances):
    largest = gpu.values.greatest([abs(v) for part in head for v in part])
    for distance in distances:
        largest = gpu.values.maximum(largest, gpu.lanes.swapped(largest, distance))
    scale = gpu.values.as_real(gpu.pairs.bfloat16_pair(largest / float(LARGEST), gpu.values.real(0)) << 16)
    inverse = gpu.values.select(scale > 0.0, 1.0 / scale, 0.0)

    def word(four):
        return gpu.lanes.packed_bytes([gpu.lanes.round_to_integer(v * inverse) for v in four], 0)

    return [[gpu.lanes.byte_vector([word(part[:4]), word(part[4:])])] for part in head], scale


def pairs(stored):
    above, out = gpu.values.integer(0x64646464), []
    for word in gpu.lanes.words(stored[0]):
        for selector in (0x4140, 0x4342):
            out.append([_less_1152(gpu.lanes.bytes_of(word ^ 0x80808080, above, selector))])
    return out


def pairs_across(a, b):
    out = []
    for a_word, b_word in zip(gpu.lanes.words(a[0]), gpu.lanes.words(b[0]), strict=True):
        for selector in (0x5410, 0x7632):  # two neighbours of a, then of b
            both = gpu.lanes.bytes_of(a_word, b_word, selector)
            for word in (both, both >> 8):
                out.append([_pair(word)])
    return out


def pairs_transposed(word):
    return [_pair(word), _pair(gpu.values.as_value(word) >> 8)]


def _pair(word):
    """The lower bytes of two halves."""
    return _less_1152(gpu.lanes.halves_of_code(word, 0x00FF00FF, 0x00800080))


def _less_1152(pair):
    """A byte of 0 to 255 under 0x64 is the float16 1024 + n, so a signed one with its sign flipped 1152 +
    n."""
    return gpu.lanes.half_less(pair, gpu.lanes.half_twice(1152))
