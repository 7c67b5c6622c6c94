"""PTQ1_0 (PrismML): 128 weights in 28 bytes, 1.75 bits a weight.   w = d * (q - 1),  q in 0..2

Five weights to a byte in base 3:

    qs 24 bytes: digit t of byte b is weight 16t + b (b < 16), of byte 16 + b weight 80 + 8t + b
    qh 2 bytes: digit t < 4 of byte b is weight 120 + 2t + b
    d f16

The bytes are those of TQ1_0.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu.vectors import NATURAL, Vectors
from pallas_kernels.formats.q2_0_g128 import KERNELS, LANES, tile_codes, untile_codes
from pallas_kernels.formats.tq1_0 import RANDOM, digits, packed, ternary_bytes, vector_digits

WEIGHTS = 128
BLOCK = np.dtype([("qs", "u1", 24), ("qh", "u1", 2), ("d", "<f2")])


def dequantize(block):
    return block["d"].astype(jnp.float32)[..., None] * (_codes(block).astype(jnp.float32) - 1)


def _codes(block):
    """[..., 128]."""
    qs, qh = block["qs"], block["qh"]
    return jnp.concatenate([digits(qs[..., :16], 5), digits(qs[..., 16:], 5), digits(qh, 4)], axis=-1)


def random_codes(key, lead):
    key_qs, key_qh = jax.random.split(key)
    return {"qs": ternary_bytes(key_qs, (*lead, 24), 5), "qh": ternary_bytes(key_qh, (*lead, 2), 4)}


def tile(block):
    """Blocks -> the tiles of Q2_0 (q2_0_g128.tile), 2.125 bits a weight, as for TQ1_0."""
    return tile_codes(_codes(block).astype(jnp.uint8), block["d"])


def untile(tiled, shape):
    """The inverse of `tile` for matrices of this shape, (N, K)."""
    q, d = untile_codes(tiled, shape)
    qs = jnp.concatenate([packed(q[..., :80], 5), packed(q[..., 80:120], 5)], axis=-1)
    return {"qs": qs, "qh": packed(q[..., 120:], 4), "d": d}


def _vector_codes(load):
    """Of two blocks."""
    runs = [[(24 * i, 16, 5), (24 * i + 16, 8, 5), (48 + 2 * i, 2, 4)] for i in (0, 1)]
    return vector_digits(load("qs").then(load("qh")), [*runs[0], *runs[1]])


CPU = Vectors(NATURAL, group=128, codes=_vector_codes, scales=lambda load: load("d").float(), zero=1)
