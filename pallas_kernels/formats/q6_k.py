"""Q6_K: 256 weights in 210 bytes, 6.5625 bits a weight.   w = d * sc * (q - 32)

q in 0..63, sc in -128..127, laid out as

    ql 128 bytes: bits 0-3; the low nibble of byte 64h + b is weight 128h + b, the high nibble 128h + 64 + b
    qh 64 bytes: bits 2t of byte 32h + b are bits 4-5 of weight 128h + 32t + b
    scales 16 signed bytes: sc of weights 16g .. 16g+15
    d f16
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import packing, tiles
from pallas_kernels.cpu.vectors import NATURAL, Vectors

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


KERNELS = "int"
SHIFTS = np.array([6, 4, 2], np.uint32)[:, None, None]


def tile(block):
    """Blocks -> {"words": uint32 [*lead, N / 16, K / 256, 6, 32, 4], "scales": uint32 [*lead, N / 16, K /
    256, 32, 2], "d": uint32 [*lead, N / 16, K / 256, 8]} (pallas_kernels/tiles.py), 6.5625 bits a weight as
    in the file.

    4 (q - 32) is a signed byte whose two low bits are free. Three of every four groups are stored as such
    bytes, one in each vector; their free bits hold the fourth group, from its top bits down. Vectors 3 i .. 3
    i + 2 have rows g and g + 8 of groups 8 i .., then those of groups 8 i + 4 ..
    """
    lead = block["d"].shape
    codes = (_codes(block) ^ 32) << 2
    words = tiles.lane_words(codes.reshape(*lead[:-1], -1), 16)  # [..., 16 groups, 32 lanes, 2 rows]
    words = words.reshape(*words.shape[:-3], 2, 2, 4, 32, 2)
    three = words[..., :3, :, :] | words[..., 3:, :, :] >> SHIFTS & 0x03030303  # [..., 2, 2, 3, 32, 2]
    three = jnp.moveaxis(three, -4, -2)  # [..., 2, 3, 32, 2 fours of groups, 2 rows]
    scales = tiles.lane_scales(block["scales"].reshape(*lead[:-1], -1), 16)  # [..., 2, 32, 2, 2]
    scales = jax.lax.bitcast_convert_type(scales.reshape(*scales.shape[:-2], 4), jnp.uint32)
    return {
        "words": three.reshape(*three.shape[:-5], 6, 32, 4),
        "scales": jnp.moveaxis(scales, -2, -1),
        "d": tiles.bits(tiles.lane_rows(block["d"])),
    }


def untile(tiled, shape):
    """The inverse of `tile` for matrices of this shape, (N, K)."""
    three = tiled["words"].reshape(*tiled["words"].shape[:-3], 2, 3, 32, 2, 2)
    three = jnp.moveaxis(three, -2, -4)
    fourth = ((three & 0x03030303) << SHIFTS).sum(axis=-3, keepdims=True, dtype=jnp.uint32)
    words = jnp.concatenate([three & np.uint32(0xFCFCFCFC), fourth], axis=-3)
    codes = tiles.from_lane_words(words.reshape(*words.shape[:-5], 16, 32, 2), shape) >> 2 ^ 32
    codes = codes.reshape(*codes.shape[:-1], -1, 2, 128)
    ql, qh = packing.packed(codes & 15, 4), packing.packed(codes >> 4, 2)
    scales = jax.lax.bitcast_convert_type(jnp.moveaxis(tiled["scales"], -1, -2), jnp.int8)
    scales = tiles.from_lane_scales(scales.reshape(*scales.shape[:-1], 2, 2), shape)
    return {
        "ql": ql.reshape(*ql.shape[:-2], 128),
        "qh": qh.reshape(*qh.shape[:-2], 64),
        "scales": scales.reshape(*scales.shape[:-1], -1, 16),
        "d": tiles.from_lane_rows(tiles.halves(tiled["d"]), shape),
    }


def _integers(vectors):
    """4 (q - 32), in the six high bits."""
    from pallas_kernels.gpu import lanes

    out = []
    for i in (0, 3):
        for rows in (slice(0, 2), slice(2, 4)):
            three = [vector[rows] for vector in vectors[i : i + 3]]
            fourth = []
            for a, b, c in zip(*three, strict=True):
                word = lanes.merged(a << 6, b << 4, 0xC0C0C0C0)
                fourth.append(lanes.merged(word, c << 2, 0xF0F0F0F0))
            out += [tiles.Integers(words, 0xFC) for words in (*three, fourth)]
    return out


def _scales(fields, lane):
    from pallas_kernels.gpu import lanes

    d = [value * 0.25 for value in lanes.halves(fields["d"][0])]
    out = []
    for packed in fields["scales"]:
        sc = [lanes.signed_byte(packed, j) for j in range(4)]
        out.append(tiles.Scales([[d[r] * sc[2 * r + h] for h in (0, 1)] for r in (0, 1)]))
    return out


LANES = tiles.Lanes(group=16, signed=True, minimums=False, units=(4, 4), integers=_integers, scales=_scales)


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
