"""IQ2_XS: 256 weights in 74 bytes, 2.3125 bits a weight.   w = d * (sc + 1/2) / 4 * s * v

Eight weights at a time are a point of GRID, v, with signs s (as in IQ2_XXS); sc in 0..15 is of 16 weights.

    d f16
    qs 32 u16: of weights 8i .. 8i+7, bits 8-0: the number of the point, bits 15-9: seven signs
    scales 8 bytes: the low nibble of byte g is sc of weights 32g .. 32g+15, the high nibble of the next 16
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.codebooks import in_chunks, joined, odd, odd_scales, signed_points
from pallas_kernels.cpu import points
from pallas_kernels.cpu.vectors import NATURAL, Vectors
from pallas_kernels.encoding import column_weights
from pallas_kernels.formats.iq2_xxs import VALUES, even, half_scale, lattice, nibbles, signs

WEIGHTS = 256
BLOCK = np.dtype([("d", "<f2"), ("qs", "<u2", 32), ("scales", "u1", 8)])
RANDOM = {"d": 1 / 55.90}  # root mean squares: 2.308 of (sc + 1/2) / 4, 24.22 of the points
GRID = lattice(
    "c-mc2TdsvL2pkgnkBRPwCicH3cK=&BJX-bM<{ZTW!^|+oxJIi-qkD|rsuaR~iB<*?x~C4>8J0pJW<V>X*vo#SY&(-c)w(<-fCU6QVt"
    "|)*=>oJ=N8h~B3mmYKBw*Y)Ca<s*uvOak7T*la5<g=kAh?T96(5+bR(Mt@J=L5^n!u1sF+~=p=RjVCGbM+vDH*59tF!>kC`)-u3GzO"
    "}jM8X_r-*1ytubG*&a^iqGs?p-do}D8x2NWXU?%O)=7t88q040RdJ=Ak)9T+$YBcFD31^6BC_W+mG1}iEA-T}Oj@u6-pQ1yByIl9%`"
    "W3mW#F%j~<yh(N0zSL~oH^Zy%}}tQx4=M73#xoc?jNErTmD?iDs40;(&MG>YYMNuDE=SK;cc#9vM%q_=>7msuqjC",
    VALUES,
    8,
)

POINTS = odd(GRID)
TRIED = [5 + 0.1 * i for i in range(-9, 10)]  # for the greatest number of a group (shared with IQ2_S)


def dequantize(block):
    lead = block["d"].shape
    v = jnp.asarray(GRID)[block["qs"] & 511] * signs(even(block["qs"] >> 9))  # [..., 32, 8]
    scale = half_scale(block["d"], nibbles(block["scales"])) / 4
    return (scale[..., None] * v.reshape(*lead, 16, 16)).reshape(*lead, 256)


def quantize_weighted(x, importance):
    """Of each 16 weights scale and points by ggml's search; scales in 4 bits, of d."""
    return in_chunks(_stored, x, column_weights(x, importance, 1))


def _stored(x, weights):
    negative, numbers, scales = signed_points(x, weights, POINTS, 16, TRIED, even=True)
    d, sc = odd_scales(scales, 15)
    qs = numbers.astype(jnp.uint32) | joined(negative[..., :7], 1) << 9
    return {
        "d": d.astype(jnp.float16),
        "qs": qs.astype(jnp.uint16),
        "scales": joined(sc.reshape(-1, 8, 2), 4).astype(jnp.uint8),
    }


def _vector_codes(load):
    qs = load("qs")
    return points.signed_codes((qs & 511).rows_of(GRID), points.even_signs(qs >> 9))


def vector_scales(load):
    """Shared with IQ2_S."""
    return load("d").float().splat(16) * (points.nibbles(load("scales")) + 0.5) * 0.25


CPU = Vectors(NATURAL, group=16, codes=_vector_codes, scales=vector_scales, zero=points.ZERO)
