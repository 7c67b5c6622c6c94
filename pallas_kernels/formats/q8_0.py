"""Q8_0: 32 weights in 34 bytes, 8.5 bits a weight.   w = d * q,  q in -128..127

d f16 | qs 32 signed bytes
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tiles
from pallas_kernels.cpu.vectors import NATURAL, Vectors
from pallas_kernels.encoding import divided, inverse, round_half_away

WEIGHTS = 32
BLOCK = np.dtype([("d", "<f2"), ("qs", "i1", 32)])
RANDOM = {"d": 1 / 73.9}  # q uniform on -128..127 has mean -0.5, standard deviation 73.9


def dequantize(block):
    d = block["d"].astype(jnp.float32)[..., None]
    return d * block["qs"].astype(jnp.float32)


def quantize(x):
    # As ggml does it: q from the float32 d, halves away from zero; only then is d rounded.
    d = divided(jnp.abs(x).max(axis=-1, keepdims=True), 127)
    q = round_half_away(x * inverse(d))
    return {"d": d[..., 0].astype(jnp.float16), "qs": q.astype(jnp.int8)}


def tile(block):
    """Blocks -> {"words": a vector per group, "scales": the lane's float16} (pallas_kernels/tiles.py)."""
    codes = jax.lax.bitcast_convert_type(block["qs"], jnp.uint8)
    return {"words": tiles.BYTES.tiled(codes), "scales": tiles.scale_words(block["d"])}


def untile(tiled, shape):
    qs = jax.lax.bitcast_convert_type(tiles.BYTES.untiled(tiled["words"], shape, WEIGHTS), jnp.int8)
    (d,) = tiles.from_scale_words(tiled["scales"], shape)
    return {"d": d, "qs": qs}


def lane_scales(fields, lane, units=(1, 1), zero=0.0):
    """d of the lane's groups, whose bytes are `units` times q, and the minimum: -m, or zero d if there is no
    m (shared with IQ4_NL and with Q4 and Q5 of groups of 32)."""
    from pallas_kernels.gpu import lanes

    d, *m = itertools.batched(map(lanes.halves, fields["scales"]), 2)
    scale = [[v if unit == 1 else v * (1 / unit) for v, unit in zip(row, units, strict=True)] for row in d]
    minimum = [[v * zero for v in row] for row in d] if zero else None
    return [tiles.Scales(scale, [[-v for v in row] for row in m[0]] if m else minimum)]


LANES = tiles.Lanes(tiles.BYTES, signed=True, minimums=False, scales=lane_scales)


def _bytes(load):
    qs = load("qs") ^ 128
    return [qs[:64], qs[64:]]


CPU = Vectors(NATURAL[:2], group=32, codes=_bytes, scales=lambda load: load("d").float(), zero=128)
