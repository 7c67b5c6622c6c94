"""The key-value cache: pages, a block table and lengths. Immutable to read, donated to write."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from bonsai_jax.config import ModelConfig


class KVCache(struct.PyTreeNode):
    """Keys and values of every layer, in pages that rows own through the block table.

    k, v         [layers, pages, page_size, kv heads, head_dim]; keys are stored rotated
    block_table  int32 [rows, pages per row]: the page of a row's tokens [i * page_size, (i + 1) * page_size)
    lengths      int32 [rows]: tokens stored

    Donate it to the function that writes it, and XLA updates the pages where they are.
    """

    k: Float[Array, "L pages page_size Hkv D"]
    v: Float[Array, "L pages page_size Hkv D"]
    block_table: Int[Array, "B pages_per_row"]
    lengths: Int[Array, "B"]

    @property
    def capacity(self) -> int:
        """Most tokens a row can hold."""
        return self.block_table.shape[1] * self.k.shape[2]


def page_count(tokens: int, page_size: int) -> int:
    """Pages that hold this many tokens of a row."""
    return -(-tokens // page_size)


def bytes_per_token(config: ModelConfig, dtype) -> int:
    """Cache bytes for one token of one row: keys and values of every layer."""
    return 2 * config.num_layers * config.kv_width * jnp.dtype(dtype).itemsize


def empty(config: ModelConfig, rows: int, context: int, dtype, page_size: int) -> KVCache:
    """An empty cache in which each row owns enough pages for `context` tokens, in order.

    Zeros and not uninitialised memory: what lies beyond a row's length is masked, but 0 * NaN would be NaN.
    """
    pages = page_count(context, page_size)
    shape = (config.num_layers, rows * pages, page_size, config.num_kv_heads, config.head_dim)
    return KVCache(
        k=jnp.zeros(shape, dtype),
        v=jnp.zeros(shape, dtype),
        block_table=jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages),
        lengths=jnp.zeros(rows, jnp.int32),
    )


def write(
    cache: KVCache,
    layer: int | Int[Array, ""],
    k: Float[Array, "B T Hkv D"],
    v: Float[Array, "B T Hkv D"],
    positions: Int[Array, "B T"],
) -> KVCache:
    """Store keys and values of one layer at their positions; those at position -1 (padding) are dropped."""
    num_pages, page_size = cache.k.shape[1:3]
    page = jnp.take_along_axis(cache.block_table, jnp.maximum(positions, 0) // page_size, axis=1)
    page = jnp.where(positions < 0, num_pages, page)  # out of bounds: dropped
    at = (layer, page, positions % page_size)
    return cache.replace(
        k=cache.k.at[at].set(k.astype(cache.k.dtype), mode="drop"),
        v=cache.v.at[at].set(v.astype(cache.v.dtype), mode="drop"),
    )


def advance(cache: KVCache, positions: Int[Array, "B T"]) -> KVCache:
    """Count the tokens at these positions (-1: none) as stored, once every layer has written them."""
    return cache.replace(lengths=jnp.maximum(cache.lengths, positions.max(axis=1) + 1))


def rewind(cache: KVCache, lengths: Int[Array, "B"]) -> KVCache:
    """Forget each row's tokens from `lengths` on; what follows is written over them."""
    return cache.replace(lengths=jnp.minimum(cache.lengths, lengths))
