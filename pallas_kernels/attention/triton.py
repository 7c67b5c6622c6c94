"""Attention over the paged cache in Triton, called through jax-triton: for heads that our own kernels refuse.

It needs the extra `triton`. A program has one KV head of a sequence, a tile of queries, a share of the keys:

    queries    a tile of (token, query head) pairs, the query heads of one KV head together
    keys       KEYS at a time, gathered from their pages by the block table; D is padded to a power of two
    shares     one query per sequence: SHARE keys a program, so that the GPU has work; more queries: all keys
               a program  ->  sum of exp(score - maximum) v, the maximum, the sum of exp(score - maximum)
    combined   in jnp, from all shares of a query

The cache has 16 bits, scores and sums are float32. Queries and weights are split into two numbers of 16 bits
whose sum they are, so that tensor cores round nothing that the cache has not rounded. A sequence's numbers do
not depend on the others in its batch.
"""

import functools

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl

from pallas_kernels import cache_layouts, device
from pallas_kernels.cache_layouts import Pages

PTX = 87  # the version of CUDA 12.8, the first that knows capability 12.0; a driver may be older than Triton
SHARE = 256  # keys of a program for one query per sequence


@triton.jit
def paged_attention(
    q_ptr, k_ptr, v_ptr, table_ptr, positions_ptr, layer_ptr, out_ptr, sums_ptr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    POOL: tl.constexpr, PAGES: tl.constexpr, PAGE_SIZE: tl.constexpr, SHARES: tl.constexpr,
    SHARE_KEYS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out, sums <- `_shares`. A SOFTCAP or WINDOW of 0: none. A layer has POOL pages, a sequence PAGES."""
    tile, share = tl.program_id(0) // SHARES, tl.program_id(0) % SHARES
    kv_head, row = tl.program_id(1), tl.program_id(2)
    pair = tile * QUERIES + tl.arange(0, QUERIES)
    token, query_head = pair // GROUP, kv_head * GROUP + pair % GROUP
    present = token < TOKENS
    position = tl.load(positions_ptr + row * TOKENS + token, mask=present, other=-1)
    d = tl.arange(0, WIDTH)
    query = (row * TOKENS + token) * (KV_HEADS * GROUP) + query_head
    q_mask = present[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + query[:, None] * D + d[None, :], mask=q_mask, other=0.0) * SCALE
    q_high = q.to(k_ptr.dtype.element_ty)
    q_low = (q - q_high.to(tl.float32)).to(k_ptr.dtype.element_ty)

    end = tl.minimum(tl.max(position, axis=0) + 1, (share + 1) * SHARE_KEYS)
    begin = share * SHARE_KEYS
    if WINDOW > 0:
        first = tl.min(tl.where(position < 0, PAGES * PAGE_SIZE, position), axis=0) - (WINDOW - 1)
        begin = tl.maximum(begin, tl.maximum(first, 0) // KEYS * KEYS)
    layer = tl.load(layer_ptr).to(tl.int64)
    maximum = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    out = tl.zeros([QUERIES, WIDTH], tl.float32)
    for block in range(begin, end, KEYS):
        key = block + tl.arange(0, KEYS)
        inside = key < end
        page = tl.load(table_ptr + row * PAGES + key // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        place = ((layer * POOL + page) * PAGE_SIZE + key % PAGE_SIZE) * KV_HEADS + kv_head
        mask = inside[:, None] & (d < D)[None, :]
        k = tl.load(k_ptr + place[:, None] * D + d[None, :], mask=mask, other=0.0)
        v = tl.load(v_ptr + place[:, None] * D + d[None, :], mask=mask, other=0.0)
        scores = tl.dot(q_high, tl.trans(k)) + tl.dot(q_low, tl.trans(k))
        if SOFTCAP > 0:
            small = tl.exp(tl.abs(scores) * (-2 / SOFTCAP))
            tanh = (1 - small) / (1 + small)
            scores = tl.where(scores < 0, -SOFTCAP, SOFTCAP) * tanh
        visible = inside[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            visible = visible & (position[:, None] - key[None, :] < WINDOW)
        scores = tl.where(visible, scores, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        base = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)  # no key yet
        weights = tl.exp(scores - base[:, None])
        keep = tl.exp(maximum - base)
        total = keep * total + tl.sum(weights, axis=1)
        high = weights.to(k.dtype)
        low = (weights - high.to(tl.float32)).to(k.dtype)
        out = keep[:, None] * out + tl.dot(high, v) + tl.dot(low, v)
        maximum = new_maximum
    stored = share * (ROWS * TOKENS * KV_HEADS * GROUP) + query
    tl.store(out_ptr + stored[:, None] * D + d[None, :], out, mask=q_mask)
    tl.store(sums_ptr + stored * 2, maximum, mask=present)
    tl.store(sums_ptr + stored * 2 + 1, total, mask=present)


def run(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    block_table: jax.Array,
    positions: jax.Array,
    layer: int | jax.Array,
    *,
    num_keys: int | jax.Array,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """float32 [B, T, H, D]: attention/reference.py's formula, with softcap tanh(scores / softcap) in
    place of the scores where there is a softcap. A sequence's own positions say where its keys end, so
    `num_keys` is not read."""
    kernel = functools.partial(_shares, window=window, scale=scale, softcap=softcap)
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    out, sums = jax.custom_batching.sequential_vmap(kernel)(
        q.astype(jnp.float32), k_pages, v_pages, block_table, positions, layer
    )
    return combined(out, sums, None if sinks is None else sinks[layer[0]])


def combined(out: jax.Array, sums: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
    """[B, T, H, D] of all shares, with the sinks [H] of a layer's heads. A query without keys gets 0."""
    maximum, total = sums[..., 0], sums[..., 1]
    largest = maximum.max(axis=0)
    largest = largest if sinks is None else jnp.maximum(largest, sinks)
    base = jnp.where(jnp.isneginf(largest), 0.0, largest)
    weights = jnp.exp(maximum - base)
    total = (weights * total).sum(axis=0)
    total = total if sinks is None else total + jnp.exp(sinks - base)
    return (weights[..., None] * out).sum(axis=0) / jnp.where(total == 0, 1.0, total)[..., None]


def sizes(
    q, k_pages, block_table, *, window, scale, softcap
) -> tuple[tuple[int, int, int], dict[str, float]]:
    """The grid and the constants of `paged_attention`."""
    rows, tokens, heads, head_dim = q.shape
    _, pool, page_size, kv_heads, _ = cache_layouts.shape(k_pages)
    pages, group, width = block_table.shape[1], heads // kv_heads, triton.next_power_of_2(head_dim)
    shares = -(-pages * page_size // SHARE) if tokens == 1 else 1
    queries = 16 if tokens * group <= 16 else 64 if width <= 128 else 32  # shared memory
    constants = {
        "SCALE": head_dim**-0.5 if scale is None else scale, "SOFTCAP": softcap or 0.0, "WINDOW": window or 0,
        "ROWS": rows, "TOKENS": tokens, "KV_HEADS": kv_heads, "GROUP": group, "D": head_dim,
        "POOL": pool, "PAGES": pages, "PAGE_SIZE": page_size, "SHARES": shares,
        "SHARE_KEYS": SHARE if tokens == 1 else pages * page_size, "QUERIES": queries,
        "KEYS": 64 if width <= 128 else 32, "WIDTH": width,
    }  # fmt: skip
    return (-(-tokens * group // queries) * shares, kv_heads, rows), constants


def _shares(q, k_pages, v_pages, block_table, positions, layer, *, window, scale, softcap):
    """Of each share of the keys: sums of weighted values [shares, B, T, H, D]; the maximum of the scores and
    the sum of the weights [shares, B, T, H, 2]."""
    grid, constants = sizes(q, k_pages, block_table, window=window, scale=scale, softcap=softcap)
    shape = constants["SHARES"], *q.shape
    return jax_triton.triton_call(
        q, k_pages, v_pages, block_table, positions, layer,
        kernel=paged_attention,
        out_type=[jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, (*shape[:-1], 2))],
        grid=grid,
        name="triton_attention",  # as profilers show it
        compute_capability=int(device.platform().removeprefix("sm_")),
        backend_options={"enable_fp_fusion": True, "ptx_version": PTX},
        num_warps=4 if constants["QUERIES"] == 16 else 8,
        num_stages=2,
        **constants,
    )  # fmt: skip
