"""Prefill and decode of some of an engine's rows, as functions of arrays.

    pool: State of all rows --take rows--> State of a few --prefill or decode--> State --put back--> pool

Pages lie in the pool and are not taken along: the block tables come from the host with each call. So a row
is wherever its numbers are, and few rows run in a small executable. Over a mesh each device has a pool, with
rows and pages of its own.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from bonsai_jax import decoding, jitted, sampling, speculation
from bonsai_jax.cache import KVCache
from bonsai_jax.config import ModelConfig
from bonsai_jax.decoding import LogitsProcessor, State
from bonsai_jax.parallel import over_mesh
from bonsai_jax.params import Params
from bonsai_jax.sampling import NO_TOKEN
from bonsai_jax.taps import Taps
from pallas_kernels import serializable

AnyArray = Array | np.ndarray
DECODE_SIZE = 64  # most tokens of a row in one dispatch


@serializable
class Chunk(struct.PyTreeNode):
    """What the host says of R rows that read tokens.

    rows        int32 [R], of the pool; as many as it has where there is none
    table       int32 [R, pages per row], pages of each row
    first       int32 [R], tokens that the pages hold before
    starts      bool [R], nothing that the row in the pool remembers is of this request
    draws       bool [R], with these tokens all is read, and one is drawn
    remaining   int32 [R], tokens that may be drawn
    answer      int32 [R], the position from which on tokens are the answer's, for penalties
    stop_ids    int32 [R, S], as State's
    copy_from, copy_to   int32 [R], a page that becomes a copy of another before anything is read; copy_to is
                         as many as there are pages where there is none
    seeds, rules   of the draws: sampling.columns
    """

    rows: Int[AnyArray, "R"]
    table: Int[AnyArray, "R pages_per_row"]
    first: Int[AnyArray, "R"]
    starts: Bool[AnyArray, "R"]
    draws: Bool[AnyArray, "R"]
    remaining: Int[AnyArray, "R"]
    answer: Int[AnyArray, "R"]
    stop_ids: Int[AnyArray, "R S"]
    copy_from: Int[AnyArray, "R"]
    copy_to: Int[AnyArray, "R"]
    seeds: UInt32[AnyArray, "R"]
    rules: dict[str, Any]


@over_mesh("held", "rows", logprobs="rows")
def prefill(
    params: Params,
    pool: State,
    chunk: Chunk,
    tokens: Int[Array, "R T"] | Float[Array, "R T H"],
    lengths: Int[Array, "R"],
    config: ModelConfig,
    *,
    taps: Taps | None = None,
    logits_processor: LogitsProcessor | None = None,
    logprobs: int | None = None,
):
    """Read `lengths` tokens of each row behind what its pages hold, and draw where chunk.draws.

    Returns the pool and int32 [R, 1], the tokens drawn, and with logprobs=n Logprobs [R, 1].
    """
    cache = pool.cache
    k, v = (
        jax.tree.map(lambda x: x.at[:, chunk.copy_to].set(x[:, chunk.copy_from], mode="drop"), pages)
        for pages in (cache.k, cache.v)
    )
    pool = pool.replace(cache=cache.replace(k=k, v=v))
    state = _started(_take(pool, chunk.rows, chunk.table), chunk)
    noted = state.sampler
    if tokens.ndim == 2:
        position = chunk.first[:, None] + jnp.arange(tokens.shape[1])
        valid = jnp.arange(tokens.shape[1]) < lengths[:, None]
        noted = sampling.read_prompt(noted, tokens, valid)
        noted = sampling.remember(noted, tokens, valid & (position >= chunk.answer[:, None]))
        state = state.replace(sampler=noted)
    options = {"taps": taps, "logits_processor": logits_processor, "logprobs": logprobs}
    first = decoding.prefill(params, state, tokens, lengths, config, **options)
    state, *scores = first if isinstance(first, tuple) else (first,)
    # A draw of rows that have more to read counts for nothing.
    draws = chunk.draws[:, None]
    drawn = state.sampler
    state = state.replace(
        sampler=drawn.replace(
            seen=jnp.where(draws, drawn.seen, noted.seen), counts=jnp.where(draws, drawn.counts, noted.counts)
        )
    )
    out = jnp.where(draws, state.tokens[:, None], NO_TOKEN)
    return _put(pool, state, chunk.rows), out, *jax.tree.map(lambda x: x[:, None], scores)


@over_mesh("held", "rows", "rows", logprobs="rows")
def decode(
    params: Params,
    pool: State,
    rows: Int[Array, "R"],
    table: Int[Array, "R pages_per_row"],
    limit: Int[Array, ""],
    config: ModelConfig,
    *,
    size: int,
    taps: Taps | None = None,
    logits_processor: LogitsProcessor | None = None,
    logprobs: int | None = None,
):
    """decoding.decode of these rows. Returns the pool, int32 [R, size], the tokens drawn, and int32 [R], the
    steps that drew them, and with logprobs=n Logprobs [R, size]."""
    state = _take(pool, rows, table)
    there = rows < pool.tokens.shape[0]
    state = state.replace(remaining=jnp.where(there, state.remaining, 0))
    if state.speculation is not None:
        width = speculation.width(rows.shape[0])
        state = state.replace(
            speculation=state.speculation.replace(width=width, steps=jnp.zeros_like(state.speculation.steps))
        )
    options = {"taps": taps, "logits_processor": logits_processor, "logprobs": logprobs}
    state, drawn, *scores = decoding.decode(params, state, config, limit=limit, size=size, **options)
    steps = (drawn != NO_TOKEN).sum(1) if state.speculation is None else state.speculation.steps
    return _put(pool, state, rows), drawn, steps, *scores


def _take(pool: State, rows: AnyArray, table: AnyArray) -> State:
    """The State of these rows, with the pages of all."""
    cache, (by_row, by_layer) = pool.cache, _parts(pool)
    state = jax.tree.map(lambda x: x.at[rows].get(mode="clip"), by_row)
    delta = jax.tree.map(lambda x: x.at[:, rows].get(mode="clip"), by_layer)
    cache = state.cache.replace(k=cache.k, v=cache.v, delta=delta, block_table=table)
    return state.replace(cache=_with_draft_pages(cache, pool.cache))


def _put(pool: State, state: State, rows: AnyArray) -> State:
    """The pool, with this State of these rows."""
    if state.speculation is not None and pool.speculation is not None:  # the pool has a width of its own
        state = state.replace(speculation=state.speculation.replace(width=pool.speculation.width))
    cache, old, new = state.cache, _parts(pool), _parts(state)
    rest = jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), old[0], new[0])
    delta = jax.tree.map(lambda x, y: x.at[:, rows].set(y, mode="drop"), old[1], new[1])
    return rest.replace(cache=_with_draft_pages(rest.cache.replace(k=cache.k, v=cache.v, delta=delta), cache))


def _with_draft_pages(cache: KVCache, pages: KVCache) -> KVCache:
    if cache.draft is None or pages.draft is None:
        return cache
    return cache.replace(draft=cache.draft.replace(k=pages.draft.k, v=pages.draft.v))


def _parts(state: State) -> tuple[State, Any]:
    """Arrays with rows first, and those with layers first; without pages, which are of no row."""
    cache = state.cache
    draft = cache.draft and cache.draft.replace(k=(), v=())
    return state.replace(cache=cache.replace(k=(), v=(), delta=None, draft=draft)), cache.delta


def _started(state: State, chunk: Chunk) -> State:
    """What the host says of each row, and nothing remembered where a request starts."""
    starts = chunk.starts[:, None]
    sampler = state.sampler.replace(
        keys=sampling.keys(chunk.seeds),
        seen=state.sampler.seen & ~starts,
        counts=jnp.where(starts, 0, state.sampler.counts),
        **chunk.rules,
    )
    if state.speculation is not None:
        ids = jnp.where(starts, NO_TOKEN, state.speculation.ids)
        state = state.replace(speculation=state.speculation.replace(ids=ids))
    return state.replace(
        cache=state.cache.replace(lengths=chunk.first),
        remaining=jnp.where(chunk.draws, chunk.remaining, 0),
        stop_ids=chunk.stop_ids,
        sampler=sampler,
    )


prefill_rows = jitted.donating(prefill, "pool")
decode_rows = jitted.donating(decode, "pool")
