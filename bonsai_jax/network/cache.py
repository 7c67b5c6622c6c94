"""What sequences keep of the tokens they have read: pages of keys and values, a block table and lengths, and
recurrent states. Immutable to read, donated to write."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from bonsai_jax.config import ModelConfig, RunConfig
from bonsai_jax.network.kinds import attention, delta_net
from bonsai_jax.network.kinds.attention import State as AttentionState
from bonsai_jax.network.kinds.attention import read_size
from bonsai_jax.network.kinds.delta_net import State as DeltaNetState
from pallas_kernels import cache_layouts, serializable
from pallas_kernels.cache_layouts import Pages


@serializable
class DraftState(struct.PyTreeNode):
    """What the draft layer keeps of each row (draft.py).

    k, v    of its one layer, in pages of their own under the KVCache's block table
    hidden  float32 [rows, hidden]: what the model made of each row's last token, not normed
    """

    k: Pages
    v: Pages
    hidden: Float[Array, "B H"]


@serializable
class KVCache(struct.PyTreeNode):
    """The state of every layer, for a batch of sequences: a row is one sequence.

    block_table  int32 [rows, pages per row]: the page of a row's tokens [i * page_size, (i + 1) * page_size)
    lengths      int32 [rows]: tokens stored; a row of 0 has nothing, in its states neither
    attention    keys and values, one state for each group of layers (ModelConfig.groups)
    delta_net    recurrent states, likewise
    draft        what the draft layer keeps, where one is loaded
    chunk        most tokens of a row that may be read at once, where windows are rings; None: any number

    Donate it to the function that writes it, and XLA updates the pages where they are.
    """

    block_table: Int[Array, "B pages_per_row"]
    lengths: Int[Array, "B"]
    attention: tuple[AttentionState, ...] = ()
    delta_net: tuple[DeltaNetState, ...] = ()
    draft: DraftState | None = None
    chunk: int | None = struct.field(pytree_node=False, default=None)

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.attention[0].page_size

    @property
    def capacity(self) -> int:
        """Most tokens a row can hold."""
        return self.block_table.shape[1] * self.page_size

    @property
    def recurrent(self) -> bool:
        """Whether layers keep a state that is made of all tokens at once."""
        return bool(self.delta_net)

    @property
    def rewinds(self) -> bool:
        """Whether `rewind` can take tokens back: neither out of a recurrent state, nor where the keys before
        them were written over."""
        return not self.recurrent and self.chunk is None

    def rewind(self, lengths: Int[Array, "B"]) -> "KVCache":
        """Forget each row's tokens from `lengths` on (below 0: all); what follows is written over them.

        Raises NotImplementedError for a cache with recurrent states or rings of pages.
        """
        if self.recurrent:
            raise NotImplementedError(
                "rewind: layers of a gated delta net keep one state of all tokens, which none can be taken "
                "out of; take a copy before you read on (cache.take), or forget whole rows (cache.reset)"
            )
        if not self.rewinds:
            raise NotImplementedError(
                "rewind: layers with a window have written over the keys before it; make the cache with "
                "bj.new_cache(..., rewinds=True), which keeps them all, or forget whole rows (cache.reset)"
            )
        return self.replace(lengths=jnp.clip(jnp.asarray(lengths, jnp.int32), 0, self.lengths))

    def reset(self, rows: Bool[Array, "B"] | bool = True) -> "KVCache":
        """Forget all tokens of these rows."""
        return self.replace(lengths=jnp.where(rows, 0, self.lengths))

    def take(self, rows: Int[Array, "R"]) -> "KVCache":
        """A cache of these rows, repeated as often as they are named: a copy, each with pages of its own.

        One prompt for many answers: cache.take([0] * 8). The survivors of a beam search: cache.take(parents).
        """
        rows = jnp.asarray(rows)
        if rows.ndim != 1 or not jnp.issubdtype(rows.dtype, jnp.integer):
            raise ValueError(f"take: rows are {rows.dtype} {rows.shape}; expected a list of row numbers")
        pages = self.block_table[rows]

        def copied(tree: Any, pages: jax.Array) -> Any:
            return jax.tree.map(lambda array: array[:, pages.reshape(-1)], tree)

        def taken(state: AttentionState) -> AttentionState:
            if state.ring is None:
                return state.replace(k=copied(state.k, pages), v=copied(state.v, pages))
            size = ring_size(state)
            first = state.ring[rows, :size]
            ring = jnp.asarray(attention.ring_table(len(rows), state.ring.shape[1], size))
            return state.replace(k=copied(state.k, first), v=copied(state.v, first), ring=ring)

        draft = self.draft and DraftState(
            copied(self.draft.k, pages), copied(self.draft.v, pages), self.draft.hidden[rows]
        )
        return self.replace(
            block_table=jnp.arange(pages.size, dtype=jnp.int32).reshape(pages.shape),
            lengths=self.lengths[rows],
            attention=tuple(map(taken, self.attention)),
            delta_net=jax.tree.map(lambda by_layer: by_layer[:, rows], self.delta_net),
            draft=draft,
        )


def ring_size(state: AttentionState) -> int:
    """Pages of each row's ring."""
    assert state.ring is not None
    return state.num_pages // state.ring.shape[0]


