"""Attention of many queries a row (prefill) over a paged cache, on Hopper's tensor cores.

One block has 64 queries for each of two warpgroups: of two query heads that share a KV head, or 128 queries
of one head. A third warpgroup brings keys and values from their pages, 64 at a time, by TMA; nothing of the
cache is copied or gathered in memory.

    per block of 128 keys:   S = Q K^T  (wgmma, bf16)  -> mask -> online softmax in float32 (base 2)
                             O = O c + P V  (wgmma, P in registers as bf16)

The two warpgroups take turns: one multiplies while the other computes its softmax (Shah et al. 2024; the
schedule is that of jax's own attention_mgpu.py). Keys behind the last position that a tile of queries can see
are never visited, and only blocks that some of its queries cannot see whole are masked. What is lost against
the definition: queries and softmax weights are rounded to bfloat16, as the cache's keys and values are.
"""
# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

QUERIES = 64  # of a warpgroup
KEYS = 128  # of a step
TMA_KEYS = 64  # of a copy: a page, or a part of one
SLOTS = 2  # blocks of keys, and of values, in shared memory


@jax.jit
def prefill_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_table: jax.Array,
    positions: jax.Array,
    layer: jax.Array,
) -> jax.Array:
    """attention.attention's candidate: the same arguments, for a bfloat16 cache whose pages hold a multiple
    of 64 tokens, and head_dim 64 or 128.

    Returns float32 [B, T, H, D].
    """
    B, T, H, D = q.shape
    kv_heads = k_pages.shape[3]
    heads = 2 if (H // kv_heads) % 2 == 0 else 1  # of a block
    tile = 2 * QUERIES // heads  # queries of a block, per head
    padding = -T % tile
    q = (q.astype(jnp.float32) * (D**-0.5 * math.log2(math.e))).astype(jnp.bfloat16)
    q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))
    positions = jnp.pad(positions, ((0, 0), (0, padding)), constant_values=-1)
    tiles = (T + padding) // tile
    by_tile = positions.reshape(B, tiles, tile)
    # Steps of a tile in all, and those before the first key that some query of it cannot see.
    steps = jnp.stack([by_tile.max(-1) // KEYS + 1, (by_tile.min(-1) + 1) // KEYS], axis=-1)
    body = functools.partial(
        _body, heads=heads, tile=tile, tiles=tiles, group=H // kv_heads, page_size=k_pages.shape[2]
    )
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((B, T + padding, H, D), jnp.float32),
        grid=(H // heads, tiles, B),
        grid_names=("heads", "tiles", "rows"),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types={
            "q_smem": plgpu.SMEM((2, QUERIES, D), jnp.bfloat16, transforms=transforms),
            "k_smem": plgpu.SMEM((SLOTS, KEYS, D), jnp.bfloat16, transforms=transforms),
            "v_smem": plgpu.SMEM((SLOTS, KEYS, D), jnp.bfloat16, transforms=transforms),
            "q_full": plgpu.Barrier(num_barriers=2),
            "k_full": plgpu.Barrier(num_arrivals=KEYS // TMA_KEYS, num_barriers=SLOTS),
            "v_full": plgpu.Barrier(num_arrivals=KEYS // TMA_KEYS, num_barriers=SLOTS),
            "k_free": plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
            "v_free": plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
            "turn": plgpu.Barrier(num_arrivals=2),
        },
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    return kernel(q, k_pages, v_pages, block_table, positions, steps, layer)[:, :T]


def _body(
    q_gmem, k_gmem, v_gmem, table_gmem, positions_gmem, steps_gmem, layer_gmem, out_gmem,
    *, q_smem, k_smem, v_smem, q_full, k_full, v_full, k_free, v_free, turn,
    heads, tile, tiles, group, page_size,
):  # fmt: skip
    row = lax.axis_index("rows")
    at = tiles - 1 - lax.axis_index("tiles")  # the longest first
    first_head = lax.axis_index("heads") * heads
    warpgroup = lax.axis_index("warpgroup")
    steps, unmasked = steps_gmem[row, at, 0], steps_gmem[row, at, 1]

    @pl.when(warpgroup < 2)
    def _multiply():
        plgpu.set_max_registers(232, action="increase")
        head = first_head + (warpgroup if heads == 2 else 0)
        queries = pl.ds(at * tile + (0 if heads == 2 else warpgroup * QUERIES), QUERIES)
        my_q = q_smem.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_gmem.at[row, queries, head], my_q, q_full.at[warpgroup])
        rows = plgpu.Layout.WGMMA.reduce(1)
        position = plgpu.load(positions_gmem.at[row, queries], layout=rows, optimized=False)
        plgpu.barrier_wait(q_full.at[warpgroup])

        def take_turns():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        D = q_smem.shape[-1]
        carry = (
            plgpu.layout_cast(jnp.zeros((QUERIES, D), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((QUERIES,), -jnp.inf, jnp.float32), rows),
            plgpu.layout_cast(jnp.zeros((QUERIES,), jnp.float32), rows),
        )

        @pl.when(steps > 0)
        def _first():
            plgpu.barrier_wait(k_full.at[0])

        pl.when(warpgroup == 1)(take_turns)

        def visit(step, carry, masked):
            out, maximum, total = carry
            slot = lax.rem(step, SLOTS)

            def scores(acc):
                plgpu.wgmma(acc, my_q, k_smem.at[slot].transpose((1, 0)))
                take_turns()
                return acc[...]

            s = pl.run_scoped(scores, plgpu.ACC((QUERIES, KEYS), jnp.float32))
            plgpu.barrier_arrive(k_free.at[slot])
            if masked:
                key = plgpu.broadcasted_iota(jnp.int32, (QUERIES, KEYS), 1, layout=plgpu.Layout.WGMMA)
                last = lax.broadcast_in_dim(position - step * KEYS, (QUERIES, KEYS), [0])
                s = jnp.where(key <= last, s, -jnp.inf)
            new = jnp.maximum(maximum, s.max(axis=1))
            keep = jnp.exp2(maximum - new)
            p = jnp.exp2(s - lax.broadcast_in_dim(new, s.shape, [0]))
            out *= lax.broadcast_in_dim(keep, out.shape, [0])
            total = total * keep + p.sum(axis=1)
            half = p.astype(jnp.bfloat16)
            out, total, new, half = lax.optimization_barrier((out, total, new, half))
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(v_full.at[slot])
            plgpu.barrier_wait(turn)

            def weigh(acc):
                plgpu.wgmma(acc, half, v_smem.at[slot])

                @pl.when(step + 1 < steps)
                def _next():
                    plgpu.barrier_wait(k_full.at[lax.rem(step + 1, SLOTS)])

            out = pl.run_state(weigh)(plgpu.ACC.init(out))
            plgpu.barrier_arrive(v_free.at[slot])
            return out, new, total

        carry = lax.fori_loop(0, unmasked, functools.partial(visit, masked=False), carry)
        out, _, total = lax.fori_loop(unmasked, steps, functools.partial(visit, masked=True), carry)
        pl.when(warpgroup == 0)(take_turns)
        out = out / lax.broadcast_in_dim(total, out.shape, [0])
        seen = lax.broadcast_in_dim(position, out.shape, [0]) >= 0  # else it was padding: 0 / 0
        out_gmem[row, queries, head] = jnp.where(seen, out, 0.0)

    @pl.when(warpgroup == 2)
    def _bring():
        plgpu.set_max_registers(40, action="decrease")
        layer, kv_head = layer_gmem[0], lax.div(first_head, group)
        parts = page_size // TMA_KEYS  # of a page

        @pl.loop(0, steps)
        def _step(step):
            slot = lax.rem(step, SLOTS)
            pages = []
            for i in range(KEYS // TMA_KEYS):
                part = step * (KEYS // TMA_KEYS) + i
                # Behind the table's end anything will do: it is masked.
                page = table_gmem[row, jnp.minimum(lax.div(part, parts), table_gmem.shape[1] - 1)]
                pages.append((page, lax.rem(part, parts) * TMA_KEYS))
            for source, target, full, free in (
                (k_gmem, k_smem, k_full, k_free),
                (v_gmem, v_smem, v_full, v_free),
            ):

                @pl.when(step >= SLOTS)
                def _wait(free=free):
                    plgpu.barrier_wait(free.at[slot])

                for i, (page, offset) in enumerate(pages):
                    plgpu.copy_gmem_to_smem(
                        source.at[layer, page, pl.ds(offset, TMA_KEYS), kv_head],
                        target.at[slot, pl.ds(i * TMA_KEYS, TMA_KEYS)],
                        full.at[slot],
                    )
