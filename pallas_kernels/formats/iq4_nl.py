"""IQ4_NL: 32 weights in 18 bytes, 4.5 bits a weight.   w = d * VALUES[q],  q in 0..15

d f16 | qs 16 bytes: the low nibble of byte j is weight j, the high nibble weight j + 16
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels import packing, tiles
from pallas_kernels.cpu.vectors import NIBBLES, Vectors
from pallas_kernels.encoding import column_weights, inverse, signed_scale
from pallas_kernels.formats.q8_0 import lane_scales

WEIGHTS = 32
BLOCK = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
# The values have mean -5.9 and root mean square 67.4; d has either sign, so that weights have mean 0.
RANDOM = {"d": (-1 / 67.4, 1 / 67.4)}


def dequantize(block):
    q = packing.codes(block["qs"], 4)
    d = block["d"].astype(jnp.float32)[..., None]
    return d * jnp.asarray(VALUES, jnp.float32)[q]


def quantize(x):
    """d by ggml's search; codes of the nearest values."""
    return _stored(x, x * x)


def quantize_weighted(x, importance):
    """`quantize`, with squares weighted by column."""
    return _stored(x, column_weights(x, importance, 2))


def _stored(x, weights):
    d = signed_scale(x, near, TRIED, weights)
    return {"d": d.astype(jnp.float16), "qs": packing.packed(nearest(x * inverse(d)[..., None]), 4)}


# Inverse scales to try, times the number furthest from 0 (shared with IQ4_XS).
TRIED = [127, *range(-134, -119)]


def nearest(x):
    """uint8 [..., n]: codes of the nearest values, of two as near the greater one (shared with IQ4_XS)."""
    between = (VALUES[:-1].astype(np.float32) + VALUES[1:]) / 2
    return (x[..., None] >= between).sum(axis=-1, dtype=jnp.uint8)


def near(x):
    return jnp.asarray(VALUES, jnp.float32)[nearest(x)]


@dataclasses.dataclass(frozen=True)
class Selectors(tiles.Words):
    """Codes of 4 bits as `prmt` wants them: the low half of a word has four neighbours of one group and the
    high half four of another, a nibble each, in which bit 0 of the code comes on top of bits 3-1. Groups of
    32: vector v has groups 2 v and 2 v + 1. Groups of 16: 4 v to 4 v + 3, the first two in the low halves."""

    def tiled(self, codes):
        words = super().tiled(codes >> 1 | (codes & 1) << 3)
        words = words | words >> 4
        words = words & 0xFF | words >> 8 & 0xFF00
        return words[..., 0::2, :, :] | words[..., 1::2, :, :] << 16

    def untiled(self, words, shape, weights):
        words = jnp.stack([words & 0xFFFF, words >> 16], axis=-3)
        words = words & 0xFF | words << 8 & 0xFF0000
        words = (words | words << 4) & 0x0F0F0F0F
        codes = super().untiled(words.reshape(*words.shape[:-4], 8, 32, 4), shape, weights)
        return codes << 1 & 15 | codes >> 3

    def integers(self, vectors):
        look_up, each = self.table(), 4 // self.sizes[2]
        groups = []
        for vector in vectors:
            pair = [], []
            for word in vector:
                other = word ^ 0x88888888
                for group, right in zip(pair, (0, 16), strict=True):
                    group.append(look_up(word, other, right))
            groups += [tiles.Integers(half[i : i + each]) for half in pair for i in range(0, 4, each)]
        return groups

    def table(self):
        """(a word of nibbles, the same with their top bits changed, right) -> the bytes of four nibbles from
        bit `right` on.

        `prmt` chooses four of eight bytes by the low three bits of four nibbles; if the fourth bit is set
        it returns the top bit of the byte, eight times. VALUES are pairs (even, odd) of the same sign s, and
        bits 3-1 of a code choose a pair. `even` has the pairs' even values xor s, which are not negative;
        `odd` has the odd values:

            bit 0 of the code   from even   from odd    one xor the other
            0                   even ^ s    s           the even value
            1                   0           odd         the odd value
        """
        from pallas_kernels.gpu import lanes
        from pallas_kernels.gpu.values import integer

        def table(values):
            low, high = map(int, values.view("<u4"))
            return lanes.in_register(low), integer(high)

        sign = VALUES[0::2] >> 7
        assert (sign == VALUES[1::2] >> 7).all()
        even, odd = table(VALUES[0::2] ^ sign), table(VALUES[1::2].copy())

        def look_up(word, other, right):
            first = lanes.chosen_bytes(*even, word >> right)
            return first ^ lanes.chosen_bytes(*odd, other >> right)

        return look_up


WORDS = Selectors(32, "00000000")


def tile(block):
    """Blocks -> {"words": `Selectors`, "scales": Q8_0's}."""
    return {"words": WORDS.tiled(packing.codes(block["qs"], 4)), "scales": tiles.scale_words(block["d"])}


def untile(tiled, shape):
    (d,) = tiles.from_scale_words(tiled["scales"], shape)
    return {"d": d, "qs": packing.packed(WORDS.untiled(tiled["words"], shape, WEIGHTS), 4)}


LANES = tiles.Lanes(WORDS, signed=True, minimums=False, scales=lane_scales)


def vector_codes(load):
    """The values plus 128 (shared with IQ4_XS, for each four groups)."""
    qs = load("qs")
    table = (VALUES.astype(int) + 128).tolist()
    pieces = [qs[i : i + 64] for i in range(0, qs.count, 64)]
    return [codes.looked_up(table) for piece in pieces for codes in (piece & 15, piece >> 4)]


CPU = Vectors(NIBBLES, group=32, codes=vector_codes, scales=lambda load: load("d").float(), zero=128)
