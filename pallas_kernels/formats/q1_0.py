"""Q1_0: 128 weights in 18 bytes, 1.125 bits a weight.   w = d where the bit is 1, -d where it is 0

d f16 | qs 16 bytes: bit j % 8 (least significant first) of byte j / 8 is weight j
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tiles
from pallas_kernels.cpu.vectors import Vectors
from pallas_kernels.encoding import not_negative, sum_in_order

WEIGHTS = 128
LEVELS = 2
BLOCK = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
RANDOM = {"d": 1.0}


def dequantize(block):
    lead = block["d"].shape
    bits = (block["qs"][..., None] >> np.arange(8, dtype=np.uint8)) & 1  # [..., 16, 8]
    d = block["d"].astype(jnp.float32)[..., None]
    return jnp.where(bits.reshape(*lead, 128) == 1, d, -d)


def quantize(x):
    """d = mean |x|, bit = x >= 0 (ggml's quantize_row_q1_0_ref, to the bit)."""
    bits = not_negative(x).reshape(*x.shape[:-1], 16, 8)
    qs = (bits.astype(jnp.uint8) << np.arange(8, dtype=np.uint8)).sum(axis=-1, dtype=jnp.uint8)
    return {"d": (sum_in_order(jnp.abs(x)) / WEIGHTS).astype(jnp.float16), "qs": qs}


# Of a pair of groups (h) words t, and scales.
WORDS, SCALES = tiles.Arrangement({"h": 2, "t": 4}, "gthr"), tiles.Arrangement({"h": 2}, "hgr")


def tile(block):
    """Blocks -> tiles of 16 rows, in which each lane's fragments of the tensor core are contiguous.

    words   uint32 [*lead, N / 16, K / 256, 32 lanes, 4]: for lane 4 g + t and a pair of groups (h = 0, 1)
            word t of rows g and g + 8: one 16-byte load
    scales  uint32 [*lead, N / 16, K / 128, 8]: the float16 scales of rows g and g + 8
    Rows are padded to 16 and groups to 2, with weights whose scale is 0.
    """
    *lead, n, groups = block["d"].shape
    words = jax.lax.bitcast_convert_type(block["qs"].reshape(*lead, n, 4 * groups, 4), jnp.uint32)
    words, scales = WORDS.tiled(words), tiles.bits(SCALES.tiled(block["d"]))
    return {
        "words": words.reshape(*words.shape[:-4], 32, 4),
        "scales": scales.reshape(*scales.shape[:-3], -1, 8),
    }


def untile(tiled, shape):
    groups, scales = shape[1] // WEIGHTS, tiles.halves(tiled["scales"])
    scales = scales.reshape(*scales.shape[:-3], -1, 2, 8, 2)
    words = WORDS.untiled(tiled["words"], (shape[0], 4 * groups), axes=2)
    qs = jax.lax.bitcast_convert_type(words, jnp.uint8)
    return {
        "d": SCALES.untiled(scales, (shape[0], groups), axes=3),
        "qs": qs.reshape(*qs.shape[:-2], groups, 16),
    }


def rows(tiled, ids, columns):
    """Dequantized rows of a tiled matrix, float32 [*ids.shape, columns]. It works on words, because blocks of
    bytes would take a GPU three launches, and a decode step has few."""
    tiles, pairs, _, _ = tiled["words"].shape
    tile, r, g = ids // 16, ids // 8 % 2, ids % 8
    words = tiled["words"].reshape(tiles, pairs, 8, 4, 2, 2)  # g, t, h, r
    words = jnp.moveaxis(words[tile, :, g, :, :, r], -1, -2).reshape(*ids.shape, 2 * pairs, 4, 1)
    d = tiled["scales"][tile, :, g] >> (16 * r)[..., None].astype(jnp.uint32)
    d = jax.lax.bitcast_convert_type(d.astype(jnp.uint16), jnp.float16).astype(jnp.float32)
    bits = (words >> np.arange(32, dtype=np.uint32)) & 1
    x = jnp.where(bits.reshape(*d.shape, 128) == 1, d[..., None], -d[..., None])
    return x.reshape(*ids.shape, -1)[..., :columns]


def _codes(load):
    """Codes: 0 for -1, 2 for 1; a bit of each of 64 bytes. So four bytes are 32 columns in every piece."""
    qs = load("qs")
    return [qs << 1 & 2, *(qs >> bit - 1 & 2 for bit in range(1, 8))]


CPU_COLUMNS = np.arange(512).reshape(64, 8).T
CPU = Vectors(CPU_COLUMNS, group=128, codes=_codes, scales=lambda load: load("d").float(), zero=1, shares=4)
