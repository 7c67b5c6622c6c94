"""Proposals from a smaller model with the same vocabulary (network/draft_model.py, RunConfig.draft_model)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bonsai_jax.decoding import sampling, step_width
from bonsai_jax.decoding.sampling import NO_TOKEN
from bonsai_jax.network import draft_model
from bonsai_jax.network.draft_model import DraftModelState
from bonsai_jax.network.kinds.place import STEP_TOKENS
from bonsai_jax.network.params import decode_bytes
from pallas_kernels import device

LOADS = "draft_model"
TRUST = 0.8  # of a model that was chosen for this
LAYER_BYTES = 43e6  # what an H200 reads in 10 us, the time that a layer takes beside its weights (LOG.md)


def time(params: Any, config: Any) -> float:
    """The time of a step of the draft model, relative to one of the model: by the bytes of weights that each
    reads and, on a GPU, by how many layers each has. A small model reads little there, but its layers wait
    for each other as those of a large one do."""
    return _cost(params.draft_model, config.draft_model) / _cost(params, config)


def _cost(params: Any, config: Any) -> float:
    """The time of a step of one row, in bytes that could be read in it."""
    layer_bytes = 0 if device.platform() == "cpu" else LAYER_BYTES
    return decode_bytes(params, config) + config.num_layers * layer_bytes


def propose(params: Any, state: Any, config: Any, count: int) -> tuple[Int[Array, "B count"], Any]:
    """The draft model's next tokens, as many as pay, and the state with its keys and values. Each is drawn as
    its row draws, with the noise of its position, so that two models which agree draw the same token.

    They are as many as the step reads that is expected to draw most tokens in its time
    (step_width.tokens_to_read). Where that is a plain step, one token is drawn, which is checked but not
    read: it shows when drafting would pay again. None where even right ones cost too much, as those of a
    large draft model for many rows.
    """
    s, running, rows = state.speculation, state.remaining > 0, len(state.tokens)
    keys = step_width.key_time(params, state.cache, config) * state.cache.lengths
    all_proposed, share = jnp.zeros((rows, count), jnp.int32), time(params, config)
    choice = step_width.tokens_to_read(s, all_proposed, running, keys, share)
    counts = [int(step_width.could_pay(rows, count + 1, share))]
    counts += [width - 1 for width in step_width.widths(count + 1)[1:]]
    missing = max(0, config.vocab_size - config.draft_model.vocab_size)

    def draw(logits: Float[Array, "B V"], positions: Int[Array, "B"]) -> Int[Array, "B"]:
        logits = jnp.pad(logits, ((0, 0), (0, missing)), constant_values=-jnp.inf)
        return sampling.guess(state.sampler, logits[:, : config.vocab_size], positions)

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
    own, cache = state.speculation.draft, state.cache
    if not step_width.could_pay(1, STEP_TOKENS, time(params, config)):
        return own
    return draft_model.follow(params.draft_model, own, cache, tokens, positions, config.draft_model)
