"""Proposals from the file's draft layer (draft.py)."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from bonsai_jax.decoding.sampling import NO_TOKEN
from bonsai_jax.network import draft

DRAFTS = True
MOST = 3  # tokens: the layer was trained to predict one, and is less sure of each that follows


def propose(params: Any, state: Any, config: Any, count: int) -> tuple[Int[Array, "B count"], Any]:
    """The draft layer's likeliest tokens, up to MOST, whatever the row's sampling, and the state with the
    layer's keys and values."""
    drafted = min(count, MOST)
    tokens, cache = draft.foresee(params, state.cache, state.tokens, state.remaining > 0, drafted, config)
    proposals = jnp.pad(tokens, ((0, 0), (0, count - drafted)), constant_values=NO_TOKEN)
    return proposals, state.replace(cache=cache)
