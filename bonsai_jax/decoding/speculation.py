"""Speculation: a step reads several tokens of a row, its newest and some that a proposer expects to follow.

    read      newest  p1   p2   p3       proposals (proposers/)
    drawn     d1      d2   d3   d4       the token after each, as plain decoding would draw it
    accepted  d1      d2   d3            p1 = d1 and p2 = d2, but p3 is not d3: d4 means nothing

The text is the text of plain decoding, greedy or sampled, whatever is proposed. The noise of a token depends
on its row's key, its position and its id alone (sampling.py), so d2 is what plain decoding draws after d1:
the same token, and so the same distribution. A proposal is accepted if it is the token that is drawn anyway.
Nothing is drawn twice, unlike in Leviathan et al. 2023. Only rounding differs: a product of several rows may
add in another order than a product of one, which shows at near-ties.

Wrong proposals cost time, so a step reads as many as pay, by the share of the latest that were right
(`tokens_to_read`). Those that are not read are checked too, against the token that is drawn: so a row's trust
in its proposals rises again without a step that is slower. A draft layer or model, whose proposals take time,
makes none while they do not pay. It reads the tokens of many plain steps together, and is checked by what it
would have proposed in the place of the latest.

Keys and values of rejected proposals are overwritten. A recurrent state cannot be rewound, so a step reads
its proposals without updating the state, stores what each token would change (its projections in every
layer), and then applies the changes of the accepted tokens (decoder.replay). The state is read twice and
written once, where a plain step reads and writes it once.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from bonsai_jax.config import ModelConfig
from bonsai_jax.decoding import proposers, sampling
from bonsai_jax.decoding.checks import check
from bonsai_jax.decoding.sampling import NO_TOKEN
from bonsai_jax.decoding.state import Drawn, Speculation, State
from bonsai_jax.decoding.step_width import key_time, tokens_to_read, widths
from bonsai_jax.network import decoder
from bonsai_jax.network.kinds.place import STEP_TOKENS
from bonsai_jax.network.params import Params
from bonsai_jax.network.taps import Taps


def start(rows: int, capacity: int, proposer: str, device_rows: int | None = None) -> Speculation:
    """A Speculation for rows that have read nothing yet.

    device_rows   rows on each device; None: all
    Raises NotImplementedError for a proposer that has no file.
    """
    ids = jnp.full((rows, capacity), NO_TOKEN, jnp.int32)
    steps, trust = jnp.zeros(rows, jnp.int32), jnp.full(rows, proposers.get(proposer).TRUST, jnp.float32)
    return Speculation(ids, steps, trust, proposer=proposer, width=width(device_rows or rows, proposer))


def width(rows: int, proposer: str) -> int:
    """Most tokens of a row in one step, by the number of rows on a device: 8 for one row, 4 for two, else 2.
    Products of up to 8 tokens run by the kernels of a decode step, in about the time of reading weights. A
    proposer of fewer has no steps of more, which would be compiled for nothing."""
    return min(max(2, STEP_TOKENS // rows), 1 + proposers.get(proposer).MOST)


def forgotten(s: Speculation, rows: Bool[Array, "B"]) -> Speculation:
    """With these rows as if they had read nothing yet."""
    ids = jnp.where(rows[:, None], NO_TOKEN, s.ids)
    return s.replace(ids=ids, trust=jnp.where(rows, proposers.get(s.proposer).TRUST, s.trust))


TRUSTED = 0.5  # from here on a row looks at each step, where that takes no time: most tokens will be proposed


def learned(s: Speculation, proposals: Int[Array, "B W-1"], tokens: Int[Array, "B W"]) -> Speculation:
    """With the trust in a row's proposals after tokens that were drawn, NO_TOKEN behind them.

        trust <- trust + (right - trust) / MEMORY,    for each proposal in whose place a token was drawn

    with the proposer's MEMORY, and for no more after the first that is wrong: those behind it were not
    expected after this token.
    """
    trust, right = s.trust, jnp.ones(len(tokens), bool)
    for i in range(proposals.shape[1]):  # column by column: one kernel
        checked = right & (proposals[:, i] != NO_TOKEN) & (tokens[:, i] != NO_TOKEN)
        right = checked & (proposals[:, i] == tokens[:, i])
        trust = jnp.where(checked, _after(s, trust, right), trust)
    return s.replace(trust=trust)


def compared(s: Speculation, guesses: Int[Array, "B T"], tokens: Int[Array, "B T"]) -> Speculation:
    """With the trust in a row's proposals after guesses, each made from the tokens that precede it: all of
    them count, by the rule of `learned`. tokens: what was drawn in their places; NO_TOKEN: no guess or token.
    """
    trust = s.trust
    for i in range(guesses.shape[1]):
        checked = (guesses[:, i] != NO_TOKEN) & (tokens[:, i] != NO_TOKEN)
        trust = jnp.where(checked, _after(s, trust, guesses[:, i] == tokens[:, i]), trust)
    return s.replace(trust=trust)


def _after(s: Speculation, trust: Float[Array, "B"], right: Bool[Array, "B"]) -> Float[Array, "B"]:
    new = 1 / proposers.get(s.proposer).MEMORY
    return (1 - new) * trust + jnp.where(right, new, 0.0)


def note(
    s: Speculation, tokens: Int[Array, "B T"], first: Int[Array, "B"], valid: Bool[Array, "B T"]
) -> Speculation:
    """Store the valid ones of a row's tokens, which stand at position `first` and after."""
    position = jnp.where(valid, first[:, None] + jnp.arange(tokens.shape[1]), s.ids.shape[1])
    row = jnp.arange(tokens.shape[0])[:, None]
    return s.replace(ids=s.ids.at[row, position].set(tokens, mode="drop"))


