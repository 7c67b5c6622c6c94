"""The samplers between penalties and the draw, as pure functions of logits (docs/sampling.md).

Logits are float32 [B, n], in any order; -inf is a token that is not drawn. Each function returns them with
-inf for the tokens that it removes, and leaves the others as they are. Parameters are [B], one for each row.
Tokens with equal logits stay or go together, so that nothing depends on an order; llama.cpp, which sorts,
keeps some of them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.sampling.reference import sortable, threshold

LEAST = 1e-30  # of a sum that the likeliest token reaches alone


def only(logits: Float[Array, "B n"], keep: Bool[Array, "B n"]) -> Float[Array, "B n"]:
    """The logits of these tokens alone."""
    return jnp.where(keep, logits, -jnp.inf)


def log_probabilities(logits: Float[Array, "B n"]) -> Float[Array, "B n"]:
    """Of the tokens that are left; -inf for the others."""
    return jax.nn.log_softmax(logits, axis=-1)


def entropy(log_p: Float[Array, "B n"]) -> Float[Array, "B"]:
    """H = -sum p log p, in nats."""
    return -jnp.where(log_p > -jnp.inf, jnp.exp(log_p) * log_p, 0.0).sum(-1)


def top_n_sigma(logits: Float[Array, "B n"], n: Float[Array, "B"]) -> Float[Array, "B n"]:
    """Keep logits >= max - n * sigma, with the standard deviation of all finite logits. n <= 0: all.

    Tang et al. 2024, arXiv:2411.07641.
    """
    finite = logits > -jnp.inf
    count = jnp.maximum(finite.sum(-1, keepdims=True), 1)
    mean = jnp.where(finite, logits, 0.0).sum(-1, keepdims=True) / count
    sigma = jnp.sqrt(jnp.where(finite, (logits - mean) ** 2, 0.0).sum(-1, keepdims=True) / count)
    least = logits.max(-1, keepdims=True) - n[:, None] * sigma
    return only(logits, (logits >= least) | (n <= 0)[:, None])


def top_k(logits: Float[Array, "B n"], k: Int[Array, "B"]) -> Float[Array, "B n"]:
    """Keep the k likeliest, and those tied with the k-th. k = 0: all."""
    order = sortable(logits)
    kth = threshold(order, jnp.ones_like(logits), jnp.where(k > 0, k, logits.shape[1]).astype(jnp.float32))
    return only(logits, order >= kth[:, None])


def typical(logits: Float[Array, "B n"], p: Float[Array, "B"]) -> Float[Array, "B n"]:
    """Keep the tokens with the least |-log p_i - H| whose probabilities sum to more than p. p >= 1: all.

    Meister et al. 2022, arXiv:2202.00666.
    """
    log_p = log_probabilities(logits)
    distance = jnp.abs(log_p + entropy(log_p)[:, None])  # inf for a token that is not drawn
    beyond = jnp.nextafter(p, jnp.float32(2))  # a sum of p is not more than p
    order = sortable(-distance)
    furthest = threshold(order, jnp.exp(log_p), beyond)
    return only(logits, (order >= furthest[:, None]) | (p >= 1)[:, None])


def top_p(logits: Float[Array, "B n"], p: Float[Array, "B"]) -> Float[Array, "B n"]:
    """Keep the fewest likeliest whose probabilities sum to p or more. p >= 1: all.

    Holtzman et al. 2020, arXiv:1904.09751.
    """
    probabilities = jnp.exp(log_probabilities(logits))
    order = sortable(logits)
    least = threshold(order, probabilities, jnp.maximum(p * probabilities.sum(-1), LEAST))
    return only(logits, (order >= least[:, None]) | (p >= 1)[:, None])


def min_p(logits: Float[Array, "B n"], p: Float[Array, "B"]) -> Float[Array, "B n"]:
    """Keep p_i >= p * max p. p = 0: all.

    Nguyen et al. 2024, arXiv:2407.01082.
    """
    relative = jnp.exp(logits - logits.max(-1, keepdims=True))
    return only(logits, relative >= p[:, None])


def xtc(
    logits: Float[Array, "B n"],
    probability: Float[Array, "B"],
    least: Float[Array, "B"],
    chance: Float[Array, "B"],
) -> Float[Array, "B n"]:
    """If chance <= probability: of the tokens with p_i >= least, keep the least likely alone, and all others.

    chance   uniform in [0, 1), of this row and position
    With least > 0.5 or probability = 0 nothing happens. p-e-w 2024, oobabooga/text-generation-webui#6335.
    """
    above = jnp.exp(log_probabilities(logits)) >= least[:, None]
    last = jnp.where(above, logits, jnp.inf).min(-1, keepdims=True)
    happens = (probability > 0) & (least <= 0.5) & (chance <= probability)
    return only(logits, ~(above & (logits > last) & happens[:, None]))


def mirostat(logits: Float[Array, "B n"], mu: Float[Array, "B"]) -> Float[Array, "B n"]:
    """Keep -log2 p_i <= mu, and the likeliest in any case.

    Basu et al. 2021, arXiv:2007.14966, algorithm 2.
    """
    surprise = -log_probabilities(logits) / jnp.log(2.0)
    return only(logits, (surprise <= mu[:, None]) | (logits == logits.max(-1, keepdims=True)))


def heated(logits: Float[Array, "B n"], temperature: Float[Array, "B"]) -> Float[Array, "B n"]:
    """logits / temperature; at 0 the largest alone."""
    greedy = (temperature <= 0)[:, None]
    hot = logits / jnp.where(greedy, 1.0, temperature[:, None])
    return jnp.where(greedy, only(logits, logits == logits.max(-1, keepdims=True)), hot)


def dynamic_temperature(
    logits: Float[Array, "B n"],
    temperature: Float[Array, "B"],
    spread: Float[Array, "B"],
    exponent: Float[Array, "B"],
    banned: Int[Array, "B"],
) -> Float[Array, "B"]:
    """low + (high - low) * (H / log count)^exponent, with low, high = max(0, temperature - spread),
    temperature + spread, and the number of tokens among which one is drawn. spread = 0: the temperature.

    banned   tokens without a probability that are counted too, as llama.cpp does
    kalomaze 2023, llama.cpp#4972.
    """
    count = (logits > -jnp.inf).sum(-1) + banned
    largest = jnp.log(jnp.maximum(count, 2).astype(jnp.float32))
    share = jnp.maximum(entropy(log_probabilities(logits)), 0.0) / largest
    low, high = jnp.maximum(temperature - spread, 0.0), temperature + spread
    own = jnp.where(count > 1, low + (high - low) * share**exponent, 1.0)
    return jnp.where(spread > 0, own, temperature)
