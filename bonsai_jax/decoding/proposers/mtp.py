"""Proposals of the draft layer that the file has (draft.py)."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from bonsai_jax.decoding.sampling import NO_TOKEN
from bonsai_jax.network import draft

DRAFTS = True
MOST = 3  # tokens: it was made to foresee one, and is less sure of each that follows


def propose(params: Any, state: Any, config: Any, count: int) -> tuple[Int[Array, "B count"], Any]:
    """Its likeliest tokens, up to MOST, whatever the row's sampling; and the state with its keys and
    values."""
    ahead = min(count, MOST)
    tokens, cache = draft.foresee(params, state.cache, state.tokens, state.remaining > 0, ahead, config)
    proposals = jnp.pad(tokens, ((0, 0), (0, count - ahead)), constant_values=NO_TOKEN)
    return proposals, state.replace(cache=cache)
