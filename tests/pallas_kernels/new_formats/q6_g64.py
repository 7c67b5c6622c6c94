"""Q6 of 64: 64 weights in 50 bytes, 6.25 bits a weight.   w = d * (q - 32),  q in 0..63

d f16
ql 32 bytes: bits 0-3; the low nibble of byte j is weight j, the high nibble weight j + 32
qh 16 bytes: bits 2i and 2i + 1 of byte j are bits 4-5 of weight 16i + j
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import packing, tiles
from pallas_kernels.cpu.vectors import NATURAL, Vectors

WEIGHTS = 64
BLOCK = np.dtype([("d", "<f2"), ("ql", "u1", 32), ("qh", "u1", 16)])
# q - 32 has mean -0.5 and root mean square 18.5; d has either sign, so that weights have mean 0.
RANDOM = {"d": (-1 / 18.5, 1 / 18.5)}


def codes(block):
    """uint8 [..., 64]."""
    return packing.codes(block["ql"], 4) | packing.codes(block["qh"], 2) << 4


def dequantize(block):
    d = block["d"].astype(jnp.float32)[..., None]
    return d * (codes(block).astype(jnp.float32) - 32)


# 4 (q - 32) is a signed byte whose two low bits are free: in three of these they have the fourth group.
WORDS = tiles.Words(32, "00000033 11111133 22222233", units=(4, 4))


def tile(block):
    d = tiles.bits(tiles.lane_rows(block["d"], 64))
    return {"words": WORDS.tiled(codes(block) ^ 32), "d": d}


def untile(tiled, shape):
    q = WORDS.untiled(tiled["words"], shape, WEIGHTS) ^ 32
    return {
        "d": tiles.from_lane_rows(tiles.halves(tiled["d"]), shape),
        "ql": packing.packed(q & 15, 4),
        "qh": packing.packed(q >> 4, 2),
    }


def _scales(fields, lane):
    from pallas_kernels.gpu import lanes

    d = [value * 0.25 for value in lanes.halves(fields["d"][0])]
    return [tiles.Scales([[value, value] for value in d])]


LANES = tiles.Lanes(WORDS, signed=True, minimums=False, scales=_scales)


def _codes(load):
    """The codes of one block, in their order."""
    ql, qh = load("ql"), load("qh")
    high = ((qh << 4).then(qh << 2)).then(qh.then(qh >> 2))
    return [(ql & 15).then(ql >> 4) | high & 48]


CPU = Vectors(NATURAL[:1], group=64, codes=_codes, scales=lambda load: load("d").float(), zero=32)
