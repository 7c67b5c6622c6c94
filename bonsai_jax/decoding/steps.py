"""Prefill, step, generate: pure functions of arrays, for jit, vmap and grad, on one device or a mesh.

                    prompts                          one token a row, at most `limit` times
    State --prefill(tokens, lengths)--> State --step--> State --step--> State ...
                                          |               |               |
                                        tokens          tokens          tokens

    KVCache --extend(tokens, lengths)--> logits after every token, and the KVCache with these tokens
    KVCache --hidden_states(tokens, lengths)--> the residual stream, the KVCache, and what taps read

`decode` is the loop of steps; `generate_tokens` is prefill and decode. All four return Drawn(state, tokens,
logprobs). `extend` draws nothing: search, guidance and draft models use it. jitted.py has the jitted forms,
which donate what they update.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from bonsai_jax import arguments
from bonsai_jax.choices import Remat
from bonsai_jax.config import ModelConfig, RunConfig
from bonsai_jax.decoding import chain, sampling, speculation
from bonsai_jax.decoding.checks import (
    check,
    check_limit,
    check_options,
    check_remat,
    check_taps,
    checked_tokens,
)
from bonsai_jax.decoding.sampling import NO_TOKEN, NOTHING_TO_DRAW, Sampler
from bonsai_jax.decoding.state import Drawn, State
from bonsai_jax.network import cache as kv
from bonsai_jax.network import decoder
from bonsai_jax.network.cache import KVCache
from bonsai_jax.network.kinds.attention import read_size
from bonsai_jax.network.parallel import over_mesh
from bonsai_jax.network.params import Params
from bonsai_jax.network.taps import Taps

# (float32 logits [B, V], the state before the draw) -> logits: see `step`.
LogitsProcessor = Callable[[jax.Array, State], jax.Array]


def start(
    cache: KVCache, sampler: Sampler, stop_ids: Int[Array, "B S"], max_new_tokens: Int[Array, "B"]
) -> State:
    """A state without any token, ready for prefill. `new_state` makes all of its parts.

    cache           its rows are those of the state; it may hold tokens already, which prefill continues
    sampler         each row's sampling parameters, key and token counts
    stop_ids        int32 [B, S], tokens that end a row, padded with -1
    max_new_tokens  int32 [B], most tokens that each row draws
    """
    remaining = jnp.asarray(max_new_tokens, jnp.int32)  # a weak type would compile everything once more
    none = jax.device_put(np.full(remaining.shape, NO_TOKEN, np.int32), may_alias=False)  # compiles nothing
    return State(cache, none, remaining, stop_ids, sampler)


DRAWN = Drawn._make(["state", "rows", "rows"])  # how results lie over a mesh


@over_mesh(DRAWN)
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
) -> Drawn:
    """Read prompts, which continue what the cache holds, and draw each row's first new token.

    tokens   int32 [B, T], prompts padded at the end. Each T is compiled separately: see `bucket`. Or float32
             [B, T, H], vectors in place of tokens, as `embed` makes them
    lengths  int32 [B], 1 to T
    taps, logits_processor, logprobs   as for `step`
    Returns the state, the tokens int32 [B], and Logprobs [B] or None. Errors are those of `extend`.
    """
    check_options(state, config, taps, logits_processor, logprobs)
    tokens, lengths = checked_tokens(tokens, lengths, state.cache, config)
    check(jnp.all(lengths > 0), "prefill: a length is 0; a prompt has at least one token")
    if tokens.ndim == 2:  # penalties and proposers know tokens, not vectors
        valid = jnp.arange(tokens.shape[1]) < lengths[:, None]
        state = state.replace(sampler=sampling.read_prompt(state.sampler, tokens, valid))
        if state.speculation is not None:
            noted = speculation.note(state.speculation, tokens, state.cache.lengths, valid)
            state = state.replace(speculation=noted)
        if state.chain is not None:
            noted = chain.note(state.chain, tokens, state.cache.lengths, valid)
            state = state.replace(chain=noted)

    hidden, state = read_chunk(params, state, tokens, lengths, config, taps)
    return draw(params, state, hidden, config, logits_processor, logprobs)


@over_mesh(DRAWN)
def step(
    params: Params,
    state: State,
    config: ModelConfig,
    *,
    taps: Taps | None = None,
    logits_processor: LogitsProcessor | None = None,
    logprobs: int | None = None,
) -> Drawn:
    """Decode one token for every row that has not ended.

    Reads state.tokens at position cache.lengths of each row, and draws the next.

    taps              edits activations (steering); activations that it reads are dropped. `hidden_states`
                      of one token returns them, and `bj.generate(read=)` those of whole answers
    logits_processor  (logits, state) -> logits, traced: called with float32 [B, V] and the state before the
                      draw, before penalties and truncation. -inf bans a token
    logprobs          n: log-probabilities of the drawn tokens and of the n likeliest; None: none
    Returns the state, the tokens int32 [B], NO_TOKEN for rows that had ended, and Logprobs [B] or None.
    Raises TypeError for params of another kind.
    """
    check_options(state, config, taps, logits_processor, logprobs)
    hidden, state = read_newest(params, state, config, taps)
    return draw(params, state, hidden, config, logits_processor, logprobs)


@over_mesh(DRAWN)
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
) -> Drawn:
    """Steps until every row has ended, or `limit` steps (at most `size`) have been made.

    size   tokens of a row in the result; static
    taps, logits_processor, logprobs   as for `step`
    Returns the state, the tokens int32 [B, size], NO_TOKEN after a row's end, and Logprobs [B, size] or None.
    With state.speculation a step draws one or more tokens of each row, the same tokens; then the loop also
    ends where every row has `size` tokens.
    """
    check_options(state, config, taps, logits_processor, logprobs)
    check_limit(limit)
    size = arguments.whole("size", size)
    options = {"taps": taps, "logits_processor": logits_processor, "logprobs": logprobs}
    if state.speculation is not None:
        return speculation.decode(params, state, config, step, limit=limit, size=size, **options)

    def unfinished(carry):
        i, state, _ = carry
        return (i < limit) & (i < size) & jnp.any(state.remaining > 0)

    def body(carry):
        i, state, out = carry
        state, *drawn = step(params, state, config, **options)
        # i is in range. To find that out, .at[:, i].set would take a GPU one more launch a step.
        place = lambda out, new: jax.lax.dynamic_update_slice_in_dim(out, new[:, None], i, axis=1)  # noqa: E731
        return i + 1, state, jax.tree.map(place, out, tuple(drawn))

    shape = state.tokens.shape[0], size
    tokens = jnp.full(shape, NO_TOKEN, jnp.int32)
    scores = sampling.no_logprobs(shape, logprobs, state.sampler.scored)
    if size > 0:
        carry = 0, state, (tokens, scores)
        _, state, (tokens, scores) = jax.lax.while_loop(unfinished, body, carry)
    return Drawn(state, tokens, scores)


@over_mesh(DRAWN)
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
) -> Drawn:
    """Prefill and decode.

    state   from `start` or `new_state`
    tokens, lengths  as for `prefill`
    size    new tokens of a row in the result, at least the largest max_new_tokens; static
    taps, logits_processor, logprobs   as for `step`
    Returns the final state, the new tokens int32 [B, size], NO_TOKEN after a row's end, and Logprobs
    [B, size] or None. Raises ValueError for a size below 1; other errors are those of `prefill`.
    """
    size = arguments.whole("size", size, 1)  # 1 for the first token
    options = {"taps": taps, "logits_processor": logits_processor, "logprobs": logprobs}
    state, *first = prefill(params, state, tokens, lengths, config, **options)
    state, *rest = decode(params, state, config, limit=size - 1, size=size - 1, **options)
    return Drawn(
        state, *jax.tree.map(lambda one, more: jnp.concatenate([one[:, None], more], axis=1), first, rest)
    )


@over_mesh(("rows", "cache"))
def extend(
    params: Params,
    cache: KVCache,
    tokens: Int[Array, "B T"] | Float[Array, "B T H"],
    lengths: Int[Array, "B"],
    config: ModelConfig,
    *,
    taps: Taps | None = None,
) -> tuple[Float[Array, "B T V"], KVCache]:
    """Read any number of tokens for each row, which continue what the cache holds, and draw nothing.

    tokens   int32 [B, T], padded at the end, or float32 [B, T, H], vectors in place of tokens
    lengths  int32 [B], 0 to T; a row with length 0 stays as it is
    taps     edits activations; `hidden_states` also returns those that it reads
    Returns float32 logits after every token (those of padding mean nothing), and the cache. `KVCache.rewind`
    removes a row's last tokens, `KVCache.take` copies and reorders rows.
    Raises ValueError for shapes that do not fit each other, and TypeError for another kind of numbers. Values
    are not checked (see `checked`).
    """
    check_taps(taps)
    tokens, lengths = checked_tokens(tokens, lengths, cache, config)
    positions = _positions(cache, tokens, lengths)
    hidden, cache = decoder.read(params, tokens, positions, cache, config, taps)
    return decoder.unembed(params, hidden, config), cache


@over_mesh(("rows", "cache", "layers"))
def hidden_states(
    params: Params,
    cache: KVCache,
    tokens: Int[Array, "B T"] | Float[Array, "B T H"],
    lengths: Int[Array, "B"],
    config: ModelConfig,
    *,
    taps: Taps | None = None,
    stop_at_layer: int | None = None,
) -> tuple[Float[Array, "B T H"], KVCache, dict[str, Float[Array, "L B ..."]]]:
    """`extend` for looking inside: read tokens, which continue what the cache holds, on kernels, and return
    what taps read. One token of each row is a decode step.

        hidden, cache, activations = hidden_states(params, cache, tokens, lengths, config, taps=taps)
        logits = unembed(params, hidden, config)          # those of extend

    tokens, lengths  as for `extend`
    taps             reads or edits activations
    stop_at_layer    run layers 0 to stop_at_layer - 1 alone; the other layers' keys are missing in the cache
    Returns the residual stream after each token, float32 [B, T, H], not normed, the cache, and the
    activations that taps.read names, by site and stacked over layers.
    Raises ValueError where the cache stores windows of keys in rings, which have no room for so many tokens
    at once: bj.new_cache(..., rewinds=True) stores all keys. Other errors are those of `forward`.
    """
    check_taps(taps)
    tokens, lengths = checked_tokens(tokens, lengths, cache, config)
    width, count = tokens.shape[1], layer_count(stop_at_layer, config)
    if cache.chunk is not None and width > cache.chunk:
        raise ValueError(
            f"tokens: {width} of each row, but this cache takes {cache.chunk} at a time; make it with "
            "bj.new_cache(..., rewinds=True), or read fewer at a time"
        )
    positions = _positions(cache, tokens, lengths)
    num_keys = positions.max() + 1
    return decoder.decoder(params, tokens, positions, cache, config, num_keys, taps, num_layers=count)


@over_mesh(("rows", "layers"))
def forward(
    params: Params,
    tokens: Int[Array, "B T"] | Float[Array, "B T H"],
    lengths: Int[Array, "B"],
    config: ModelConfig,
    *,
    taps: Taps | None = None,
    stop_at_layer: int | None = None,
    logits: bool = True,
    remat: Remat = False,
) -> tuple[Float[Array, "B T V"] | Float[Array, "B T H"], dict[str, Float[Array, "L B ..."]]]:
    """Whole sequences at once, from their first token, for gradients and for looking inside.

    tokens   int32 [B, T], padded at the end; or float32 [B, T, H], vectors in place of tokens, as `embed`
             makes them (a soft prompt is vectors before those of the tokens)
    lengths  int32 [B], 1 to T
    taps     reads or edits activations (taps.Taps)
    stop_at_layer  run layers 0 to stop_at_layer - 1 alone, as if the model ended there; None: all
    logits   False: return the residual stream instead, float32 [B, T, H], as the last layer that runs leaves
             it, not normed (`unembed` makes logits of it); the output matrix is not read
    remat    True: a backward pass stores the residual stream between layers alone, and computes each layer
             again (jax.checkpoint): less memory, up to a third more arithmetic. "offload": the same, and the
             stream waits in the host's memory (of a GPU; the same as True on a CPU)
    Returns float32 logits after every token (those of padding mean nothing), and the activations that
    taps.read names.
    Raises ValueError for shapes, or numbers of layers, that do not fit the model, and NotImplementedError for
    remat where layers read another layer's keys (Gemma 4).

    Differentiable (jax.grad) in vectors, in dense weights, and in everything that taps.edit closes over. It
    runs the reference attention, with float32 keys and values. The reference's products are exact, unless
    jax.default_matmul_precision is set ("BF16_BF16_F32" trains on tensor cores).

    Errors are those of `extend`.
    """
    check_taps(taps)
    check_remat(remat, config)
    tokens, lengths = checked_tokens(tokens, lengths, None, config)
    B, T = tokens.shape[:2]
    parts = 1 if params.axis is None else jax.lax.axis_size(params.axis)
    run = RunConfig(impl="reference", cache_dtype="float32")
    cache = kv.empty(config.for_device(parts), run, B, T, rewinds=True)
    # A static number of keys: reverse differentiation needs loops of known length.
    positions, count = _positions(cache, tokens, lengths), layer_count(stop_at_layer, config)
    # With remat no layer's keys are kept, so they need no pages; latent attention has no other way.
    latent = any(half.kind == "latent_attention" for layer in config.layers for half in layer.mixers)
    num_keys = None if remat and not latent else T
    hidden, _, activations = decoder.decoder(
        params, tokens, positions, cache, config, num_keys, taps, num_layers=count, remat=remat
    )
    return decoder.unembed(params, hidden, config) if logits else hidden, activations


def layer_count(stop_at_layer: int | None, config: ModelConfig) -> int:
    """The number of layers to run. Raises ValueError for one that the model does not have."""
    if stop_at_layer is None:
        return config.num_layers
    count = arguments.any_whole("stop_at_layer", stop_at_layer)
    if not 1 <= count <= config.num_layers:
        raise ValueError(f"stop_at_layer is {count}; it must be 1 to {config.num_layers}, the model's layers")
    return count


def read(
    params: Params,
    cache: KVCache,
    tokens: Int[Array, "B T"] | Float[Array, "B T H"],
    lengths: Int[Array, "B"],
    config: ModelConfig,
    taps: Taps | None = None,
) -> tuple[Float[Array, "B H"], KVCache]:
    """Run tokens, which continue what the cache holds, through the layers in chunks. Returns the hidden
    vector after each row's last token, and the cache."""

    def forward(cache, tokens, positions):
        return decoder.read(params, tokens, positions, cache, config, taps)

    return _in_chunks(forward, cache, cache, tokens, lengths, config)


