"""What precedes attention of many queries, in one launch: QK-norm, rope, cache write.

    queries -> norm, rope -> times their factor, 16 bits, as tensor cores take them
    keys    -> norm, rope -> as the cache stores them -> their pages
    values                -> as the cache stores them -> their pages

A block has one token, and each of its warps as many heads at a time as its lanes hold (lane_heads.py). Its
time is that of memory: qkv is read once, and queries and what the cache stores are written once.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import cache_layouts
from pallas_kernels.attention.lane_heads import PART, LaneHeads
from pallas_kernels.attention.scores import Scores
from pallas_kernels.cache_layouts import Pages
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import index, minimum, not_negative, select

WARPS = 4  # of a block
AT_ONCE = 3  # loads of a warp on their way together: of 6 fewer blocks are on a multiprocessor at once


@functools.partial(jax.jit, static_argnames=("eps", "interleaved", "gated", "scores"))
def prefill_heads(
    qkv: Float[Array, "B T width"],
    k_pages: Pages,
    v_pages: Pages,
    block_table: Int[Array, "B pages_per_row"],
    positions: Int[Array, "B T"],
    layer: Int[Array, ""],
    cos: Float[Array, "B T pairs"] | None,
    sin: Float[Array, "B T pairs"] | None,
    norms: tuple[Float[Array, "L D"], Float[Array, "L D"]] | None,
    *,
    eps: float,
    interleaved: bool,
    gated: bool,
    scores: Scores,
) -> tuple[Float[Array, "B T H D"], Pages, Pages]:
    """(queries, k_pages, v_pages): queries as the kernels of prefill multiply them (prefill_tiles.py), times
    `scores.query_factor`, in the OPERAND of the cache's PREFILL; pages with the new keys and values. Of
    padding, position -1, nothing is stored, and its queries mean nothing.

    Arguments as for `attend`, cos and sin being its rotation. For a layout that has PREFILL, and heads of 64,
    128 or 256.
    """
    (rows, tokens, width), (*_, page_size, kv_heads, D) = qkv.shape, cache_layouts.shape(k_pages)
    per_query = 1 + gated
    heads = (width // D - 2 * kv_heads) // per_query
    lane_heads = LaneHeads(D, 0 if cos is None else cos.shape[-1], interleaved)
    layout = cache_layouts.recognize(k_pages)
    operand = cache_layouts.get(layout.PREFILL)
    parts, last = lane_heads.parts, heads + 2 * kv_heads - 1
    each = 32 // parts  # heads of a warp at a time
    turns = math.ceil((last + 1) / (each * WARPS))

    def body(qkv, pages, table, positions, layer, rotation, gammas, q_out):
        row, token = lanes.block() // tokens, lanes.block() % tokens
        position = memory.load(positions, row, token)
        with lanes.when(not_negative(position)):
            warp, lane = lanes.thread() // 32, lanes.thread() % 32
            part = lane % parts
            at = index(position)
            page = memory.load(table, row, at // page_size)
            layer = index(memory.load(layer, 0))
            own_gammas = None
            if gammas is not None:
                own_gammas = [memory.load_reals(PART, ref, [layer, part * PART]) for ref in gammas]
            angles = lane_heads.angles(rotation, [row, token], part)

            def store(number, raw):
                """Of a lane's head its numbers as projected."""
                is_query, is_value = number < heads, number >= heads + kv_heads
                x = raw
                if own_gammas is not None:
                    gamma = [select(is_query, q, k) for q, k in zip(*own_gammas, strict=True)]
                    x = lane_heads.normed(x, gamma, eps)
                if angles is not None:
                    x = lane_heads.rotated(x, part, *angles)
                (x,) = layout.rotate_lanes([x], lane_heads.distances)
                factor = scores.query_factor(D)
                (query,), _ = operand.narrow([[v * factor for v in x]], lane_heads.distances)
                with lanes.when(is_query):
                    operand.store(query, q_out, [row, token, number, part * PART])
                x = [select(is_value, old, v) for old, v in zip(raw, x, strict=True)]
                (stored,), scale = layout.narrow([x], lane_heads.distances)
                kv_head = (number - heads) % kv_heads
                place = [layer, page, at % page_size, kv_head, part * PART]
                is_key = (number >= heads) & (number < heads + kv_heads)
                for refs, own in zip(pages, (is_key, is_value), strict=True):
                    with lanes.when(own):
                        layout.store(stored, refs, place)
                        if scale is not None:
                            with lanes.when(part == 0):
                                layout.store_scale(scale, refs, place[:-1])

            def some(first, carry):
                loaded = []
                for turn in range(min(AT_ONCE, turns)):
                    number = ((first + turn) * WARPS + warp) * each + lane // parts
                    number = minimum(number, last)  # the last several times: the same bits
                    column = select(number < heads, number * per_query, number + heads * (per_query - 1)) * D
                    x = [memory.load_reals(4, qkv, [row, token, column + (part * PART + i)]) for i in (0, 4)]
                    loaded.append((number, [*x[0], *x[1]]))
                for number, x in loaded:
                    store(number, x)
                return carry

            lanes.loop(0, turns, AT_ONCE, [], some)

    pages = jax.tree.map(jax.new_ref, (k_pages, v_pages))
    q = launch(
        body,
        {
            "qkv": qkv,
            "pages": pages,
            "table": block_table,
            "positions": positions,
            "layer": jnp.asarray(layer, jnp.int32).reshape(1),
            "rotation": None if cos is None else (cos, sin),
            "gammas": norms,
        },
        {"q_out": jax.ShapeDtypeStruct((rows, tokens, heads, D), operand.DTYPE)},
        name="prefill_heads",
        blocks=rows * tokens,
        threads=32 * WARPS,
    )
    return q, *jax.tree.map(jax.freeze, pages)
