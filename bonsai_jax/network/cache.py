"""What sequences keep of the tokens they have read: pages of keys and values, a block table and lengths, and
recurrent states. Immutable to read, donated to write."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from bonsai_jax.config import ATTENTION, ModelConfig, RunConfig
from bonsai_jax.network import kinds
from bonsai_jax.network.kinds.attention import read_size
from bonsai_jax.network.kinds.state import Room, map_states
from pallas_kernels import cache_layouts, serializable


@serializable
class KVCache(struct.PyTreeNode):
    """The state of every layer, for a batch of sequences: a row is one sequence.

    block_table  int32 [rows, pages per row]: the page of a row's tokens [i * page_size, (i + 1) * page_size)
    lengths      int32 [rows]: tokens stored; a row of 0 has nothing, in its states neither
    states       what each kind of mixer stores, by its name: states["attention"][0].k; one State for each
                 group of layers with equal settings (ModelConfig.groups)
    chunk        most tokens of a row that may be read at once, where windows are rings; None: any number

    Donate it to the function that writes it, and XLA updates the pages where they are.
    """

    block_table: Int[Array, "B pages_per_row"]
    lengths: Int[Array, "B"]
    states: dict[str, tuple[Any, ...]]
    chunk: int | None = struct.field(pytree_node=False, default=None)

    @property
    def paged(self) -> tuple[Any, ...]:
        """The states that have pages of keys."""
        states = (state for kind in ATTENTION for state in self.states.get(kind, ()))
        return tuple(state for state in states if state.k is not None)

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.paged[0].page_size

    @property
    def num_pages(self) -> int:
        """Pages that the block table deals out."""
        shared = (state.num_pages for state in self.paged if state.ring is None)
        return next(shared, self.block_table.size)

    @property
    def capacity(self) -> int:
        """Most tokens a row can hold."""
        return self.block_table.shape[1] * self.page_size

    @property
    def recurrent(self) -> bool:
        """Whether layers keep a state that is made of all tokens at once."""
        return any(state.recurrent for states in self.states.values() for state in states)

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
                "rewind: recurrent layers (a gated delta net) keep one state of all tokens, which none can "
                "be taken out of; take a copy before you read on (cache.take), or forget whole rows "
                "(cache.reset)"
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
        return self.replace(
            block_table=jnp.arange(pages.size, dtype=jnp.int32).reshape(pages.shape),
            lengths=self.lengths[rows],
            states=map_states(lambda state: state.copies(rows, pages), self.states),
        )

    def with_tokens_as_rows(self, tokens: int) -> "KVCache":
        """The same pages with each row `tokens` times, for as many rows of one token (decoder.py). Neither
        for recurrent states nor for rings, which belong to a row."""
        each = functools.partial(jnp.repeat, repeats=tokens, axis=0)
        return self.replace(block_table=each(self.block_table), lengths=each(self.lengths))

    def source(self, config: ModelConfig, half: Any) -> tuple[Any, int] | None:
        """The state, and the index in it, of the layer whose keys and values a half of a layer reads in place
        of its own (Attention.reads); None: it has its own, or needs none."""
        if half.kind != "attention" or half.reads is None:
            return None
        group, index = config.position(half.reads, config.layers[half.reads].mixer)
        return self.states["attention"][group], index

    def with_state(self, kind: str, group: int, state: Any) -> "KVCache":
        """The same cache with another state for a group of layers."""
        groups = list(self.states[kind])
        groups[group] = state
        return self.replace(states=self.states | {kind: tuple(groups)})


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
    checkpoints: int = 0,
) -> KVCache:
    """An empty cache whose rows can hold `context` tokens each. `run` must be resolved.

    pages    in all, for an engine that deals them out; None: each row owns enough of them, in order
    rewinds  keep the keys that no window reaches any more, so that `rewind` can take tokens back and any
             number of tokens can be read at once; else layers with a window keep a ring of pages
    checkpoints  rows that only what belongs to a row has: recurrent states, and rings

    Zeros and not uninitialised memory: what lies beyond a row's length is masked, but 0 * NaN would be NaN.
    """
    chunk = None
    if not rewinds:
        chunk = max(read_size(group.settings.prefill_kernel(run)) for group in config.attention_groups)
    table = first_table(rows, page_count(context, run.page_size), pages)
    states = empty_states(config, run, Room(rows + checkpoints, context, pages, chunk))
    cache = KVCache(
        block_table=jax.device_put(table, may_alias=False),
        lengths=jax.device_put(np.zeros(rows, np.int32), may_alias=False),
        states=with_kernels(states, config, run),
    )
    rings = any(state.ring is not None for state in cache.paged)
    return cache.replace(chunk=chunk if rings else None)


def empty_states(config: ModelConfig, run: RunConfig, room: Room) -> dict[str, tuple[Any, ...]]:
    """KVCache.states of rows that have read nothing."""
    mixers = dict.fromkeys(mixer.kind for layer in config.layers for mixer in layer.mixers)
    return {
        kind: tuple(
            kinds.get(kind).empty(group.settings, len(group.layers), run, room)
            for group in config.groups(kind)
        )
        for kind in mixers
    }


def with_kernels(
    states: dict[str, tuple[Any, ...]], config: ModelConfig, run: RunConfig
) -> dict[str, tuple[Any, ...]]:
    """The same states, for the kernels that are chosen for a model on this device."""

    def chosen(settings: Any, state: Any) -> Any:
        one, many = settings.kernels(run)
        return state.replace(impl=one, prefill_impl=many)

    return {
        kind: tuple(chosen(group.settings, s) for group, s in zip(config.groups(kind), own, strict=True))
        for kind, own in states.items()
    }


def advance(cache: KVCache, positions: Int[Array, "B T"]) -> KVCache:
    """Count the tokens at these positions (-1: none) as stored, once every layer has written them."""
    return cache.replace(lengths=jnp.maximum(cache.lengths, positions.max(axis=1) + 1))


def dtype_name(cache: KVCache) -> str:
    """The layout of its keys and values."""
    return cache_layouts.name_of(cache.paged[0].k)
