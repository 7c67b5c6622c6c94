"""A step in two programs, for engines in which some rows have constraints.

    read     the newest token goes through the layers; the vector after it stays in the pool (State.hidden)
    draw     the next token is drawn from that vector, among those that its mask allows

A mask depends on the newest token, which the host must see first, and it is needed only at the end of a step.
So the device reads a token while the host makes the mask for the next draw:

    device   draw t | read t            | draw t+1 | read t+1
    host            | fetch t, mask t+1 |          | fetch t+1, mask t+2

A row whose mask is late is left out of a draw, and its vector waits in the pool.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bonsai_jax.config import ModelConfig
from bonsai_jax.decoding import jitted, steps
from bonsai_jax.decoding.state import State
from bonsai_jax.decoding.steps import LogitsProcessor
from bonsai_jax.engine import rows as whole
from bonsai_jax.engine.rows import RESULT, Result
from bonsai_jax.model import Model
from bonsai_jax.network import parallel
from bonsai_jax.network.parallel import over_mesh
from bonsai_jax.network.params import Params
from bonsai_jax.network.taps import Taps


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
    hidden, state = steps.read_chunk(params, state, tokens, chunk["count"], config, taps)
    if pool.hidden is not None and pool.hidden.ndim == 3:  # split_guesses.py: nothing is guessed yet
        hidden = jnp.pad(hidden[:, None], ((0, 0), (0, pool.hidden.shape[1] - 1), (0, 0)))
    state = state.replace(hidden=hidden)
    return Result(whole.put(pool, state, chunk["row"], remembers, chunk["saves"]))


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

    columns   the row's number, beyond all rows for padding; the row's pages
    """
    rows, table = columns[:, 0], jax.lax.optimization_barrier(columns[:, 1:])
    state = only_rows(whole.take(pool, rows, table, False), rows, pool)
    params = whole.with_adapters(params, state)
    hidden, state = steps.read_newest(params, state, config, taps)
    return Result(whole.put(pool, state.replace(hidden=hidden), rows, False))


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
    first = 1 + (pool.chain is not None)
    rows, words = columns[:, 0], jax.lax.optimization_barrier(columns[:, first:])
    allowed = jax.lax.bitcast_convert_type(words, jnp.uint32)
    remembers = whole.rows_remember(pool, rows, logits_processor)
    state = only_rows(whole.take_without_states(pool, rows, remembers), rows, pool)
    state = whole.only_chained(state, columns, 1)
    hidden: Any = state.hidden
    state, tokens, scores = steps.draw(params, state, hidden, config, logits_processor, logprobs, allowed)
    drawn = jnp.stack([jnp.ones_like(tokens), tokens], axis=1)
    pool = whole.put_without_states(pool, state, rows, remembers)
    return Result(pool, drawn, jax.tree.map(lambda x: x[:, None], scores), whole.row_mu(state))


def only_rows(state: State, rows: Int[Array, "R"], pool: State) -> State:
    """The state without tokens to draw where a row is padding."""
    return state.replace(remaining=jnp.where(rows < pool.tokens.shape[0], state.remaining, 0))


def empty(pool: State, model: Model, width: int = 1) -> Float[Array, "B *W H"]:
    """State.hidden of a pool whose rows have read nothing. width: of a step that guesses."""
    shape = (len(pool.tokens), *[width] * (width > 1), model.config.hidden)
    return parallel.place_rows(jnp.zeros(shape, jnp.float32), model.mesh)


def mask_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // np.iinfo(np.uint32).bits)


read_chunk_rows = jitted.donating(read_chunk, "pool")
read_newest_rows = jitted.donating(read_newest, "pool")
draw_rows = jitted.donating(draw, "pool")
