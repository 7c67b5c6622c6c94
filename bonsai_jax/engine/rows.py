"""Prefill and decode of some of an engine's rows, as functions of arrays.

    pool: State of all rows --take rows--> State of a few --prefill or decode--> State --put back--> pool

Pages stay in the pool; the host sends the block tables with each call. So a few rows run in a small program,
whichever rows they are. Over a mesh each device has a pool, with rows and pages of its own.

The tables of penalties are as long as the vocabulary and nearly all of a row's state. They stay in the pool:
a draw gets the number of each row's (Sampler.table). A table is emptied where a request with penalties
starts, so for others it holds what earlier requests left, and nobody reads it.

A pool with State.chain has programs of its own, which run while a request uses one of its samplers.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bonsai_jax.config import ModelConfig
from bonsai_jax.decoding import chain, jitted, sampling, speculation, steps
from bonsai_jax.decoding.sampling import NO_TOKEN, Logprobs
from bonsai_jax.decoding.state import State
from bonsai_jax.decoding.steps import LogitsProcessor
from bonsai_jax.network.kinds.state import map_states
from bonsai_jax.network.parallel import over_mesh
from bonsai_jax.network.params import Params
from bonsai_jax.network.taps import Taps

DECODE_SIZE = 64  # most tokens of a row in one dispatch
PENALTIES = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # and neutral values


class Result(NamedTuple):
    """What `note`, `prefill` and `decode` of R rows return.

    pool     with the changed rows
    drawn    int32 [R, 1 + size]: in column 0 the decode steps in which a row drew tokens (0 for prefill),
             then the tokens, NO_TOKEN after the last. One array, as the host fetches each array separately.
             None from `note`, which draws nothing
    logprobs  Logprobs [R, size]; None unless asked for
    mu       float32 [R], Chain.mu after them; None where the pool has no chain
    """

    pool: State
    drawn: Int[Array, "R 1+size"] | None = None
    logprobs: Logprobs | None = None
    mu: Float[Array, "R"] | None = None


RESULT = Result._make(["pool", "rows", "rows", "rows"])  # how results lie over a mesh


def layout(pool: State, tokens: int, chained: bool) -> np.dtype:
    """The chunk of one row as a numpy structured type of 4-byte fields. An array of R such rows goes to the
    device as one int32 [R, columns] (`packed`), where `unpacked` restores the fields.

    row         its number in the pool; beyond all rows and checkpoints for padding
    first       tokens that its pages hold before the chunk
    count       tokens to read
    starts      1: the first chunk of its request, so penalties and proposals in the pool are another's
    draws       1: the prompt ends with this chunk, and a token is drawn
    remaining   tokens that may be drawn
    answer      the position of the answer's first token, for penalties
    begins      the recurrent state to begin with: its own row, or a checkpoint, numbered after all rows
    saves       the checkpoint to save the state in after the chunk; beyond all for none
    copy_from, copy_to   page copy_to becomes a copy of page copy_from first; copy_to is the number of pages
                for none
    rules       how it draws: sampling.columns, and the stop ids as State has them
    chain       chain.layout, where the pool has a chain
    table       pages of the row
    tokens      of the chunk; those after `count` are padding
    """
    names = ("row", "first", "count", "starts", "draws", "remaining", "answer")
    names += ("begins", "saves", "copy_from", "copy_to")
    pages = pool.cache.block_table.shape[1]
    fields = [(name, np.int32) for name in names]
    return np.dtype(
        [
            *fields,
            ("rules", rules_layout(pool)),
            *([("chain", chain.layout(pool.sampler.seen.shape[1]))] if chained else []),
            ("table", np.int32, (pages,)),
            ("tokens", np.int32, (tokens,)),
        ]
    )


def rules_layout(pool: State) -> np.dtype:
    """How a request draws, the same in all of its chunks."""
    biases, stops = pool.sampler.bias_ids.shape[1], pool.stop_ids.shape[1]
    return np.dtype(
        [
            ("seeds", np.uint32),
            *((name, np.float32) for name in ("temperature", "top_p", "min_p")),
            *((name, np.int32) for name in ("top_k", "temperature_first")),
            *((f"{name}_penalty", np.float32) for name in ("repetition", "presence", "frequency")),
            ("bias_ids", np.int32, (biases,)),
            ("bias", np.float32, (biases,)),
            ("stop_ids", np.int32, (stops,)),
            *([] if pool.adapter is None else [("adapter", np.int32)]),
        ]
    )


def packed(rows: np.ndarray) -> Int[np.ndarray, "R columns"]:
    """Rows of a structured type of 4-byte fields as one array."""
    return rows.view(np.int32).reshape(len(rows), -1)


def unpacked(columns: Int[Array, "R columns"], layout: np.dtype) -> dict[str, Any]:
    """The fields by name, [R, ...]; a structured field becomes a dict.

    With one row a field is a contiguous slice. XLA would pass a kernel its address within `columns`, but
    Mosaic requires arrays aligned to 256 bytes; the barrier makes the field an array of its own.
    """
    out: dict[str, Any] = {}
    for name, (dtype, offset, *_) in (layout.fields or {}).items():
        part = columns[:, offset // 4 : (offset + dtype.itemsize) // 4]
        if dtype.fields:
            out[name] = unpacked(part, dtype)
            continue
        part = part.reshape(len(columns), *dtype.shape)
        part = jax.lax.optimization_barrier(part) if dtype.shape else part
        out[name] = part if dtype.base == np.int32 else jax.lax.bitcast_convert_type(part, dtype.base)
    return out


@over_mesh(RESULT)
def note(params: Params, pool: State, columns: Int[Array, "R columns"]) -> Result:
    """Give rows the tokens that they will not read, because their pages hold them already, for penalties,
    proposals and logits processors. columns: `packed` rows of `layout`, with one token or more."""
    chunk = chunk_fields(pool, columns)
    state = started(take(pool, chunk["row"], chunk["table"]), chunk, True)
    return Result(put(pool, noted_tokens(state, chunk, True), chunk["row"]))


@over_mesh(RESULT)
def save(params: Params, pool: State, columns: Int[Array, "R 2"]) -> Result:
    """Copy what mixers store of a row, beside pages, to a checkpoint. columns: the row's number, and the
    checkpoint's, numbered after all rows; both beyond all for padding."""
    source, to = columns[:, 0], columns[:, 1]
    states = map_states(lambda state: state.with_row_copies(source, to), states_of(pool))
    return Result(with_states(pool, states))


