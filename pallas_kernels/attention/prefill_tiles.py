"""What the two kernels of attention of many queries a row share: how queries are shared out to blocks, and
the online softmax."""

import math
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

QUERIES = 64  # of a part of a block: as many as one product has


class Tiles(NamedTuple):
    """How queries are shared out to blocks, of one or two parts.

    heads    of a block: as many as its parts, which share a KV head, or 1
    queries  of a block, per head
    count    tiles of so many queries
    """

    heads: int
    queries: int
    count: int

    @classmethod
    def of(cls, q: jax.Array, kv_heads: int, parts: int = 2) -> "Tiles":
        T, H = q.shape[1:3]
        heads = parts if (H // kv_heads) % parts == 0 else 1
        queries = parts * QUERIES // heads
        return cls(heads, queries, -(-T // queries))

    def prepared(self, q: jax.Array, positions: jax.Array, keys: int, layout: ModuleType):
        """For whole tiles: (q log2(e) / sqrt(D) as the layout of the cache stores numbers; positions; int32
        [B, tiles, 2]: a tile's steps of so many keys, and those of them before the first key that some query
        of it cannot see)."""
        B, T, _, D = q.shape
        padding = self.count * self.queries - T
        q = layout.quantize(q.astype(jnp.float32) * (D**-0.5 * math.log2(math.e)))
        q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))
        positions = jnp.pad(positions, ((0, 0), (0, padding)), constant_values=-1)
        by_tile = positions.reshape(B, self.count, self.queries)
        return q, positions, jnp.stack([by_tile.max(-1) // keys + 1, (by_tile.min(-1) + 1) // keys], axis=-1)

    def first_query(self, tile, part):
        """Of a part's 64, in its head."""
        return tile * self.queries + (0 if self.heads == 2 else part * QUERIES)

    def head(self, first_head, part):
        return first_head + (part if self.heads == 2 else 0)


def softmax_step(s, out, maximum, total, layout: ModuleType):
    """The online softmax of a part's scores s, in base 2: (out and total for the new maximum, it, the
    weights as tensor cores multiply them)."""
    largest = s.max(axis=1)
    if layout.WEIGHT_EXPONENT:
        largest -= layout.WEIGHT_EXPONENT
    new = jnp.maximum(maximum, largest)
    keep = jnp.exp2(maximum - new)
    p = jnp.exp2(s - lax.broadcast_in_dim(new, s.shape, [0]))
    out *= lax.broadcast_in_dim(keep, out.shape, [0])
    return out, new, total * keep + p.sum(axis=1), p.astype(layout.OPERAND)


def visible(s, position, first_key, layout):
    """Scores s [64, keys], minus infinity where the key is behind the query's position; `layout` as they
    have it in registers."""
    key = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=layout)
    last = lax.broadcast_in_dim(position - first_key, s.shape, [0])
    return jnp.where(key <= last, s, -jnp.inf)