def page_count(tokens: int, page_size: int) -> int:
    """Pages that hold this many tokens of a row."""
    return -(-tokens // page_size)


def first_table(rows: int, pages_per_row: int, pages: int | None = None) -> np.ndarray:
    """The block table of an empty cache: each row owns its pages, in order; all zeros where `pages` says how
    many there are, which somebody deals out (engine/)."""
    table = np.arange(rows * pages_per_row, dtype=np.int32).reshape(rows, pages_per_row)
    return table if pages is None else np.zeros_like(table)


def empty(
    config: ModelConfig,
    run: RunConfig,
    rows: int,
    context: int,
    pages: int | None = None,
    *,
    rewinds: bool = False,
) -> KVCache:
    """An empty cache whose rows can hold `context` tokens each. `run` must be resolved.

    pages    in all, for an engine that deals them out; None: each row owns enough of them, in order
    rewinds  keep the keys that no window reaches any more, so that `rewind` can take tokens back and any
             number of tokens can be read at once; else layers with a window keep a ring of pages

    Zeros and not uninitialised memory: what lies beyond a row's length is masked, but 0 * NaN would be NaN.
    """
    groups, chunk = config.groups("attention"), None
    if not rewinds:
        chunk = max(read_size(group.settings.prefill_kernel(run)) for group in groups)
    states = tuple(
        attention.empty(group.settings, len(group.layers), run, rows, context, pages, chunk)
        for group in groups
    )
    draft = None
    if config.draft is not None:
        hidden = jax.device_put(np.zeros((rows, config.hidden), np.float32), may_alias=False)
        only = attention.empty(config.attention, 1, run, rows, context, pages, None)
        draft = DraftState(only.k, only.v, hidden)
    cache = KVCache(
        block_table=jax.device_put(
            first_table(rows, page_count(context, run.page_size), pages), may_alias=False
        ),
        lengths=jax.device_put(np.zeros(rows, np.int32), may_alias=False),
        attention=states,
        delta_net=empty_states(config, rows),
        draft=draft,
        chunk=chunk if any(state.ring is not None for state in states) else None,
    )
    return with_kernels(cache, config, run)


def empty_states(config: ModelConfig, rows: int) -> tuple[DeltaNetState, ...]:
    """Recurrent states of rows that have read nothing."""
    groups = config.groups("delta_net")
    return tuple(delta_net.empty(group.settings, len(group.layers), rows) for group in groups)


def with_kernels(cache: KVCache, config: ModelConfig, run: RunConfig) -> KVCache:
    """The same cache, for the kernels that are chosen for a model on this device."""

    def chosen(kind: str, states: tuple[Any, ...]) -> tuple[Any, ...]:
        kernels = [group.settings.kernels(run) for group in config.groups(kind)]
        return tuple(
            state.replace(impl=one, prefill_impl=many)
            for state, (one, many) in zip(states, kernels, strict=True)
        )

    return cache.replace(
        attention=chosen("attention", cache.attention), delta_net=chosen("delta_net", cache.delta_net)
    )


def advance(cache: KVCache, positions: Int[Array, "B T"]) -> KVCache:
    """Count the tokens at these positions (-1: none) as stored, once every layer has written them."""
    return cache.replace(lengths=jnp.maximum(cache.lengths, positions.max(axis=1) + 1))


def dtype_name(cache: KVCache) -> str:
    """The layout of its keys and values."""
    return cache_layouts.name_of(cache.attention[0].k)
