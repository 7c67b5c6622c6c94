"""Q4_K: 256 weights in 144 bytes, 4.5 bits a weight.   w = d * sc * q - dmin * m

q in 0..15, sc and m in 0..63, laid out as

    d f16 | dmin f16
    scales 12 bytes: sc and m of weights 32g .. 32g+31

        byte      bits 7-6             bits 5-0
        0..3      bits 5-4 of sc[4+i]  sc[i]
        4..7      bits 5-4 of m[4+i]   m[i]
        8..11     bits 7-4: bits 3-0 of m[4+i], bits 3-0: bits 3-0 of sc[4+i]

    qs 128 bytes: the low nibble of byte 32h + b is weight 64h + b, the high nibble weight 64h + 32 + b
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import packing, tiles
from pallas_kernels.cpu.vectors import Vectors
from pallas_kernels.encoding import (
    TRIALS,
    codes_of,
    column_weights,
    quantized_scales,
    scale_and_minimum,
    weighted_scales,
)

WEIGHTS = 256
BLOCK = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)])
# sc and m: mean 31.5, mean square 1333.5, variance 341.25; q: 7.5, 77.5. Mean 0 takes dmin = 7.5 d, and then
# variance / d^2 = 1333.5 * 77.5 - (31.5 * 7.5)^2 + 7.5^2 * 341.25 = 258.3^2
RANDOM = {"d": 1 / 258.3, "dmin": 7.5 / 258.3}
# Of "scales" sc[i], sc[4 + i], m[i], m[4 + i] in bytes i, 4 + i, 8 + i; of tiles what `six_bit_words` makes.
SIX_BITS, LANE_WORD = "11000000 33222222 33331111", "44444444333333222222111111000000"


def scales_mins(block):
    """d * sc and dmin * m of the 8 groups, each float32 [..., 8] and exact (shared with Q5_K)."""
    sc, m = (codes.astype(jnp.float32) for codes in _six_bits(block["scales"]))
    d = block["d"].astype(jnp.float32)[..., None]
    dmin = block["dmin"].astype(jnp.float32)[..., None]
    return d * sc, dmin * m


def _six_bits(scales):
    """sc and m, each uint8 [..., 8]."""
    codes = packing.unpack(scales.reshape(*scales.shape[:-1], 3, 4), SIX_BITS)
    return codes[..., :2, :].reshape(*scales.shape[:-1], 8), codes[..., 2:, :].reshape(*scales.shape[:-1], 8)


def dequantize(block):
    q = low_codes(block).astype(jnp.float32)
    scale, minimum = scales_mins(block)
    return (scale[..., None] * q - minimum[..., None]).reshape(*block["d"].shape, 256)


def low_codes(block):
    """The low 4 bits of the codes, uint8 [..., 8, 32] (shared with Q5_K)."""
    lead = block["d"].shape
    return packing.codes(block["qs"].reshape(*lead, 4, 32), 4).reshape(*lead, 8, 32)


def packed_low(codes):
    """The inverse of `low_codes`: [..., 256] -> {"qs"}."""
    qs = packing.packed((codes & 15).reshape(*codes.shape[:-1], 4, 64), 4)
    return {"qs": qs.reshape(*qs.shape[:-2], 128)}


def quantize(x):
    """Of each 32 weights scale and minimum by ggml's search; these in 6 bits, of d and dmin; codes by what
    was stored."""
    q, scales = searched(x, 15, -1.0, 20)
    return scales | packed_low(q)


def quantize_weighted(x, importance):
    q, scales = searched_weighted(x, importance, 15)
    return scales | packed_low(q)


def searched(x, levels, first, tries):
    """Codes, uint8 [..., 256], and {"d", "dmin", "scales"} (shared with Q5_K)."""
    x = x.reshape(*x.shape[:-1], 8, 32)
    weights = jnp.sqrt((x * x).mean(axis=-1, keepdims=True)) + jnp.abs(x)
    scale, minimum = scale_and_minimum(x, weights, levels, first, 0.1, tries)
    return _stored(x, quantized_scales(scale, 63), quantized_scales(minimum, 63), levels)


def searched_weighted(x, importance, levels):
    """`searched`, with errors weighted by column, also those of d, dmin and their codes (shared with
    Q5_K)."""
    weights = column_weights(x, importance, 2)
    x, weights = (a.reshape(*a.shape[:-1], 8, 32) for a in (x, weights))
    scale, minimum = scale_and_minimum(x, weights, levels, *TRIALS)
    sums = weights.sum(axis=-1)
    return _stored(x, weighted_scales(scale, sums, 63), weighted_scales(minimum, sums, 63), levels)


def _stored(x, scales, minimums, levels):
    (d, sc), (dmin, m) = scales, minimums
    q = codes_of(x, d, sc, dmin, m, levels).reshape(*d.shape, 256)
    return q, {"d": d, "dmin": dmin, "scales": _packed_six_bits(sc, m)}


def _packed_six_bits(sc, m):
    """The inverse of `_six_bits`."""
    codes = jnp.concatenate([sc, m], axis=-1).reshape(*sc.shape[:-1], 4, 4)
    return packing.pack(codes, SIX_BITS).reshape(*sc.shape[:-1], 12)


def tile(block):
    """Blocks -> {"words": vectors of two groups, "scales": `tile_scales_mins`}, 4.5 bits a weight as in the
    file (pallas_kernels/tiles.py)."""
    codes = low_codes(block).reshape(*block["d"].shape, 256)
    return {"words": tiles.NIBBLES.tiled(codes), "scales": tile_scales_mins(block)}


def untile(tiled, shape):
    codes = tiles.NIBBLES.untiled(tiled["words"], shape, 256)
    return {**untile_scales_mins(tiled["scales"], shape), **packed_low(codes)}


def tile_scales_mins(block):
    """d, dmin, sc and m of blocks [*lead, N, K / 256] -> uint32 [*lead, N / 16, K / 256, 32 lanes, 2]:
    `six_bit_words` of sc with the low byte of the lane's float16, and of m with the high byte. This is d or
    dmin of rows g or g + 8: d[g], dmin[g], d[g + 8], dmin[g + 8] for t = 0, 1, 2, 3.
    """
    d = jnp.stack([tiles.lane_rows(block["d"]), tiles.lane_rows(block["dmin"])], axis=-1)  # [..., 8, 2, 2]
    d = jax.lax.bitcast_convert_type(d, jnp.uint8).reshape(*d.shape[:-3], 32, 2)
    words = [six_bit_words(codes, d[..., i]) for i, codes in enumerate(_six_bits(block["scales"]))]
    return jnp.stack(words, axis=-1)


def untile_scales_mins(tiled, shape):
    """The inverse of `tile_scales_mins`: {"d", "dmin", "scales"}."""
    (sc, low), (m, high) = (from_six_bit_words(tiled[..., i], shape) for i in (0, 1))
    d = jax.lax.bitcast_convert_type(jnp.stack([low, high], axis=-1), jnp.float16)
    d, dmin = (tiles.from_lane_rows(d.reshape(*d.shape[:-1], 8, 2, 2)[..., i], shape) for i in (0, 1))
    return {"d": d, "dmin": dmin, "scales": _packed_six_bits(sc, m)}


def six_bit_words(codes, byte):
    """6 bits of each 32 columns, uint8 [*lead, N, K / 256, 8], and a byte of each lane -> uint32 [*lead, N /
    16, K / 256, 32 lanes] (shared with IQ4_XS):

        bits     31-24   23-18  17-12  11-6   5-0
        a lane   byte    row g + 8     row g           of groups 2 t + 1, 2 t
    """
    codes = tiles.lane_scales(codes.reshape(*codes.shape[:-2], -1), 32)  # [..., 1, 32, 2, 2]
    codes = jnp.concatenate([codes.reshape(*byte.shape, 4), byte[..., None]], axis=-1)
    return packing.pack(codes.swapaxes(-1, -2).astype(jnp.uint32), LANE_WORD)[..., 0, :]


def from_six_bit_words(words, shape):
    """The inverse of `six_bit_words`: (codes, byte)."""
    codes = packing.unpack(words[..., None, :], LANE_WORD).swapaxes(-1, -2).astype(jnp.uint8)
    six = tiles.from_lane_scales(codes[..., :4].reshape(*words.shape[:-1], 1, 32, 2, 2), shape)
    return six.reshape(*six.shape[:-1], -1, 8), codes[..., 4]


def lane_scales(factors, fields, lane):
    """d * sc times the factor of groups 2 t and 2 t + 1, and dmin * m, from a lane's two words (shared with
    Q5_K)."""
    from pallas_kernels.gpu import lanes

    words = fields["scales"]
    own = lanes.bytes_of(words[0], words[1], 0x0073)  # this lane's float16
    d = [lanes.low_half(lanes.from_quad(own, lane, i)) for i in range(4)]
    scale, minimum = [], []
    for r in (0, 1):
        sc, m = ([lanes.small_integer(word, 12 * r + 6 * h, 6) for h in (0, 1)] for word in words)
        scale.append([d[2 * r] * f * v for f, v in zip(factors, sc, strict=True)])
        minimum.append([d[2 * r + 1] * v for v in m])
    return [tiles.Scales(scale, minimum)]


def lane_half_scales(fields):
    """d * sc and -dmin * m in float16, computed as (1024 + sc) d - 1024 d, which is rounded once."""
    from pallas_kernels.gpu import lanes

    words = fields["scales"]
    own = lanes.bytes_of(words[0], words[1], 0x7373)  # this lane's float16, twice
    d = [lanes.from_quad_lane(own, i) for i in range(4)]  # d and dmin of row g, of row g + 8
    less = [
        lanes.half_times(v, lanes.half_twice(sign * 1024)) for v, sign in zip(d, (-1, 1) * 2, strict=True)
    ]
    d = [lanes.half_times(v, lanes.half_twice(-1)) if i % 2 else v for i, v in enumerate(d)]
    out = [[[], []], [[], []]]
    for kind, word in enumerate(words):
        for r in (0, 1):
            for h in (0, 1):
                code = lanes.halves_of_code(word >> 12 * r + 6 * h, 0x3F)
                i = 2 * r + kind
                out[h][r].append(lanes.half_fma(lanes.low_twice(code), d[i], less[i]))
    return out


LANES = tiles.Lanes(
    tiles.NIBBLES,
    signed=False,
    minimums=True,
    scales=functools.partial(lane_scales, (1, 1 / 16)),
    half_scales=lane_half_scales,
)


def vector_codes(load):
    """The low 4 bits (shared with Q5_K)."""
    qs = load("qs")
    return [part for piece in (qs[:64], qs[64:]) for part in (piece & 15, piece >> 4)]


def vector_scales(load):
    """d * sc of the 8 groups (shared with Q5_K)."""
    a, _, c = _sixes(load)
    return load("d").float().splat(8) * (a & 63).then((c & 15) | (a >> 6 << 4)).float(signed=False)


def vector_minimums(load):
    """dmin * m (shared with Q5_K)."""
    _, b, c = _sixes(load)
    return load("dmin").float().splat(8) * (b & 63).then((c >> 4) | (b >> 6 << 4)).float(signed=False)


def _sixes(load):
    scales = load("scales")
    return scales[0:4], scales[4:8], scales[8:12]


CPU_COLUMNS = np.arange(256).reshape(2, 2, 2, 32).swapaxes(1, 2).reshape(4, 64)
CPU = Vectors(CPU_COLUMNS, group=32, codes=vector_codes, scales=vector_scales, minimums=vector_minimums)
