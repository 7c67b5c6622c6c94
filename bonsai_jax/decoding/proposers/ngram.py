"""Proposals from the text itself: the tokens that followed the last time that its last tokens occurred.

prompt and answer   ... the cat sat on the mat. Then the cat
                                ^^^^^^                           followed "the cat" before: proposed
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from bonsai_jax.decoding.sampling import NO_TOKEN
from bonsai_jax.network.kinds.place import STEP_TOKENS

LOADS = None
MOST = STEP_TOKENS - 1
TRUST = 0.4  # the first proposals are just read; if they are wrong, the next are only checked
MEMORY, ALONE = 8, 4
LONGEST = 3  # tokens of the n-gram that is looked for: the newest and those before it
SHORTEST = 1


def time(params: Any, config: Any) -> float:
    return 0.0


def propose(params: Any, state: Any, config: Any, count: int) -> tuple[Int[Array, "B count"], Any]:
    """The `count` tokens after the latest earlier occurrence of the longest n-gram, LONGEST to SHORTEST
    tokens, that a row's text ends with. An occurrence less than `count` before the end is taken to repeat, as
    lists and tables do. NO_TOKEN where there is none."""
    ids, end = state.speculation.ids, state.cache.lengths[:, None]  # the newest token is at `end`
    at = jnp.arange(ids.shape[1])
    same, length = at < end, jnp.zeros(ids.shape, jnp.int32)  # n-grams that end at each position
    for back in range(LONGEST):
        token = jnp.take_along_axis(ids, jnp.maximum(end - back, 0), 1)
        earlier = jnp.roll(ids, back, 1)
        same &= (earlier == token) & (token != NO_TOKEN) & (at >= back) & (end >= back)
        length += same
    match = (length * ids.shape[1] + at).argmax(1)[:, None]  # the longest, and of these the latest
    known = jnp.take_along_axis(length, match, 1) >= SHORTEST
    following = match + 1 + jnp.arange(count) % jnp.maximum(end - match, 1)
    following = jnp.take_along_axis(ids, jnp.clip(following, 0, ids.shape[1] - 1), 1)
    return jnp.where(known, following, NO_TOKEN), state
