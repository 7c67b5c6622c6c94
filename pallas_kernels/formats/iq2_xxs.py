"""IQ2_XXS: 256 weights in 66 bytes, 2.0625 bits a weight.   w = d * (sc + 1/2) / 4 * s * v

Eight weights at a time are a point of GRID, v, with signs s; sc in 0..15 is of 32 weights.

    d f16
    qs 16 u32: of weights 32g .. 32g+31 two words
        the first    byte i: the number of the point of weights 8i .. 8i+7
        the second   bits 7i .. 7i+6: the signs of the first seven of these, 1 is minus; the eighth makes the
                     number of minuses even; bits 31-28: sc
"""

import base64
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.codebooks import in_chunks, joined, odd, odd_scales, signed_points
from pallas_kernels.cpu import points
from pallas_kernels.cpu.vectors import NATURAL, Vectors
from pallas_kernels.encoding import column_weights, positive_fit


def lattice(packed: str, values: tuple[int, ...], width: int) -> np.ndarray:
    """The points of a codebook, float32 [points, width].

    packed  a bitmap (deflated, in base 85) over all points of `width` values, whose first value changes
    fastest
    """
    bits = np.unpackbits(
        np.frombuffer(zlib.decompress(base64.b85decode(packed)), np.uint8), bitorder="little"
    )
    digits = np.flatnonzero(bits)[:, None] // len(values) ** np.arange(width) % len(values)
    return np.array(values, np.float32)[digits]


WEIGHTS = 256
BLOCK = np.dtype([("d", "<f2"), ("qs", "<u4", 16)])
RANDOM = {"d": 1 / 53.36}  # root mean squares: 2.308 of (sc + 1/2) / 4, 23.12 of the points
VALUES = (8, 25, 43)
GRID = lattice(
    "c-nPRORB^$43oj#tB`je2YP^R=KfcCw)5@K5e=lV<VbEmf91ogR%p3E0BR^O#16P=^@J3)+t0mx___f>P^zDolEn6;is&dxI!#Zg_{"
    "KuzkVd4Mw`?l*l~*(z5~c8Qj-!-YZym34v`$TQ4<4*~)dpL;rq|+W4irx`d$&)6^vGb7UkLBrzcFbHqcf>sMFwRxr;MTG;*}m%Qlby"
    "-@@TSk)X7om@@#uKQIjUUWQ&$2&y}*gX5TV=Bc|Cuh1wL(2Kn3A3Yj<N%;gblzhT7_jxp@MF=lA5st5R^Hl2J=^JV`E{Z0D^#$6R7",
    VALUES,
    8,
)

POINTS = odd(GRID)
TRIED = [5 + 0.1 * i for i in range(-6, 7)]  # for the greatest number of a group


def dequantize(block):
    lead = block["d"].shape
    points, rest = (block["qs"].reshape(*lead, 8, 2)[..., i] for i in (0, 1))
    number = points[..., None] >> np.arange(0, 32, 8, dtype=np.uint32) & 255
    v = jnp.asarray(GRID)[number] * word_signs(rest)  # [..., 8, 4, 8]
    scale = half_scale(block["d"], rest >> 28) / 4
    return (scale[..., None, None] * v).reshape(*lead, 256)


def quantize_weighted(x, importance):
    """Of each 32 weights scale and points by ggml's search; scales in 4 bits, of d."""
    return in_chunks(_stored, x, column_weights(x, importance, 1))


def _stored(x, weights):
    negative, numbers, scales = signed_points(x, weights, POINTS, 32, TRIED, even=True, most=_most)
    d, sc = odd_scales(scales, 15)
    first = joined(numbers.reshape(-1, 8, 4), 8)
    second = sign_words(negative) | sc.astype(jnp.uint32) << 28
    return {"d": d.astype(jnp.float16), "qs": jnp.stack([first, second], axis=-1).reshape(-1, 16)}


def _most(x, weights):
    """3 / 4 of the greatest number, by a fit of codes 0..4: a few numbers may lie beyond the points."""
    return 3 * positive_fit(x, weights, 4)[0]


def sign_words(negative):
    """The inverse of `word_signs`: bool [m, 32, 8] -> uint32 [m, 8]."""
    return joined(joined(negative[..., :7], 1).reshape(-1, 8, 4), 7)


def word_signs(word):
    """The signs in four times seven bits of a u32 [...]: float32 [..., 4, 8]."""
    return signs(even(word[..., None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127))


def even(seven):
    """Seven bits, and above them an eighth that makes the number of ones even."""
    return seven | (jax.lax.population_count(seven) & 1) << 7


def signs(bits):
    """The low eight bits of unsigned integers [...]: float32 [..., 8], -1 where a bit is 1, lowest first."""
    one = bits[..., None] >> np.arange(8, dtype=bits.dtype) & 1
    return 1 - 2 * one.astype(jnp.float32)


def half_scale(d, sc):
    """d [...] times (sc [..., groups] + 1/2)."""
    return d.astype(jnp.float32)[..., None] * (sc.astype(jnp.float32) + 0.5)


def nibbles(scales):
    """4-bit scales, two per byte, the lower one first: uint8 [..., n] -> [..., 2 n]."""
    return jnp.stack([scales & 15, scales >> 4], axis=-1).reshape(*scales.shape[:-1], -1)


def _vector_codes(load):
    words = load("qs")
    numbers = points.each_part(words[0:16:2], [0, 8, 16, 24]) & 255
    return points.signed_codes(numbers.rows_of(GRID), points.signs_of_words(words[1:16:2]))


def _vector_scales(load):
    return load("d").float().splat(8) * ((load("qs")[1:16:2] >> 28).float() + 0.5) * 0.25


CPU = Vectors(NATURAL, group=32, codes=_vector_codes, scales=_vector_scales, zero=points.ZERO)
