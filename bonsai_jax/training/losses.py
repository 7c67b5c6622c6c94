"""Losses of logits, in nats a token."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def distillation_loss(
    logits: Float[Array, "B T V"],
    teacher_logits: Float[Array, "B T V"],
    mask: Bool[Array, "B T"],
    temperature: float = 1.0,
) -> Float[Array, ""]:
    """How far a student's predictions are from its teacher's (Hinton et al. 2015, arXiv:1503.02531).

    mean over mask of  t^2 sum_v p_v (log p_v - log q_v),   p = softmax(teacher / t),  q = softmax(logits / t)

    mask   the positions that count, True where there is a token
    The teacher's logits are constants.
    """
    teacher_logits = jax.lax.stop_gradient(teacher_logits)
    log_p, log_q = (jax.nn.log_softmax(x / temperature) for x in (teacher_logits, logits))
    divergence = (jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    return temperature**2 * jnp.where(mask, divergence, 0).sum() / mask.sum()


def token_logprobs(logits: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Float[Array, "B T-1"]:
    """log p of each token but the first, given those before it."""
    scores = jax.nn.log_softmax(logits[:, :-1])
    return jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]


def cross_entropy(
    logits: Float[Array, "B T V"], tokens: Int[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, ""]:
    """- mean of log p(token), over the tokens of mask but the first of each row."""
    counted = mask[:, 1:]
    return -jnp.where(counted, token_logprobs(logits, tokens), 0).sum() / counted.sum()
