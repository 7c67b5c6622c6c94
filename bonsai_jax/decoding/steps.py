"""Prefill, step, generate: pure functions of arrays, for jit, vmap and grad, on one device or a mesh.

                    prompts                          one token a row, at most `limit` times
    State --prefill(tokens, lengths)--> State --step--> State --step--> State ...

    KVCache --extend(tokens, lengths)--> logits after every token, and the KVCache that holds them too

`decode` is the loop of steps; `generate_tokens` is prefill and decode. `extend` draws nothing: search,
guidance and speculation stand on it. Their jitted forms, which donate what they update, are in jitted.py.
"""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from bonsai_jax.config import ModelConfig, RunConfig
from bonsai_jax.decoding import sampling, speculation
from bonsai_jax.decoding.checks import check, checked_tokens
from bonsai_jax.decoding.sampling import NO_TOKEN, Sampler
from bonsai_jax.decoding.speculation import Speculation
from bonsai_jax.network import cache as kv
from bonsai_jax.network import decoder, draft
from bonsai_jax.network.cache import KVCache
from bonsai_jax.network.kinds.attention import read_size
from bonsai_jax.network.parallel import over_mesh
from bonsai_jax.network.params import Params
from bonsai_jax.network.taps import Taps
from pallas_kernels import serializable

# (float32 logits [B, V], the state before the draw) -> logits: see `step`.
LogitsProcessor = Callable[[jax.Array, "State"], jax.Array]


@serializable
class State(struct.PyTreeNode):
    """Everything that changes while B rows are generated.

    cache       keys and values of all tokens but each row's newest
    tokens      int32 [B], each row's newest token, which the next step reads
    remaining   int32 [B], tokens a row may still produce; 0: it has ended, and steps leave it as it is
    stop_ids    int32 [B, S], tokens that end a row, padded with -1
    sampler     each row's sampling parameters, key and token counts
    speculation  what `decode` proposes tokens from; None: it does not
    """

    cache: KVCache
    tokens: Int[Array, "B"]
    remaining: Int[Array, "B"]
    stop_ids: Int[Array, "B S"]
    sampler: Sampler
    speculation: Speculation | None = None


def start(
    cache: KVCache, sampler: Sampler, stop_ids: Int[Array, "B S"], max_new_tokens: Int[Array, "B"]
) -> State:
    """A state without any token, ready for prefill."""
    remaining = jnp.asarray(max_new_tokens, jnp.int32)  # of no weak type, for which all were compiled anew
    return State(cache, jnp.full_like(remaining, NO_TOKEN), remaining, stop_ids, sampler)


@over_mesh("held", logprobs="rows")
def prefill(
    params: Params,
    state: State,
    tokens: Int[Array, "B T"] | Float[Array, "B T H"],
    lengths: Int[Array, "B"],
    config: ModelConfig,
    *,
    taps: Taps | None = None,
    logits_processor: LogitsProcessor | None = None,
    logprobs: int | None = None,
) -> State:
    """Read prompts behind what the cache holds, and draw each row's first new token.

    tokens   int32 [B, T], prompts padded at the end. T decides what is compiled: see `bucket`. Or float32
             [B, T, H], vectors in their place, as `embed` makes them
    lengths  int32 [B], 1 to T
    taps, logits_processor, logprobs   as for `step`
    Returns the state, and with logprobs=n Logprobs [B] too.
    """
    tokens, lengths = checked_tokens(tokens, lengths, state.cache, config)
    check(jnp.all(lengths > 0), "prefill: a length is 0; a prompt has at least one token")
    hidden, cache = read(params, state.cache, tokens, lengths, config, taps)
    if tokens.ndim == 2:  # vectors are no tokens that a penalty or a proposer could know
        valid = jnp.arange(tokens.shape[1]) < lengths[:, None]
        state = state.replace(sampler=sampling.read_prompt(state.sampler, tokens, valid))
        if state.speculation is not None:
            noted = speculation.note(state.speculation, tokens, state.cache.lengths, valid)
            state = state.replace(speculation=noted)
    state = state.replace(cache=cache)
    return _draw(params, state, hidden, config, logits_processor, logprobs)