def follow(
    params: Params,
    state: State,
    hidden: Float[Array, "B T H"],
    tokens: Int[Array, "B T"] | Float[Array, "B T H"],
    positions: Int[Array, "B T"],
    config: ModelConfig,
) -> State:
    """The state with the draft layer or the draft model, where the proposer has one, after the tokens at
    these positions (-1: none), which the model has read; hidden: what it made of them."""
    s = state.speculation
    if s is None or s.draft is None:
        return state
    own = proposers.get(s.proposer).follow(params, state, hidden, tokens, positions, config)
    return state.replace(speculation=s.replace(draft=own))


def decode(
    params: Params,
    state: State,
    config: ModelConfig,
    plain: Callable[..., Drawn],
    *,
    limit: int | Int[Array, ""],
    size: int,
    logprobs: int | None = None,
    **options: Any,
) -> Drawn:
    """steps.decode for a state with a Speculation: steps until every row has ended or has `size` tokens, or
    `limit` steps have been made.

    plain   steps.step, for steps that read no proposals
    """
    assert state.speculation is not None
    rows, width = state.tokens.shape[0], state.speculation.width
    proposer = proposers.get(state.speculation.proposer)
    options = {"config": config, "logprobs": logprobs, **options}
    plain, share = functools.partial(plain, params, **options), proposer.time(params, config)
    steps_alone = proposer.ALONE if share == 0 else min(proposer.ALONE, size)
    most = max(width, steps_alone)
    each_key = key_time(params, state.cache, config)

    def room(state, written):
        return jnp.minimum(state.remaining, size - written)

    def unfinished(carry):
        i, state, written, _ = carry
        return (i < limit) & jnp.any(room(state, written) > 0)

    def body(carry):
        i, state, written, out = carry
        left = room(state, written)
        readable = jnp.minimum(left, state.cache.capacity - state.cache.lengths)
        proposals, state = proposer.propose(params, state, config, width - 1)  # [B, T - 1]
        proposals = jnp.where(jnp.arange(1, width) < readable[:, None], proposals, NO_TOKEN)

        def alone(state):
            if share > 0:
                at_most = jnp.minimum(limit - i, steps_alone)
                nothing = jnp.full_like(proposals, NO_TOKEN)  # does not end these steps
                alone_steps = functools.partial(_alone, plain, left=left, proposals=nothing, limit=at_most)
                return _followed_together(alone_steps, params, state, config, most, logprobs)
            trusted = jnp.any((left > 0) & (state.speculation.trust > TRUSTED))
            at_most = jnp.minimum(limit - i, jnp.where(trusted, 1, steps_alone))
            return _alone(plain, state, left, proposals, at_most, most, logprobs)

        def with_proposals(count, state):
            drawn = step(params, state, proposals[:, : count - 1], left > 0, **options)
            return 1, (left > 0).astype(jnp.int32), _widened(drawn, most)

        keys = each_key * state.cache.lengths
        choice = tokens_to_read(state.speculation, proposals, left > 0, keys, share)
        made, steps, (state, tokens, scores) = jax.lax.switch(
            choice,
            [alone, *(functools.partial(with_proposals, count) for count in widths(width)[1:])],
            state,
        )
        if share > 0:  # plain steps have learned from their own guesses
            proposals = jnp.where(choice > 0, proposals, NO_TOKEN)
        s = learned(state.speculation, proposals, tokens[:, :width])
        state = state.replace(speculation=s.replace(steps=s.steps + steps))
        drawn = tokens != NO_TOKEN
        at = jnp.where(drawn, written[:, None] + jnp.arange(most), size)
        row = jnp.arange(rows)[:, None]
        out = jax.tree.map(lambda out, new: out.at[row, at].set(new, mode="drop"), out, (tokens, scores))
        written = written + sum(drawn[:, t].astype(jnp.int32) for t in range(most))  # no kernel of its own
        return i + made, state, written, out

    no_scores = sampling.no_logprobs((rows, size), logprobs, state.sampler.scored)
    out = jnp.full((rows, size), NO_TOKEN, jnp.int32), no_scores
    carry = 0, state, jnp.zeros(rows, jnp.int32), out
    _, state, _, out = jax.lax.while_loop(unfinished, body, carry)
    return Drawn(state, *out)


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
) -> Drawn:
    """Read each running row's newest token and its proposals up to the first NO_TOKEN, and accept what plain
    steps would draw.

    Returns tokens int32 [B, T], 1 to T for each running row and NO_TOKEN after them, and Logprobs [B, T].
    """
    assert state.speculation is not None
    first, offset = state.cache.lengths, jnp.arange(proposals.shape[1] + 1)
    read = jnp.concatenate([state.tokens[:, None], proposals], axis=1)  # [B, T]
    full = first >= state.cache.capacity
    check(~jnp.any(running & full), "decode: a row's cache is full; make the state with a larger context")
    readable = running[:, None] & up_to(proposals != NO_TOKEN)
    positions = jnp.where(readable, first[:, None] + offset, -1)
    keep_updates = state.cache.recurrent
    tokens = jnp.maximum(read, 0)
    hidden, cache, updates = decoder.decoder(
        params, tokens, positions, state.cache, config, positions.max() + 1, taps, keep_updates
    )
    state = state.replace(cache=cache.replace(lengths=first + 1))
    state, accepted, drawn, scores = verify(
        params, state, hidden, proposals, readable, config, logits_processor, logprobs
    )
    positions = jnp.where(accepted, positions, -1)
    if keep_updates:
        cache = decoder.replay(params, cache, updates, positions, config)
    state = state.replace(cache=cache.replace(lengths=first + accepted.sum(1)))
    state = follow(params, state, hidden, tokens, positions, config)
    return Drawn(state, jnp.where(accepted, drawn, NO_TOKEN), scores)