def read_chunk(
    params: Params,
    state: State,
    tokens: Int[Array, "B T"] | Float[Array, "B T H"],
    lengths: Int[Array, "B"],
    config: ModelConfig,
    taps: Taps | None = None,
) -> tuple[Float[Array, "B H"], State]:
    """The first half of `prefill`: run tokens, which continue what the cache holds, through the layers.
    Returns the hidden vector after each row's last token, from which `draw` draws the next, and the state."""

    def forward(state, tokens, positions):
        return _read(params, state, tokens, positions, config, taps)

    return _in_chunks(forward, state, state.cache, tokens, lengths, config)


def read_newest(
    params: Params, state: State, config: ModelConfig, taps: Taps | None = None
) -> tuple[Float[Array, "B H"], State]:
    """The first half of `step`: run the newest token of each row that has not ended through the layers.
    Returns the hidden vectors after them, and the state."""
    running = state.remaining > 0
    full = state.cache.lengths >= state.cache.capacity
    check(~jnp.any(running & full), "step: a row's cache is full; make the state with a larger context")
    positions = jnp.where(running, state.cache.lengths, -1)[:, None]  # [B, 1]
    tokens = jnp.maximum(state.tokens, 0)[:, None]
    hidden, state = _read(params, state, tokens, positions, config, taps)
    return hidden[:, 0], state


