"""Proposals from a smaller model with the same vocabulary (network/draft_model.py, RunConfig.draft_model)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bonsai_jax.decoding import guesses, sampling, step_width
from bonsai_jax.decoding.sampling import NO_TOKEN
from bonsai_jax.network import decoder, draft_model
from bonsai_jax.network.draft_model import DraftModelState
from bonsai_jax.network.kinds.place import STEP_TOKENS
from bonsai_jax.network.params import decode_bytes

LOADS = "draft_model"
MOST = STEP_TOKENS - 1
TRUST = 0.8  # of a model that was chosen for this
MEMORY, ALONE = 8, 32  # tokens of 32 steps are read in the time of four


def time(params: Any, config: Any) -> float:
    """The time of a step of the draft model, relative to one of the model: by the bytes of weights that each
    reads and, on a GPU, by how many layers each has. A small model reads little there, but its layers wait
    for each other as those of a large one do."""
    own = config.draft_model
    cost = step_width.cost(decode_bytes(params.draft_model, own), own.num_layers)
    return cost / step_width.cost(decode_bytes(params, config), config.num_layers)


def propose(params: Any, state: Any, config: Any, count: int) -> tuple[Int[Array, "B count"], Any]:
    """The draft model's next tokens, as many as pay, and the state with its keys and values. Each is drawn as
    its row draws, with the noise of its position, so that two models which agree draw the same token.

    They are as many as the step reads that is expected to draw most tokens in its time
    (step_width.tokens_to_read). None where that is a plain step: `follow_and_guess` sees when drafting would
    pay again. None either where it never could, as with a large draft model for many rows.
    """
    s, running, rows = state.speculation, state.remaining > 0, len(state.tokens)
    share = time(params, config)
    if not step_width.could_pay(rows, count + 1, share):
        return jnp.full((rows, count), NO_TOKEN, jnp.int32), state
    choice = step_width.tokens_to_propose(params, state, config, count, share)
    counts = [width - 1 for width in step_width.widths(count + 1)]

    def draw(logits: Float[Array, "B V"], positions: Int[Array, "B"]) -> Int[Array, "B"]:
        return sampling.guess(state.sampler, _same_ids(logits, config), positions)

    tokens, own = draft_model.foresee(
        params.draft_model,
        s.draft,
        state.cache,
        state.tokens,
        running,
        jnp.array(counts)[choice],
        count,
        config.draft_model,
        draw,
    )
    proposals = jnp.where(running[:, None], tokens, NO_TOKEN)
    return proposals, state.replace(speculation=s.replace(draft=own))


def follow(
    params: Any,
    state: Any,
    hidden: Float[Array, "B T H"] | None,
    tokens: jax.Array,
    positions: Int[Array, "B T"],
    config: Any,
) -> DraftModelState:
    """The draft model's state after these tokens; as it was where drafting could not even pay for one row."""
    if not step_width.could_pay(1, STEP_TOKENS, time(params, config)):
        return state.speculation.draft
    return _read(params, state, tokens, positions, config)[1]


def unread(own: DraftModelState, first: Int[Array, "B"], most: int) -> None:
    """Nothing: it reads tokens alone."""


def follow_and_guess(
    params: Any,
    state: Any,
    unread: None,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    config: Any,
) -> tuple[DraftModelState, Int[Array, "B T"]]:
    """`follow`, and what it would have proposed after each of a row's latest tokens, drawn as `propose`
    draws. No guesses where drafting could not pay for so many rows."""
    if not step_width.could_pay(len(tokens), state.speculation.width, time(params, config)):
        return follow(params, state, None, tokens, positions, config), guesses.none(positions)
    hidden, own = _read(params, state, tokens, positions, config)

    def guess(hidden: Float[Array, "B C H"], positions: Int[Array, "B C"]) -> Int[Array, "B C"]:
        logits = _same_ids(decoder.unembed(params.draft_model, hidden, config.draft_model), config)
        return sampling.guess_each(state.sampler, logits, positions + 1)

    return own, guesses.after_latest(hidden, positions, guess)


def _read(
    params: Any, state: Any, tokens: jax.Array, positions: Int[Array, "B T"], config: Any
) -> tuple[Float[Array, "B T H"], DraftModelState]:
    own, cache = state.speculation.draft, state.cache
    return draft_model.read(params.draft_model, own, cache, tokens, positions, config.draft_model)


def _same_ids(logits: Float[Array, "*batch D"], config: Any) -> Float[Array, "*batch V"]:
    """The draft model's logits, for the ids that the model has; vocabularies may differ in what pads them."""
    missing = max(0, config.vocab_size - config.draft_model.vocab_size)
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, missing)]
    return jnp.pad(logits, padding, constant_values=-jnp.inf)[..., : config.vocab_size]
