"""Norms, which stand before products and, per head, before attention."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*batch H"], gamma: Float[Array, "H"], eps: float) -> Float[Array, "*batch H"]:
    """Root-mean-square norm (Zhang and Sennrich 2019).

    y = gamma * x / sqrt(mean(x^2) + eps)
    """
    return gamma * (x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps))


def layer_norm(x: Float[Array, "*batch H"], gamma: Float[Array, "H"], eps: float) -> Float[Array, "*batch H"]:
    """Layer norm without bias (Ba et al. 2016): the root-mean-square norm of what differs from the mean.

    y = gamma * (x - mean(x)) / sqrt(variance(x) + eps)
    """
    return rms_norm(centered(x), gamma, eps)


def centered(x: Float[Array, "*batch H"]) -> Float[Array, "*batch H"]:
    """x - mean(x)"""
    return x - jnp.mean(x, axis=-1, keepdims=True)