def _in_chunks[Carry](
    forward: Callable[[Carry, jax.Array, jax.Array], tuple[jax.Array, Carry]],
    carry: Carry,
    cache: KVCache,
    tokens: Int[Array, "B T"] | Float[Array, "B T H"],
    lengths: Int[Array, "B"],
    config: ModelConfig,
) -> tuple[Float[Array, "B H"], Carry]:
    """The hidden vector after each row's last token, and the carry, after forward(carry, tokens, positions)
    -> (hidden, carry) of one chunk after another; cache: the carry, or that in it."""
    B, T = tokens.shape[:2]
    positions = _positions(cache, tokens, lengths)
    size = chunk_size(cache, B)
    if size >= T:
        hidden, carry = forward(carry, tokens, positions)
        return (hidden[:, 0] if T == 1 else hidden[jnp.arange(B), lengths - 1]), carry

    def read_chunk(i, both):
        last, carry = both
        at = i * size
        chunk, chunk_positions = (jax.lax.dynamic_slice_in_dim(a, at, size, 1) for a in (tokens, positions))
        hidden, carry = forward(carry, chunk, chunk_positions)
        index = jnp.clip(lengths - 1 - at, 0, size - 1)
        ends = (lengths - 1) // size == i
        return jnp.where(ends[:, None], hidden[jnp.arange(B), index], last), carry

    padding = -T % size
    tokens = jnp.pad(tokens, ((0, 0), (0, padding), *[(0, 0)] * (tokens.ndim - 2)))
    positions = jnp.pad(positions, ((0, 0), (0, padding)), constant_values=-1)
    chunks = (lengths.max() + size - 1) // size
    return jax.lax.fori_loop(0, chunks, read_chunk, (jnp.zeros((B, config.hidden)), carry))


