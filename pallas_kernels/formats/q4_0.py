"""Q4_0: 32 weights in 18 bytes, 4.5 bits a weight.   w = d * (q - 8),  q in 0..15

d f16 | qs 16 bytes: the low nibble of byte j is weight j, the high nibble weight j + 16
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import packing, tiles
from pallas_kernels.cpu.vectors import NIBBLES, Vectors

WEIGHTS = 32
BLOCK = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
# q - 8 has mean -0.5 and root mean square 4.64; d has either sign, as in files, so that weights have mean 0
RANDOM = {"d": (-1 / 4.64, 1 / 4.64)}


def dequantize(block):
    q = packing.codes(block["qs"], 4)
    d = block["d"].astype(jnp.float32)[..., None]
    return d * (q.astype(jnp.float32) - 8)


KERNELS = "int"


def tile(block):
    """Blocks -> {"words": uint32 [*lead, N / 16, K / 256, 4, 32, 4], "scales": uint32 [*lead, N / 16, K /
    256, 32, 2]}: words as in Q4_K, and the float16 scales of the lane's rows and groups
    (pallas_kernels/tiles.py)."""
    return {"words": tile_nibbles(block["qs"]), "scales": tiles.scale_words(block["d"])}


def untile(tiled, shape):
    """The inverse of `tile` for matrices of this shape, (N, K)."""
    d = tiles.from_scale_words(tiled["scales"], shape)
    return {"d": d, "qs": untile_nibbles(tiled["words"], shape)}


def _scales(fields, lane):
    """8 is subtracted from every q: the minimum is 8 d."""
    from pallas_kernels.gpu import lanes

    d = [lanes.halves(word) for word in fields["scales"]]
    scale = [[first, second * (1 / 16)] for first, second in d]
    return [tiles.Scales(scale, [[v * 8.0 for v in row] for row in d])]


LANES = tiles.Lanes(
    group=32, signed=False, minimums=True, units=(1, 16), integers=tiles.nibble_integers, scales=_scales
)


def tile_nibbles(qs):
    """uint8 [*lead, N, K / 32, 16] -> words (shared with Q4_1)."""
    codes = packing.codes(qs, 4)
    return tiles.nibble_words(codes.reshape(*codes.shape[:-2], -1))


def untile_nibbles(words, shape):
    """The inverse of `tile_nibbles`."""
    codes = tiles.from_nibble_words(words, shape)
    return packing.packed(codes.reshape(*codes.shape[:-1], -1, 32), 4)


def nibbles(load):
    """The codes of four blocks (shared with Q4_1)."""
    qs = load("qs")
    return [qs & 15, qs >> 4]


CPU = Vectors(NIBBLES, group=32, codes=nibbles, scales=lambda load: load("d").float(), zero=8)
