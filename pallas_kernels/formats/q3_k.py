"""Q3_K: 256 weights in 110 bytes, 3.4375 bits a weight.   w = d * (sc - 32) * (q - 4)

q in 0..7, sc in 0..63, laid out as

    hmask 32 bytes: bit t of byte b is bit 2 of weight 32t + b
    qs 64 bytes: bits 2t of byte 32h + b are bits 0-1 of weight 128h + 32t + b
    scales 12 bytes: sc of weights 16g .. 16g+15; bits 0-3 are the low (g < 8) or high nibble of byte g % 8,
                     bits 4-5 are bits 2(g / 4) of byte 8 + g % 4
    d f16
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import packing, tiles
from pallas_kernels.cpu.vectors import QUARTERS, Vectors
from pallas_kernels.encoding import (
    column_weights,
    quantized_signed_scales,
    refined_scale,
    rounded_between,
    signed_codes_of,
    signed_scale,
    tenths,
    weighted_signed_scales,
)
from pallas_kernels.formats.q2_0_g128 import two_bits

WEIGHTS = 256
BLOCK = np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])
RANDOM = {"d": 1 / 43.3}  # mean squares: 341.5 of sc - 32, 5.5 of q - 4; the product is 43.3^2


def dequantize(block):
    q = _codes(block).astype(jnp.float32) - 4
    scale = block["d"].astype(jnp.float32)[..., None] * (_scale_codes(block).astype(jnp.float32) - 32)
    return (scale[..., None] * q).reshape(*block["d"].shape, 256)


def _codes(block):
    """uint8 [..., 16, 16]."""
    lead = block["d"].shape
    low = packing.codes(block["qs"].reshape(*lead, 2, 32), 2)
    return low.reshape(*lead, 16, 16) | packing.codes(block["hmask"], 1).reshape(*lead, 16, 16) << 2


def _scale_codes(block):
    """sc, uint8 [..., 16]."""
    nibbles, pairs = block["scales"][..., :8], block["scales"][..., 8:]
    return packing.codes(nibbles, 4) | packing.codes(pairs, 2) << 4


def quantize(x):
    """Of each 16 weights the scale by ggml's search, one code after the other; these in 6 bits, of d; codes
    by what was stored."""
    x = x.reshape(*x.shape[:-1], 16, 16)
    return _stored(x, *quantized_signed_scales(refined_scale(x, -4, 3), -32, 31))


def quantize_weighted(x, importance):
    """Of each 16 weights the scale by ggml's weighted search, then d and its codes by the same one."""
    weights = column_weights(x, importance, 2)
    x, weights = (a.reshape(*a.shape[:-1], 16, 16) for a in (x, weights))
    scale = signed_scale(x, rounded_between(-4, 3), tenths(4), weights)
    return _stored(x, *weighted_signed_scales(scale, weights.sum(axis=-1), -32, 31))


def _stored(x, d, sc):
    q = (signed_codes_of(x, d, sc, -4, 3) + 4).astype(jnp.uint8).reshape(*d.shape, 256)
    sc = (sc + 32).astype(jnp.uint8)
    return {
        "hmask": packing.packed(q >> 2, 1),
        "qs": packing.packed((q & 3).reshape(*d.shape, 2, 128), 2).reshape(*d.shape, 64),
        "scales": _packed_scales(sc),
        "d": d,
    }


def _packed_scales(sc):
    """The inverse of `_scale_codes`."""
    return jnp.concatenate([packing.packed(sc & 15, 4), packing.packed(sc >> 4, 2)], axis=-1)


# 32 (q - 4) is a signed byte whose five low bits are free: three have eight groups.
WORDS = tiles.Words(16, "00011166 22233377 44455567", units=(32, 32))
# Of sc in two eights of groups a byte of "scales" and half of a byte of "low".
SIX_BITS, LANE_PAIR = "00001111 0011", "11110000"


def tile(block):
    """Blocks -> {"words", "scales": uint32 [*lead, N / 16, K / 256, 32], "low": uint32 [..., 16], "d": uint32
    [..., 8]} (pallas_kernels/tiles.py), 3.4375 bits a weight as in the file.

    sc - 32, signed, of groups 2 t and 2 t + 1 and rows g and g + 8, has a byte in the lane's "scales", and a
    byte in the word of "low" that two neighbouring lanes share:

        scales   bits 7-4: bits 5-2 of sc - 32 of the first eight groups, bits 3-0: of the other eight
        low      bits 3-2: bits 1-0 of sc - 32 of the first eight groups, bits 1-0: of the other eight; bits
                 7-4 belong to the lane with the odd number
    """
    sc = tiles.byte_words(_scale_codes(block) ^ 32).swapaxes(-1, -2)
    both = packing.pack(sc, SIX_BITS, tiles.ONES)  # [..., 2, 32]
    low = both[..., 1, :].reshape(*both.shape[:-2], 16, 2).swapaxes(-1, -2)
    return {
        "words": WORDS.tiled((_codes(block) ^ 4).reshape(*block["d"].shape, 256)),
        "scales": both[..., 0, :],
        "low": packing.pack(low, LANE_PAIR, tiles.ONES)[..., 0, :],
        "d": tiles.bits(tiles.lane_rows(block["d"])),
    }


def untile(tiled, shape):
    q = WORDS.untiled(tiled["words"], shape, 256) ^ 4
    qs = packing.packed((q & 3).reshape(*q.shape[:-1], 2, 128), 2)
    low = packing.unpack(tiled["low"][..., None, :], LANE_PAIR, tiles.ONES).swapaxes(-1, -2)
    both = jnp.stack([tiled["scales"], low.reshape(tiled["scales"].shape)], axis=-2)
    sc = packing.unpack(both, SIX_BITS, tiles.ONES).swapaxes(-1, -2)
    sc = tiles.from_byte_words(sc, shape) ^ 32
    return {
        "hmask": packing.packed(q >> 2, 1),
        "qs": qs.reshape(*qs.shape[:-2], 64),
        "scales": _packed_scales(sc),
        "d": tiles.from_lane_rows(tiles.halves(tiled["d"]), shape),
    }


def _scales(fields, lane):
    """Scales are 4 (sc - 32) times d / 128: bytes are 32 (q - 4)."""
    from pallas_kernels.gpu import lanes

    (high,), (low,) = fields["scales"], fields["low"]
    low = low >> (lane & 1) * 4
    d = [v * (1 / 128) for v in lanes.halves(fields["d"][0])]
    both = ((high, low), (high << 4, low << 2))
    return tiles.WholeScales([d], [[lanes.merged(*words, 0xF0F0F0F0) & 0xFCFCFCFC] for words in both])


LANES = tiles.Lanes(WORDS, signed=True, minimums=False, scales=_scales, whole_scales=True)


def _vector_codes(load):
    """Bit 2 of the weights of group g of 32 is bit g of hmask's bytes."""
    hmask = load("hmask")
    hmask = hmask.then(hmask)
    high = [(hmask & (1 << bits)).compared("!=", 0).bytes(4, 0) for bits in QUARTERS // 32]
    return [low | bit for low, bit in zip(two_bits(load), high, strict=True)]


def _vector_scales(load):
    scales = load("scales")
    nibbles, pairs = scales[:8], scales[8:]
    high = (pairs & 3).then((pairs >> 2) & 3).then((pairs >> 4).then(pairs >> 6) & 3)
    codes = (nibbles & 15).then(nibbles >> 4) | (high << 4)
    return load("d").float().splat(16) * (codes.float(signed=False) - 32.0)


CPU = Vectors(QUARTERS, group=16, codes=_vector_codes, scales=_vector_scales, zero=4)
