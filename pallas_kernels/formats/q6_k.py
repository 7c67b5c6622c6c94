"""Q6_K: 256 weights in 210 bytes, 6.5625 bits a weight.   w = d * sc * (q - 32)

q in 0..63, sc in -128..127, laid out as

    ql 128 bytes: bits 0-3; the low nibble of byte 64h + b is weight 128h + b, the high nibble 128h + 64 + b
    qh 64 bytes: bits 2t of byte 32h + b are bits 4-5 of weight 128h + 32t + b
    scales 16 signed bytes: sc of weights 16g .. 16g+15
    d f16
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import packing, tiles
from pallas_kernels.cpu.vectors import NATURAL, Vectors
from pallas_kernels.encoding import (
    quantized_signed_scales,
    rounded_between,
    signed_codes_of,
    signed_scale,
    tenths,
)

WEIGHTS = 256
BLOCK = np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])
RANDOM = {"d": 1 / 1366}  # mean squares: 5461.5 of sc, 341.5 of q - 32; the product is 1366^2


def dequantize(block):
    lead = block["d"].shape
    q = _codes(block).reshape(*lead, 16, 16).astype(jnp.float32) - 32
    scale = block["d"].astype(jnp.float32)[..., None] * block["scales"].astype(jnp.float32)
    return (scale[..., None] * q).reshape(*lead, 256)


def _codes(block):
    """uint8 [..., 256]."""
    lead = block["d"].shape
    low = packing.codes(block["ql"].reshape(*lead, 2, 64), 4)  # [..., 2, 128]
    high = packing.codes(block["qh"].reshape(*lead, 2, 32), 2)
    return (low | high << 4).reshape(*lead, 256)


def quantize(x):
    """Of each 16 weights the scale by ggml's search; these in 8 bits, of d; codes by what was stored."""
    x = x.reshape(*x.shape[:-1], 16, 16)
    return _stored(x, x * x)


def quantize_weighted(x, importance):
    """`quantize`, with squares weighted by column."""
    x, weights = (a.reshape(*a.shape[:-1], 16, 16) for a in (x, jnp.broadcast_to(importance, x.shape)))
    return _stored(x, weights)


def _stored(x, weights):
    scale = signed_scale(x, rounded_between(-32, 31), tenths(32), weights)
    d, sc = quantized_signed_scales(scale, -128, 127)
    q = signed_codes_of(x, d, sc, -32, 31).reshape(*d.shape, 2, 128) + 32
    q = q.astype(jnp.uint8)
    return {
        "ql": packing.packed(q & 15, 4).reshape(*d.shape, 128),
        "qh": packing.packed(q >> 4, 2).reshape(*d.shape, 64),
        "scales": sc.astype(jnp.int8),
        "d": d,
    }


# 4 (q - 32) is a signed byte whose two low bits are free: in three of these they have the fourth group.
WORDS = tiles.Words(16, "00000033 11111133 22222233", units=(4, 4))


def tile(block):
    """Blocks -> {"words", "scales": `tiles.byte_words`, "d"} (pallas_kernels/tiles.py), 6.5625 bits a weight
    as in the file."""
    return {
        "words": WORDS.tiled(_codes(block) ^ 32),
        "scales": tiles.byte_words(block["scales"]),
        "d": tiles.bits(tiles.lane_rows(block["d"])),
    }


def untile(tiled, shape):
    codes = WORDS.untiled(tiled["words"], shape, 256) ^ 32
    codes = codes.reshape(*codes.shape[:-1], 2, 128)
    ql, qh = packing.packed(codes & 15, 4), packing.packed(codes >> 4, 2)
    return {
        "ql": ql.reshape(*ql.shape[:-2], 128),
        "qh": qh.reshape(*qh.shape[:-2], 64),
        "scales": tiles.from_byte_words(tiled["scales"], shape, jnp.int8),
        "d": tiles.from_lane_rows(tiles.halves(tiled["d"]), shape),
    }


def _scales(fields, lane):
    from pallas_kernels.gpu import lanes

    d = [value * 0.25 for value in lanes.halves(fields["d"][0])]
    out = []
    for packed in fields["scales"]:
        sc = [lanes.signed_byte(packed, j) for j in range(4)]
        out.append(tiles.Scales([[d[r] * sc[2 * r + h] for h in (0, 1)] for r in (0, 1)]))
    return out


LANES = tiles.Lanes(WORDS, signed=True, minimums=False, scales=_scales)


def _vector_codes(load):
    out = []
    for h in (0, 1):
        ql, qh = load("ql")[64 * h : 64 * h + 64], load("qh")[32 * h : 32 * h + 32]
        out.append((ql & 15) | (qh << 4).then(qh << 2) & 48)
        out.append((ql >> 4) | qh.then(qh >> 2) & 48)
    return out


CPU = Vectors(
    NATURAL,
    group=16,
    codes=_vector_codes,
    scales=lambda load: load("d").float().splat(16) * load("scales").float(),
    zero=32,
)
