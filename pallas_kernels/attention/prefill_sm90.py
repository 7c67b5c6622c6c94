"""Attention of many queries a row (prefill) over a paged cache, on Hopper's tensor cores.

An item of work is 64 queries for each of two warpgroups: of two query heads that share a KV head, or 128
queries of one head. A third warpgroup brings keys and values from their pages, 64 at a time, by TMA; nothing
of the cache is copied or gathered in memory. Blocks are persistent, one on each multiprocessor: queries, keys
and values of the next item are on their way while results of one are stored.

    per step of 128 keys:    S = Q K^T  (wgmma)  -> mask -> online softmax in float32 (base 2)
                             O = O c + P V  (wgmma, P in registers)

The two warpgroups take turns: one multiplies while the other computes its softmax (Shah et al. 2024; the
schedule is that of jax's own attention_mgpu.py). Who waits for whom:

    memory        K0 V0 K1 V1 |           K2       V2 |         K3       V3 |
                              .           ^ k_free 0  ^ v_free 0
    warpgroup 0   Q K0        | softmax 0 | P V0, Q K1 | softmax 1  | P V1, Q K2 | ...
    warpgroup 1               | Q K0      | softmax 0  | P V0, Q K1 | softmax 1  | ...
                            turn        turn         turn         turn

    q_full[w]      warpgroup w, for its item's queries (TMA)
    k_full, v_full [slot]   both warpgroups, for a step's keys and values (TMA), before they multiply
    k_free, v_free [slot]   memory, for both warpgroups to have multiplied what the slot held two steps before
    turn           each warpgroup for the other: who has issued Q K, for the other to be done with its softmax

A tile visits the steps between the first key and the last that its queries see, and masks only those of which
some query does not see all keys. Against the reference, queries and softmax weights are rounded to the
layout's OPERAND, as the cache's keys and values are.
"""

import dataclasses
import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels.attention import prefill, prefill_tiles
from pallas_kernels.attention.prefill_tiles import QUERIES, Tiles
from pallas_kernels.attention.scores import Scores

TMA_KEYS = 64  # of a copy: a page, or a part of one
SLOTS = 2  # steps of keys, and of values, in shared memory


def keys_of_step(key_dim: int, value_dim: int) -> int:
    """Fewer keys for wide heads, so that shared memory and a lane's 128 sums still fit."""
    return 128 if key_dim <= 192 and value_dim <= 128 else 64


def _kernel(q: jax.Array, values: int, tiles: Tiles, totals: bool = False, **rest):
    """For pages that hold a multiple of 64 tokens, keys of 64, 128, 192 or 256 numbers, and values of 64, 128
    or 256."""
    B, T, H, D = q.shape
    keys, blocks = keys_of_step(D, values), min(device.multiprocessors(), H // tiles.heads * tiles.count * B)
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    results = [(B, T, H, values), (B, H, T)][: 1 + totals]
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in results]
    full = plgpu.Barrier(num_arrivals=keys // TMA_KEYS, num_barriers=SLOTS)
    free = plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS)
    return plgpu.kernel(
        functools.partial(_body, tiles=tiles, blocks=blocks, totals=totals, **rest),
        out_type=tuple(results) if totals else results[0],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="prefill_sm90",  # as profilers show it
        scratch_types={
            "q_smem": plgpu.SMEM((2, QUERIES, D), q.dtype, transforms=transforms),
            "k_smem": plgpu.SMEM((SLOTS, keys, D), q.dtype, transforms=transforms),
            "v_smem": plgpu.SMEM((SLOTS, keys, values), q.dtype, transforms=transforms),
            "q_full": plgpu.Barrier(num_barriers=2),
            "k_full": full,
            "v_full": full,
            "k_free": free,
            "v_free": free,
            "turn": plgpu.Barrier(num_arrivals=2),
        },
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )


prefill_attention = prefill_tiles.attention_by(_kernel, keys_of_step, parts=2)
prefill_part = prefill_tiles.attention_by(
    functools.partial(_kernel, totals=True), keys_of_step, parts=2, totals=True
)


