"""IQ2_S: 256 weights in 82 bytes, 2.5625 bits a weight.   w = d * (sc + 1/2) / 4 * s * v

Eight weights at a time are a point of GRID, v, with signs s; sc in 0..15 is of 16 weights.

    d f16
    qs 32 bytes: byte i is bits 7-0 of the number of the point of weights 8i .. 8i+7
    signs 32 bytes: bit j of byte i is 1 where weight 8i + j is negative
    qh 8 bytes: bits 2i and 2i + 1 of byte g are bits 9-8 of the number of point 4g + i
    scales 8 bytes: the low nibble of byte g is sc of weights 32g .. 32g+15, the high nibble of the next 16
"""

import functools

import jax.numpy as jnp
import numpy as np

from pallas_kernels.codebooks import PLAIN, WEIGHTED, in_chunks, joined, odd, odd_scales, signed_points
from pallas_kernels.cpu import points
from pallas_kernels.cpu.vectors import NATURAL, Vectors
from pallas_kernels.encoding import column_weights
from pallas_kernels.formats.iq2_xs import TRIED, vector_scales
from pallas_kernels.formats.iq2_xxs import VALUES, half_scale, lattice, nibbles, signs

WEIGHTS = 256
BLOCK = np.dtype([("d", "<f2"), ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)])
RANDOM = {"d": 1 / 56.39}  # root mean squares: 2.308 of (sc + 1/2) / 4, 24.43 of the points
GRID = lattice(
    "c-n1JU5W-F3~NE(E9iYHjPDBe{#V(wI=kPpE5rQ7#3X8F%Z9aF@G^(h-0EI3Em0|W3^QwctZ7zp0a8G#rYWS&oF&YfEj@sgh^u5FBB"
    "gC>LAkBEEtarKv-X}c)kMD5E9g)N*35uFS6j&;COQ!QC2=T0oAzp}=fs8f?3xctXeG?g^dQAA!2(KVP=j1x!<Qgx@l7F)Pu!TMd$m>"
    "{ZzEray(N$AzRb24)#*U9zYZZF^+2!@EVQ9?ARiEH!J<ErE8usn4?()-BQhW*1pE<<S|Z6aT82aQO}QP4+el6zUY~*z7~Sl6pK?p!Q"
    "_DMIhH4w7?joIO9P^#Dw9CRS7mu8OBC|vDii4FoWN_zK9m?6y$}qXC*pyH_2f!)+bXep&HXz~CYasM7Fd3(JhmM~KIbkHJ7yU4;E69"
    "2~{FNElHOf~Fzm+TBn!W(JyjC6",
    VALUES,
    8,
)

POINTS = odd(GRID)
FACTOR = 0.9875  # ggml's, of d


def dequantize(block):
    lead = block["d"].shape
    high = block["qh"][..., None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    number = block["qs"].astype(jnp.uint16) | high.reshape(*lead, 32).astype(jnp.uint16) << 8
    v = jnp.asarray(GRID)[number] * signs(block["signs"])  # [..., 32, 8]
    scale = half_scale(block["d"], nibbles(block["scales"])) / 4
    return (scale[..., None] * v.reshape(*lead, 16, 16)).reshape(*lead, 256)


def quantize(x):
    """Of each 16 weights scale and points by ggml's search; scales in 4 bits, of d."""
    square = x * x
    return in_chunks(
        functools.partial(_stored, floor=PLAIN), x, square + square.mean(axis=-1, keepdims=True) / 2
    )


def quantize_weighted(x, importance):
    """`quantize`, with errors weighted by column."""
    return in_chunks(_stored, x, column_weights(x, importance, 2))


def _stored(x, weights, floor=WEIGHTED):
    negative, numbers, scales = signed_points(x, weights, POINTS, 16, TRIED, floor)
    d, sc = odd_scales(scales, 15)
    return {
        "d": (FACTOR * d).astype(jnp.float16),
        "qs": numbers.astype(jnp.uint8),
        "signs": joined(negative, 1).astype(jnp.uint8),
        "qh": joined((numbers >> 8).reshape(-1, 8, 4), 2).astype(jnp.uint8),
        "scales": joined(sc.reshape(-1, 8, 2), 4).astype(jnp.uint8),
    }


def _vector_codes(load):
    high = points.each_part(load("qh"), [0, 2, 4, 6]) & 3
    numbers = load("qs").words() | high.words() << 8
    return points.signed_codes(numbers.rows_of(GRID), load("signs"))


CPU = Vectors(NATURAL, group=16, codes=_vector_codes, scales=vector_scales, zero=points.ZERO)
