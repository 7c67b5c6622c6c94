"""Attention of many queries a row as a layer calls it: a kernel that multiplies pages of 16 bits, and the
launches before it.

    qkv -> QK-norm, rope, cache write (prefill_heads.py) -> queries, pages -> kernel
                                       pages of 8 bits -> what rows see of them, as float16 (prefill_pages.py)
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels import cache_layouts
from pallas_kernels.attention import prefill_heads, prefill_pages
from pallas_kernels.attention.scores import Scores


def run_stored_by(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Attention of queries (problems.Attention) by a kernel that multiplies pages of 16 bits as they are
    stored, for a cache of any layout that has PREFILL. Queries are float32, or what prefill_heads.py makes of
    them."""

    def op(scores: Scores, sinks, q, k_pages, v_pages, block_table, positions, layer):
        own_sinks = None if sinks is None else sinks[layer]
        if cache_layouts.name_of(k_pages) != cache_layouts.recognize(k_pages).PREFILL:
            k_pages, v_pages, block_table, layer = prefill_pages.as_float16(
                k_pages, v_pages, block_table, positions, layer, scores.window
            )
        return kernel(q, k_pages, v_pages, block_table, positions, layer, scores, own_sinks)

    def run_stored(*arrays, num_keys, window, scale, softcap, sinks=None) -> jax.Array:
        attends = functools.partial(op, Scores(window, scale, softcap))
        return jax.custom_batching.sequential_vmap(attends)(sinks, *arrays)

    return run_stored


def run_by(run_stored: Callable[..., jax.Array]) -> Callable[..., Any]:
    """All that a layer does between its projections (api.attend) with many tokens a row: QK-norm, rope and
    cache write by prefill_heads.py, then `run_stored`."""

    def run(
        qkv, k_pages, v_pages, block_table, positions, layer, cos, sin, norms, workspace,
        *, eps, interleaved, gated, sinks, scores: Scores, tokens=1,
    ):  # fmt: skip
        """The output, float32 [B, T, H, D], and pages and workspace as they are then."""
        q, k_pages, v_pages = prefill_heads.prefill_heads(
            qkv, k_pages, v_pages, block_table, positions, layer, cos, sin, norms,
            eps=eps, interleaved=interleaved, gated=gated, scores=scores,
        )  # fmt: skip
        out = run_stored(
            q, k_pages, v_pages, block_table, positions, layer, sinks=sinks,
            num_keys=None, window=scores.window, scale=scores.scale, softcap=scores.softcap,
        )  # fmt: skip
        if gated:  # a query head is followed by its gate
            heads, D = out.shape[2:]
            both = qkv[..., : 2 * heads * D].reshape(*out.shape[:3], 2, D)
            out = out * jax.nn.sigmoid(both[..., 1, :])
        return out, k_pages, v_pages, workspace

    return run