def _body(
    q_gmem, k_gmem, v_gmem, table_gmem, positions_gmem, steps_gmem, layer_gmem, *last_gmem,
    q_smem, k_smem, v_smem, q_full, k_full, v_full, k_free, v_free, turn,
    tiles, blocks, totals, layout, group, scores,
):  # fmt: skip
    count = len(last_gmem) - 1 - totals
    sinks_gmem, out_gmem = last_gmem[:count], last_gmem[count:]
    work = Work.share_out(q_gmem.shape, tiles, blocks, steps_gmem)
    keys, values = Slots(k_gmem, k_smem, k_full, k_free), Slots(v_gmem, v_smem, v_full, v_free)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < 2)
    def _():
        plgpu.set_max_registers(232, action="increase")
        queries = Queries(warpgroup, q_gmem, positions_gmem, sinks_gmem, out_gmem, q_smem, q_full)
        _multiply(work, queries, keys, values, turn, layout, scores)

    @pl.when(warpgroup == 2)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        _bring(work, keys, values, table_gmem, layer_gmem, group)


@dataclasses.dataclass(frozen=True)
class Work:
    """The items of this block, of so many blocks: one in each of the rounds, but for the last.

    heads   of a row: groups of tiles.heads that an item has
    items   of all blocks
    steps_gmem  int32 [rows, tiles, 2 or 4]: the bounds of steps, for `ranges`
    """

    tiles: Tiles
    rows: int
    heads: int
    items: int
    block: Any
    blocks: int
    steps_gmem: Any

    @classmethod
    def share_out(cls, shape: tuple[int, ...], tiles: Tiles, blocks: int, steps_gmem) -> "Work":
        rows, _, heads, _ = shape
        heads //= tiles.heads
        items = heads * tiles.count * rows
        return cls(tiles, rows, heads, items, lax.axis_index("block"), blocks, steps_gmem)

    @property
    def rounds(self) -> int:
        return -(-self.items // self.blocks)

    def item(self, i):
        """Of this block's i-th item: whether there is one, row, tile, first head. The longest first; who has
        the longest of a round has the shortest of the next."""
        number = i * self.blocks + jnp.where(lax.rem(i, 2) == 0, self.block, self.blocks - 1 - self.block)
        last, per_tile = jnp.minimum(number, self.items - 1), self.heads * self.rows
        tile, rest = self.tiles.count - 1 - lax.div(last, per_tile), lax.rem(last, per_tile)
        return (
            number < self.items,
            lax.div(rest, self.heads),
            tile,
            lax.rem(rest, self.heads) * self.tiles.heads,
        )

    def ranges(self, i) -> list[tuple]:
        """Of the i-th item's steps: none where there is no item."""
        exists, row, tile, _ = self.item(i)
        stop = jnp.where(exists, self.steps_gmem[row, tile, 0], 0)
        rest = range(1, self.steps_gmem.shape[-1])
        return prefill_tiles.ranges([stop, *(jnp.minimum(self.steps_gmem[row, tile, n], stop) for n in rest)])


@dataclasses.dataclass(frozen=True)
class Slots:
    """Keys or values: in their pages, in shared memory by slot, and the barriers of the slots."""

    gmem: Any
    smem: Any
    full: Any
    free: Any

    @property
    def step_keys(self) -> int:
        return self.smem.shape[1]


@dataclasses.dataclass(frozen=True)
class Queries:
    """A warpgroup's queries: all of them in memory, and its own of an item in shared memory.

    sinks_gmem  of heads; none: an empty sequence
    out_gmem    outputs, and where they are asked for the logarithms of totals
    """

    warpgroup: Any
    gmem: Any
    positions_gmem: Any
    sinks_gmem: Sequence
    out_gmem: Sequence
    smem: Any
    full: Any

    @property
    def own_smem(self):
        return self.smem.at[self.warpgroup]

    @property
    def arrived(self):
        return self.full.at[self.warpgroup]

    def place(self, work: Work, i):
        """(row, queries, head) of the i-th item."""
        _, row, tile, first_head = work.item(i)
        head = work.tiles.head(first_head, self.warpgroup)
        return row, pl.ds(work.tiles.first_query(tile, self.warpgroup), QUERIES), head

    def bring(self, work: Work, i):
        plgpu.copy_gmem_to_smem(self.gmem.at[self.place(work, i)], self.own_smem, self.arrived)


def _multiply(
    work: Work, queries: Queries, keys: Slots, values: Slots, turn, layout: ModuleType, scores: Scores
):
    """A warpgroup of the two that compute."""
    rows = plgpu.Layout.WGMMA.reduce(1)

    def take_turns():
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    def visit(step, carry, masked, before, stop, position):
        """A step: the block's number before + step."""
        out, maximum, total = carry
        slot = lax.rem(before + step, SLOTS)

        def multiply(acc):
            plgpu.wgmma(acc, queries.own_smem, keys.smem.at[slot].transpose((1, 0)))
            take_turns()
            return acc[...]

        s = pl.run_scoped(multiply, plgpu.ACC((QUERIES, keys.step_keys), jnp.float32))
        plgpu.barrier_arrive(keys.free.at[slot])
        s = prefill_tiles.capped(s, scores)
        if masked:
            s = prefill_tiles.visible(s, position, step * keys.step_keys, plgpu.Layout.WGMMA, scores)
        carry = prefill_tiles.softmax_step(s, out, maximum, total, layout, scores)
        out, new, total, p = lax.optimization_barrier(carry)
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(values.full.at[slot])
        plgpu.barrier_wait(turn)

        def weigh(acc):
            plgpu.wgmma(acc, p, values.smem.at[slot])

            @pl.when(step + 1 < stop)
            def _next():
                plgpu.barrier_wait(keys.full.at[lax.rem(before + step + 1, SLOTS)])

        out = pl.run_state(weigh)(plgpu.ACC.init(out))
        plgpu.barrier_arrive(values.free.at[slot])
        return out, new, total

    def attend(i, before):
        exists, *_ = work.item(i)
        stretches = work.ranges(i)
        start, stop = stretches[0][0], stretches[-1][1]
        place = queries.place(work, i)
        position = plgpu.load(queries.positions_gmem.at[place[:2]], layout=rows, optimized=False)
        carry = prefill_tiles.start_of_sums(values.smem.shape[-1], plgpu.Layout.WGMMA)
        plgpu.barrier_wait(queries.arrived)
        pl.when(stop > start)(lambda: plgpu.barrier_wait(keys.full.at[lax.rem(before, SLOTS)]))
        before -= start
        step = functools.partial(visit, before=before, stop=stop, position=position)
        for first, end, masked in stretches:
            carry = lax.fori_loop(first, end, functools.partial(step, masked=masked), carry)
        pl.when(i + 1 < work.rounds)(lambda: queries.bring(work, i + 1))

        @pl.when(exists)
        def _store():
            sink = queries.sinks_gmem[0][place[-1]] if queries.sinks_gmem else None
            out, maximum, total = carry
            queries.out_gmem[0][place] = prefill_tiles.results(out, maximum, total, position, sink)
            for totals_gmem in queries.out_gmem[1:]:
                row, tokens, head = place
                totals_gmem[row, head, tokens] = prefill_tiles.log_total(maximum, total, position)

        return before + stop

    queries.bring(work, 0)
    pl.when(queries.warpgroup == 1)(take_turns)  # warpgroup 0 begins
    lax.fori_loop(0, work.rounds, attend, jnp.int32(0))
    pl.when(queries.warpgroup == 0)(take_turns)


def _bring(work: Work, keys: Slots, values: Slots, table_gmem, layer_gmem, group: int):
    """The warpgroup that brings keys and values, `group` query heads to each head of them."""
    parts = keys.gmem.shape[2] // TMA_KEYS  # of a page

    def bring(i, before):
        _, row, _, first_head = work.item(i)
        kv_head = lax.div(first_head, group)
        stretches = work.ranges(i)
        start, stop = stretches[0][0], stretches[-1][1]
        before -= start

        @pl.loop(start, stop)
        def _step(step):
            slot = lax.rem(before + step, SLOTS)
            pages = []
            for n in range(keys.step_keys // TMA_KEYS):
                part = step * (keys.step_keys // TMA_KEYS) + n
                # Past the table's end any page will do: its keys are masked.
                page = table_gmem[row, jnp.minimum(lax.div(part, parts), table_gmem.shape[1] - 1)]
                pages.append((page, lax.rem(part, parts) * TMA_KEYS))
            for slots in (keys, values):

                @pl.when(before + step >= SLOTS)
                def _wait(slots=slots):
                    plgpu.barrier_wait(slots.free.at[slot])

                for n, (page, offset) in enumerate(pages):
                    plgpu.copy_gmem_to_smem(
                        slots.gmem.at[layer_gmem[0], page, pl.ds(offset, TMA_KEYS), kv_head],
                        slots.smem.at[slot, pl.ds(n * TMA_KEYS, TMA_KEYS)],
                        slots.full.at[slot],
                    )

        return before + stop

    lax.fori_loop(0, work.rounds, bring, jnp.int32(0))


run_stored = prefill.run_stored_by(prefill_attention)
run = prefill.run_by(run_stored)
