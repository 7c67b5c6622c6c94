"""Q4_1: 32 weights in 20 bytes, 5 bits a weight.   w = d * q + m,  q in 0..15

d f16 | m f16 | qs 16 bytes: the low nibble of byte j is weight j, the high nibble weight j + 16
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import packing, tiles
from pallas_kernels.cpu.vectors import NIBBLES, Vectors
from pallas_kernels.formats.q4_0 import nibbles, tile_nibbles, untile_nibbles

WEIGHTS = 32
BLOCK = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])
RANDOM = {"d": 1 / 4.61, "m": -7.5 / 4.61}  # q uniform on 0..15 has mean 7.5, standard deviation 4.61


def dequantize(block):
    q = packing.codes(block["qs"], 4)
    d = block["d"].astype(jnp.float32)[..., None]
    m = block["m"].astype(jnp.float32)[..., None]
    return d * q.astype(jnp.float32) + m


KERNELS = "int"


def tile(block):
    """Blocks -> {"words": uint32 [*lead, N / 16, K / 256, 4, 32, 4], "scales": uint32 [*lead, N / 16, K /
    256, 32, 4]}: words as in Q4_K, and for the lane's rows and groups two words of d, then two of m
    (pallas_kernels/tiles.py)."""
    return {"words": tile_nibbles(block["qs"]), "scales": tile_scales(block)}


def untile(tiled, shape):
    """The inverse of `tile` for matrices of this shape, (N, K)."""
    return {**untile_scales(tiled["scales"], shape), "qs": untile_nibbles(tiled["words"], shape)}


def tile_scales(block):
    """d, then m, of the lane's rows and groups (shared with Q5_1)."""
    return jnp.concatenate([tiles.scale_words(block[name]) for name in ("d", "m")], axis=-1)


def untile_scales(tiled, shape):
    """The inverse of `tile_scales`: {"d", "m"}."""
    d, m = (tiles.from_scale_words(part, shape) for part in jnp.split(tiled, 2, axis=-1))
    return {"d": d, "m": m}


def _scales(fields, lane):
    from pallas_kernels.gpu import lanes

    d, m = ([lanes.halves(word) for word in fields["scales"][first : first + 2]] for first in (0, 2))
    scale = [[first, second * (1 / 16)] for first, second in d]
    return [tiles.Scales(scale, [[-v for v in row] for row in m])]


LANES = tiles.Lanes(
    group=32, signed=False, minimums=True, units=(1, 16), integers=tiles.nibble_integers, scales=_scales
)
CPU = Vectors(
    NIBBLES,
    group=32,
    codes=nibbles,
    scales=lambda load: load("d").float(),
    minimums=lambda load: -load("m").float(),
)