def verify(
    params: Params,
    state: State,
    hidden: Float[Array, "B T H"],
    proposals: Int[Array, "B T-1"],
    readable: Bool[Array, "B T"],
    config: ModelConfig,
    logits_processor: Callable[[jax.Array, State], jax.Array] | None = None,
    logprobs: int | None = None,
    allowed: UInt32[Array, "B T words"] | None = None,
) -> tuple[State, Bool[Array, "B T"], Int[Array, "B T"], sampling.Logprobs | None]:
    """Draw the token after each that was read, and accept those that plain steps would draw.

    state     has read each row's newest token, and not its proposals
    hidden    the residual stream after the newest token and the proposals
    readable  of these, which were read
    allowed   the tokens that may be drawn at each position, as `sampling.sample` has them; None: all
    Returns the state after the accepted tokens, apart from what mixers store; which are accepted; all tokens
    that were drawn; and Logprobs [B, T].
    """
    offset = jnp.arange(proposals.shape[1] + 1)
    at = state.cache.lengths[:, None] + offset  # positions of the tokens drawn
    scores = decoder.unembed(params, hidden, config)  # [B, T, V]
    sampler = sampling.foresee(state.sampler, proposals)
    logits = scores
    if logits_processor is not None:
        read = jnp.concatenate([state.tokens[:, None], proposals], axis=1)
        before = {"tokens": read, "remaining": state.remaining[:, None] - offset, "sampler": sampler}

        def processed(logits, lengths, before):
            own = state.replace(cache=state.cache.replace(lengths=lengths), **before)
            return logits_processor(logits, own)

        logits = jax.vmap(processed, 1, 1)(scores, at, before)
    drawn = sampling.sample_each(sampler, logits, at, allowed)  # [B, T]
    stops = (drawn < 0) | jnp.any(drawn[..., None] == state.stop_ids[:, None], axis=-1)
    accepted = readable & up_to((proposals == drawn[:, :-1]) & ~stops[:, :-1])
    count = accepted.sum(1)
    newest = jnp.take_along_axis(drawn, jnp.maximum(count - 1, 0)[:, None], 1)[:, 0]
    remaining = jnp.where(jnp.any(accepted & stops, axis=1), 0, state.remaining - count)
    s: Any = state.speculation
    state = state.replace(
        cache=state.cache.replace(lengths=state.cache.lengths + jnp.maximum(count - 1, 0)),
        tokens=jnp.where(count > 0, newest, state.tokens),
        remaining=jnp.maximum(remaining, 0),
        sampler=sampling.remember(state.sampler, drawn, accepted),
        speculation=note(s, drawn, at[:, 0], accepted),
    )
    own = _logprobs(scores, drawn, logprobs)
    if own is not None and sampler.scored:
        own = own.replace(sampled=sampling.score_each(sampler, logits, drawn, allowed))
    return state, accepted, drawn, own


