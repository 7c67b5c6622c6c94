"""Speculation: steps that read several tokens of a row, its newest and some that are proposed to follow.

    read     newest  p1   p2   p3        proposals (proposers/), behind the cache
    drawn    d1      d2   d3   d4        the token behind each, as plain decoding would draw it
    kept     d1      d2   d3             p1 = d1 and p2 = d2 but p3 is not d3: what is behind p3 means nothing

The text is that of plain decoding, greedy or sampled, whatever is proposed. A token's noise depends on its
row's key, its position and its id alone (sampling.py), so d2 is what plain decoding draws behind d1: the same
token, and so the same distribution. A proposal is accepted if it is the token that is drawn anyway; nothing
has to be drawn again, as in Leviathan et al. 2023, whose draws cannot be repeated. What differs is rounding:
a product of several rows may add in another order than that of one, which shows at near-ties.

Keys of what is not kept are written over. A recurrent state cannot take tokens back, so it takes none in
before they are kept: a step reads proposals on top of the state without changing it, notes what each token
would have done to it, of every layer its projections, and then lets those that are kept do it
(decoder.replay). The state is read twice and written once, where a plain step reads and writes it once.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from bonsai_jax.config import ModelConfig
from bonsai_jax.decoding import proposers, sampling
from bonsai_jax.decoding.checks import check
from bonsai_jax.decoding.sampling import NO_TOKEN
from bonsai_jax.network import decoder, draft
from bonsai_jax.network.kinds.place import STEP_TOKENS
from bonsai_jax.network.params import Params
from bonsai_jax.network.taps import Taps
from pallas_kernels import serializable

State = Any  # decoding.State, which has a Speculation in it


@serializable
class Speculation(struct.PyTreeNode):
    """What B rows that speculate keep beside their cache.

    ids       int32 [B, capacity of the cache]: prompt and answer by position, the newest token at
              cache.lengths; NO_TOKEN where vectors were read in place of tokens
    steps     int32 [B], steps of `decode` that a row took part in: with the tokens of its answer, how many
              one step gave
    proposer  a file of proposers/
    width     tokens of a row in a step, its newest among them
    """

    ids: Int[Array, "B capacity"]
    steps: Int[Array, "B"]
    proposer: str = struct.field(pytree_node=False, default="ngram")
    width: int = struct.field(pytree_node=False, default=STEP_TOKENS)


def start(rows: int, capacity: int, proposer: str, of_device: int | None = None) -> Speculation:
    """For rows of which nothing was read.

    of_device   rows of each device; None: all
    Raises NotImplementedError for a proposer that there is no file for.
    """
    proposers.get(proposer)
    ids = jnp.full((rows, capacity), NO_TOKEN, jnp.int32)
    return Speculation(ids, jnp.zeros(rows, jnp.int32), proposer, width(of_device or rows))


def width(rows: int) -> int:
    """Tokens of a row in a step where a device has so many rows, 8 of one row, 4 of two, else 2: products of
    up to 8 tokens run by kernels of a decode step, which take about the time that reading the weights
    takes."""
    return max(2, STEP_TOKENS // rows)


def note(
    s: Speculation, tokens: Int[Array, "B T"], first: Int[Array, "B"], valid: Bool[Array, "B T"]
) -> Speculation:
    """Keep those of a row's tokens that are valid, the first of them at position `first`."""
    position = jnp.where(valid, first[:, None] + jnp.arange(tokens.shape[1]), s.ids.shape[1])
    row = jnp.arange(tokens.shape[0])[:, None]
    return s.replace(ids=s.ids.at[row, position].set(tokens, mode="drop"))


