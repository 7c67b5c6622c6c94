"""IQ4_XS: 256 weights in 136 bytes, 4.25 bits a weight.   w = d * (sc - 32) * VALUES[q],  q in 0..15

VALUES of IQ4_NL, sc in 0..63, laid out as

    d f16
    scales_h u16: bits 2g and 2g + 1 are bits 5-4 of the sc of weights 32g .. 32g+31
    scales_l 4 bytes: the low nibble of byte i is bits 3-0 of sc[2i], the high nibble of sc[2i+1]
    qs 128 bytes: the low nibble of byte 16g + b is weight 32g + b, the high nibble weight 32g + 16 + b
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import packing, tiles
from pallas_kernels.cpu.vectors import NIBBLES, Vectors
from pallas_kernels.encoding import column_weights, inverse, quantized_signed_scales, signed_scale
from pallas_kernels.formats.iq4_nl import TRIED, VALUES, WORDS, near, nearest, vector_codes
from pallas_kernels.formats.q4_k import from_six_bit_words, six_bit_words

WEIGHTS = 256
BLOCK = np.dtype([("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 128)])
RANDOM = {"d": 1 / 1246}  # mean squares: 341.5 of sc - 32, 4548 of the values; the product is 1246^2


def dequantize(block):
    lead = block["d"].shape
    scale = block["d"].astype(jnp.float32)[..., None] * (_scale_codes(block).astype(jnp.float32) - 32)
    return (scale[..., None] * jnp.asarray(VALUES, jnp.float32)[_codes(block)]).reshape(*lead, 256)


def _scale_codes(block):
    """sc, uint8 [..., 8]."""
    low = jnp.stack([block["scales_l"] & 15, block["scales_l"] >> 4], axis=-1)
    high = block["scales_h"][..., None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    return low.reshape(high.shape) | high.astype(jnp.uint8) << 4


def _codes(block):
    """uint8 [..., 8, 32]."""
    return packing.codes(block["qs"].reshape(*block["d"].shape, 8, 16), 4)


def quantize(x):
    """Of each 32 weights d by IQ4_NL's search; these in 6 bits, of the block's d; codes of the nearest
    values, by the d that is stored. (ggml takes the d before it is rounded.)"""
    x = x.reshape(*x.shape[:-1], 8, 32)
    return _stored(x, x * x)


def quantize_weighted(x, importance):
    """`quantize`, with squares weighted by column."""
    weights = column_weights(x, importance, 2)
    return _stored(*(a.reshape(*a.shape[:-1], 8, 32) for a in (x, weights)))


def _stored(x, weights):
    d, sc = quantized_signed_scales(signed_scale(x, near, TRIED, weights), -32, 31)
    scale = d.astype(jnp.float32)[..., None] * sc
    qs = packing.packed(nearest(x * inverse(scale)[..., None]), 4)
    low, high = _packed_scales((sc + 32).astype(jnp.uint8))
    return {"d": d, "scales_h": high, "scales_l": low, "qs": qs.reshape(*d.shape, 128)}


def _packed_scales(sc):
    """The inverse of `_scale_codes`: scales_l and scales_h."""
    low = (sc & 15).reshape(*sc.shape[:-1], 4, 2)
    high = (sc >> 4).astype(jnp.uint16) << np.arange(0, 16, 2, dtype=np.uint16)
    return low[..., 0] | low[..., 1] << 4, high.sum(axis=-1, dtype=jnp.uint16)


def tile(block):
    """Blocks -> {"words": IQ4_NL's, "scales": uint32 [*lead, N / 16, K / 256, 32]}, 4.25 bits a weight as in
    the file: `six_bit_words` of sc, lane 4 g + t with byte t of d of rows g, g + 8."""
    codes = _codes(block).reshape(*block["d"].shape, 256)
    d = jax.lax.bitcast_convert_type(tiles.lane_rows(block["d"]), jnp.uint8)  # [..., 8, 2, 2]
    scales = six_bit_words(_scale_codes(block), d.reshape(*d.shape[:-3], 32))
    return {"words": WORDS.tiled(codes), "scales": scales}


def untile(tiled, shape):
    codes = WORDS.untiled(tiled["words"], shape, 256)
    qs = packing.packed(codes.reshape(*codes.shape[:-1], 8, 32), 4)
    sc, d = from_six_bit_words(tiled["scales"], shape)
    low, high = _packed_scales(sc)
    d = jax.lax.bitcast_convert_type(d.reshape(*d.shape[:-1], 8, 2, 2), jnp.float16)
    return {
        "d": tiles.from_lane_rows(d, shape),
        "scales_h": high,
        "scales_l": low,
        "qs": qs.reshape(*qs.shape[:-2], 128),
    }


def _scales(fields, lane):
    from pallas_kernels.gpu import lanes

    (word,) = fields["scales"]
    first, second, third, fourth = (lanes.from_quad_lane(word, i) for i in range(4))
    both = lanes.bytes_of(lanes.bytes_of(first, second, 0x73), lanes.bytes_of(third, fourth, 0x73), 0x5410)
    scale = [
        [d * lanes.small_integer(word, 12 * r + 6 * h, 6, less=32) for h in (0, 1)]
        for r, d in enumerate(lanes.halves(both))
    ]
    return [tiles.Scales(scale)]


LANES = tiles.Lanes(WORDS, signed=True, minimums=False, scales=_scales)


def _vector_scales(load):
    low, high = load("scales_l"), load("scales_h")
    low = (low & 15).then(low >> 4).take([0, 4, 1, 5, 2, 6, 3, 7])
    high = ((high.splat(8) >> np.arange(0, 16, 2)) & 3).low_bytes()
    return load("d").float().splat(8) * ((low | (high << 4)).float(signed=False) - 32.0)


CPU = Vectors(
    np.concatenate([NIBBLES, NIBBLES + 128]), group=32, codes=vector_codes, scales=_vector_scales, zero=128
)
