"""Attention on a CPU, from the pages as they lie: nothing of them is gathered or copied.

The reference's formula and arguments (reference.attention); derivatives are the reference's, and vmap makes a
call of each entry."""

import functools
import itertools

import jax
import jax.numpy as jnp

from pallas_kernels.attention.reference import attention
from pallas_kernels.attention.scores import Scores
from pallas_kernels.cache_layouts import Pages, shape


def run(
    q: jax.Array, k_pages: Pages, v_pages: Pages, block_table, positions, layer,
    *, num_keys, window=None, scale=None, softcap=None, sinks=None,
) -> jax.Array:  # fmt: skip
    """q float32 [B, T, H, D], rotated -> [B, T, H, D]. The rest as for `attention`. A token's bits depend
    neither on T nor on B."""

    def exact(q, k_pages, v_pages, sinks, block_table, positions, layer, keys):
        keys = num_keys if isinstance(num_keys, int) else keys
        return attention(
            q, k_pages, v_pages, block_table, positions, layer,
            num_keys=keys, window=window, scale=scale, softcap=softcap, sinks=sinks,
        )  # fmt: skip

    @jax.custom_jvp
    def op(*arguments):
        kernel = functools.partial(_kernel, scores=Scores(window, scale, softcap))
        return jax.custom_batching.sequential_vmap(kernel)(*arguments[:7])

    @op.defjvp
    def derivative(primals, tangents):
        changing = lambda *arrays: exact(*arrays, *primals[4:])  # noqa: E731
        return op(*primals), jax.jvp(changing, primals[:4], tangents[:4])[1]

    layer, keys = jnp.asarray(layer, jnp.int32), jnp.asarray(num_keys, jnp.int32)
    return op(q.astype(jnp.float32), k_pages, v_pages, sinks, block_table, positions, layer, keys)


def _kernel(q, k_pages, v_pages, sinks, block_table, positions, layer, *, scores: Scores) -> jax.Array:
    from pallas_kernels.cpu import keys  # needs the extra `cpu`

    (rows, tokens, heads, head_dim), (*_, page_size, kv_heads, _) = q.shape, shape(k_pages)
    # Of keys and of values: numbers, then their scales where they have some (cache_layouts/int8.py).
    arrays = list(zip(jax.tree.leaves(k_pages), jax.tree.leaves(v_pages), strict=True))
    dtypes = [str(field.dtype) for field, _ in arrays]
    dtype, scales = dtypes if len(dtypes) == 2 else (*dtypes, None)
    kernel = keys.Kernel(
        dtype, scales, heads // kv_heads, head_dim, scores.factor(head_dim), scores.window, scores.softcap,
        sinks is not None,
    )  # fmt: skip
    room = kernel.workspace(rows, tokens, kv_heads, block_table.shape[1] * page_size)
    results = (
        jax.ShapeDtypeStruct(q.shape, jnp.float32),
        jax.ShapeDtypeStruct((room,), jnp.float32),
    )
    operands = [q, positions, block_table, layer.reshape(1), *itertools.chain(*arrays)]
    operands += [] if sinks is None else [sinks.astype(jnp.float32)]
    out, _ = jax.ffi.ffi_call(kernel.target(), results)(*operands)
    return out