@over_mesh(RESULT)
def prefill(
    params: Params,
    pool: State,
    columns: Int[Array, "R columns"],
    vectors: Float[Array, "R T H"] | None,
    config: ModelConfig,
    *,
    taps: Taps | None = None,
    logits_processor: LogitsProcessor | None = None,
    logprobs: int | None = None,
) -> Result:
    """Read tokens of each row, which continue what its pages hold, and draw one where `draws` says so.

    columns   `packed` rows of `layout`
    vectors   in place of tokens; columns then has no tokens
    The result has size 1.
    """
    chunk = chunk_fields(pool, columns)
    remembers = remembered(chunk["rules"], logits_processor)
    pool, state, tokens = begun(pool, chunk, vectors, remembers)
    # Rows that have more to read draw a token, too; it is dropped, and not counted. A chain draws only where
    # `remaining` is above 0.
    draws = chunk["draws"] > 0
    state = state.replace(sampler=sampling.without_tables(state.sampler, ~draws))
    options = {"taps": taps, "logits_processor": logits_processor, "logprobs": logprobs}
    params = with_adapters(params, state)
    state, token, scores = steps.prefill(params, state, tokens, chunk["count"], config, **options)
    drawn = jnp.where(draws, token, NO_TOKEN)[:, None]
    pool = put(pool, state, chunk["row"], chunk["saves"])
    scores = jax.tree.map(lambda x: x[:, None], scores)
    return Result(pool, jnp.pad(drawn, ((0, 0), (1, 0))), scores, row_mu(state))


