"""Norms, which stand before products and, per head, before attention."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import device


def rms_norm(x: Float[Array, "*batch H"], gamma: Float[Array, "H"], eps: float) -> Float[Array, "*batch H"]:
    """Root-mean-square norm (Zhang and Sennrich 2019).

    y = gamma * x / sqrt(mean(x^2) + eps)
    """
    return gamma * (x * jax.lax.rsqrt(_mean(jnp.square(x)) + eps))


def layer_norm(x: Float[Array, "*batch H"], gamma: Float[Array, "H"], eps: float) -> Float[Array, "*batch H"]:
    """Layer norm without bias (Ba et al. 2016): the root-mean-square norm of what differs from the mean.

    y = gamma * (x - mean(x)) / sqrt(variance(x) + eps)
    """
    return rms_norm(centered(x), gamma, eps)


def centered(x: Float[Array, "*batch H"]) -> Float[Array, "*batch H"]:
    """x - mean(x)"""
    return x - _mean(x)


def _mean(x: Float[Array, "*batch H"]) -> Float[Array, "*batch 1"]:
    """On a CPU a row has the same bits, however many rows there are: XLA shares many rows out to threads, and
    sums them in another order than few."""
    if device.platform() != "cpu":
        return jnp.mean(x, axis=-1, keepdims=True)
    return _sum_by_halves(x) / x.shape[-1]


@jax.custom_jvp
def _sum_by_halves(x: Float[Array, "*batch H"]) -> Float[Array, "*batch 1"]:
    """The sum over the last axis: its second half is added to the first until one number is left. As fast on
    a CPU as XLA's reduction, whose order XLA chooses; that of additions it keeps."""
    last = []
    while (count := x.shape[-1]) > 1:
        half = count // 2
        if count % 2:
            last.append(x[..., -1:])
        x = x[..., :half] + x[..., half : 2 * half]
    return sum(last, x)


@_sum_by_halves.defjvp
def _derivative(primals, tangents):
    return _sum_by_halves(*primals), jnp.sum(*tangents, axis=-1, keepdims=True)
