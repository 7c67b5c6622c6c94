"""Q5_K: 256 weights in 176 bytes, 5.5 bits a weight.   w = d * sc * q - dmin * m

q in 0..31, sc and m in 0..63, laid out as

    d f16 | dmin f16 | scales 12 bytes: as in Q4_K
    qh 32 bytes: bit g of byte b is bit 4 of weight 32g + b
    qs 128 bytes: bits 0-3; the low nibble of byte 32h + b is weight 64h + b, the high nibble 64h + 32 + b
"""

import functools

import jax.numpy as jnp
import numpy as np

from pallas_kernels import packing, tiles
from pallas_kernels.cpu.vectors import Vectors
from pallas_kernels.formats.q4_k import (
    CPU_COLUMNS,
    lane_half_scales,
    lane_scales,
    low_codes,
    packed_low,
    scales_mins,
    searched,
    searched_weighted,
    tile_scales_mins,
    untile_scales_mins,
    vector_codes,
    vector_minimums,
    vector_scales,
)

WEIGHTS = 256
BLOCK = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)])
# sc and m: mean 31.5, mean square 1333.5, variance 341.25; q: 15.5, 325.5. Mean 0 takes dmin = 15.5 d, and
# then variance / d^2 = 1333.5 * 325.5 - (31.5 * 15.5)^2 + 15.5^2 * 341.25 = 526.9^2
RANDOM = {"d": 1 / 526.9, "dmin": 15.5 / 526.9}


def dequantize(block):
    q = codes(block).astype(jnp.float32)
    scale, minimum = scales_mins(block)
    return (scale[..., None] * q - minimum[..., None]).reshape(*block["d"].shape, 256)


def codes(block):
    """uint8 [..., 8, 32]."""
    low = low_codes(block)
    return low | packing.codes(block["qh"], 1).reshape(low.shape) << 4


def quantize(x):
    """As Q4_K, with twice as many codes."""
    q, scales = searched(x, 31, -0.5, 15)
    return scales | {"qh": packing.packed(q >> 4, 1)} | packed_low(q)


def quantize_weighted(x, importance):
    q, scales = searched_weighted(x, importance, 31)
    return scales | {"qh": packing.packed(q >> 4, 1)} | packed_low(q)


# Five of every eight groups are in bits 7 to 3 of a byte, 8 q; the other three in what these have free.
WORDS = tiles.Words(32, "00000555 11111666 22222777 33333557 44444667", units=(8, 8))


def tile(block):
    """Blocks -> {"words", "scales": as Q4_K's}, 5.5 bits a weight as in the file."""
    words = WORDS.tiled(codes(block).reshape(*block["d"].shape, 256))
    return {"words": words, "scales": tile_scales_mins(block)}


def untile(tiled, shape):
    codes = WORDS.untiled(tiled["words"], shape, 256)
    qh = packing.packed(codes >> 4, 1)
    return {**untile_scales_mins(tiled["scales"], shape), "qh": qh, **packed_low(codes)}


LANES = tiles.Lanes(
    WORDS,
    signed=False,
    minimums=True,
    scales=functools.partial(lane_scales, (1 / 8, 1 / 8)),
    half_scales=lane_half_scales,
)


def _codes(load):
    """Bit 4 of group g's weights is bit g of qh's bytes."""
    qh = load("qh")
    qh = qh.then(qh)
    group = CPU_COLUMNS // 32
    high = [(qh & (1 << bits)).compared("!=", 0).bytes(16, 0) for bits in group]
    return [low | bit for low, bit in zip(vector_codes(load), high, strict=True)]


CPU = Vectors(CPU_COLUMNS, group=32, codes=_codes, scales=vector_scales, minimums=vector_minimums)
