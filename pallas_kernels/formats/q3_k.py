"""Q3_K: 256 weights in 110 bytes, 3.4375 bits a weight.   w = d * (sc - 32) * (q - 4)

q in 0..7, sc in 0..63, laid out as

    hmask 32 bytes: bit t of byte b is bit 2 of weight 32t + b
    qs 64 bytes: bits 2t of byte 32h + b are bits 0-1 of weight 128h + 32t + b
    scales 12 bytes: sc of weights 16g .. 16g+15; bits 0-3 are the low (g < 8) or high nibble of byte g % 8,
                     bits 4-5 are bits 2(g / 4) of byte 8 + g % 4
    d f16
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import packing, tiles
from pallas_kernels.cpu.vectors import QUARTERS, Vectors
from pallas_kernels.formats.q2_0_g128 import two_bits

WEIGHTS = 256
BLOCK = np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])
RANDOM = {"d": 1 / 43.3}  # mean squares: 341.5 of sc - 32, 5.5 of q - 4; the product is 43.3^2


def dequantize(block):
    q = _codes(block).astype(jnp.float32) - 4
    scale = block["d"].astype(jnp.float32)[..., None] * (_scale_codes(block).astype(jnp.float32) - 32)
    return (scale[..., None] * q).reshape(*block["d"].shape, 256)


def _codes(block):
    """uint8 [..., 16, 16]."""
    lead = block["d"].shape
    low = packing.codes(block["qs"].reshape(*lead, 2, 32), 2)
    return low.reshape(*lead, 16, 16) | packing.codes(block["hmask"], 1).reshape(*lead, 16, 16) << 2


def _scale_codes(block):
    """sc, uint8 [..., 16]."""
    nibbles, pairs = block["scales"][..., :8], block["scales"][..., 8:]
    return packing.codes(nibbles, 4) | packing.codes(pairs, 2) << 4


KERNELS = "int"
ONES = np.uint32(0x01010101)
BYTE = np.arange(0, 32, 8, dtype=np.uint32).reshape(2, 2)  # of a word, by row and group


def tile(block):
    """Blocks -> {"words": uint32 [*lead, N / 16, K / 256, 3, 32, 4], "scales": uint32 [..., 32], "low":
    uint32 [..., 16], "d": uint32 [..., 8]} (pallas_kernels/tiles.py), 3.4375 bits a weight as in the file.

    32 (q - 4) is a signed byte whose five low bits are free. Eight groups of a row fit in three words:

        bits   7-5     4-2     1-0
        x      group 0 group 1 bits 2-1 of group 6
        y      group 2 group 3 bits 2-1 of group 7
        z      group 4 group 5 bit 0 of group 6, bit 0 of group 7

    Each vector has one of these words for rows g and g + 8, then for the same rows of the other eight groups.

    sc - 32, signed, of groups 2 t and 2 t + 1 and rows g and g + 8, has a byte in the lane's "scales", and a
    byte in the word of "low" that two neighbouring lanes share:

        scales   bits 7-4: bits 5-2 of sc - 32 of the first eight groups, bits 3-0: of the other eight
        low      bits 3-2: bits 1-0 of sc - 32 of the first eight groups, bits 1-0: of the other eight; bits
                 7-4 belong to the lane with the odd number
    """
    q = (_codes(block) ^ 4).reshape(*block["d"].shape[:-1], -1)
    words = tiles.lane_words(q, 16)  # [..., 16 groups, 32 lanes, 2 rows]
    words = words.reshape(*words.shape[:-3], 2, 8, 32, 2)
    g = [words[..., i, :, :] for i in range(8)]
    x = g[0] << 5 | g[1] << 2 | g[6] >> 1 & 3 * ONES
    y = g[2] << 5 | g[3] << 2 | g[7] >> 1 & 3 * ONES
    z = g[4] << 5 | g[5] << 2 | (g[6] & ONES) << 1 | g[7] & ONES
    words = jnp.moveaxis(jnp.stack([x, y, z], axis=-3), -4, -2)  # [..., 3, 32, 2 eights of groups, 2 rows]
    sc = _scale_codes(block) ^ 32
    sc = tiles.lane_scales(sc.reshape(*sc.shape[:-2], -1).astype(jnp.uint32), 16)  # [..., 2, 32, 2, 2]
    high, low = (
        ((part[..., 0, :, :, :] << bits | part[..., 1, :, :, :]) << BYTE).sum(axis=(-2, -1), dtype=jnp.uint32)
        for part, bits in ((sc >> 2, 4), (sc & 3, 2))
    )
    return {
        "words": words.reshape(*words.shape[:-2], 4),
        "scales": high,
        "low": low[..., 0::2] | low[..., 1::2] << 4,
        "d": tiles.bits(tiles.lane_rows(block["d"])),
    }


def untile(tiled, shape):
    """The inverse of `tile` for matrices of this shape, (N, K)."""
    words = tiled["words"]
    words = jnp.moveaxis(words.reshape(*words.shape[:-1], 2, 2), -2, -4)  # [..., 2, 3, 32, 2]
    x, y, z = (words[..., i, :, :] for i in range(3))
    six = (x & 3 * ONES) << 1 | z >> 1 & ONES
    seven = (y & 3 * ONES) << 1 | z & ONES
    groups = [part >> right & 7 * ONES for part in (x, y, z) for right in (5, 2)]
    words = jnp.stack([*groups, six, seven], axis=-3)
    q = tiles.from_lane_words(words.reshape(*words.shape[:-4], 16, 32, 2), shape) ^ 4
    q = q.reshape(*q.shape[:-1], -1, 256)
    qs = packing.packed((q & 3).reshape(*q.shape[:-1], 2, 128), 2)

    low = jnp.stack([tiled["low"], tiled["low"] >> 4], axis=-1).reshape(tiled["scales"].shape)
    high, low = (part[..., None, None] >> BYTE for part in (tiled["scales"], low))
    sc = [(high >> 4 * u & 15) << 2 | low >> 2 * u & 3 for u in (1, 0)]
    sc = tiles.from_lane_scales(jnp.stack(sc, axis=-4), shape).astype(jnp.uint8) ^ 32
    sc = sc.reshape(*sc.shape[:-1], -1, 16)
    return {
        "hmask": packing.packed(q >> 2, 1),
        "qs": qs.reshape(*qs.shape[:-2], 64),
        "scales": jnp.concatenate([packing.packed(sc & 15, 4), packing.packed(sc >> 4, 2)], axis=-1),
        "d": tiles.from_lane_rows(tiles.halves(tiled["d"]), shape),
    }


def _integers(vectors):
    """32 (q - 4), in the three high bits."""
    from pallas_kernels.gpu import lanes

    out = []
    for rows in (slice(0, 2), slice(2, 4)):
        x, y, z = (vector[rows] for vector in vectors)
        for words in (x, y, z):
            out += [words, [word << 3 for word in words]]
        for words, left in ((x, 4), (y, 5)):
            bits = [(a << 6, b << left) for a, b in zip(words, z, strict=True)]
            out.append([lanes.merged(*both, 0xC0C0C0C0) for both in bits])
    return [tiles.Integers(words, 0xE0) for words in out]


def _scales(fields, lane):
    """Scales are 4 (sc - 32) times d / 128: bytes are 32 (q - 4)."""
    from pallas_kernels.gpu import lanes

    (high,), (low,) = fields["scales"], fields["low"]
    low = low >> (lane & 1) * 4
    d = [v * (1 / 128) for v in lanes.halves(fields["d"][0])]
    both = ((high, low), (high << 4, low << 2))
    return tiles.WholeScales([d], [[lanes.merged(*words, 0xF0F0F0F0) & 0xFCFCFCFC] for words in both])


LANES = tiles.Lanes(
    group=16,
    signed=True,
    minimums=False,
    units=(32, 32),
    integers=_integers,
    scales=_scales,
    whole_scales=True,
)


def _vector_codes(load):
    """Bit 2 of the weights of group g of 32 is bit g of hmask's bytes."""
    hmask = load("hmask")
    hmask = hmask.then(hmask)
    high = [(hmask & (1 << bits)).compared("!=", 0).bytes(4, 0) for bits in QUARTERS // 32]
    return [low | bit for low, bit in zip(two_bits(load), high, strict=True)]


def _vector_scales(load):
    scales = load("scales")
    nibbles, pairs = scales[:8], scales[8:]
    high = (pairs & 3).then((pairs >> 2) & 3).then((pairs >> 4).then(pairs >> 6) & 3)
    codes = (nibbles & 15).then(nibbles >> 4) | (high << 4)
    return load("d").float().splat(16) * (codes.float(signed=False) - 32.0)


CPU = Vectors(QUARTERS, group=16, codes=_vector_codes, scales=_vector_scales, zero=4)
