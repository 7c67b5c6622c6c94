"""Proposals from the file's draft layer (network/draft.py)."""

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from bonsai_jax.network import draft
from bonsai_jax.network.draft import DraftState

LOADS = "draft"
TRUST = 1.0  # trained to be right; and drafted at a cost, whether they are read or not
MOST = 3  # tokens: the layer was trained to predict one, and is less sure of each that follows


def time(params: Any, config: Any) -> float:
    return 0.0  # of one layer, which drafts in any case


def propose(params: Any, state: Any, config: Any, count: int) -> tuple[Int[Array, "B count"], Any]:
    """The draft layer's likeliest tokens, whatever the row's sampling, and the state with the layer's keys
    and values."""
    running, s = state.remaining > 0, state.speculation
    tokens, own = draft.foresee(
        params, params.draft, s.draft, state.cache, state.tokens, running, count, config
    )
    return tokens, state.replace(speculation=s.replace(draft=own))


def follow(
    params: Any,
    state: Any,
    hidden: Float[Array, "B T H"],
    tokens: jax.Array,
    positions: Int[Array, "B T"],
    config: Any,
) -> DraftState:
    """The draft layer's state after these tokens."""
    own, cache = state.speculation.draft, state.cache
    return draft.follow(params, params.draft, own, cache, hidden, tokens, positions, config)