def chunk_size(cache: KVCache, rows: int) -> int:
    """Tokens of each row that `read` takes through the layers at a time."""
    return max(read_size(state.prefill_impl, rows) for state in cache.paged)


def bucket(length: int) -> int:
    """The padded length for a prompt: a power of two, at least 16, so that few lengths are compiled."""
    return max(16, 1 << (length - 1).bit_length())


def _read(
    params: Params,
    state: State,
    tokens: jax.Array,
    positions: jax.Array,
    config: ModelConfig,
    taps: Taps | None,
) -> tuple[jax.Array, State]:
    """Hidden vectors after these tokens, and the state whose cache, and whose proposer, has read them."""
    hidden, cache = decoder.read(params, tokens, positions, state.cache, config, taps)
    state = state.replace(cache=cache)
    return hidden, speculation.follow(params, state, hidden, tokens, positions, config)


def _positions(cache: KVCache, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """Positions of tokens that continue the cache; -1 beyond `lengths`."""
    offset = jnp.arange(tokens.shape[1])
    return jnp.where(offset < lengths[:, None], cache.lengths[:, None] + offset, -1)


def _shown(value: Any) -> str:
    return f"shape {value.shape}" if isinstance(value, jax.Array) else repr(value)


def draw(
    params: Params,
    state: State,
    hidden: Float[Array, "B H"],
    config: ModelConfig,
    logits_processor: LogitsProcessor | None = None,
    logprobs: int | None = None,
    allowed: UInt32[Array, "B words"] | None = None,
) -> Drawn:
    """The second half of `prefill` and `step`: draw each running row's next token from its hidden vector, and
    see whether it ends the row.

    allowed   bit i % 32 of word i // 32 says whether token i may be drawn; None: all may
    """
    running = state.remaining > 0
    scores = decoder.unembed(params, hidden, config)
    logits = scores
    if logits_processor is not None:
        own = state.replace(sampler=sampling.with_own_tables(state.sampler))
        logits = logits_processor(scores, own)
    if np.shape(logits) != scores.shape:
        raise ValueError(
            f"logits_processor: it returned {_shown(logits)}; expected logits of shape {scores.shape}"
        )
    tokens, state, sampled = _sampled(state, logits, running, allowed, logprobs is not None)
    check(jnp.all((tokens >= 0) | ~running), NOTHING_TO_DRAW)
    # One by one: XLA makes a launch of a reduction, in front of all that waits for it.
    stops = [tokens == state.stop_ids[:, i] for i in range(state.stop_ids.shape[1])]
    stopped = functools.reduce(jnp.logical_or, stops, tokens < 0)
    remaining = jnp.where(stopped, 0, jnp.maximum(state.remaining - 1, 0))
    state = state.replace(
        tokens=jnp.where(running, tokens, state.tokens),
        remaining=jnp.where(running, remaining, 0),
    )
    if state.speculation is not None:
        noted = speculation.note(state.speculation, tokens[:, None], state.cache.lengths, running[:, None])
        state = state.replace(speculation=noted)
    drawn = jnp.where(running, tokens, NO_TOKEN)
    own = sampling.token_logprobs(scores, tokens, logprobs)
    return Drawn(state, drawn, None if own is None else own.replace(sampled=sampled))


def _sampled(
    state: State,
    logits: Float[Array, "B V"],
    running: Bool[Array, "B"],
    allowed: UInt32[Array, "B words"] | None,
    logprobs: bool,
) -> tuple[Int[Array, "B"], State, Float[Array, "B"] | None]:
    """The tokens that are drawn from these logits, the state whose samplers know them, and
    Logprobs.sampled."""
    positions, before = state.cache.lengths, state.sampler
    scored = logprobs and before.scored
    if state.chain is None:
        tokens, sampler = sampling.sample(before, logits, positions, allowed)
        own = sampling.sampled_logprobs(sampling.rules(before, allowed), logits, tokens) if scored else None
        return tokens, state.replace(sampler=sampler), own
    tokens, sampler, after, own = chain.sample(
        state.chain, before, logits, positions, state.stop_ids, running, allowed, scored
    )
    return tokens, state.replace(sampler=sampler, chain=after), own
