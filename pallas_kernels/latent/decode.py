"""Latent attention of one query a row (decode) in its absorbed form, from the projections to the weighted sum
of rows, in one launch: norm and rope of the new row and its place in the cache, rope of queries, scores,
softmax, sum.

A block has a row of the batch, up to 32 query heads, and a split of the row's keys, which it visits up to 64
at a time, in tiles of 16. All heads read the same rows, once, from shared memory:

    rows of the next visit -> shared memory                                  (on their way meanwhile)
    warp:  scores of all heads with its dimensions, 32 at a time             (tensor cores)
    block: sums of the warps' parts -> online softmax                        (4 neighbouring keys a lane)
    warp:  sums of 64 dimensions, weighted for all heads                     (tensor cores)
    splits -> out                                                            (splits.py)

    lane = 4 g + t    of the scores                  of the weighted sums
    rows              keys g and g + 8,              keys 4 t to 4 t + 3,
                      dimensions 32 c + 8 t + i      dimensions 64 w + 8 g + i
    queries, weights  heads 8 n + g, the same        heads 8 n + g, the same keys
    results           the same keys,                 the same dimensions,
                      heads 8 n + 2 t and + 1        heads 8 n + 2 t and + 1

Queries and weights are two numbers of 16 bits whose sum they are, as in attention/decode_warp.py, so that
tensor cores round nothing that the cache has not rounded.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import cache_layouts, device
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.exchange import Exchange, tag
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import ceil_divided, integer, maximum, minimum, not_negative, select
from pallas_kernels.latent import splits
from pallas_kernels.latent.block import Block
from pallas_kernels.latent.plan import KEYS, SLOTS, WARPS, Plan
from pallas_kernels.latent.rows import Rows
from pallas_kernels.latent.token import Queries, store_new_row


def run(absorbed, q, latents, pages, block_table, positions, layer, rotation, norm, workspace, **how):
    """api.py calls it; as `latent_decode`, with one token a row as an axis, and under vmap."""
    arguments = absorbed[:, 0], q[:, 0], latents[:, 0], pages, block_table, positions[:, 0], layer
    angles = tuple(x[:, 0] for x in rotation)
    attends = functools.partial(latent_decode, **how)
    out, pages, used = jax.custom_batching.sequential_vmap(attends)(*arguments, angles, norm, workspace)
    return out[:, None], pages, used


@functools.partial(jax.jit, static_argnames=("interleaved", "eps", "scale"))
def latent_decode(
    absorbed, q, latents, pages, block_table, positions, layer, rotation, norm, workspace,
    *, interleaved: bool, eps: float, scale: float,
):  # fmt: skip
    """float32 [B, H, C]: of each head the weighted sum of the rows' first C numbers; the pages with the new
    rows; the workspace.

    absorbed   float32 [B, H, C]: K_h n_h
    q          float32 [B, H, D], as projected: its last numbers are turned
    latents    float32 [B, W], as projected: its last numbers are c and k
    positions  int32 [B]; rotation float32 [B, R / 2] each; norm float32 [L, C]
    workspace  int32, in which splits meet (splits.py); None: zeros
    """
    (B, H, D), turned = q.shape, 2 * rotation[0].shape[-1]
    page_size, width = pages.shape[2], pages.shape[4]
    sizes = page_size, block_table.shape[1], device.multiprocessors()
    plan = Plan(B, H, width - turned, turned, D - turned, *sizes)
    words = max(4, plan.exchanged)
    if workspace is not None and workspace.size < plan.exchanged:
        raise ValueError(
            f"attend_latent: workspace has {workspace.size} words, but {words} are exchanged; make it by "
            "empty_latent_workspace"
        )
    refs = [jax.new_ref(x) for x in (pages, jnp.zeros(words, jnp.int32) if workspace is None else workspace)]
    layout = cache_layouts.recognize(pages)
    step = functools.partial(Step, plan, layout, interleaved, eps, scale)
    out = launch(
        lambda **refs: _body(step(**refs)),
        {
            "absorbed": absorbed, "q": q, "latents": latents, "pages": refs[0], "table": block_table,
            "positions": positions, "layer_gmem": jnp.asarray(layer, jnp.int32).reshape(1),
            "rotation": rotation, "norm": norm, "workspace": refs[1],
        },
        {"out": jax.ShapeDtypeStruct(absorbed.shape, jnp.float32)},
        name="latent_decode",
        blocks=plan.blocks,
        threads=32 * WARPS,
        scratch={
            "rows_smem": plgpu.SMEM((SLOTS * plan.tiles * plan.tile_bytes // 4,), jnp.int32),
            "scratch_smem": plgpu.SMEM((plan.scratch.words,), jnp.int32),
        },
    )  # fmt: skip
    return out, *map(jax.freeze, refs)


@dataclasses.dataclass(frozen=True)
class Step:
    """What a block is given: sizes, and refs by the names of `latent_decode`."""

    plan: Plan
    layout: Any
    interleaved: bool
    eps: float
    scale: float
    absorbed: Any
    q: Any
    latents: Any
    pages: Any
    table: Any
    positions: Any
    layer_gmem: Any
    rotation: Any
    norm: Any
    workspace: Any
    out: Any
    rows_smem: Any
    scratch_smem: Any


@dataclasses.dataclass(frozen=True)
class Share:
    """A block's share of the work, i32.

    owner        row and group of heads, as one number
    split, used  its split, and how many of them have keys
    length       keys before the new one
    first, stop  keys of the split, the new one among them
    has_new      whether it is one of this split's
    """

    owner: Any
    row: Any
    heads: Any
    split: Any
    used: Any
    length: Any
    first: Any
    stop: Any
    has_new: Any
    layer: Any

    @classmethod
    def locate(cls, step: Step) -> "Share":
        plan, block = step.plan, integer(lanes.block())
        owner, split = block // plan.splits, block % plan.splits
        row = owner // plan.groups
        position = memory.load(step.positions, row)
        is_active = not_negative(position)
        length = select(is_active, position, 0)
        keys = length + select(is_active, integer(1), integer(0))
        tiles = ceil_divided(keys, KEYS)
        # What splits send each other takes time too: few tiles are one split's, of many each has several.
        several = select(tiles > 64, integer(4), integer(2))
        least = select(tiles > 4, select(tiles > 16, several, integer(1)), integer(4))
        each = maximum(ceil_divided(tiles, plan.splits), least)
        first = split * (each * KEYS)
        stop = minimum(keys, first + each * KEYS)
        return cls(
            owner, row, owner % plan.groups * plan.group, split, maximum(ceil_divided(tiles, each), 1),
            length, first, stop, is_active & (first <= length) & (length < stop),
            memory.load(step.layer_gmem, 0),
        )  # fmt: skip


def _body(step: Step):
    plan, share = step.plan, Share.locate(step)
    with lanes.when(share.split < share.used):
        rows = Rows.locate(step, share)
        page = memory.load(step.table, share.row, share.length // plan.page_size)
        rows.request(integer(0))
        queries = Queries.load(step, share)  # on their way while the new row is made
        with lanes.when(share.has_new & (integer(lanes.thread() // 32) == WARPS - 1)):
            store_new_row(step, share, page)
        block = Block.locate(step, share, queries.pairs())
        visits = ceil_divided(share.stop - minimum(share.first, share.stop), plan.tiles * KEYS)
        state = lanes.loop(0, visits, 1, block.start(), lambda i, state: block.visit(rows, integer(i), state))
        maxima, totals, sums = block.unpacked(state)
        block.store_totals(maxima, totals)
        lanes.block_barrier()
        exchange = Exchange(step.workspace, 0, integer(tag(share.layer)))
        splits.combine(step, share, block, sums, exchange)
