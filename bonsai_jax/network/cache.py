"""What rows keep of the tokens they have read: pages of keys and values, a block table and lengths, and the
states of layers that keep no keys. Immutable to read, donated to write."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from bonsai_jax.config import ModelConfig, RunConfig
from bonsai_jax.weights.plan import attention_kernels, delta_kernels
from pallas_kernels import cache_layouts, serializable
from pallas_kernels.cache_layouts import Pages


@serializable
class DeltaState(struct.PyTreeNode):
    """What layers of a gated delta net keep of each row (pallas_kernels/delta). A row that reads its token
    at position 0 begins anew, whatever is here.

    s      float32 [layers, rows, v heads, k_dim, v_dim]
    tail   float32 [layers, rows, conv, channels]: what the convolution sees, that at position p in slot
           p % conv
    impl, prefill_impl  the kernels chosen for one token a row and for more (plan.py)
    """

    s: Float[Array, "L B Hv K V"]
    tail: Float[Array, "L B W C"]
    impl: str = struct.field(pytree_node=False, default="reference")
    prefill_impl: str = struct.field(pytree_node=False, default="reference")


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
    """Keys and values of every layer with attention, in pages that rows own through the block table, and the
    states of other layers, by row.

    k, v         [layers, pages, page_size, kv heads, head_dim], as a layout stores it (pallas_kernels.
                 cache_layouts); keys are rotated
    block_table  int32 [rows, pages per row]: the page of a row's tokens [i * page_size, (i + 1) * page_size)
    lengths      int32 [rows]: tokens stored; a row of 0 holds nothing, in its states neither
    delta        the states of layers whose mixer is delta; None for models without
    draft        what the draft layer keeps, where one is loaded
    impl         the kernel of attention chosen for it (plan.py)
    prefill_impl the one for many tokens a row

    Donate it to the function that writes it, and XLA updates the pages where they are.
    """

    k: Pages
    v: Pages
    block_table: Int[Array, "B pages_per_row"]
    lengths: Int[Array, "B"]
    delta: DeltaState | None = None
    draft: DraftState | None = None
    impl: str = struct.field(pytree_node=False, default="reference")
    prefill_impl: str = struct.field(pytree_node=False, default="reference")

    @property
    def num_pages(self) -> int:
        return jax.tree.leaves(self.k)[0].shape[1]

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return jax.tree.leaves(self.k)[0].shape[2]

    @property
    def capacity(self) -> int:
        """Most tokens a row can hold."""
        return self.block_table.shape[1] * self.page_size

    @property
    def rewinds(self) -> bool:
        """Whether `rewind` can take tokens back: a recurrent state is of all tokens at once."""
        return self.delta is None

    def rewind(self, lengths: Int[Array, "B"]) -> "KVCache":
        """Forget each row's tokens from `lengths` on (below 0: all); what follows is written over them.

        Raises NotImplementedError for a cache with recurrent states.
        """
        if not self.rewinds:
            raise NotImplementedError(
                "rewind: layers of a gated delta net keep one state of all tokens, which none can be taken "
                "out of; take a copy before you read on (cache.take), or forget whole rows (cache.reset)"
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

        def copied(array: jax.Array) -> jax.Array:
            return array[:, pages.reshape(-1)]

        draft = self.draft and DraftState(
            jax.tree.map(copied, self.draft.k), jax.tree.map(copied, self.draft.v), self.draft.hidden[rows]
        )
        return self.replace(
            k=jax.tree.map(copied, self.k),
            v=jax.tree.map(copied, self.v),
            draft=draft,
            block_table=jnp.arange(pages.size, dtype=jnp.int32).reshape(pages.shape),
            lengths=self.lengths[rows],
            delta=jax.tree.map(lambda of_rows: of_rows[:, rows], self.delta),
        )


def page_count(tokens: int, page_size: int) -> int:
    """Pages that hold this many tokens of a row."""
    return -(-tokens // page_size)


def bytes_per_token(config: ModelConfig, dtype: str | None) -> int:
    """Cache bytes for one token of one row: keys and values of every layer with attention, and of the draft
    layer where it is loaded. dtype: a resolved RunConfig's cache_dtype."""
    of_head = cache_layouts.bytes_per_head(str(dtype), config.head_dim)
    layers = len(config.layers_of("attention")) + (config.draft is not None)
    return 2 * layers * config.num_kv_heads * of_head


def bytes_per_row(config: ModelConfig) -> int:
    """Bytes of one row's recurrent states, whatever it has read; 0 for models without."""
    if (d := config.delta) is None:
        return 0
    of_layer = d.v_heads * d.k_dim * d.v_dim + d.conv * d.qkv_width
    return 4 * len(config.layers_of("delta")) * of_layer


def first_table(rows: int, pages_per_row: int, pages: int | None = None) -> np.ndarray:
    """The block table of an empty cache: each row owns its pages, in order; all zeros where `pages` says how
    many there are, which somebody deals out (engine/)."""
    table = np.arange(rows * pages_per_row, dtype=np.int32).reshape(rows, pages_per_row)
    return table if pages is None else np.zeros_like(table)


def empty(config: ModelConfig, run: RunConfig, rows: int, context: int, pages: int | None = None) -> KVCache:
    """An empty cache whose rows can hold `context` tokens each. `run` must be resolved.

    pages   in all, for an engine that deals them out; None: each row owns enough of them, in order

    Zeros and not uninitialised memory: what lies beyond a row's length is masked, but 0 * NaN would be NaN.
    """
    of_row = page_count(context, run.page_size)
    in_all = rows * of_row if pages is None else pages
    of_layer = (in_all, run.page_size, config.num_kv_heads, config.head_dim)

    def of_layers(count: int) -> Pages:
        return cache_layouts.empty(str(run.cache_dtype), (count, *of_layer))

    layers, draft = len(config.layers_of("attention")), None
    if config.draft is not None:
        hidden = jax.device_put(np.zeros((rows, config.hidden), np.float32), may_alias=False)
        draft = DraftState(of_layers(1), of_layers(1), hidden)
    cache = KVCache(
        k=of_layers(layers),
        v=of_layers(layers),
        block_table=jax.device_put(first_table(rows, of_row, pages), may_alias=False),
        lengths=jax.device_put(np.zeros(rows, np.int32), may_alias=False),
        delta=empty_states(config, rows),
        draft=draft,
    )
    return with_kernels(cache, config, run)


def with_kernels(cache: KVCache, config: ModelConfig, run: RunConfig) -> KVCache:
    """The same, for the kernels that are chosen for a model on this device."""
    one, prefill = attention_kernels(config, run)
    if cache.delta is not None and config.delta is not None:
        of_one, of_many = delta_kernels(config.delta, run)
        cache = cache.replace(delta=cache.delta.replace(impl=of_one, prefill_impl=of_many))
    return cache.replace(impl=one, prefill_impl=prefill)


def empty_states(config: ModelConfig, rows: int) -> DeltaState | None:
    """States of rows that have read nothing; None for models without."""
    if (d := config.delta) is None:
        return None
    layers = len(config.layers_of("delta"))
    return DeltaState(
        jnp.zeros((layers, rows, d.v_heads, d.k_dim, d.v_dim)),
        jnp.zeros((layers, rows, d.conv, d.qkv_width)),
    )


def advance(cache: KVCache, positions: Int[Array, "B T"]) -> KVCache:
    """Count the tokens at these positions (-1: none) as stored, once every layer has written them."""
    return cache.replace(lengths=jnp.maximum(cache.lengths, positions.max(axis=1) + 1))