def up_to(holds: Bool[Array, "B T-1"]) -> Bool[Array, "B T"]:
    """True for the first, and for each whose predecessors all hold."""
    holds = jnp.pad(holds, ((0, 0), (1, 0)), constant_values=True)
    return jnp.cumprod(holds, axis=1).astype(bool)


def _logprobs(scores: jax.Array, tokens: jax.Array, n: int | None) -> sampling.Logprobs | None:
    flat = sampling.token_logprobs(scores.reshape(-1, scores.shape[-1]), tokens.reshape(-1), n)
    return jax.tree.map(lambda x: x.reshape(*tokens.shape, *x.shape[1:]), flat)


def _alone(
    plain: Callable[[State], Drawn],
    state: State,
    left: Int[Array, "B"],
    proposals: Int[Array, "B W-1"],
    limit: Int[Array, ""],
    most: int,
    logprobs: int | None,
) -> tuple[Int[Array, ""], Int[Array, "B"], Drawn]:
    """Up to `limit` plain steps without reading proposals. They end early when a token is drawn that was
    proposed for its place, because proposals may pay again.

    left   tokens that each row may still draw
    Returns the number of steps, the number in which each row drew a token, and what was drawn, [B, most].
    """
    rows = len(left)
    expected = jnp.pad(proposals, ((0, 0), (0, most - proposals.shape[1])), constant_values=NO_TOKEN)

    def running(j, state):
        return (j < left) & (state.remaining > 0)

    def unfinished(carry):
        j, _, state, _, right = carry
        return (j < limit) & jnp.any(running(j, state)) & ~right

    def body(carry):
        j, steps, state, out, _ = carry
        runs, remaining = running(j, state), state.remaining
        sampler, table = state.sampler, state.sampler.table
        if rows > 1:  # one row alone does not wait
            sampler = sampling.without_tables(sampler, ~runs)
        state, *drawn = plain(state.replace(remaining=jnp.where(runs, remaining, 0), sampler=sampler))
        remaining = jnp.where(runs, state.remaining, remaining)
        state = state.replace(remaining=remaining, sampler=state.sampler.replace(table=table))
        out = jax.tree.map(lambda x, new: x.at[:, j].set(new), out, tuple(drawn))
        right = jnp.any((drawn[0] == expected[:, j]) & (drawn[0] != NO_TOKEN))
        return j + 1, steps + runs, state, out, right

    no_scores = sampling.no_logprobs((rows, most), logprobs, state.sampler.scored)
    out = jnp.full((rows, most), NO_TOKEN, jnp.int32), no_scores
    carry = jnp.int32(0), jnp.zeros(rows, jnp.int32), state, out, jnp.bool_(False)
    j, steps, state, (tokens, scores), _ = jax.lax.while_loop(unfinished, body, carry)
    return j, steps, Drawn(state, tokens, scores)