@over_mesh(RESULT)
def decode(
    params: Params,
    pool: State,
    columns: Int[Array, "R columns"],
    config: ModelConfig,
    *,
    size: int,
    taps: Taps | None = None,
    logits_processor: LogitsProcessor | None = None,
    logprobs: int | None = None,
) -> Result:
    """steps.decode for some rows.

    columns   the row's number, beyond all rows for padding; most steps, the same for all; where the pool has
              a chain, 1 for a row that uses it; the row's pages
    """
    first = 2 + (pool.chain is not None)
    rows, limit, table = columns[:, 0], columns[0, 1], jax.lax.optimization_barrier(columns[:, first:])
    state = only_chained(take(pool, rows, table), columns, 2)
    state = state.replace(remaining=jnp.where(rows < pool.tokens.shape[0], state.remaining, 0))
    if state.speculation is not None:
        width = speculation.width(rows.shape[0], state.speculation.proposer)
        state = state.replace(
            speculation=state.speculation.replace(width=width, steps=jnp.zeros_like(state.speculation.steps))
        )
    options = {"taps": taps, "logits_processor": logits_processor, "logprobs": logprobs}
    params = with_adapters(params, state)
    state, tokens, scores = steps.decode(params, state, config, limit=limit, size=size, **options)
    taken = (tokens != NO_TOKEN).sum(1) if state.speculation is None else state.speculation.steps
    drawn = jnp.concatenate([taken[:, None], tokens], axis=1)
    return Result(put(pool, state, rows), drawn, scores, row_mu(state))


def with_adapters(params: Params, state: State) -> Params:
    """The weights, where each row has an adapter of its own."""
    if params.adapter is None or state.adapter is None:
        return params
    return params.replace(adapter=params.adapter.replace(chosen=state.adapter))


def only_chained(state: State, columns: Int[Array, "R columns"], at: int) -> State:
    """The state in which the rows with 1 in this column use the chain, where there is one. In the pool the
    fields of a row that does not use it may be an earlier request's."""
    if state.chain is None:
        return state
    return state.replace(chain=state.chain.replace(used=columns[:, at] > 0))


def row_mu(state: State) -> Float[Array, "R"] | None:
    """Result.mu."""
    return None if state.chain is None else state.chain.mu


