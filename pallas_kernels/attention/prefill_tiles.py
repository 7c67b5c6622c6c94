"""What the two kernels of attention of many queries a row share: how queries are shared out to blocks, and
the online softmax."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import cache_layouts
from pallas_kernels.attention.scores import LOG2_E, PLAIN, Scores

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
    def share_out(cls, q: jax.Array, kv_heads: int, parts: int) -> "Tiles":
        T, H = q.shape[1:3]
        heads = parts if (H // kv_heads) % parts == 0 else 1
        queries = parts * QUERIES // heads
        return cls(heads, queries, -(-T // queries))

    def prepared(self, q: jax.Array, positions: jax.Array, keys: int, layout: ModuleType, scores: Scores):
        """For whole tiles: (q times its factor, as the layout of the cache stores numbers; positions; bounds
        of each tile's steps of so many keys, int32 [B, tiles, 2 or 4], as `ranges` takes them). q is float32,
        or what prefill_heads.py has made of it."""
        B, T, _, D = q.shape
        padding = self.count * self.queries - T
        if q.dtype != layout.DTYPE:
            q = layout.quantize(q * scores.query_factor(D))
        q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))
        positions = jnp.pad(positions, ((0, 0), (0, padding)), constant_values=-1)
        by_tile = positions.reshape(B, self.count, self.queries)
        last, first = by_tile.max(-1), by_tile.min(-1)
        bounds = [last // keys + 1, (first + 1) // keys]
        if scores.window is not None:
            first = jnp.where(by_tile < 0, last[..., None], by_tile).min(-1)  # of those that are not padding
            start = jnp.maximum(first - scores.window + 1, 0) // keys
            whole = jnp.minimum(-(-jnp.maximum(last - scores.window + 1, 0) // keys), bounds[0])
            bounds = [bounds[0], jnp.maximum(bounds[1], whole), start, whole]
        return q, positions, jnp.stack(bounds, axis=-1)

    def first_query(self, tile, part):
        """The first of a part's 64, in its head."""
        return tile * self.queries + (0 if self.heads == 2 else part * QUERIES)

    def head(self, first_head, part):
        return first_head + (part if self.heads == 2 else 0)


def attention_by(
    make: Callable, step_keys: Callable[[int, int], int], parts: int, totals: bool = False
) -> Callable[..., Any]:
    """attention.attention's candidate: the same arguments, for a cache that tensor cores multiply as it lies
    (cache_layouts: PREFILL is itself). Returns float32 [B, T, H, V]; values may be less wide than keys.

    make       (queries of whole tiles, width of values, tiles, keywords) -> the kernel
    step_keys  widths of keys and values -> keys that it visits at a time
    parts      of a block
    totals     whether also log2 of each query's sum of 2^(log2(e) score) is returned, float32 [B, T, H]: what
               it takes to join attention to some keys with attention to others. -inf: it saw none of them
    sinks of the candidate are float32 [H], the layer's, or None.
    """

    @functools.partial(jax.jit, static_argnames="scores")
    def attention(q, k_pages, v_pages, block_table, positions, layer, scores: Scores = PLAIN, sinks=None):
        (T, H, D), kv_heads, V = q.shape[1:], k_pages.shape[3], v_pages.shape[-1]
        tiles, layout = Tiles.share_out(q, kv_heads, parts), cache_layouts.recognize(k_pages)
        q, positions, steps = tiles.prepared(q, positions, step_keys(D, V), layout, scores)
        kernel = make(q, V, tiles, layout=layout, group=H // kv_heads, scores=scores)
        layer = jnp.asarray(layer, jnp.int32).reshape(1)
        rest = () if sinks is None else (sinks * LOG2_E,)
        made = kernel(q, k_pages, v_pages, block_table, positions, steps, layer, *rest)
        return (made[0][:, :T], made[1].swapaxes(1, 2)[:, :T]) if totals else made[:, :T]

    return attention


def ranges(bounds: list) -> list[tuple]:
    """[(first step, the step after the last, whether some query does not see all their keys)].

    bounds  the end of a tile's steps; the end of those before the first key that comes after some query; and
            with a window its first step, and the first that starts inside the window of all its queries
    """
    stop, whole_stop, *window_bounds = bounds
    if not window_bounds:
        return [(0, whole_stop, False), (whole_stop, stop, True)]
    start, whole = window_bounds
    return [(start, whole, True), (whole, whole_stop, False), (whole_stop, stop, True)]


def start_of_sums(D: int, layout) -> tuple:
    """(out, maximum, total) of queries that have seen no keys; `layout` of their scores in registers."""
    rows = layout.reduce(1)
    return (
        plgpu.layout_cast(jnp.zeros((QUERIES, D), jnp.float32), layout),
        plgpu.layout_cast(jnp.full((QUERIES,), -jnp.inf, jnp.float32), rows),
        plgpu.layout_cast(jnp.zeros((QUERIES,), jnp.float32), rows),
    )


def results(out, maximum, total, position, sink=None):
    """The outputs of queries at these positions: 0 for padding, which would be 0 / 0. `sink` is log2(e) times
    their head's, or None."""
    if sink is not None:
        total += jnp.exp2(sink - maximum)
    seen = lax.broadcast_in_dim(position, out.shape, [0]) >= 0
    return jnp.where(seen, out / lax.broadcast_in_dim(total, out.shape, [0]), 0.0)


def log_total(maximum, total, position):
    """log2 of the sum of 2^score, -inf for padding."""
    return jnp.where(position >= 0, maximum + jnp.log2(total), -jnp.inf)


def capped(products, scores: Scores):
    return scores.capped(products, jnp.exp2, lambda x: 1.0 / x)


def softmax_step(s, out, maximum, total, layout: ModuleType, scores: Scores):
    """The online softmax of a part's scores s, in base 2: (out and total for the new maximum, it, the
    weights as tensor cores multiply them)."""
    largest = s.max(axis=1)
    if layout.WEIGHT_EXPONENT:
        largest -= layout.WEIGHT_EXPONENT
    new = jnp.maximum(maximum, largest)
    # A query whose window begins after these keys has a maximum of -inf, and -inf - -inf is NaN.
    base = new if scores.window is None else jnp.where(new == -jnp.inf, 0.0, new)
    keep = jnp.exp2(maximum - base)
    p = jnp.exp2(s - lax.broadcast_in_dim(base, s.shape, [0]))
    out *= lax.broadcast_in_dim(keep, out.shape, [0])
    return out, new, total * keep + p.sum(axis=1), p.astype(layout.OPERAND)


def visible(s, position, first_key, layout, scores: Scores):
    """Scores s [64, keys], minus infinity where the key is after the query's position or before its window;
    `layout` as they have it in registers."""
    key = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=layout)
    last = lax.broadcast_in_dim(position - first_key, s.shape, [0])
    if scores.window is None:
        return jnp.where(key <= last, s, -jnp.inf)
    return jnp.where((key <= last) & (key > last - scores.window), s, -jnp.inf)