@over_mesh("held", logprobs="rows")
def step(
    params: Params,
    state: State,
    config: ModelConfig,
    *,
    taps: Taps | None = None,
    logits_processor: LogitsProcessor | None = None,
    logprobs: int | None = None,
) -> State:
    """Decode one token for every row that has not ended.

    Reads state.tokens at position cache.lengths of each row, and draws the next.

    taps              edits activations on their way (steering); what it reads is dropped, `forward` returns
                      it
    logits_processor  (logits, state) -> logits, traced: called with float32 [B, V] and the state before the
                      draw, ahead of penalties and truncation. -inf bans a token
    logprobs          n: of the drawn tokens and the n likeliest
    Returns the state, and with logprobs=n Logprobs [B] too.
    """
    running = state.remaining > 0
    full = state.cache.lengths >= state.cache.capacity
    check(~jnp.any(running & full), "step: a row's cache is full; make the state with a larger context")
    positions = jnp.where(running, state.cache.lengths, -1)[:, None]  # [B, 1]
    tokens = jnp.maximum(state.tokens, 0)[:, None]
    hidden, cache = _forward(params, state.cache, tokens, positions, config, taps)
    return _draw(params, state.replace(cache=cache), hidden[:, 0], config, logits_processor, logprobs)


@over_mesh("held", "rows", logprobs="rows")
def decode(
    params: Params,
    state: State,
    config: ModelConfig,
    *,
    limit: int | Int[Array, ""],
    size: int,
    taps: Taps | None = None,
    logits_processor: LogitsProcessor | None = None,
    logprobs: int | None = None,
) -> tuple[State, Int[Array, "B size"]]:
    """Steps until every row has ended, or `limit` (at most `size`, the width of the output) have been made.

    Returns the state and the tokens drawn, NO_TOKEN behind a row's end, and with logprobs=n Logprobs
    [B, size] (see `step`). A token that ends a row is among them. With state.speculation a step draws one or
    more tokens of each row, the same ones; it ends with `size` tokens, too.
    """
    if state.speculation is not None:
        options = {"taps": taps, "logits_processor": logits_processor, "logprobs": logprobs}
        return speculation.decode(params, state, config, limit=limit, size=size, **options)

    def unfinished(carry):
        i, state, _ = carry
        return (i < limit) & (i < size) & jnp.any(state.remaining > 0)

    def body(carry):
        i, state, out = carry
        running = state.remaining > 0
        stepped = step(params, state, config, taps=taps, logits_processor=logits_processor, logprobs=logprobs)
        state, *scores = stepped if isinstance(stepped, tuple) else (stepped,)
        drawn = (jnp.where(running, state.tokens, NO_TOKEN), *scores)
        return i + 1, state, jax.tree.map(lambda out, new: out.at[:, i].set(new), out, drawn)

    rows = state.tokens.shape[0]
    out = (jnp.full((rows, size), NO_TOKEN, jnp.int32),)
    if logprobs is not None:
        out += (sampling.no_logprobs((rows, size), logprobs),)
    if size == 0:
        return (state, *out)  # pyrefly: ignore[bad-return]
    _, state, out = jax.lax.while_loop(unfinished, body, (0, state, out))
    return (state, *out)  # pyrefly: ignore[bad-return]


