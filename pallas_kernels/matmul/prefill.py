"""Products with many rows (prefill, steps of 9 rows and more), on the tensor cores: a prologue that norms and
rounds activations, then a GEMM with its epilogue. Three modules have these two:

    bit_prefill_sm90          x [M, K] -> norm -> x = s q, q integers, s per group of 128 columns
                                         -> integer sums of a group -> s in float32, activation or residual
    int_prefill_sm90, cublas  x [M, K] -> norm -> x = s a, s a power of two per row, a float16 in [-2, 2]
                                         -> GEMM with float32 sums -> s, activation or residual

bit_prefill_sm90, for 1-bit weights, has the activations of a decode step, of 8 or 16 bits. With 16 bits, or
up to 32 rows, only the sums over groups are in another order; else it also rounds the weights' scales to 7
bits. It is for ternary weights, too, where activations are rotated and have 8 bits. int_prefill_sm90 is for
stacks of one format of 2 to 8 bits. In a decode step's products both have few tiles of tokens. Then a tile
has as few tokens as there are, and columns are split over blocks too, so that all multiprocessors have work
(prefill_plan.py).

Why the others get float16 and not bfloat16: it holds a weight's float16 scale exactly, and 11 bits of an
activation where bfloat16 holds 8; the scale of each row keeps any activation in range. What is lost:
activations are rounded to 2^-12 of themselves (below 2^-15 of the row's largest: to 2^-25 of it), and weights
of formats that multiply two numbers (Q4_K) to 2^-12 of themselves.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.activations import Activation

Prologue = Callable[[jax.Array, Sequence[Any], Any, Any, float], tuple[jax.Array, ...]]
Gemm = Callable[[jax.Array, jax.Array, Sequence[Any], Any, Any, Activation], jax.Array]


def in_two_phases(prologue: Prologue, gemm: Gemm) -> Callable[..., jax.Array]:
    """The `run` (execute.py) of a module that has

    prologue(x, weights, layer, gamma, eps) -> (a, s)   x, or rms_norm(x; gamma[layer], eps), as its GEMM
                                                        reads it; x float32 [M, K]
    gemm(a, s, weights, part_layer, residual, activation) -> y   float32 [M or more, N]; residual [M, N]
    """

    def run(x, weights, part_layer, layer, gamma, eps, residual, activation) -> jax.Array:
        n = weights[0].shape[0]
        a, scale = prologue(x.reshape(-1, x.shape[-1]).astype(jnp.float32), weights, layer, gamma, eps)
        residual = None if residual is None else residual.reshape(-1, n)
        y = gemm(a, scale, weights, part_layer, residual, activation)
        return y[: x.size // x.shape[-1]].reshape(*x.shape[:-1], n)

    return run


def in_order(parts: jax.Array, residual: jax.Array | None) -> jax.Array:
    """float32 [splits, M or more, N], what each split of the columns has of the sums -> their sum, and the
    residual, float32 [M, N]. Always in the same order, so that bits are the same each time."""
    y, *others = parts
    if residual is not None:
        y = residual + y[: len(residual)]
    for part in others:
        y = y + part[: len(y)]
    return y


def clocks_of_sums(size: int, splits: int, summed: bool) -> float:
    """What `in_order` takes of so many sums, as measured on an H200; not summed, what their reader does."""
    if not summed:
        return size * splits / 800
    return 2300 + size * (splits + 2) / 800 if splits > 1 else 0


def scaled_to_half(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 [*batch, K] -> (a float16 [*batch, K], s float32 [*batch, 1]): x = s a but for a's rounding,
    with s the power of two that brings the largest |a| of a row into [1, 2)."""
    largest = jnp.abs(x).max(axis=-1, keepdims=True)
    exponent = jax.lax.bitcast_convert_type(largest, jnp.int32) & 0x7F800000
    # From 2^-100 on, so that the inverse is a normal number too; rows of zeros stay zeros.
    exponent = jnp.clip(exponent, 27 << 23, 227 << 23)
    scale = jax.lax.bitcast_convert_type(exponent, jnp.float32)
    inverse = jax.lax.bitcast_convert_type((254 << 23) - exponent, jnp.float32)
    return (x * inverse).astype(jnp.float16), scale
