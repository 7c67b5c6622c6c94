"""A draft model: a smaller model with the same vocabulary, which proposes tokens that the model checks.

    the model       reads t0 t1 t2 t3                        draws t4
    draft model     reads t0 t1 t2 t3 (`read`), then  t4 -> p1, p1 -> p2, p2 -> p3 (`foresee`)

It reads what the model reads, so its keys and values have pages of their own under the model's block table
and lengths: rows, shared prefixes and files need nothing more. Those of proposals are written over. A
recurrent state has no such places, so proposals do not change it, and `read` gets the accepted ones again.

It never sees vectors that stand for tokens, nor taps or adapters: with these it proposes worse.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from bonsai_jax.config import ModelConfig, RunConfig
from bonsai_jax.network import cache as kv
from bonsai_jax.network import decoder
from bonsai_jax.network.cache import KVCache
from bonsai_jax.network.kinds.state import map_states
from bonsai_jax.network.params import Params
from pallas_kernels import serializable


@serializable
class DraftModelState(struct.PyTreeNode):
    """What the draft model stores of each row.

    states   as KVCache.states, in pages under the model's block table
    chunk    as KVCache.chunk
    """

    states: dict[str, tuple[Any, ...]]
    chunk: int | None = struct.field(pytree_node=False, default=None)

    def with_states(self, states: Any) -> "DraftModelState":
        """The same with other `states`."""
        return self.replace(states=states)

    def under(self, cache: KVCache) -> KVCache:
        """Its cache: these states under the block table and the lengths of the model's."""
        return cache.replace(states=self.states, chunk=self.chunk)


def empty(config: ModelConfig, run: RunConfig, cache: KVCache, checkpoints: int = 0) -> DraftModelState:
    """The state of rows that have read nothing, beside the model's empty cache.

    config       the draft model's
    checkpoints  as for cache.empty
    """
    rows = len(cache.lengths)
    own = kv.empty(config, run, rows, cache.capacity, cache.num_pages, checkpoints=checkpoints)
    return DraftModelState(own.states, own.chunk)


def read(
    params: Params,
    state: DraftModelState,
    cache: KVCache,
    tokens: Int[Array, "B T"] | Float[Array, "B T H"],
    positions: Int[Array, "B T"],
    config: ModelConfig,
) -> tuple[Float[Array, "B T H"], DraftModelState]:
    """The draft model's hidden vectors and its state after the tokens at these positions (-1: none), which
    the model has read.

    params, config  the draft model's
    cache           the model's, for its block table
    """
    integers = jnp.issubdtype(tokens.dtype, jnp.integer)
    tokens = _clipped(tokens, config) if integers else jnp.zeros(positions.shape, jnp.int32)
    hidden, own = decoder.read(params, tokens, positions, state.under(cache), config)
    return hidden, state.replace(states=own.states)


def foresee(
    params: Params,
    state: DraftModelState,
    cache: KVCache,
    tokens: Int[Array, "B"],
    running: Bool[Array, "B"],
    count: Int[Array, ""],
    most: int,
    config: ModelConfig,
    draw: Callable[[Float[Array, "B V"], Int[Array, "B"]], Int[Array, "B"]],
) -> tuple[Int[Array, "B most"], DraftModelState]:
    """The tokens that the draft model draws after each running row's newest, `count` of them one after the
    other, then -1; and the state.

    tokens  each row's newest, at position cache.lengths
    most    the largest `count`; static
    draw    (logits, positions of the tokens that are drawn) -> tokens
    """
    own = state.under(cache)

    def step(i, carry):
        tokens, states, drawn = carry
        at = cache.lengths + i
        positions = jnp.where(running & (at < cache.capacity), at, -1)[:, None]
        before = own.replace(states=states)
        hidden, after = decoder.read(params, _clipped(tokens, config)[:, None], positions, before, config)
        tokens = draw(decoder.unembed(params, hidden[:, 0], config), at + 1)
        return tokens, after.states, drawn.at[:, i].set(tokens)

    carry = tokens, state.states, jnp.full((len(tokens), most), -1, jnp.int32)
    _, states, drawn = jax.lax.fori_loop(0, count, step, carry)
    states = map_states(lambda old, new: old if old.recurrent else new, state.states, states)
    return drawn, state.replace(states=states)


def _clipped(tokens: Int[Array, "*batch"], config: ModelConfig) -> Int[Array, "*batch"]:
    """Tokens as ids that the draft model has; vocabularies may differ in what pads them."""
    return jnp.clip(tokens, 0, config.vocab_size - 1)
