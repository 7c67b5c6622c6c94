"""Latent attention of many queries a row (prefill) on Hopper: keys and values of every head are made of the
rows, and attention/prefill_sm90.py attends to them.

    rows [c, r] of the cache -> keys [K_h^T c, r] and values V_h c, float16     (dequantized K and V, cuBLAS)
                             -> prefill_sm90                                    (out, log of its total)

For GLM-4.7-Flash a query then takes 512 multiplications for each key and head, and not 1,088. To make a
row's keys and values takes as many as 448 queries do. Rows are taken so many at a time that memory is
bounded; parts are joined by the logarithms of their totals.

Weights, keys, values, queries and softmax weights are rounded to float16, as those of prefill with other
attention are; the cache may be bfloat16. What is beyond float16's 65504 overflows, which normed rows do not.
"""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.attention import prefill_sm90
from pallas_kernels.attention.scores import Scores
from pallas_kernels.matmul.cublas import each_to_float16

EXPANDED = 2**27  # most numbers of keys and values at once: 268 MB, of GLM-4.7-Flash 13,000 rows
PAGE = prefill_sm90.TMA_KEYS  # tokens in a page of what is made


def run(
    q: jax.Array, k_b, v_b, pages: jax.Array, block_table: jax.Array, positions: jax.Array, layer,
    *, scale: float, num_keys,
) -> jax.Array:  # fmt: skip
    """float32 [B, T, H, V]: api.py's formula. q float32 [B, T, H, D], after rope; the pages have
    the new rows already."""
    known = layer if isinstance(layer, int) else None

    @jax.custom_batching.sequential_vmap
    def op(q, weights, pages, block_table, positions, layer, num_keys):
        at = layer if known is None else known
        k_b, v_b = (each_to_float16(w, at) for w in weights)
        return _attend(q, k_b, v_b, pages, block_table, positions, at, scale, num_keys)

    return op(q, (k_b, v_b), pages, block_table, positions, None if known is not None else layer, num_keys)


def _attend(q, k_b, v_b, pages, block_table, positions, layer, scale: float, num_keys) -> jax.Array:
    """k_b float16 [H, C, D - R], v_b float16 [H, V, C]."""
    (B, T, H, D), V, page_size = q.shape, v_b.shape[1], pages.shape[2]
    together = PAGE // math.gcd(PAGE, page_size)  # pages that are whole pages of what is made
    most = EXPANDED // (B * H * (D + V) * page_size)
    taken = max(together, min(most, block_table.shape[1] + together - 1) // together * together)
    table = jnp.pad(block_table, ((0, 0), (0, -block_table.shape[1] % taken)))

    def part(i):
        """(out, log2 of the total) of the i-th pages."""
        some = jax.lax.dynamic_slice_in_dim(table, i * taken, taken, axis=1)
        keys, values = _expanded(pages[layer, some], k_b, v_b)
        first, count = i * taken * page_size, taken * page_size
        seen = jnp.clip(positions - first, -1, count - 1)
        own = jnp.arange(B * count // PAGE, dtype=jnp.int32).reshape(B, -1)
        return prefill_sm90.prefill_part(q, keys, values, own, seen, 0, Scores(scale=scale))

    if table.shape[1] == taken:  # no loop: on a GPU its condition would go to the host and back
        return part(0)[0]

    def visit(i, carry):
        out, total = carry
        more, more_total = part(i)
        largest = jnp.maximum(total, more_total)
        base = jnp.where(jnp.isneginf(largest), 0.0, largest)  # a query that has seen no key yet
        weights = [jnp.exp2(x - base) for x in (total, more_total)]
        summed = weights[0] + weights[1]
        shares = [(w / jnp.where(summed == 0, 1.0, summed))[..., None] for w in weights]
        return shares[0] * out + shares[1] * more, base + jnp.log2(summed)

    start = jnp.zeros((B, T, H, V)), jnp.full((B, T, H), -jnp.inf)
    count = taken * page_size
    return jax.lax.fori_loop(0, (num_keys + count - 1) // count, visit, start)[0]


def _expanded(rows, k_b, v_b) -> tuple[jax.Array, jax.Array]:
    """Keys and values, float16 [1, pages, PAGE, H, D and V], of rows [B, pages, page_size, 1, C + R]."""
    C = k_b.shape[1]
    rows = rows.reshape(-1, rows.shape[-1]).astype(jnp.float16)
    c, turned = rows[:, :C], rows[:, None, C:]
    keys = jnp.einsum("sc,hcn->shn", c, k_b, preferred_element_type=jnp.float16)
    turned = jnp.broadcast_to(turned, (len(rows), len(k_b), turned.shape[-1]))
    values = jnp.einsum("sc,hvc->shv", c, v_b, preferred_element_type=jnp.float16)
    keys = jnp.concatenate([keys, turned], axis=-1)
    keys, values = (x.reshape(1, -1, PAGE, *x.shape[1:]) for x in (keys, values))
    return keys, values
