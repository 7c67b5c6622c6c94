"""Proposals from the file's draft layer (network/draft.py)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bonsai_jax.decoding import guesses, step_width
from bonsai_jax.decoding.sampling import NO_TOKEN
from bonsai_jax.network import draft
from bonsai_jax.network.draft import DraftState, Unread
from bonsai_jax.network.params import decode_bytes

LOADS = "draft"
TRUST = 0.8  # it was trained to be right
MEMORY = 16  # with 8, a layer that is right in two of three cases is often mistrusted by chance (LOG.md)
ALONE = 8  # tokens are read together as rows of one token each, so there is little to gain by more
MOST = 3  # tokens: the layer was trained to predict one, and is less sure of each that follows
LAYERS = 2  # whose time it takes on a GPU beside its weights: its other products are launches, too


def time(params: Any, config: Any) -> float:
    """The time of the draft layer and the output matrix, relative to a step of the model."""
    head = params.embed if params.head is None else params.head
    own_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves((params.draft, head)))
    cost = step_width.cost(own_bytes, LAYERS)
    return cost / step_width.cost(decode_bytes(params, config), config.num_layers)


def propose(params: Any, state: Any, config: Any, count: int) -> tuple[Int[Array, "B count"], Any]:
    """The draft layer's likeliest tokens, whatever the row's sampling, and the state with the layer's keys
    and values. None where a plain step is expected to draw more in its time."""
    running, s, share = state.remaining > 0, state.speculation, time(params, config)
    none = jnp.full((len(running), count), NO_TOKEN, jnp.int32)
    if not step_width.could_pay(len(running), count + 1, share):
        return none, state

    def drafted() -> tuple[jax.Array, DraftState]:
        return draft.foresee(params, params.draft, s.draft, state.cache, state.tokens, running, count, config)

    choice = step_width.tokens_to_propose(params, state, config, count, share)
    tokens, own = jax.lax.cond(choice > 0, drafted, lambda: (none, s.draft))
    return tokens, state.replace(speculation=s.replace(draft=own))


def follow(
    params: Any,
    state: Any,
    hidden: Float[Array, "B T H"],
    tokens: jax.Array,
    positions: Int[Array, "B T"],
    config: Any,
) -> DraftState | Unread:
    """The draft layer's state after these tokens, or what it is to read later, with these; as it was where
    drafting could not even pay for one row."""
    own, cache = state.speculation.draft, state.cache
    if isinstance(own, Unread):
        return own.noted(hidden, positions)
    if not step_width.could_pay(1, 1 + MOST, time(params, config)):
        return own
    return draft.follow(params, params.draft, own, cache, hidden, tokens, positions, config)[1]


def unread(own: DraftState, first: Int[Array, "B"], most: int) -> Unread:
    """Hidden vectors of up to `most` tokens that a row reads from position `first` on."""
    return Unread(jnp.zeros((len(first), most, own.hidden.shape[1])), first)


def follow_and_guess(
    params: Any,
    state: Any,
    unread: Unread,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    config: Any,
) -> tuple[Any, Int[Array, "B T"]]:
    """`follow`, and the first token that it would have proposed after each of a row's latest ones. No guesses
    where drafting could not pay for so many rows."""
    hidden, s, cache = unread.hidden[:, : tokens.shape[1]], state.speculation, state.cache
    if not step_width.could_pay(len(tokens), s.width, time(params, config)):
        return follow(params, state, hidden, tokens, positions, config), guesses.none(positions)
    x, own = draft.follow(params, params.draft, s.draft, cache, hidden, tokens, positions, config)

    def guess(x: Float[Array, "B C H"], positions: Int[Array, "B C"]) -> Int[Array, "B C"]:
        return draft.likeliest(params, params.draft, cache, x, positions, config)[0]

    return own, guesses.after_latest(x, positions, guess)
