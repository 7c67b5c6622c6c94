"""IQ3_S: 256 weights in 110 bytes, 3.4375 bits a weight.   w = d * (2 sc + 1) * s * v

Four weights at a time are a point of GRID, v, with signs s; sc in 0..15 is of 32 weights.

    d f16
    qs 64 bytes: byte i is bits 7-0 of the number of the point of weights 4i .. 4i+3
    qh 8 bytes: bit i of byte g is bit 8 of the number of point 8g + i
    signs 32 bytes: bit j of byte i is 1 where weight 8i + j is negative
    scales 4 bytes: the low nibble of byte g is sc of weights 64g .. 64g+31, the high nibble of the next 32
"""

import functools

import jax.numpy as jnp
import numpy as np

from pallas_kernels.codebooks import PLAIN, WEIGHTED, in_chunks, joined, odd_scales, signed_points
from pallas_kernels.cpu import points
from pallas_kernels.cpu.vectors import NATURAL, Vectors
from pallas_kernels.encoding import column_weights
from pallas_kernels.formats.iq2_xxs import half_scale, lattice, nibbles, signs

WEIGHTS = 256
BLOCK = np.dtype([("d", "<f2"), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)])
RANDOM = {"d": 1 / 140.2}  # root mean squares: 18.47 of 2 sc + 1, 7.594 of the points
GRID = lattice(
    "c-k#d!AiqG5PdVu!e&pqA>uXNMyUCUt<-~hDT4SrX{pfmmf{D9Rs{Q#&TgE;z`Qr}-rMBob#A|%IbF{W(Id*&Lkwq!%0~0(%@Ao{OU"
    "0lD_x2OXCI^OquXIKLt}o^pYnG?L6&oz+9HeSVPSrN(A}t!YmF^Xmp*3Qy-5G8(e|b5Y-VC?q(AA>+32wuC)HmEXp@c1}PT|h83}iu"
    "XSwt^ePGkv?U+Lf3a_=1ov?9@{igP&9v4ypFswx3&TJZ@M2_=SuX>*z&qp%+CoXl)ge8!drA@5Agyn!FG+()?*sDei}n1QT95(J|p-"
    "wR7#Aht{0!Hx!aZfy;cl!bD4D3uqR(zW`GY5;6>@R{_|3X$jRqNR^eu)^e<Ll^vCYlKPU1;QQ+o$IB(hKom+bHx0SXmXXwyZnVo8~6"
    "jd#wQ>",
    (1, 3, 5, 7, 9, 11, 13, 15),
    4,
)

TRIED = [15 + 0.2 * i for i in range(-9, 10)]  # for the greatest number of a group
FACTOR = 1.033  # ggml's, of d


def dequantize(block):
    lead = block["d"].shape
    high = block["qh"][..., None] >> np.arange(8, dtype=np.uint8) & 1
    number = block["qs"].astype(jnp.uint16) | high.reshape(*lead, 64).astype(jnp.uint16) << 8
    v = jnp.asarray(GRID)[number].reshape(*lead, 32, 8) * signs(block["signs"])
    scale = 2 * half_scale(block["d"], nibbles(block["scales"]))
    return (scale[..., None] * v.reshape(*lead, 8, 32)).reshape(*lead, 256)


def quantize(x):
    """Of each 32 weights scale and points by ggml's search; scales in 4 bits, of d."""
    return in_chunks(functools.partial(_stored, floor=PLAIN), x, x * x)


def quantize_weighted(x, importance):
    """`quantize`, with errors weighted by column."""
    return in_chunks(_stored, x, column_weights(x, importance, 2))


def _stored(x, weights, floor=WEIGHTED):
    negative, numbers, scales = signed_points(x, weights, GRID, 32, TRIED, floor)
    d, sc = odd_scales(scales, 15)
    return {
        "d": (FACTOR * d).astype(jnp.float16),
        "qs": numbers.astype(jnp.uint8),
        "qh": joined((numbers >> 8).reshape(-1, 8, 8), 1).astype(jnp.uint8),
        "signs": joined(negative, 1).astype(jnp.uint8),
        "scales": joined(sc.reshape(-1, 4, 2), 4).astype(jnp.uint8),
    }


def _vector_codes(load):
    numbers = load("qs").words() | load("qh").bits().bytes(1, 0).words() << 8
    return points.signed_codes(numbers.rows_of(GRID), load("signs"))


def _vector_scales(load):
    return load("d").float().splat(8) * (points.nibbles(load("scales")) * 2.0 + 1.0)


CPU = Vectors(NATURAL, group=32, codes=_vector_codes, scales=_vector_scales, zero=points.ZERO)
