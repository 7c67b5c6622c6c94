"""Q8_0: 32 weights in 34 bytes, 8.5 bits a weight.   w = d * q,  q in -128..127

d f16 | qs 32 signed bytes
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tiles
from pallas_kernels.cpu.vectors import NATURAL, Vectors

WEIGHTS = 32
BLOCK = np.dtype([("d", "<f2"), ("qs", "i1", 32)])
RANDOM = {"d": 1 / 73.9}  # q uniform on -128..127 has mean -0.5, standard deviation 73.9


def dequantize(block):
    d = block["d"].astype(jnp.float32)[..., None]
    return d * block["qs"].astype(jnp.float32)


def quantize(x):
    # As ggml does it: q from the float32 d, halves away from zero; only then is d rounded.
    d = jnp.abs(x).max(axis=-1, keepdims=True) / 127
    inverse = jnp.where(d == 0, 0, 1 / d)
    q = jax.lax.round(x * inverse, jax.lax.RoundingMethod.AWAY_FROM_ZERO)
    return {"d": d[..., 0].astype(jnp.float16), "qs": q.astype(jnp.int8)}


KERNELS = "int"


def tile(block):
    """Blocks -> {"words": uint32 [*lead, N / 16, K / 256, 8, 32, 4], "scales": uint32 [*lead, N / 16, K /
    256, 32, 2]}: a 16-byte vector per group, and the float16 scales of the lane's rows and groups
    (pallas_kernels/tiles.py).
    """
    codes = jax.lax.bitcast_convert_type(block["qs"], jnp.uint8)
    words = tiles.lane_words(codes.reshape(*codes.shape[:-2], -1), 32)
    return {"words": words, "scales": tiles.scale_words(block["d"])}


def untile(tiled, shape):
    """The inverse of `tile` for matrices of this shape, (N, K)."""
    qs = jax.lax.bitcast_convert_type(tiles.from_lane_words(tiled["words"], shape), jnp.int8)
    d = tiles.from_scale_words(tiled["scales"], shape)
    return {"d": d, "qs": qs.reshape(*qs.shape[:-1], -1, 32)}


def lane_scales(fields, lane):
    from pallas_kernels.gpu import lanes

    return [tiles.Scales([lanes.halves(word) for word in fields["scales"]])]


def _integers(vectors):
    return [tiles.Integers(vector) for vector in vectors]


LANES = tiles.Lanes(group=32, signed=True, minimums=False, integers=_integers, scales=lane_scales)


def _bytes(load):
    qs = load("qs") ^ 128
    return [qs[:64], qs[64:]]


CPU = Vectors(NATURAL[:2], group=32, codes=_bytes, scales=lambda load: load("d").float(), zero=128)
