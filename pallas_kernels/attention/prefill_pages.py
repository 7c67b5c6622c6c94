"""Keys and values that rows see as float16, for kernels of prefill: of a cache that tensor cores do not
multiply as it lies (cache_layouts: PREFILL).

A block takes one page of a row, a thread 8 neighbouring numbers at a time. Pages that no query sees are left
out: memory has room for all of them, but time goes by what is read.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels import cache_layouts
from pallas_kernels.cache_layouts import Pages
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import index, minimum

THREADS = 128
EACH = 8  # numbers of a thread
AT_ONCE = 4  # of them on their way together
KEYS = 128  # kernels of prefill visit so many at a time, the last of them masked: they must be numbers


def as_float16(
    k_pages: Pages,
    v_pages: Pages,
    block_table: Int[Array, "B pages_per_row"],
    positions: Int[Array, "B T"],
    layer: int | Int[Array, ""],
    window: int | None = None,
) -> tuple[jax.Array, jax.Array, Int[Array, "B pages_per_row"], int]:
    """What queries at these positions see of one layer, in pages of its own: keys and values float16 [1, B *
    pages per row, page_size, Hkv, D], the block table of these pages, and the layer, 0. What is beyond 65504
    is that.

    Arguments as for `attention`, of a layout whose numbers are one float16 each before they are scaled.
    """
    layout, (*_, page_size, kv_heads, head_dim) = (
        cache_layouts.recognize(k_pages),
        cache_layouts.shape(k_pages),
    )
    rows, width = block_table.shape
    heads = page_size * kv_heads
    # Keys of a row, up to the last that a kernel visits.
    keys = (positions.max(axis=1) // KEYS + 1) * KEYS
    inputs = {
        "pages": (k_pages, v_pages),
        "table": block_table,
        "keys": keys,
        "layer": jnp.asarray(layer, jnp.int32).reshape(1),
    }
    if window is not None:  # from the first that a kernel visits
        first = jnp.where(positions < 0, positions.max(axis=1, keepdims=True), positions).min(axis=1)
        inputs["first"] = jnp.maximum(first - window + 1, 0) // KEYS * KEYS

    def body(pages, table, keys, layer, keys_out, values_out, first=None):
        row, page = lanes.block() // width, lanes.block() % width

        def copied(source, refs, target):
            def some(first, carry):
                thread, places, loaded = lanes.thread(), [], []
                for u in range(AT_ONCE):
                    at = first + (thread + u * THREADS) * EACH
                    at = minimum(at, heads * head_dim - EACH)  # the last twice: the same bits
                    head = at // head_dim
                    place = [head // kv_heads, head % kv_heads]
                    stored_at = [memory.load(layer, 0), source, *place]
                    places.append([0, lanes.block(), *place, at % head_dim])
                    stored = layout.load(refs, [*stored_at, at % head_dim])
                    loaded.append((stored, layout.load_scale(refs, stored_at)))
                for (stored, scale), place in zip(loaded, places, strict=True):
                    (scale,) = lanes.reals(scale)
                    pairs = [lanes.halves(pair) for (pair,) in layout.pairs(stored)]
                    words = [lanes.half_pair(*(x * scale for x in pair), saturated=True) for pair in pairs]
                    memory.store_halves(words, target, place)
                return carry

            lanes.loop(0, heads * head_dim, THREADS * EACH * AT_ONCE, [], some)

        visited = page * page_size < index(memory.load(keys, row))
        if first is not None:
            visited = visited & (page * page_size + page_size > index(memory.load(first, row)))
        with lanes.when(visited):
            source = memory.load(table, row, page)
            for refs, target in zip(pages, (keys_out, values_out), strict=True):
                copied(source, refs, target)

    shape = jax.ShapeDtypeStruct((1, rows * width, page_size, kv_heads, head_dim), jnp.float16)
    k, v = launch(
        body,
        inputs,
        {"keys_out": shape, "values_out": shape},
        name="prefill_pages",
        blocks=rows * width,
        threads=THREADS,
    )
    return k, v, jnp.arange(rows * width, dtype=jnp.int32).reshape(rows, width), 0
