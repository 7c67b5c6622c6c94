"""Steps in two programs (split_rows.py) for engines that guess: rows with constraints are read and drawn with
guesses, several tokens at once.

    read     newest  p1   p2         the row's newest token, and what the proposer expects to follow
    masks    m1      m2   m3         m2 as if p1 was drawn, made while the device reads
    drawn    d1      d2   d3         accepted as in speculation.py: d1 and d2 where p1 = d1 and p2 is not d2

The host needs p1 and p2 for the masks, before they are read. So a draw proposes what follows, and the next
read proposes the same again, from the same text. The host leaves out proposals that a constraint forbids.

Only proposers without a draft layer or draft model, and caches without recurrent states: these could not be
rewound in another program than the one that reads.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from bonsai_jax.config import ModelConfig
from bonsai_jax.decoding import jitted, proposers, speculation
from bonsai_jax.decoding.sampling import NO_TOKEN
from bonsai_jax.decoding.state import State
from bonsai_jax.decoding.steps import LogitsProcessor
from bonsai_jax.engine import rows as whole
from bonsai_jax.engine.rows import RESULT, Result
from bonsai_jax.engine.split_rows import only_rows
from bonsai_jax.network import decoder
from bonsai_jax.network.parallel import over_mesh
from bonsai_jax.network.params import Params
from bonsai_jax.network.taps import Taps


def guess_width(speculate: str | None, recurrent: bool, rows: int) -> int:
    """Tokens of a row with a constraint in one step; 1: it does not guess. rows: most of a device."""
    if speculate is None or recurrent or proposers.get(speculate).LOADS is not None:
        return 1
    return speculation.width(rows, speculate)


@over_mesh(RESULT)
def read_newest(
    params: Params,
    pool: State,
    columns: Int[Array, "R columns"],
    config: ModelConfig,
    *,
    taps: Taps | None = None,
) -> Result:
    """Read the newest token of each row, and what is proposed to follow.

    columns   as for split_rows.read_newest; each draw takes a token here
    """
    rows, table = columns[:, 0], jax.lax.optimization_barrier(columns[:, 2:])
    state = only_rows(whole.take(pool, rows, table), rows, pool)
    width, params = _width(pool), whole.with_adapters(params, state)
    proposals = _proposed(params, state, config, width)
    first, running = state.cache.lengths, state.remaining > 0

    def read(state: State, proposals: Int[Array, "R T-1"]) -> tuple[jax.Array, Any]:
        tokens = jnp.maximum(jnp.concatenate([state.tokens[:, None], proposals], axis=1), 0)
        readable = running[:, None] & speculation.up_to(proposals != NO_TOKEN)
        positions = jnp.where(readable, first[:, None] + jnp.arange(tokens.shape[1]), -1)
        num_keys = positions.max() + 1
        hidden, cache, _ = decoder.decoder(params, tokens, positions, state.cache, config, num_keys, taps)
        return jnp.pad(hidden, ((0, 0), (0, width - hidden.shape[1]), (0, 0))), cache

    hidden, cache = jax.lax.cond(
        jnp.any(proposals[:, 0] != NO_TOKEN),
        lambda state: read(state, proposals),
        lambda state: read(state, proposals[:, :0]),
        state,
    )
    own: Any = state.hidden
    cache = cache.replace(lengths=first + running)
    state = state.replace(hidden=own.replace(vectors=hidden), cache=cache)
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
    """Draw a token of each row after what it has read, and more where what was proposed is drawn.

    columns   the row's number, beyond all rows for padding; W - 1 proposals that were read, NO_TOKEN for
              none; the words of W masks, as steps.draw has them
    drawn of the result has W tokens, and W - 1 proposals of what follows.
    """
    width = _width(pool)
    rows, proposals, words = columns[:, 0], columns[:, 1:width], columns[:, width:]
    words = jax.lax.optimization_barrier(words).reshape(len(rows), width, -1)
    allowed = jax.lax.bitcast_convert_type(words, jnp.uint32)
    state = only_rows(whole.take_without_states(pool, rows), rows, pool)
    hidden: Any = state.hidden
    readable = (state.remaining > 0)[:, None] & speculation.up_to(proposals != NO_TOKEN)
    state, accepted, drawn, scores = speculation.verify(
        params, state, hidden.vectors, proposals, readable, config, logits_processor, logprobs, allowed
    )
    following = _proposed(params, state, config, width)
    tokens = jnp.where(accepted, drawn, NO_TOKEN)
    result = jnp.concatenate([jnp.ones_like(tokens[:, :1]), tokens, following], axis=1)
    return Result(whole.put_without_states(pool, state, rows), result, scores)


def _proposed(params: Params, state: State, config: ModelConfig, width: int) -> Int[Array, "R W-1"]:
    """The tokens that are proposed to follow each row's newest one, as far as the row may go on."""
    s = state.speculation
    assert s is not None
    proposals, _ = proposers.get(s.proposer).propose(params, state, config, width - 1)
    room = jnp.minimum(state.remaining, s.ids.shape[1] - state.cache.lengths)
    return jnp.where(jnp.arange(1, width) < room[:, None], proposals, NO_TOKEN)


def _width(pool: State) -> int:
    assert pool.hidden is not None
    return pool.hidden.vectors.shape[1]


read_newest_rows = jitted.donating(read_newest, "pool")
draw_rows = jitted.donating(draw, "pool")
