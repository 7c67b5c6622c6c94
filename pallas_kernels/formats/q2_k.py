"""Q2_K: 256 weights in 84 bytes, 2.625 bits a weight.   w = d * sc * q - dmin * m

q in 0..3, sc and m in 0..15, laid out as

    scales 16 bytes: the low nibble of byte g is sc, the high nibble m of weights 16g .. 16g+15
    qs 64 bytes: bits 2t of byte 32h + b are weight 128h + 32t + b
    d f16 | dmin f16
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import packing, tiles
from pallas_kernels.cpu.vectors import QUARTERS, Vectors
from pallas_kernels.formats.q2_0_g128 import two_bits

WEIGHTS = 256
BLOCK = np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")])
# sc and m: mean 7.5, mean square 77.5, variance 21.25; q: 1.5, 3.5. Mean 0 takes dmin = 1.5 d, and then
# variance / d^2 = 77.5 * 3.5 - (7.5 * 1.5)^2 + 1.5^2 * 21.25 = 13.87^2
RANDOM = {"d": 1 / 13.87, "dmin": 1.5 / 13.87}


def dequantize(block):
    q = _codes(block).astype(jnp.float32)
    scale = block["d"].astype(jnp.float32)[..., None] * (block["scales"] & 15).astype(jnp.float32)
    minimum = block["dmin"].astype(jnp.float32)[..., None] * (block["scales"] >> 4).astype(jnp.float32)
    return (scale[..., None] * q - minimum[..., None]).reshape(*block["d"].shape, 256)


def _codes(block):
    """uint8 [..., 16, 16]."""
    lead = block["d"].shape
    return packing.codes(block["qs"].reshape(*lead, 2, 32), 2).reshape(*lead, 16, 16)


KERNELS = "int"
BYTE = np.arange(0, 32, 8, dtype=np.uint32).reshape(2, 2)  # of a word, by row and group


def tile(block):
    """Blocks -> {"words": uint32 [*lead, N / 16, K / 256, 2, 32, 4], "scales": uint32 [..., 32, 2], "d":
    uint32 [..., 8, 2], d and dmin} (pallas_kernels/tiles.py), 2.625 bits a weight as in the file.

    Bits 2 i and 2 i + 1 of a word's bytes belong to group i of four. Vector v has rows g and g + 8 of groups
    4 v .., then those of groups 8 + 4 v .. Each lane has a word of scales for its two of eight groups: a byte
    for each group and each of rows g and g + 8, with sc in the low and m in the high nibble.
    """
    words = tiles.lane_words(_codes(block).reshape(*block["d"].shape[:-1], -1), 16)  # [..., 16, 32, 2]
    words = words.reshape(*words.shape[:-3], 2, 2, 4, 32, 2)  # eights, fours
    words = (words << np.arange(0, 8, 2, dtype=np.uint32)[:, None, None]).sum(axis=-3, dtype=jnp.uint32)
    words = jnp.moveaxis(words, -4, -2)  # [..., 2 fours, 32, 2 eights, 2 rows]
    scales = block["scales"].reshape(*block["scales"].shape[:-2], -1).astype(jnp.uint32)
    scales = (tiles.lane_scales(scales, 16) << BYTE).sum(axis=(-2, -1), dtype=jnp.uint32)  # [..., 2, 32]
    return {
        "words": words.reshape(*words.shape[:-2], 4),
        "scales": jnp.moveaxis(scales, -2, -1),
        "d": jnp.stack([tiles.bits(tiles.lane_rows(block[name])) for name in ("d", "dmin")], axis=-1),
    }


def untile(tiled, shape):
    """The inverse of `tile` for matrices of this shape, (N, K)."""
    words = tiled["words"].reshape(*tiled["words"].shape[:-1], 2, 2)
    words = jnp.moveaxis(words, -2, -4)[..., None, :, :]
    words = words >> np.arange(0, 8, 2, dtype=np.uint32)[:, None, None] & 0x03030303
    q = tiles.from_lane_words(words.reshape(*words.shape[:-5], 16, 32, 2), shape)
    scales = jnp.moveaxis(tiled["scales"], -1, -2)[..., None, None] >> BYTE
    scales = tiles.from_lane_scales(scales.astype(jnp.uint8), shape)
    d, dmin = (tiles.from_lane_rows(tiles.halves(tiled["d"][..., i]), shape) for i in (0, 1))
    return {
        "scales": scales.reshape(*scales.shape[:-1], -1, 16),
        "qs": packing.packed(q.reshape(*d.shape, 2, 128), 2).reshape(*d.shape, 64),
        "d": d,
        "dmin": dmin,
    }


def _integers(vectors):
    """The code in even groups, 4 times the code in odd groups."""
    out = []
    for rows in (slice(0, 2), slice(2, 4)):
        for words in (vector[rows] for vector in vectors):
            for part in (words, [word >> 4 for word in words]):
                out += [tiles.Integers(part, 0x03), tiles.Integers(part, 0x0C)]
    return out


def _scales(fields, lane):
    """Scales are d / 4, times 4 sc in even groups and sc in odd groups."""
    from pallas_kernels.gpu import lanes

    d, dmin = map(lanes.halves, fields["d"])
    eights = []
    for word in fields["scales"]:
        scale = word & 0x0F000F00 | (word & 0x000F000F) << 2
        eights.append([scale, word >> 4 & 0x0F0F0F0F])
    return tiles.WholeScales([[v * (1 / 4) for v in d], dmin], eights)


LANES = tiles.Lanes(
    group=16,
    signed=False,
    minimums=True,
    units=(1, 4),
    integers=_integers,
    scales=_scales,
    whole_scales=True,
)

CPU = Vectors(
    QUARTERS,
    group=16,
    codes=two_bits,
    scales=lambda load: load("d").float().splat(16) * (load("scales") & 15).float(signed=False),
    minimums=lambda load: load("dmin").float().splat(16) * (load("scales") >> 4).float(signed=False),
)
