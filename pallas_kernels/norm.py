"""Root-mean-square norm, which stands before products and, per head, before attention."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*batch H"], gamma: Float[Array, "H"], eps: float) -> Float[Array, "*batch H"]:
    """Root-mean-square norm (Zhang and Sennrich 2019).

    y = gamma * x / sqrt(mean(x^2) + eps)
    """
    return gamma * (x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps))
