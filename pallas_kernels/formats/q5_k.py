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


KERNELS = "int"
LOW3, MIDDLE, BIT4, BIT3 = (np.uint32(byte * 0x01010101) for byte in (0x07, 0x18, 0x10, 0x08))


def tile(block):
    """Blocks -> {"words": `five_bit_words` of the codes, "scales": as Q4_K's}, 5.5 bits a weight as in the
    file (pallas_kernels/tiles.py)."""
    words = five_bit_words(codes(block).reshape(*block["d"].shape[:-1], -1))
    return {"words": words, "scales": tile_scales_mins(block)}


def untile(tiled, shape):
    """The inverse of `tile` for matrices of this shape, (N, K)."""
    codes = from_five_bit_words(tiled["words"], shape)
    codes = codes.reshape(*codes.shape[:-1], -1, 256)
    qh = packing.packed(codes >> 4, 1)
    return {**untile_scales_mins(tiled["scales"], shape), "qh": qh, **packed_low(codes)}


def five_bit_words(codes):
    """5-bit codes, uint8 [*lead, N, K], in groups of 32 -> uint32 [*lead, N / 16, K / 256, 5, 32 lanes, 4].

    8 q is a byte whose three low bits are free. Five of every eight groups are stored as such bytes, one in
    each vector; their free bits hold the other three groups:

        vector   0              1              2              3                          4
        bits     2-0: q5 4..2   2-0: q6 4..2   2-0: q7 4..2   2-1: q5 1..0, 0: q7 1      2-1: q6 1..0, 0: q7 0
    """
    words = tiles.lane_words(codes << 3, 32)  # [..., 8, 32, 4]
    five, six, seven = (words[..., i, :, :] for i in (5, 6, 7))
    free = [
        five >> 5 & LOW3,
        six >> 5 & LOW3,
        seven >> 5 & LOW3,
        (five & MIDDLE) >> 2 | (seven & BIT4) >> 4,
        (six & MIDDLE) >> 2 | (seven & BIT3) >> 3,
    ]
    return words[..., :5, :, :] | jnp.stack(free, axis=-3)


def from_five_bit_words(words, shape):
    """The inverse of `five_bit_words` for matrices of this shape: uint8 [*lead, N, K]."""
    free = [words[..., i, :, :] & LOW3 for i in range(5)]
    three = [
        free[0] << 5 | free[3] << 2 & MIDDLE,
        free[1] << 5 | free[4] << 2 & MIDDLE,
        free[2] << 5 | free[3] << 4 & BIT4 | free[4] << 3 & BIT3,
    ]
    words = jnp.concatenate([words & ~LOW3, jnp.stack(three, axis=-3)], axis=-3)
    return tiles.from_lane_words(words, shape) >> 3


def five_bit_integers(vectors):
    """`Lanes.integers` for `five_bit_words`: 8 q."""
    from pallas_kernels.gpu import lanes

    five, six, seven = [], [], []
    for v in zip(*vectors, strict=True):
        for group, top, rest in ((five, v[0], v[3]), (six, v[1], v[4])):
            group.append(lanes.merged(top << 5, rest << 2, 0xE0E0E0E0))
        both = lanes.merged(v[2] << 5, v[3] << 4, 0xE0E0E0E0)
        seven.append(lanes.merged(both, v[4] << 3, 0xF0F0F0F0))
    return [tiles.Integers(words, 0xF8) for words in (*vectors, five, six, seven)]


LANES = tiles.Lanes(
    group=32,
    signed=False,
    minimums=True,
    units=(8, 8),
    integers=five_bit_integers,
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
