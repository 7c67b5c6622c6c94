"""NVFP4: 64 weights in 36 bytes, 4.5 bits a weight.   w = s / 2 * v(q),  v of MXFP4, q in 0..15

d 4 bytes: of each 16 weights the scale s as an eight-bit float without a sign, four bits of exponent (bias 7)
  and three of mantissa: (1 + m / 8) 2^(e - 7), or m 2^-9 where e is 0; 127 is 0
qs 32 bytes: the low nibble of byte 8g + b is weight 16g + b, the high nibble weight 16g + 8 + b

The top bit of a scale is not read, except that 255 is 480. A tensor in this format may have a scale of its
own, in a tensor beside it: with that it is loaded as NVFP4_SCALED.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import packing, tiles
from pallas_kernels.cpu.vectors import Vectors
from pallas_kernels.encoding import divided
from pallas_kernels.formats.mxfp4 import VALUES, Signs, nearest, vector_codes

WEIGHTS = 64
BLOCK = np.dtype([("d", "u1", 4), ("qs", "u1", 32)])
SCALED = "nvfp4_scaled"  # these blocks with a float that a tensor's scale multiplies
_E, _M = np.divmod(np.arange(256) & 127, 8)
SCALES = (
    np.where(_E == 0, _M * 2.0**-9, (1 + _M / 8) * 2.0 ** (_E - 7)).astype(np.float32) / 2
)  # s / 2 of byte d
SCALES[127] = 0


def dequantize(block):
    lead = block["d"].shape[:-1]
    d = jnp.asarray(SCALES)[block["d"]]
    v = jnp.asarray(np.concatenate([VALUES, -VALUES.astype(int)]), jnp.float32)
    return (d[..., None] * v[_codes(block)]).reshape(*lead, 64)


def quantize(x):
    """The scale of each 16 weights brings the number furthest from 0 to the greatest value; it is the nearest
    that there is (ggml's quantize_row_nvfp4_ref)."""
    x = x.reshape(*x.shape[:-1], 4, 16)
    scale = divided(jnp.abs(x).max(axis=-1), 12)
    d = jnp.abs(scale[..., None] - jnp.asarray(SCALES[:127])).argmin(axis=-1).astype(jnp.uint8)
    q = nearest(x, jnp.asarray(SCALES)[d][..., None])
    return {"d": d, "qs": packing.packed(q, 4).reshape(*d.shape[:-1], 32)}


def _codes(block):
    """uint8 [..., 4, 16]."""
    return packing.codes(block["qs"].reshape(*block["d"].shape, 8), 4)


def _random_d(key, shape, scale):
    """The scale nearest to scale / 5.852, the root mean square of v, and its neighbours."""
    target = scale[..., None] / 5.852
    nearest = jnp.abs(jnp.asarray(SCALES[:127]) - target[..., None]).argmin(axis=-1)
    near = nearest + jax.random.randint(key, shape, -1, 2)
    return jnp.clip(near, 0, 126).astype(jnp.uint8)


RANDOM = {"d": _random_d}
WORDS = Signs(16, "00000000")


def tile(block):
    """Blocks -> {"words": MXFP4's, "scales": uint32 [*lead, N / 16, K / 256, 32, 2]: `byte_words` of d}, 4.5
    bits a weight as in the file. Of bytes with the same scale one is stored; 127 stands for 255."""
    d = block["d"]
    d = jnp.where(d == 127, 0, d & 127)
    codes = _codes(block).reshape(*d.shape[:-1], 64)
    return {"words": WORDS.tiled(codes), "scales": tiles.byte_words(_padded(d))}


def _padded(d):
    """d of whole tiles: [..., K / 64, 4] -> [..., K / 256, 16]."""
    *lead, blocks, _ = d.shape
    d = jnp.pad(d, [(0, 0)] * len(lead) + [(0, -blocks % 4), (0, 0)])
    return d.reshape(*lead, -1, 16)


def untile(tiled, shape):
    d = tiles.from_byte_words(tiled["scales"], (shape[0], -(-shape[1] // 256) * 256))
    d = d.reshape(*d.shape[:-2], -1, 4)[..., : shape[1] // 64, :]
    codes = WORDS.untiled(tiled["words"], shape, WEIGHTS)
    qs = packing.packed(codes.reshape(*d.shape, 16), 4)
    return {"d": jnp.where(d == 127, 255, d).astype(jnp.uint8), "qs": qs.reshape(*d.shape[:-1], 32)}


def lane_scales(fields, lane):
    """A byte moved up by 7 bits is s 2^-8 in float16, also without a leading 1."""
    from pallas_kernels.gpu import lanes

    eights = []
    for word in fields["scales"]:
        rows = (word << 7 & 0x3F80 | word << 15 & 0x3F800000, word >> 9 & 0x3F80 | word >> 1 & 0x3F800000)
        eights.append(tiles.Scales([[v * 128.0 for v in lanes.halves(row)] for row in rows]))
    return eights


LANES = tiles.Lanes(WORDS, signed=True, minimums=False, scales=lane_scales)


def vector_scales(load):
    from pallas_kernels.cpu.values import F16

    d = load("d")
    d = d.compared("!=", 127).select(d, 0) & 127
    half = d.words() << 7
    return half.as_type(half.shaped(F16)).float() * 128.0


CPU = Vectors(
    np.arange(128).reshape(8, 2, 8).swapaxes(0, 1).reshape(2, 64),
    group=16,
    codes=vector_codes,
    scales=vector_scales,
    zero=12,
)