def _followed_together(
    alone: Callable[..., tuple[Int[Array, ""], Int[Array, "B"], Drawn]],
    params: Params,
    state: State,
    config: ModelConfig,
    most: int,
    logprobs: int | None,
) -> tuple[Int[Array, ""], Int[Array, "B"], Drawn]:
    """The plain steps of `alone`, up to `most`, whose tokens the draft layer or model reads afterwards,
    together. Its guesses from what it reads, in the place of tokens that were drawn, change the trust in it.
    """
    s: Any = state.speculation
    first, proposer = state.cache.lengths, proposers.get(s.proposer)
    undrafted = state.replace(speculation=s.replace(draft=proposer.unread(s.draft, first, most)))
    made, steps, drawn = alone(state=undrafted, most=most, logprobs=logprobs)
    after: Any = drawn.state.speculation
    own = drawn.state.replace(speculation=after.replace(draft=s.draft))

    def read(width):
        """What the draft layer or model stores, and the trust in it, after it has read up to `width` tokens
        of each row."""
        positions = first[:, None] + jnp.arange(width)
        positions = jnp.where(positions < own.cache.lengths[:, None], positions, -1)
        tokens = jnp.take_along_axis(after.ids, jnp.maximum(positions, 0), 1)
        draft, guesses = proposer.follow_and_guess(params, own, after.draft, tokens, positions, config)
        # A row's steps are one after another from the first: column i is what it drew after the i-th token.
        return draft, compared(after, guesses, drawn.tokens[:, :width]).trust

    # A dispatch may be of few steps: then few tokens are read, in the time of few.
    few = min(STEP_TOKENS, most)
    reads = [functools.partial(read, width) for width in sorted({few, most})]
    draft, trust = jax.lax.switch((made > few).astype(jnp.int32), reads)
    after = after.replace(draft=draft, trust=trust)
    return made, steps, drawn._replace(state=own.replace(speculation=after))


def _widened(drawn: Drawn, width: int) -> Drawn:
    """The result of a step that reads fewer tokens a row, in the shapes of a step that reads `width`."""

    def pad(x, value=0):
        missing = width - x.shape[1]
        return jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)), constant_values=value)

    return Drawn(drawn.state, pad(drawn.tokens, NO_TOKEN), jax.tree.map(pad, drawn.logprobs))
