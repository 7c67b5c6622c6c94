"""Attention of many queries a row (prefill) over a paged cache, on the tensor cores that every GPU since
compute capability 8.0 has (mma.sync): for those that are not Hopper, which have prefill_sm90.py's wgmma.

A block has 64 queries of one head, for one warpgroup. All its threads bring keys and values from their pages,
64 at a time, one step early (cp.async); nothing of the cache is copied or gathered in memory.

    per step of 64 keys:   S = Q K^T  (mma)  -> mask -> online softmax in float32 (base 2)
                           O = O c + P V  (mma, P in registers)

Arguments, what is visited, what is masked and what is rounded are prefill_sm90.py's.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import prefill, prefill_tiles
from pallas_kernels.attention.prefill_tiles import QUERIES, Tiles
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import as_value, index, integer, minimum
from pallas_kernels.gpu.wgmma import fragment

KEYS = 64  # of a step
SLOTS = 2  # steps in shared memory
THREADS = 128
TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
ACC, LHS, RHS = (  # of any numbers of 16 bits
    layout(jnp.bfloat16) for layout in (plgpu.Layout.MMA_ACC, plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS)
)


def _kernel(q: jax.Array, values: int, tiles: Tiles, **rest):
    """For head_dim 64 and 128."""
    B, _, H, D = q.shape
    assert values == D
    smem = plgpu.SMEM((SLOTS, KEYS, D), q.dtype, transforms=TRANSFORMS)
    return plgpu.kernel(
        functools.partial(_body, tiles=tiles, **rest),
        out_type=jax.ShapeDtypeStruct(q.shape, jnp.float32),
        grid=(H, tiles.count, B),
        grid_names=("heads", "tiles", "rows"),
        kernel_name="prefill_sm80",  # as profilers show it
        scratch_types={"k_smem": smem, "v_smem": smem},
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )


mma_attention = prefill_tiles.attention_by(_kernel, lambda key_dim, value_dim: KEYS, parts=1)


def _body(
    q_gmem, k_gmem, v_gmem, table_gmem, positions_gmem, steps_gmem, layer_gmem, *last_gmem,
    k_smem, v_smem, tiles, layout, group, scores,
):  # fmt: skip
    *sinks_gmem, out_gmem = last_gmem
    row = lax.axis_index("rows")
    tile = tiles.count - 1 - lax.axis_index("tiles")  # the longest first
    head = lax.axis_index("heads")
    stretches = prefill_tiles.ranges([steps_gmem[row, tile, i] for i in range(steps_gmem.shape[-1])])
    start, stop = stretches[0][0], stretches[-1][1]
    queries = pl.ds(tile * QUERIES, QUERIES)
    my_q = plgpu.load(q_gmem.at[row, queries, head], layout=LHS, optimized=False)
    position = plgpu.load(positions_gmem.at[row, queries], layout=ACC.reduce(1), optimized=False)
    carry = prefill_tiles.start_of_sums(k_smem.shape[-1], ACC)

    def bring(step):
        slot = lax.rem(step, SLOTS)
        numbers = (step, row, layer_gmem[0], lax.div(head, group))
        for source, target in ((k_gmem, k_smem), (v_gmem, v_smem)):
            _bring(tuple(map(jnp.int32, numbers)), source, table_gmem, target.at[slot])
        _commit()

    pl.when(stop > start)(lambda: bring(jnp.int32(start)))

    def visit(step, carry, masked):
        out, maximum, total = carry
        slot = lax.rem(step, SLOTS)
        _arrived()  # everybody's part of this step; and nobody reads the step before any more
        pl.when(step + 1 < stop)(lambda: bring(step + 1))
        k = plgpu.load(k_smem.at[slot].transpose((1, 0)), layout=RHS)
        s = plgpu.mma(plgpu.layout_cast(jnp.zeros((QUERIES, KEYS), jnp.float32), ACC), my_q, k)
        s = prefill_tiles.capped(s, scores)
        if masked:
            s = prefill_tiles.visible(s, position, step * KEYS, ACC, scores)
        out, maximum, total, p = prefill_tiles.softmax_step(s, out, maximum, total, layout, scores)
        v = plgpu.load(v_smem.at[slot], layout=RHS)
        return plgpu.mma(out, _as_operand(p), v), maximum, total

    for first, end, masked in stretches:
        carry = lax.fori_loop(first, end, functools.partial(visit, masked=masked), carry)
    sink = sinks_gmem[0][head] if sinks_gmem else None
    out, maximum, total = carry
    out_gmem[row, queries, head] = prefill_tiles.results(out, maximum, total, position, sink)


def _bring(numbers, source, table_gmem, target):
    """`bring_by_lane` for all lanes; numbers: step, row, layer, KV head."""
    plain, swizzled = plgpu.RefType(), plgpu.RefType(TRANSFORMS)

    @plgpu.inline_mgpu(arg_types=((plgpu.Layout.WG_SPLAT,) * 4, plain, plain, swizzled))
    def bring(ctx, numbers, source, table, target):
        bring_by_lane([as_value(v.registers.item()) for v in numbers], source, table, target)

    bring(numbers, source, table_gmem, target)


def bring_by_lane(numbers, source, table, target):
    """Ask for a step's keys (or values) of a head: this thread's part of it, 16 bytes of a key at a time.

    numbers  i32 step, row, layer, KV head
    target   ref of 16-bit numbers [64, D], in tiles of 8 x 64; of a row's pieces of 16 bytes number i is in
             place i xor the row
    """
    step, row, layer, kv_head = numbers
    pages, page_size, kv_heads, D = source.type.shape[1:]
    pieces = D // 8  # of a key
    at_once = THREADS // pieces  # keys, a multiple of 8
    thread = integer(lanes.thread())
    key, piece = thread // pieces, thread % pieces

    def address_of(token):
        # Past the table's end any page will do: its keys are masked.
        page = minimum(token // page_size, table.type.shape[1] - 1)
        page = layer * pages + memory.load(table, index(row), index(page))
        place = page * page_size + token % page_size
        return memory.at_byte(memory.address(source), place, kv_heads * D * 2, kv_head * (2 * D) + piece * 16)

    r = key % 8
    place = memory.shared_address(target) + key // 8 * (D * 16) + piece // 8 * 1024
    place = place + r * 128 + (piece % 8 ^ r) * 16
    first = address_of(step * KEYS + key)
    one_page = page_size % KEYS == 0
    for done in range(0, KEYS, at_once):
        at = first + done * (kv_heads * D * 2) if one_page else address_of(step * KEYS + key + done)
        memory.copy_async(place + done * (D * 2), at, 16)


def _as_operand(p):
    """16-bit numbers [64, K] as mma gave them, as mma wants its first operand: each lane has the same of
    both, in the same order."""

    @plgpu.inline_mgpu(arg_types=(ACC,), return_type=plgpu.ShapeDtypeStruct(p.shape, p.dtype, layout=LHS))
    def relabeled(ctx, p):
        return fragment(list(p.registers.flat), p.shape, LHS.to_mgpu())

    return relabeled(p)


def _commit():
    plgpu.inline_mgpu(arg_types=())(lambda ctx: memory.commit_copies())()


def _arrived():
    @plgpu.inline_mgpu(arg_types=())
    def arrived(ctx):
        memory.wait_copies(0)
        lanes.block_barrier()

    arrived()


run_stored = prefill.run_stored_by(mma_attention)
run = prefill.run_by(run_stored)