@over_mesh("held", "rows", logprobs="rows")
def generate_tokens(
    params: Params,
    state: State,
    tokens: Int[Array, "B T"] | Float[Array, "B T H"],
    lengths: Int[Array, "B"],
    config: ModelConfig,
    *,
    size: int,
    taps: Taps | None = None,
    logits_processor: LogitsProcessor | None = None,
    logprobs: int | None = None,
) -> tuple[State, Int[Array, "B size"]]:
    """Prefill and decode.

    state   from `start` or `new_state`
    tokens, lengths  as for `prefill`
    size    width of the output, at least the largest max_new_tokens; static
    Returns the final state and the new tokens, NO_TOKEN behind a row's end, and with logprobs=n Logprobs
    [B, size] (see `step`).
    """
    if operator.index(size) < 1:
        raise ValueError(f"generate_tokens: size is {size}; it must be 1 or more, for the first token")
    options = {"taps": taps, "logits_processor": logits_processor, "logprobs": logprobs}
    first = prefill(params, state, tokens, lengths, config, **options)
    state, *scores = first if isinstance(first, tuple) else (first,)
    drawn = (state.tokens, *scores)
    state, *rest = decode(params, state, config, limit=size - 1, size=size - 1, **options)
    together = jax.tree.map(
        lambda one, more: jnp.concatenate([one[:, None], more], axis=1), drawn, tuple(rest)
    )
    return (state, *together)


@over_mesh("rows", "held")
def extend(
    params: Params,
    cache: KVCache,
    tokens: Int[Array, "B T"] | Float[Array, "B T H"],
    lengths: Int[Array, "B"],
    config: ModelConfig,
    *,
    taps: Taps | None = None,
) -> tuple[Float[Array, "B T V"], KVCache]:
    """Read tokens behind what the cache holds, any number for each row, and draw nothing.

    tokens   int32 [B, T], padded at the end, or float32 [B, T, H], vectors in their place
    lengths  int32 [B], 0 to T: of a row with 0 nothing is read
    taps     edits activations; what it reads is dropped
    Returns float32 logits after every token (padding's mean nothing), and the cache. `KVCache.rewind` takes
    tokens back, `KVCache.take` copies and reorders rows.
    """
    tokens, lengths = checked_tokens(tokens, lengths, cache, config)
    positions = _positions(cache, tokens, lengths)
    hidden, cache = _forward(params, cache, tokens, positions, config, taps)
    return decoder.logits(params, hidden, config), cache


@over_mesh("rows", "layers")
def forward(
    params: Params,
    tokens: Int[Array, "B T"] | Float[Array, "B T H"],
    lengths: Int[Array, "B"],
    config: ModelConfig,
    *,
    taps: Taps | None = None,
) -> tuple[Float[Array, "B T V"], dict[str, Float[Array, "L B ..."]]]:
    """Whole sequences at once, from their first token: what research takes gradients of and looks into.

    tokens   int32 [B, T], padded at the end; or in their place float32 [B, T, H], rows as `embed` makes them
             (a soft prompt is such rows before those of the tokens)
    lengths  int32 [B], 1 to T
    taps     reads or edits activations (taps.Taps)
    Returns float32 logits after every token (padding's mean nothing), and the activations that taps.read
    names.

    Differentiable (jax.grad) in `tokens` of the second kind, in dense weights, and in all that taps.edit
    closes over. Attention is its reference implementation, keys and values are float32 in a cache of its own.
    """
    tokens, lengths = checked_tokens(tokens, lengths, None, config)
    B, T = tokens.shape[:2]
    parts = 1 if params.axis is None else jax.lax.axis_size(params.axis)
    run = RunConfig(impl="reference", cache_dtype="float32")
    cache = kv.empty(config.for_device(parts), run, B, T, rewinds=True)
    # A length known beforehand: reverse differentiation needs loops of known length.
    hidden, _, kept = decoder.decoder(
        params, tokens, _positions(cache, tokens, lengths), cache, config, num_keys=T, taps=taps
    )
    return decoder.logits(params, hidden, config), kept


