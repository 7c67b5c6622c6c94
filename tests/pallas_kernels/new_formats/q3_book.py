"""Q3_BOOK: 16 weights in 12 bytes, 6 bits a weight.   w = d * BOOK[q] - m,  q in 0..7

d f16 | m f16 | qs 8 bytes: the low nibble of byte j is weight j, the high nibble weight j + 8
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tiles

WEIGHTS = 16
BLOCK = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 8)])
BOOK = np.array([-127, -83, -49, -22, 1, 25, 53, 113], np.int8)
# BOOK has root mean square 72.5; (72.5 / 84)^2 + 0.5^2 = 1. Signs are random, so that weights have mean 0.
RANDOM = {
    "d": (-1 / 84, 1 / 84),
    "m": (-0.5, 0.5),
    "qs": lambda key, shape, _: jax.random.bits(key, shape, jnp.uint8) & 0x77,
}


def codes(qs):
    return jnp.concatenate([qs & 15, qs >> 4], axis=-1)


def dequantize(block):
    d, m = (block[name].astype(jnp.float32)[..., None] for name in ("d", "m"))
    return d * jnp.asarray(BOOK)[codes(block["qs"])].astype(jnp.float32) - m


@dataclasses.dataclass(frozen=True)
class Selectors(tiles.Words):
    """A word is what prmt wants: its low half has the four codes of an even group, its high half of an odd
    one."""

    def tiled(self, codes):
        words = super().tiled(codes)  # [..., 8 pairs of groups, 32, 4]
        words = words | words >> 4
        words = words & 0xFF | words >> 8 & 0xFF00
        words = words[..., :2] | words[..., 2:] << 16  # [..., 8, 32, 2]
        words = words.reshape(*words.shape[:-3], 4, 2, 32, 2).swapaxes(-3, -2)
        return words.reshape(*words.shape[:-2], 4)

    def untiled(self, words, shape, weights):
        words = words.reshape(*words.shape[:-1], 2, 2).swapaxes(-3, -2).reshape(*words.shape[:-3], 8, 32, 2)
        words = jnp.concatenate([words & 0xFFFF, words >> 16], axis=-1)
        words = words & 0xFF | (words & 0xFF00) << 8
        return super().untiled((words | words << 4) & 0x0F0F0F0F, shape, weights)

    def integers(self, vectors):
        from pallas_kernels.gpu import lanes
        from pallas_kernels.gpu.values import integer

        low, high = (integer(int(word)) for word in BOOK.view("<u4"))
        out = []
        for vector in vectors:
            for pair in (vector[:2], vector[2:]):
                for right in (0, 16):
                    selectors = [word >> right for word in pair]
                    out.append(tiles.Integers([lanes.chosen_bytes(low, high, s) for s in selectors]))
        return out


WORDS = Selectors(16, "00000000")


def tile(block):
    d, m = (tiles.bits(tiles.lane_scales(block[name], 16)) for name in ("d", "m"))  # [..., 2, 32, 2]
    scales = jnp.concatenate([d, m], axis=-1)
    return {"words": WORDS.tiled(codes(block["qs"])), "scales": scales}


def untile(tiled, shape):
    q = WORDS.untiled(tiled["words"], shape, WEIGHTS)
    q = q.reshape(*q.shape[:-1], 2, 8)
    d, m = (
        tiles.from_lane_scales(tiles.halves(part), shape) for part in jnp.split(tiled["scales"], 2, axis=-1)
    )
    return {"d": d, "m": m, "qs": q[..., 0, :] | q[..., 1, :] << 4}


def scales(fields, lane):
    from pallas_kernels.gpu import lanes

    out = []
    for *d, m0, m1 in fields["scales"]:
        minimum = [lanes.halves(word) for word in (m0, m1)]
        out.append(tiles.Scales([lanes.halves(word) for word in d], minimum))
    return out


LANES = tiles.Lanes(WORDS, signed=True, minimums=True, scales=scales)
