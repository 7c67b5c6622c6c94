"""TQ1_0: 256 weights in 54 bytes, 1.6875 bits a weight.   w = d * (q - 1),  q in 0..2

Five weights to a byte in base 3:

    qs 48 bytes: digit t of byte b is weight 32t + b (b < 32), of byte 32 + b weight 160 + 16t + b
    qh 4 bytes: digit t < 4 of byte b is weight 240 + 4t + b
    d f16

A byte is the fraction 0.q0 q1 q2 q3 q4 in base 3, times 256 and rounded up: multiply by 3, and the carry
is the next digit.
"""

import jax
import jax.numpy as jnp
import numpy as np

WEIGHTS = 256
BLOCK = np.dtype([("qs", "u1", 48), ("qh", "u1", 4), ("d", "<f2")])
RANDOM = {"d": 1 / 0.816}  # -1, 0, +1 have standard deviation 0.816


def digits(packed, count):
    """The first `count` base-3 digits of bytes [..., B], digit by digit: uint16 [..., count * B]."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
    rest = packed[..., None, :] * powers  # [..., count, B], modulo 256
    carry = (rest.astype(jnp.uint16) * 3) >> 8
    return carry.reshape(*packed.shape[:-1], -1)


def dequantize(block):
    qs, qh = block["qs"], block["qh"]
    q = jnp.concatenate([digits(qs[..., :32], 5), digits(qs[..., 32:], 5), digits(qh, 4)], axis=-1)
    return block["d"].astype(jnp.float32)[..., None] * (q.astype(jnp.float32) - 1)


def random_codes(key, lead):
    key_qs, key_qh = jax.random.split(key)
    return {"qs": ternary_bytes(key_qs, (*lead, 48), 5), "qh": ternary_bytes(key_qh, (*lead, 4), 4)}


def ternary_bytes(key, shape, count):
    """Random bytes of `count` base-3 digits (the digits after them are 0)."""
    v = jax.random.randint(key, shape, 0, 3**count, jnp.uint16) * 3 ** (5 - count)
    return ((v * 256 + 242) // 243).astype(jnp.uint8)
