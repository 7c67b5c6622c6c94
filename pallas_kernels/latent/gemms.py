"""Latent attention on a GPU by GEMMs of 16 bits (cuBLAS), where values are the first numbers of keys.

All heads of a token read the same rows, so the queries of all heads and tokens of a sequence are the rows of
one product. Queries and weights are split into two numbers of 16 bits whose sum they are, so that tensor
cores round nothing that the cache has not rounded; sums are float32.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.attention.scores import Scores

GATHERED = 2**24  # most numbers of keys that are gathered at once: for one query a row mostly all, in no loop
SCORES = 2**25  # most scores at once
LEAST_KEYS = 256


def run(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, block_table: jax.Array, positions: jax.Array, layer,
    *, num_keys, window=None, scale=None, softcap=None, sinks=None,
) -> jax.Array:  # fmt: skip
    """float32 [B, T, H, D]: attention/reference.py's formula without window, softcap and sinks, of keys that
    are values too; v_pages are the same array, and not read."""
    (B, T, H, D), (page_size, *_) = q.shape, k_pages.shape[2:]
    dtype, N = k_pages.dtype, T * H
    most = max(LEAST_KEYS, min(GATHERED // (B * D), SCORES // (B * N)))
    pages_per_block = min(max(1, most // page_size), block_table.shape[1])
    block = pages_per_block * page_size
    table = jnp.pad(block_table, ((0, 0), (0, -block_table.shape[1] % pages_per_block)))
    queries = (q.astype(jnp.float32) * Scores(scale=scale).factor(D)).reshape(B, N, D)
    # Powers of two bring each query's largest number to 1 at most, which 16 bits can hold.
    exponent = jnp.frexp(jnp.abs(queries).max(-1, keepdims=True))[1]
    parts = _parts(jnp.ldexp(queries, -exponent), dtype)  # [B, 2, N, D]
    position = jnp.repeat(positions, H, axis=1)[..., None]  # [B, N, 1]

    def visit(i, carry):
        maximum, total, out = carry  # [B, N, 1], [B, N, 1], [B, N, D]
        pages = jax.lax.dynamic_slice_in_dim(table, i * pages_per_block, pages_per_block, axis=1)
        rows = k_pages[layer, pages].reshape(B, block, D)
        keys = i * block + jnp.arange(block)
        both = jnp.einsum("bpnd,bsd->bpns", parts, rows, preferred_element_type=jnp.float32)
        scores = jnp.where(keys <= position, jnp.ldexp(both.sum(1), exponent), -jnp.inf)
        new_maximum = jnp.maximum(maximum, scores.max(-1, keepdims=True))
        base = jnp.where(jnp.isneginf(new_maximum), 0.0, new_maximum)  # a query that has seen no key yet
        weights, keep = jnp.exp(scores - base), jnp.exp(maximum - base)
        both = jnp.einsum("bpns,bsd->bpnd", _parts(weights, dtype), rows, preferred_element_type=jnp.float32)
        return new_maximum, keep * total + weights.sum(-1, keepdims=True), keep * out + both.sum(1)

    carry = jnp.full((B, N, 1), -jnp.inf), jnp.zeros((B, N, 1)), jnp.zeros((B, N, D))
    if table.shape[1] == pages_per_block:  # no loop: on a GPU its condition would go to the host and back
        _, total, out = visit(0, carry)
    else:
        _, total, out = jax.lax.fori_loop(0, (num_keys + block - 1) // block, visit, carry)
    return (out / jnp.where(total == 0, 1.0, total)).reshape(B, T, H, D)


def _parts(x: jax.Array, dtype) -> jax.Array:
    """Two numbers of 16 bits whose sum x [B, N, K] is: [B, 2, N, K]."""
    bits = jnp.finfo(dtype)
    high = jax.lax.reduce_precision(x, bits.nexp, bits.nmant)  # XLA would leave out a cast there and back
    return jnp.stack([high, x - high], axis=1).astype(dtype)
