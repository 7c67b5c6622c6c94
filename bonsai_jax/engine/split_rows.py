"""A step in two programs, for engines in which some rows have constraints.

    read     the newest token goes through the layers; the vector after it stays in the pool (State.hidden)
    draw     the next token is drawn from that vector, among those that its mask allows

A mask depends on the newest token, which the host must see first, and it is needed only at the end of a step.
So the device reads a token while the host makes the mask for the next draw:

    device   draw t | read t            | draw t+1 | read t+1
    host            | fetch t, mask t+1 |          | fetch t+1, mask t+2

On one GPU an engine dispatches the next draw before its masks are made, and it waits for them on the device
(mailbox.py), because to dispatch a program takes longer than to make a mask. Elsewhere masks are sent with a
draw.

A row whose mask is late draws nothing, and its vector waits in the pool. So the read behind a draw asks the
device which rows have drawn.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from bonsai_jax.config import ModelConfig
from bonsai_jax.decoding import jitted, steps
from bonsai_jax.decoding.state import Hidden, State
from bonsai_jax.decoding.steps import LogitsProcessor
from bonsai_jax.engine import rows as whole
from bonsai_jax.engine.rows import RESULT, Result
from bonsai_jax.model import Model
from bonsai_jax.network import parallel
from bonsai_jax.network.parallel import over_mesh
from bonsai_jax.network.params import Params
from bonsai_jax.network.taps import Taps
from pallas_kernels import host_masks


@over_mesh(RESULT)
def read_chunk(
    params: Params,
    pool: State,
    columns: Int[Array, "R columns"],
    vectors: Float[Array, "R T H"] | None,
    config: ModelConfig,
    *,
    taps: Taps | None = None,
    logits_processor: LogitsProcessor | None = None,
) -> Result:
    """rows.prefill without its draw: read tokens of each row, which continue what its pages hold.

    logits_processor   what will be called in the draw
    """
    chunk = whole.chunk_fields(pool, columns)
    remembers = whole.remembered(chunk["rules"], logits_processor)
    pool, state, tokens = whole.begun(pool, chunk, vectors, remembers)
    params = whole.with_adapters(params, state)
    vectors, state = steps.read_chunk(params, state, tokens, chunk["count"], config, taps)
    own: Any = state.hidden
    if own.vectors.ndim == 3:  # split_guesses.py: nothing is guessed yet
        vectors = jnp.pad(vectors[:, None], ((0, 0), (0, own.vectors.shape[1] - 1), (0, 0)))
    state = state.replace(hidden=own.replace(vectors=vectors))
    return Result(whole.put(pool, state, chunk["row"], chunk["saves"]))


@over_mesh(RESULT)
def read_newest(
    params: Params,
    pool: State,
    columns: Int[Array, "R columns"],
    config: ModelConfig,
    *,
    taps: Taps | None = None,
) -> Result:
    """Read the newest token of each row.

    columns   the row's number, beyond all rows for padding; 1: only if its last draw took a token; the row's
              pages
    """
    rows, table = columns[:, 0], jax.lax.optimization_barrier(columns[:, 2:])
    state = only_rows(whole.take(pool, rows, table), rows, pool)
    params = whole.with_adapters(params, state)
    before: Any = state.hidden
    waits = before.undrawn & (columns[:, 1] > 0)
    vectors, read = steps.read_newest(params, without(state, waits), config, taps)
    vectors = jnp.where(waits[:, None], before.vectors, vectors)
    state = read.replace(remaining=state.remaining, hidden=before.replace(vectors=vectors))
    return Result(whole.put(pool, state, rows))


@over_mesh(RESULT)
def draw(
    params: Params,
    pool: State,
    columns: Int[Array, "R columns"],
    config: ModelConfig,
    *,
    logits_processor: LogitsProcessor | None = None,
    logprobs: int | None = None,
) -> Result:
    """Draw a token of each row, after what it has read.

    columns   the row's number, beyond all rows for padding; where the pool has a chain, 1 for a row that uses
              it; the words of its mask, as steps.draw has them
    The result has size 1. What mixers store is not in the state that a logits_processor sees.
    """
    words = _beyond_row(pool, columns)
    allowed, draws = jax.lax.bitcast_convert_type(words, jnp.uint32), jnp.ones(len(columns), bool)
    return _drawn(params, pool, columns, config, allowed, draws, logits_processor, logprobs)


@over_mesh(RESULT)
def draw_from_mailbox(
    params: Params,
    pool: State,
    columns: Int[Array, "R columns"],
    config: ModelConfig,
    *,
    logits_processor: LogitsProcessor | None = None,
    logprobs: int | None = None,
) -> Result:
    """`draw` that waits for masks in a mailbox (host_masks.receive), and leaves rows out that are held.

    columns   as for `draw`; in place of a mask 1 for a row that waits for one, and the mailbox's address
    """
    rest = _beyond_row(pool, columns)
    words = mask_words(config.vocab_size)
    allowed, draws = host_masks.receive(rest[0, 1:], columns[:, 0], rest[:, 0] > 0, words)
    return _drawn(params, pool, columns, config, allowed, draws, logits_processor, logprobs)


def _beyond_row(pool: State, columns: Int[Array, "R columns"]) -> Int[Array, "R rest"]:
    """What the columns have of a draw beyond its row, as an array of its own."""
    return jax.lax.optimization_barrier(columns[:, 1 + (pool.chain is not None) :])


def _drawn(
    params: Params,
    pool: State,
    columns: Int[Array, "R columns"],
    config: ModelConfig,
    allowed: UInt32[Array, "R words"],
    draws: Bool[Array, "R"],
    logits_processor: LogitsProcessor | None,
    logprobs: int | None,
) -> Result:
    rows = columns[:, 0]
    state = only_rows(whole.take_without_states(pool, rows), rows, pool)
    state = whole.only_chained(state, columns, 1)
    own: Any = state.hidden
    after, tokens, scores = steps.draw(
        params, without(state, ~draws), own.vectors, config, logits_processor, logprobs, allowed
    )
    remaining = jnp.where(draws, after.remaining, state.remaining)
    state = after.replace(remaining=remaining, hidden=own.replace(undrawn=~draws))
    drawn = jnp.stack([jnp.ones_like(tokens), tokens], axis=1)
    pool = whole.put_without_states(pool, state, rows)
    return Result(pool, drawn, jax.tree.map(lambda x: x[:, None], scores), whole.row_mu(state))


def without(state: State, rows: Bool[Array, "R"]) -> State:
    """The state as if these rows had ended."""
    return state.replace(remaining=jnp.where(rows, 0, state.remaining))


def only_rows(state: State, rows: Int[Array, "R"], pool: State) -> State:
    """The state without tokens to draw where a row is padding."""
    return state.replace(remaining=jnp.where(rows < pool.tokens.shape[0], state.remaining, 0))


def empty(pool: State, model: Model, width: int = 1) -> Hidden:
    """State.hidden of a pool whose rows have read nothing. width: of a step that guesses."""
    rows = len(pool.tokens)
    vectors = jnp.zeros((rows, *[width] * (width > 1), model.config.hidden), jnp.float32)
    place = functools.partial(parallel.place_rows, mesh=model.mesh)
    return jax.tree.map(place, Hidden(vectors, jnp.zeros(rows, bool)))


def mask_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // np.iinfo(np.uint32).bits)


read_chunk_rows = jitted.donating(read_chunk, "pool")
read_newest_rows = jitted.donating(read_newest, "pool")
draw_rows = jitted.donating(draw, "pool")
draw_from_mailbox_rows = jitted.donating(draw_from_mailbox, "pool")
