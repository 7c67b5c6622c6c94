"""How far the predictions of one model are from another's on a text, both run side by side."""

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Int

from bonsai_jax.measure.evaluate import Divergence, Mean, score_chunk
from bonsai_jax.model import Model
from bonsai_jax.network import architectures
from bonsai_jax.tokens.tokenizer import Tokenizer
from checkpoints import Checkpoint


@dataclasses.dataclass
class Comparison:
    """Figures of models A and B over the tokens scored so far (evaluate.py).

    nll_a, nll_b  negative log-likelihoods of the text's tokens, in nats
    divergence    of B from A: KL(A || B) in nats, and whether both have the same likeliest token
    """

    nll_a: Mean = dataclasses.field(default_factory=Mean)
    nll_b: Mean = dataclasses.field(default_factory=Mean)
    divergence: Divergence = dataclasses.field(default_factory=Divergence)


def compare_predictions(
    a: Model,
    b: Model,
    cut: Int[np.ndarray, "chunks context"],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Score every chunk with both models.

        KL = sum_v p_v (log p_v - log q_v)    of each scored token; p: A's distribution, q: B's

    cut  chunks of the text, from `evaluate.chunks`; the second half of each is scored
    Memory holds the log-probabilities of one chunk of both, float32 [scored tokens, vocabulary].
    Raises ValueError for models with vocabularies of two sizes; `shared_tokenizer` also compares tokens.
    """
    if a.config.vocab_size != b.config.vocab_size:
        raise ValueError(
            _unlike(a.source, b.source, f"{a.config.vocab_size} and {b.config.vocab_size} tokens")
        )
    result = Comparison()
    for done, chunk in enumerate(cut, 1):
        log_probs_a, losses_a = score_chunk(a, chunk)
        log_probs_b, losses_b = score_chunk(b, chunk)
        result.nll_a.add(losses_a)
        result.nll_b.add(losses_b)
        result.divergence.add(log_probs_a, log_probs_b)
        progress(done, len(cut))
    return result


def shared_tokenizer(a: Checkpoint, b: Checkpoint) -> Tokenizer:
    """A's tokenizer, where both models have the same tokens under the same ids; reads no weights. Raises
    ValueError where they have not."""
    sizes = [architectures.config_of(checkpoint).vocab_size for checkpoint in (a, b)]
    if sizes[0] != sizes[1]:
        raise ValueError(_unlike(a.source, b.source, f"{sizes[0]} and {sizes[1]} tokens"))
    first, second = (Tokenizer.from_checkpoint(checkpoint) for checkpoint in (a, b))
    for token in range(sizes[0] if first.texts != second.texts else 0):  # texts may name a byte in two ways
        one, other = first.token_bytes(token), second.token_bytes(token)
        if one != other:
            raise ValueError(_unlike(a.source, b.source, f"token {token} is {one!r} and {other!r}"))
    return first


def _unlike(a: str, b: str, how: str) -> str:
    return (
        f"{a} and {b} have different vocabularies ({how}), so their predictions cannot be compared; compare "
        "models with one vocabulary, or the weights alone, without a text (-f)"
    )
