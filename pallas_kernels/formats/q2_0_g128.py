"""Q2_0 of 128 (older PrismML): 128 weights in 34 bytes, 2.125 bits a weight.   w = d * (q - 1),  q in 0..2

    d f16 | qs 32 bytes: bits 2(j % 4) of byte j / 4 are weight j

The code 3 is no ternary weight; should a file hold it, it decodes to 2d, as the formula says. In products of
many rows with rotated inputs it is taken for 0 (matmul/bit_mma/weight_bytes.py).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tiles
from pallas_kernels.cpu.vectors import Vectors
from pallas_kernels.encoding import inverse, round_half_away

WEIGHTS = 128
LEVELS = 3
BLOCK = np.dtype([("d", "<f2"), ("qs", "u1", 32)])
SHIFTS = np.arange(0, 8, 2, dtype=np.uint8)


def dequantize(block):
    return block["d"].astype(jnp.float32)[..., None] * (_codes(block).astype(jnp.float32) - 1)


def _codes(block):
    """uint8 [..., WEIGHTS]."""
    q = (block["qs"][..., None] >> SHIFTS) & 3  # [..., bytes, 4]
    return q.reshape(*block["d"].shape, -1)


def quantize(x):
    d, q = ternary(x)
    return {"d": d, "qs": _bytes(q)}


def ternary(x):
    """d = max |x|, float16 [...], and q = x / d, rounded (halves away from 0), plus 1: uint8 [..., WEIGHTS].
    Of weights that are -d, 0 and d already, these very weights."""
    d = jnp.abs(x).max(axis=-1)
    q = round_half_away(x * inverse(d)[..., None]) + 1
    return d.astype(jnp.float16), q.astype(jnp.uint8)


def _bytes(q):
    """The inverse of `_codes`."""
    q = q.reshape(*q.shape[:-1], -1, 4) << SHIFTS
    return q.sum(axis=-1, dtype=jnp.uint8)


def _random_qs(key, shape, _):
    """Bytes of four codes, each 0, 1 or 2."""
    v = jax.random.randint(key, (*shape, 1), 0, 81, jnp.uint8)
    q = v // np.array([1, 3, 9, 27], np.uint8) % 3
    return (q << SHIFTS).sum(axis=-1, dtype=jnp.uint8)


RANDOM = {"d": 1 / 0.816, "qs": _random_qs}  # -1, 0, +1 have standard deviation 0.816


@dataclasses.dataclass(frozen=True)
class Quarters(tiles.Words):
    def integers(self, vectors):
        """Where they lie: 1, 4, 16 and 64 times the code in each four groups."""
        return [tiles.Integers(vector, mask) for vector in vectors for mask in (0x03, 0x0C, 0x30, 0xC0)]


WORDS = Quarters(32, "33221100")


def tile_codes(codes, d):
    """`tile` for any ternary format, from codes uint8 [*lead, N, blocks, WEIGHTS] and d float16 [*lead, N,
    blocks]: {"words": vectors of four groups, "d": uint32 [*lead, N / 16, K / 256, 2048 / WEIGHTS], d of rows
    g and g + 8} (pallas_kernels/tiles.py); 2 bits and its share of d a weight."""
    return {"words": WORDS.tiled(codes), "d": tiles.bits(tiles.lane_rows(d, codes.shape[-1]))}


def untile_codes(tiled, shape):
    """The inverse of `tile_codes`: (codes, d)."""
    d = tiles.from_lane_rows(tiles.halves(tiled["d"]), shape)
    return WORDS.untiled(tiled["words"], shape, shape[1] // d.shape[-1]), d


def tile(block):
    return tile_codes(_codes(block), block["d"])


def untile(tiled, shape):
    q, d = untile_codes(tiled, shape)
    return {"d": d, "qs": _bytes(q)}


def _scales(fields, lane):
    """The bytes of each four groups are 1, 4, 16 and 64 times q. 1 is subtracted from every q: the minimum is
    d."""
    from pallas_kernels.gpu import lanes
    from pallas_kernels.gpu.values import real, select

    def both(word, factors):
        d = lanes.halves(word)
        return [[[v * f for f in factors] for v in d], [[v, v] for v in d]]

    def fetch(other_lane, t):
        return both(lanes.from_lane(fields["d"][0], other_lane), factors[t % 2])

    # Groups 2 t and 2 t + 1 are the first two of a vector for even t, and the last two for odd t.
    factors = (1, 1 / 4), (1 / 16, 1 / 64)
    own = [select(lane & 1 == 0, even, odd) for even, odd in zip(*factors, strict=True)]
    scale, minimum = both(fields["d"][0], own)
    return [tiles.Scales(scale, minimum, fetch)]


# All ternary formats have groups of 32 columns; 2, 4 or 8 neighbouring groups share d.
LANES = tiles.Lanes(WORDS, signed=False, minimums=True, scales=_scales)


def two_bits(load):
    """Four codes of each of 64 bytes."""
    qs = load("qs")
    return [(qs >> shift) & 3 for shift in (0, 2, 4, 6)]


CPU_COLUMNS = np.arange(256).reshape(64, 4).T
CPU = Vectors(CPU_COLUMNS, group=128, codes=two_bits, scales=lambda load: load("d").float(), zero=1, shares=4)