def read(
    params: Params,
    cache: KVCache,
    tokens: Int[Array, "B T"] | Float[Array, "B T H"],
    lengths: Int[Array, "B"],
    config: ModelConfig,
    taps: Taps | None = None,
) -> tuple[Float[Array, "B H"], KVCache]:
    """Tokens through the layers, in chunks, behind what the cache holds. Returns each row's hidden vector
    after its last token."""
    B, T = tokens.shape[:2]
    positions = _positions(cache, tokens, lengths)
    size = chunk_size(cache, B)
    if size >= T:
        hidden, cache = _forward(params, cache, tokens, positions, config, taps)
        return (hidden[:, 0] if T == 1 else hidden[jnp.arange(B), lengths - 1]), cache

    def read_chunk(i, carry):
        last, cache = carry
        at = i * size
        chunk, chunk_positions = (jax.lax.dynamic_slice_in_dim(a, at, size, 1) for a in (tokens, positions))
        hidden, cache = _forward(params, cache, chunk, chunk_positions, config, taps)
        index = jnp.clip(lengths - 1 - at, 0, size - 1)
        ends_here = (lengths - 1) // size == i
        return jnp.where(ends_here[:, None], hidden[jnp.arange(B), index], last), cache

    padding = -T % size
    tokens = jnp.pad(tokens, ((0, 0), (0, padding), *[(0, 0)] * (tokens.ndim - 2)))
    positions = jnp.pad(positions, ((0, 0), (0, padding)), constant_values=-1)
    chunks = (lengths.max() + size - 1) // size
    return jax.lax.fori_loop(0, chunks, read_chunk, (jnp.zeros((B, config.hidden)), cache))


def chunk_size(cache: KVCache, rows: int) -> int:
    """Tokens of each row that `read` takes through the layers at a time."""
    return max(read_size(state.prefill_impl, rows) for state in cache.attention)


def bucket(length: int) -> int:
    """The padded length for a prompt: a power of two, at least 16, so that few lengths are compiled."""
    return max(16, 1 << (length - 1).bit_length())


def _forward(params, cache, tokens, positions, config, taps=None) -> tuple[jax.Array, KVCache]:
    size, width = cache.chunk, tokens.shape[1]
    if size is not None and width > size:  # a ring has no room for more at once
        pieces = []
        for first in range(0, width, size):
            part = slice(first, first + size)
            hidden, cache = _forward(params, cache, tokens[:, part], positions[:, part], config, taps)
            pieces.append(hidden)
        return jnp.concatenate(pieces, axis=1), cache
    hidden, cache, _ = decoder.decoder(
        params, tokens, positions, cache, config, num_keys=positions.max() + 1, taps=taps
    )
    return hidden, draft.follow(params, cache, hidden, tokens, positions, config)


def _positions(cache: KVCache, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """Positions of tokens behind the cache's; -1 beyond `lengths`."""
    offset = jnp.arange(tokens.shape[1])
    return jnp.where(offset < lengths[:, None], cache.lengths[:, None] + offset, -1)


def _shown(value: Any) -> str:
    return f"shape {value.shape}" if isinstance(value, jax.Array) else repr(value)


def _draw(
    params: Params,
    state: State,
    hidden: jax.Array,
    config: ModelConfig,
    logits_processor: LogitsProcessor | None,
    logprobs: int | None,
) -> Any:
    """Draw each running row's next token from its hidden vector [B, H], and see whether it ends the row."""
    running = state.remaining > 0
    of_model = decoder.logits(params, hidden, config)
    logits = of_model if logits_processor is None else logits_processor(of_model, state)
    if np.shape(logits) != of_model.shape:
        raise ValueError(
            f"logits_processor: it returned {_shown(logits)}; expected logits of shape {of_model.shape}"
        )
    tokens, sampler = sampling.sample(state.sampler, logits, state.cache.lengths)
    stopped = jnp.any(tokens[:, None] == state.stop_ids, axis=1)
    remaining = jnp.where(stopped, 0, jnp.maximum(state.remaining - 1, 0))
    state = state.replace(
        tokens=jnp.where(running, tokens, state.tokens),
        remaining=jnp.where(running, remaining, 0),
        sampler=sampler,
    )
    if state.speculation is not None:
        at = state.cache.lengths, running[:, None]
        state = state.replace(speculation=speculation.note(state.speculation, tokens[:, None], *at))
    return state if logprobs is None else (state, sampling.logprobs_of(of_model, tokens, logprobs))
