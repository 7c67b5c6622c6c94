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


KERNELS = "int"
FOURTH = np.array([6, 4, 2], np.uint32)[:, None, None]


def tile(block):
    """4 (q - 32) is a signed byte whose two low bits are free. Three of every four groups are stored as such
    bytes; their free bits hold the fourth group."""
    q = (codes(block) ^ 32) << 2
    words = tiles.lane_words(q.reshape(*q.shape[:-2], -1), 32)  # [..., 8 groups, 32, 4]
    words = words.reshape(*words.shape[:-3], 2, 4, 32, 4)
    three = words[..., :3, :, :] | words[..., 3:, :, :] >> FOURTH & 0x03030303
    d = tiles.bits(tiles.lane_rows(block["d"], 64))
    return {"words": three.reshape(*three.shape[:-4], 6, 32, 4), "d": d}


def untile(tiled, shape):
    three = tiled["words"].reshape(*tiled["words"].shape[:-3], 2, 3, 32, 4)
    fourth = ((three & 0x03030303) << FOURTH).sum(axis=-3, keepdims=True, dtype=jnp.uint32)
    words = jnp.concatenate([three & np.uint32(0xFCFCFCFC), fourth], axis=-3)
    q = tiles.from_lane_words(words.reshape(*words.shape[:-4], 8, 32, 4), shape) >> 2 ^ 32
    q = q.reshape(*q.shape[:-1], -1, 64)
    return {
        "d": tiles.from_lane_rows(tiles.halves(tiled["d"]), shape),
        "ql": packing.packed(q & 15, 4),
        "qh": packing.packed(q >> 4, 2),
    }


def _integers(vectors):
    from pallas_kernels.gpu import lanes

    groups = []
    for three in (vectors[:3], vectors[3:]):
        fourth = []
        for a, b, c in zip(*three, strict=True):
            word = lanes.merged(a << 6, b << 4, 0xC0C0C0C0)
            fourth.append(lanes.merged(word, c << 2, 0xF0F0F0F0))
        groups += [tiles.Integers(words, 0xFC) for words in (*three, fourth)]
    return groups


def _scales(fields, lane):
    from pallas_kernels.gpu import lanes

    d = [value * 0.25 for value in lanes.halves(fields["d"][0])]
    return [tiles.Scales([[value, value] for value in d])]


LANES = tiles.Lanes(group=32, signed=True, minimums=False, units=(4, 4), integers=_integers, scales=_scales)


def _codes(load):
    """The codes of one block, in their order."""
    ql, qh = load("ql"), load("qh")
    high = ((qh << 4).then(qh << 2)).then(qh.then(qh >> 2))
    return [(ql & 15).then(ql >> 4) | high & 48]


CPU = Vectors(NATURAL[:1], group=64, codes=_codes, scales=lambda load: load("d").float(), zero=32)
