"""Q2_K: 256 weights in 84 bytes, 2.625 bits a weight.   w = d * sc * q - dmin * m

q in 0..3, sc and m in 0..15, laid out as

    scales 16 bytes: the low nibble of byte g is sc, the high nibble m of weights 16g .. 16g+15
    qs 64 bytes: bits 2t of byte 32h + b are weight 128h + 32t + b
    d f16 | dmin f16
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import packing, tiles
from pallas_kernels.cpu.vectors import QUARTERS, Vectors
from pallas_kernels.encoding import (
    TRIALS,
    codes_of,
    column_weights,
    quantized_scales,
    scale_and_minimum,
    weighted_scales,
)
from pallas_kernels.formats.q2_0_g128 import two_bits

WEIGHTS = 256
BLOCK = np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")])
# sc and m: mean 7.5, mean square 77.5, variance 21.25; q: 1.5, 3.5. Mean 0 takes dmin = 1.5 d, and then
# variance / d^2 = 77.5 * 3.5 - (7.5 * 1.5)^2 + 1.5^2 * 21.25 = 13.87^2
RANDOM = {"d": 1 / 13.87, "dmin": 1.5 / 13.87}


def dequantize(block):
    q = _codes(block).astype(jnp.float32)
    scale = block["d"].astype(jnp.float32)[..., None] * (block["scales"] & 15).astype(jnp.float32)
    minimum = block["dmin"].astype(jnp.float32)[..., None] * (block["scales"] >> 4).astype(jnp.float32)
    return (scale[..., None] * q - minimum[..., None]).reshape(*block["d"].shape, 256)


def _codes(block):
    """uint8 [..., 16, 16]."""
    lead = block["d"].shape
    return packing.codes(block["qs"].reshape(*lead, 2, 32), 2).reshape(*lead, 16, 16)


def quantize(x):
    """Of each 16 weights scale and minimum by ggml's search with absolute errors; these in 4 bits, of d and
    dmin; codes by what was stored."""
    x = x.reshape(*x.shape[:-1], 16, 16)
    scale, minimum = scale_and_minimum(x, jnp.abs(x), 3, -0.5, 0.1, 15, absolute=True)
    return _stored(x, quantized_scales(scale, 15), quantized_scales(minimum, 15))


def quantize_weighted(x, importance):
    """Of each 16 weights scale and minimum by ggml's search with weighted squares, then d, dmin and their
    codes by another."""
    weights = column_weights(x, importance, 1)
    x, weights = (a.reshape(*a.shape[:-1], 16, 16) for a in (x, weights))
    scale, minimum = scale_and_minimum(x, weights, 3, *TRIALS)
    sums = weights.sum(axis=-1)
    return _stored(x, weighted_scales(scale, sums, 15), weighted_scales(minimum, sums, 15))


def _stored(x, scales, minimums):
    (d, sc), (dmin, m) = scales, minimums
    q = codes_of(x, d, sc, dmin, m, 3).reshape(*d.shape, 2, 128)
    qs = packing.packed(q, 2).reshape(*d.shape, 64)
    return {"scales": sc | m << 4, "qs": qs, "d": d, "dmin": dmin}


WORDS = tiles.Words(16, "33221100 77665544", units=(1, 4))


def tile(block):
    """Blocks -> {"words", "scales": `tiles.byte_words`, sc in the low and m in the high nibbles, "d": d and
    dmin} (pallas_kernels/tiles.py), 2.625 bits a weight as in the file."""
    return {
        "words": WORDS.tiled(_codes(block).reshape(*block["d"].shape, 256)),
        "scales": tiles.byte_words(block["scales"]),
        "d": jnp.stack([tiles.bits(tiles.lane_rows(block[name])) for name in ("d", "dmin")], axis=-1),
    }


def untile(tiled, shape):
    q = WORDS.untiled(tiled["words"], shape, 256)
    qs = packing.packed(q.reshape(*q.shape[:-1], 2, 128), 2)
    d, dmin = (tiles.from_lane_rows(tiles.halves(tiled["d"][..., i]), shape) for i in (0, 1))
    scales = tiles.from_byte_words(tiled["scales"], shape)
    return {"scales": scales, "qs": qs.reshape(*d.shape, 64), "d": d, "dmin": dmin}


def _scales(fields, lane):
    """Scales are d / 4, times 4 sc in even groups and sc in odd groups."""
    from pallas_kernels.gpu import lanes

    d, dmin = map(lanes.halves, fields["d"])
    eights = []
    for word in fields["scales"]:
        scale = word & 0x0F000F00 | (word & 0x000F000F) << 2
        eights.append([scale, word >> 4 & 0x0F0F0F0F])
    return tiles.WholeScales([[v * (1 / 4) for v in d], dmin], eights)


LANES = tiles.Lanes(WORDS, signed=False, minimums=True, scales=_scales, whole_scales=True)
CPU = Vectors(
    QUARTERS,
    group=16,
    codes=two_bits,
    scales=lambda load: load("d").float().splat(16) * (load("scales") & 15).float(signed=False),
    minimums=lambda load: load("dmin").float().splat(16) * (load("scales") >> 4).float(signed=False),
)
