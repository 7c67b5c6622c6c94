"""Q5_1: 32 weights in 24 bytes, 6 bits a weight.   w = d * q + m,  q in 0..31

d f16 | m f16 | qh u32: bit j is bit 4 of weight j
              | qs 16 bytes: bits 0-3; the low nibble of byte j is weight j, the high nibble weight j + 16
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import tiles
from pallas_kernels.cpu.vectors import NIBBLES, Vectors
from pallas_kernels.formats.q4_1 import tile_scales, untile_scales
from pallas_kernels.formats.q5_0 import codes, packed, vector_codes
from pallas_kernels.formats.q5_k import five_bit_integers, five_bit_words, from_five_bit_words

WEIGHTS = 32
BLOCK = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "<u4"), ("qs", "u1", 16)])
RANDOM = {"d": 1 / 9.23, "m": -15.5 / 9.23}  # q uniform on 0..31 has mean 15.5, standard deviation 9.23


def dequantize(block):
    d = block["d"].astype(jnp.float32)[..., None]
    m = block["m"].astype(jnp.float32)[..., None]
    return d * codes(block).astype(jnp.float32) + m


KERNELS = "int"


def tile(block):
    """Blocks -> {"words": uint32 [*lead, N / 16, K / 256, 5, 32, 4], "scales": uint32 [*lead, N / 16, K /
    256, 32, 4]}: Q5_K's words, and Q4_1's scales."""
    q = codes(block)
    return {"words": five_bit_words(q.reshape(*q.shape[:-2], -1)), "scales": tile_scales(block)}


def untile(tiled, shape):
    """The inverse of `tile` for matrices of this shape, (N, K)."""
    q = from_five_bit_words(tiled["words"], shape)
    return {**untile_scales(tiled["scales"], shape), **packed(q.reshape(*q.shape[:-1], -1, 32))}


def _scales(fields, lane):
    from pallas_kernels.gpu import lanes

    d, m = ([lanes.halves(word) for word in fields["scales"][first : first + 2]] for first in (0, 2))
    scale = [[v * (1 / 8) for v in row] for row in d]
    return [tiles.Scales(scale, [[-v for v in row] for row in m])]


LANES = tiles.Lanes(
    group=32, signed=False, minimums=True, units=(8, 8), integers=five_bit_integers, scales=_scales
)
CPU = Vectors(
    NIBBLES,
    group=32,
    codes=vector_codes,
    scales=lambda load: load("d").float(),
    minimums=lambda load: -load("m").float(),
)