def chunk_fields(pool: State, columns: Int[Array, "R columns"]) -> dict[str, Any]:
    """The fields of packed rows."""
    chained = pool.chain is not None
    return unpacked(columns, layout(pool, columns.shape[1] - layout(pool, 0, chained).itemsize // 4, chained))


def remembered(
    rules: Mapping[str, Array], logits_processor: LogitsProcessor | None
) -> bool | Bool[Array, ""]:
    """Whether draws of some of these requests depend on earlier tokens."""
    penalized = [jnp.any(rules[name] != neutral) for name, neutral in PENALTIES.items()]
    return logits_processor is not None or jnp.any(jnp.stack(penalized))


def take(
    pool: State,
    rows: Int[Array, "R"],
    table: Int[Array, "R pages"],
    begins: Int[Array, "R"] | None = None,
) -> State:
    """The State of these rows, with the pages and the tables of penalties of all rows, beginning as `begins`.
    A row beyond all has no table."""
    state = take_without_states(pool, rows)
    state = with_states(state, map_states(lambda state: state.taken(rows, begins), states_of(pool)))
    return state.replace(cache=state.cache.replace(block_table=table))


def take_without_states(pool: State, rows: Int[Array, "R"]) -> State:
    """`take` without what mixers store."""

    def gathered(x):
        return x.at[rows].get(mode="clip", wrap_negative_indices=False)

    return _with_tables(jax.tree.map(gathered, _by_row(pool)), pool.sampler, rows)


def put(
    pool: State,
    state: State,
    rows: Int[Array, "R"],
    saves: Int[Array, "R"] | None = None,
) -> State:
    """The pool with this State in these rows, and with what mixers store of them in `saves` too."""
    states = map_states(lambda old, new: old.put(new, rows, saves), states_of(pool), states_of(state))
    return with_states(put_without_states(pool, state, rows), states)


def put_without_states(pool: State, state: State, rows: Int[Array, "R"]) -> State:
    """`put` that leaves what mixers store as it is."""

    def with_rows(x, y):
        return x.at[rows].set(y, mode="drop", wrap_negative_indices=False)

    if state.speculation is not None and pool.speculation is not None:  # the pool has a width of its own
        state = state.replace(speculation=state.speculation.replace(width=pool.speculation.width))
    both = jax.tree.map(with_rows, _by_row(pool), _by_row(state))
    return with_states(_with_tables(both, state.sampler, None), states_of(pool))


def _by_row(state: State) -> State:
    """The arrays with rows first, without what mixers store and tables of penalties."""
    without = with_states(state, map_states(lambda state: None, states_of(state)))
    return without.replace(sampler=without.sampler.replace(seen=(), counts=(), table=None))


def _with_tables(state: State, its: sampling.Sampler, table: Int[Array, "R"] | None) -> State:
    """The state with the tables of this sampler, and which of them each row has."""
    sampler = state.sampler.replace(seen=its.seen, counts=its.counts, table=table)
    return state.replace(sampler=sampler)


def states_of(state: State) -> Any:
    """What mixers store, those of the draft layer or the draft model too."""
    s = state.speculation
    return state.cache.states, None if s is None or s.draft is None else s.draft.states


def with_states(state: State, states: Any) -> State:
    """With what mixers store, as `states_of` has it."""
    s, (own, draft) = state.speculation, states
    if s is not None and s.draft is not None:
        state = state.replace(speculation=s.replace(draft=s.draft.with_states(draft)))
    return state.replace(cache=state.cache.replace(states=own))


def _only_if(
    remembers: bool | Bool[Array, ""], change: Callable[[sampling.Sampler], sampling.Sampler], state: State
) -> State:
    """The state whose tables of penalties are changed, if they will be read."""
    if isinstance(remembers, bool):
        return state.replace(sampler=change(state.sampler)) if remembers else state
    return state.replace(sampler=jax.lax.cond(remembers, change, lambda same: same, state.sampler))


def begun(
    pool: State,
    chunk: dict[str, Any],
    vectors: Float[Array, "R T H"] | None,
    remembers: bool | Bool[Array, ""],
) -> tuple[State, State, Array]:
    """The pool with the pages that these chunks copy, the state of their rows, which has noted their tokens,
    and the tokens or vectors to read."""
    pages = chunk["copy_from"], chunk["copy_to"]
    pool = with_states(pool, map_states(lambda state: state.with_page_copies(*pages), states_of(pool)))
    state = started(take(pool, chunk["row"], chunk["table"], chunk["begins"]), chunk, remembers)
    if vectors is None:
        return pool, noted_tokens(state, chunk, remembers), chunk["tokens"]
    return pool, state, vectors


def started(state: State, chunk: dict[str, Any], remembers: bool | Bool[Array, ""]) -> State:
    """The state of each row as its chunk says, with empty tables of penalties where a request starts."""
    rules = dict(chunk["rules"])
    stop_ids, seeds, adapter = rules.pop("stop_ids"), rules.pop("seeds"), rules.pop("adapter", None)
    rules["temperature_first"] = rules["temperature_first"] > 0
    starts = chunk["starts"][:, None] > 0
    state = state.replace(sampler=state.sampler.replace(keys=sampling.keys(seeds), **rules))
    state = _only_if(remembers, lambda sampler: sampling.cleared(sampler, starts[:, 0]), state)
    if state.speculation is not None:
        forgotten = speculation.forgotten(state.speculation, starts[:, 0])
        state = state.replace(speculation=forgotten)
    if state.chain is not None:
        ids = jnp.where(starts, NO_TOKEN, state.chain.dry.ids)
        own = state.chain.replace(
            drawn=jnp.maximum(chunk["first"] + chunk["count"] - chunk["answer"], 0),
            dry=state.chain.dry.replace(ids=ids),
        )
        state = state.replace(chain=chain.with_rows(own, chunk["chain"]))
    return state.replace(
        cache=state.cache.replace(lengths=chunk["first"]),
        remaining=jnp.where(chunk["draws"] > 0, chunk["remaining"], 0),
        stop_ids=stop_ids,
        adapter=adapter,
    )


def noted_tokens(state: State, chunk: dict[str, Any], remembers: bool | Bool[Array, ""]) -> State:
    """Count the tokens of this chunk for penalties, and store them for proposals."""
    tokens, offset = chunk["tokens"], jnp.arange(chunk["tokens"].shape[1])
    valid = offset < chunk["count"][:, None]
    answer = chunk["first"][:, None] + offset >= chunk["answer"][:, None]

    def noted(sampler: sampling.Sampler) -> sampling.Sampler:
        return sampling.remember(sampling.read_prompt(sampler, tokens, valid), tokens, valid & answer)

    if state.speculation is not None:
        known = speculation.note(state.speculation, tokens, chunk["first"], valid)
        state = state.replace(speculation=known)
    if state.chain is not None:
        state = state.replace(chain=chain.note(state.chain, tokens, chunk["first"], valid))
    return _only_if(remembers, noted, state)


save_rows = jitted.donating(save, "pool")
note_rows = jitted.donating(note, "pool")
prefill_rows = jitted.donating(prefill, "pool")
decode_rows = jitted.donating(decode, "pool")
