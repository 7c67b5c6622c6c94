"""A causal depthwise convolution over tokens that come a few at a time."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def causal_conv(
    x: Float[Array, "B T C"],
    tails: Float[Array, "L B W C"],
    positions: Int[Array, "B T"],
    layer: int | Int[Array, ""],
    *,
    weights: Float[Array, "L C W"],
    bias: Float[Array, "L C"] | None = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "L B W C"]]:
    """Each channel of each token as a weighted sum of that channel in the last W tokens, in float32.

    y[t, c] = bias[c] + sum_i weights[c, i] x[t - W + 1 + i, c],   x before a row's first token is 0

    tails      the last tokens that each layer and row has read, float32: that at position p in slot p % W
    positions  int32, of each token within its row; -1 for padding, behind a row's tokens: nothing of it is
               kept. A row whose first token is at 0 begins with zeros, whatever the tail holds
    layer      picks the layer of tails, weights and bias
    Returns y, and tails with the layer's own replaced.
    """
    seen, tail = inputs(x.astype(jnp.float32), tails[layer], positions)
    y = jnp.zeros(()) if bias is None else bias[layer]
    for i, tokens in enumerate(seen):
        y = y + weights[layer][:, i] * tokens
    return y, tails.at[layer].set(tail)


def inputs(
    x: Float[Array, "B T C"], tail: Float[Array, "B W C"], positions: Int[Array, "B T"]
) -> tuple[list[jax.Array], jax.Array]:
    """What the convolution reads: W arrays [B, T, C], which are the tokens W - 1 places before each token,
    then W - 2, and at last each token itself; and the tail after these tokens."""
    W, T = tail.shape[1], x.shape[1]
    slots, valid = jnp.arange(W), positions >= 0
    start = jnp.maximum(positions[:, :1], 0)
    before = start - W + slots  # positions [B, W]
    old = jnp.take_along_axis(tail, (before % W)[..., None], axis=1)
    old = jnp.where(((before < 0) & valid[:, :1])[..., None], 0.0, old)
    # Each apart, so that XLA makes none of them: what is multiplied reads x as it lies.
    seen = [jnp.concatenate([old[:, 1 + i :], x[:, : T + i + 1 - W]], axis=1)[:, :T] for i in range(W)]
    newest = start + valid.sum(1, keepdims=True) - 1
    at = (newest - (newest - slots) % W - start)[..., None]  # among these; below 0 for those before
    took = lambda x, i: jnp.take_along_axis(x, jnp.clip(i, 0, x.shape[1] - 1), axis=1)  # noqa: E731
    return seen, jnp.where(at < 0, took(old, at + W), took(x, at))