def decode(
    params: Params,
    state: State,
    config: ModelConfig,
    *,
    limit: int | Int[Array, ""],
    size: int,
    logprobs: int | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """decoding.decode of a state with a Speculation: steps until every row has ended or has `size` tokens, or
    `limit` of them have been made. Where no row has a proposal, a step is an ordinary one."""
    rows, width = state.tokens.shape[0], state.speculation.width
    propose = proposers.get(state.speculation.proposer).propose
    one_step = functools.partial(step, params, config=config, logprobs=logprobs, **options)

    def room(state, written):
        return jnp.minimum(state.remaining, size - written)

    def unfinished(carry):
        i, state, written, _ = carry
        return (i < limit) & jnp.any(room(state, written) > 0)

    def body(carry):
        i, state, written, out = carry
        left = room(state, written)
        readable = jnp.minimum(left, state.cache.capacity - state.cache.lengths)
        proposals, state = propose(params, state, config, width - 1)  # [B, T - 1]
        proposals = jnp.where(jnp.arange(1, width) < readable[:, None], proposals, NO_TOKEN)
        state, *drawn = jax.lax.cond(
            jnp.any(proposals[:, 0] != NO_TOKEN),
            lambda state: one_step(state, proposals, left > 0),
            lambda state: _widened(one_step(state, proposals[:, :0], left > 0), width),
            state,
        )
        new = drawn[0] != NO_TOKEN
        at = jnp.where(new, written[:, None] + jnp.arange(width), size)
        row = jnp.arange(rows)[:, None]
        out = jax.tree.map(lambda out, new: out.at[row, at].set(new, mode="drop"), out, drawn)
        return i + 1, state, written + new.sum(1), out

    out: list[Any] = [jnp.full((rows, size), NO_TOKEN, jnp.int32)]
    if logprobs is not None:
        out.append(sampling.no_logprobs((rows, size), logprobs))
    carry = 0, state, jnp.zeros(rows, jnp.int32), out
    _, state, _, out = jax.lax.while_loop(unfinished, body, carry)
    return (state, *out)


def step(
    params: Params,
    state: State,
    proposals: Int[Array, "B T-1"],
    running: Bool[Array, "B"],
    *,
    config: ModelConfig,
    taps: Taps | None = None,
    logits_processor: Callable[[jax.Array, State], jax.Array] | None = None,
    logprobs: int | None = None,
) -> tuple[Any, ...]:
    """Read each running row's newest token and its proposals up to the first NO_TOKEN, and keep what plain
    steps would draw, as far as the proposals foresee it.

    Returns the state, int32 [B, T] tokens, 1 to T of each running row and NO_TOKEN behind, and with
    logprobs=n Logprobs [B, T].
    """
    first, offset = state.cache.lengths, jnp.arange(proposals.shape[1] + 1)
    read = jnp.concatenate([state.tokens[:, None], proposals], axis=1)  # [B, T]
    full = first >= state.cache.capacity
    check(~jnp.any(running & full), "decode: a row's cache is full; make the state with a larger context")
    readable = running[:, None] & _up_to(proposals != NO_TOKEN)
    after = first[:, None] + offset + 1  # positions of what is drawn
    positions = jnp.where(readable, after - 1, -1)
    hold = proposals.shape[1] > 0 and state.cache.recurrent
    tokens = jnp.maximum(read, 0)
    hidden, cache, updates = decoder.decoder(
        params, tokens, positions, state.cache, config, positions.max() + 1, taps, keep_updates=hold
    )
    cache = draft.follow(params, cache, hidden, tokens, positions, config)
    of_model = decoder.logits(params, hidden, config)  # [B, T, V]
    sampler = sampling.foresee(state.sampler, proposals)
    logits = of_model
    if logits_processor is not None:
        before = {"tokens": read, "remaining": state.remaining[:, None] - offset, "sampler": sampler}

        def processed(logits, lengths, before):
            return logits_processor(logits, state.replace(cache=cache.replace(lengths=lengths), **before))

        logits = jax.vmap(processed, 1, 1)(of_model, after, before)
    drawn = sampling.sample_each(sampler, logits, after)  # [B, T]
    stops = jnp.any(drawn[..., None] == state.stop_ids[:, None], axis=-1)
    kept = readable & _up_to((proposals == drawn[:, :-1]) & ~stops[:, :-1])
    count = kept.sum(1)
    newest = jnp.take_along_axis(drawn, jnp.maximum(count - 1, 0)[:, None], 1)[:, 0]
    remaining = jnp.where(jnp.any(kept & stops, axis=1), 0, state.remaining - count)
    if hold:
        cache = decoder.replay(params, cache, updates, jnp.where(kept, positions, -1), config)
    cache = draft.rewound(cache, state.cache, hidden, count)
    state = state.replace(
        cache=cache.replace(lengths=first + count),
        tokens=jnp.where(running, newest, state.tokens),
        remaining=jnp.maximum(remaining, 0),
        sampler=sampling.remember(state.sampler, drawn, kept),
        speculation=note(
            state.speculation.replace(steps=state.speculation.steps + running), drawn, first + 1, kept
        ),
    )
    tokens = jnp.where(kept, drawn, NO_TOKEN)
    return (state, tokens) if logprobs is None else (state, tokens, _logprobs(of_model, drawn, logprobs))


def _up_to(holds: Bool[Array, "B T-1"]) -> Bool[Array, "B T"]:
    """True for the first, and for each whose predecessors all hold."""
    holds = jnp.pad(holds, ((0, 0), (1, 0)), constant_values=True)
    return jnp.cumprod(holds, axis=1).astype(bool)


def _logprobs(logits: jax.Array, tokens: jax.Array, n: int) -> sampling.Logprobs:
    flat = sampling.logprobs_of(logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1), n)
    return jax.tree.map(lambda x: x.reshape(*tokens.shape, *x.shape[1:]), flat)


def _widened(stepped: tuple[Any, ...], width: int) -> tuple[Any, ...]:
    """What a step of one token a row returns in the shapes of one of `width`."""
    state, tokens, *scores = stepped

    def pad(x, value=0):
        return jnp.pad(x, ((0, 0), (0, width - 1), *[(0, 0)] * (x.ndim - 2)), constant_values=value)

    return (state, pad(tokens, NO_TOKEN), *(jax.tree.map(pad, of) for of in scores))
