"""How many tokens a step that speculates reads: those that are expected to pay, by how long it takes."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bonsai_jax.config import ModelConfig
from bonsai_jax.decoding.sampling import NO_TOKEN
from bonsai_jax.decoding.state import Speculation, State
from bonsai_jax.network.cache import KVCache
from bonsai_jax.network.params import Params, decode_bytes
from pallas_kernels import device

# How long a step takes, by the number of tokens that it reads in all, relative to a step of one: the 8B in
# Q1_0 on an H200, with its layers in one launch (docs/performance.md). Beyond 256 it grows in proportion.
TIMES = {1: 1.0, 2: 1.24, 4: 1.40, 8: 1.77, 16: 2.4, 32: 4.0, 64: 5.4, 256: 14.8, 1024: 59}
KEY_TIME = 0.5  # of a byte of keys, relative to one of weights, which come at half of the memory's rate
MARGIN = 1.1  # by which reading must pay: chance lifts the trust of a proposer that is right less often
# The most that a draft model may hope for: published pairs of one family are right in 0.6 to 0.85 of cases,
# and more often only where the text copies its prompt. If this does not pay, nothing will.
BEST = 0.9
LAYER_BYTES = 43e6  # what an H200 reads in 10 us, the time that a layer takes beside its weights (LOG.md)


def widths(most: int) -> list[int]:
    """The tokens of a row that steps of up to `most` read. Each is a copy of the step's program, so one row
    has no 2: these would gain up to 8 %, where 0.24 to 0.35 of proposals are right."""
    return [1, *sorted({min(most, 4), most})]


def key_time(params: Params, cache: KVCache, config: ModelConfig) -> float:
    """The time of reading a stored token's keys and values, relative to that of a plain step of one row."""
    stored = sum(
        leaf.nbytes / (s.num_pages * s.page_size) for s in cache.paged for leaf in jax.tree.leaves(s)
    )
    return KEY_TIME * stored / decode_bytes(params, config)


def cost(weight_bytes: int, layers: int) -> float:
    """The time of a step of one row, in bytes that could be read in it."""
    return weight_bytes + layers * (0 if device.platform() == "cpu" else LAYER_BYTES)


def tokens_to_propose(
    params: Params, state: State, config: ModelConfig, count: int, share: float
) -> jax.Array:
    """`tokens_to_read` before anything is proposed, as if `count` tokens of each row were; share: the time in
    which a token is."""
    s: Any = state.speculation
    all_proposed, running = jnp.zeros((len(state.tokens), count), jnp.int32), state.remaining > 0
    keys = key_time(params, state.cache, config) * state.cache.lengths
    return tokens_to_read(s, all_proposed, running, keys, share)


def tokens_to_read(
    s: Speculation,
    proposals: Int[Array, "B W-1"],
    running: Bool[Array, "B"],
    keys: float | Float[Array, "B"] = 0.0,
    share: float = 0.0,
) -> Int[Array, ""]:
    """Which of `widths` the next step reads: the one that is expected to draw most tokens in its time.

        a row draws 1 + p + p^2 + ... + p^(T - 1) tokens,    p its trust, as far as it has proposals
        in          time(T) + share [(T - 1) time(1) + time(T)]

    keys   the time in which a token reads its row's keys (`key_time`): each token of a step does
    share  the time of a step of a draft layer or model: it draws T - 1 tokens one by one, and afterwards
           reads the accepted ones together
    """
    rows, all_keys = len(running), jnp.where(running, keys, 0).sum()
    # Columns one by one, and no argmax: one kernel, where each costs every step its microseconds.
    choice, best, tokens, p = jnp.int32(0), MARGIN, running.astype(jnp.float32), 1.0
    for number, (narrower, width) in enumerate(itertools.pairwise(widths(s.width)), 1):
        for column in range(narrower - 1, width - 1):
            p = p * s.trust
            tokens = tokens + jnp.where(running & (proposals[:, column] != NO_TOKEN), p, 0)
        time = (_whole_time(rows, width, share) + width * all_keys) / (_time(rows) + all_keys)
        gain = tokens.sum() / jnp.maximum(running.sum(), 1) / time
        choice, best = jnp.where(gain > best, number, choice), jnp.maximum(gain, best)
    return choice


def could_pay(rows: int, most: int, share: float) -> bool:
    """Whether some step of up to `most` tokens would pay if each proposal were right with probability BEST.
    Arguments as for `tokens_to_read`."""

    def gain(width):
        tokens = sum(BEST**n for n in range(width))
        return tokens * _time(rows) / _whole_time(rows, width, share)

    return any(gain(width) > MARGIN for width in widths(most)[1:])


def _whole_time(rows: int, width: int, share: float) -> float:
    """The time of a step that reads `width` tokens of each row, with that of drafting and following them."""
    return _time(rows * width) + share * ((width - 1) * _time(rows) + _time(rows * width))


def _time(tokens: int) -> float:
    """The time of a step that reads this number of tokens in all, relative to a step of one."""
    return float(np.interp(tokens, list(TIMES), list(TIMES.values())))
