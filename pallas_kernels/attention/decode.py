"""One token's attention for every row: QK-norm, rope, cache write and flash decoding over pages, in one
launch.

A team of warps has a share of the work (decode_plan.py): one row, the query heads of one KV head, and one
split of the row's keys. Its warps take 16 keys at a time (decode_warp.py):

    first keys and values of its split -> shared memory, or registers         (on their way while q is made)
    team:   q, k and v of the new token -> norm, rope -> shared memory, cache   (decode_token.py)
    warp:   the new key in its place; scores, online softmax, weighted values   (tensor cores)
    team:   its warps -> shared memory -> (m, l, o) of the split
    splits -> out

Splits meet as decode_splits.py has it, for which all blocks of a launch must run at once: one on each
multiprocessor do. `decode_attention` is this phase as a kernel of its own; step/decode_layers.py has it in
one launch with the products.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import cache_layouts, device
from pallas_kernels.attention.decode_cache import Cache, stored_key, team_warp
from pallas_kernels.attention.decode_plan import BLOCKS_AT_ONCE, KEYS, KEYS_PER_SPLIT, WARPS, Plan
from pallas_kernels.attention.decode_sources import copy_first, visit_bytes
from pallas_kernels.attention.decode_splits import Exchange, Share, combine
from pallas_kernels.attention.decode_warp import attend
from pallas_kernels.attention.scores import PLAIN
from pallas_kernels.gpu import lanes, memory, shared_memory
from pallas_kernels.gpu.values import exp, index, integer, maximum, minimum, of, select, total, true
from pallas_kernels.matmul.bit_mma import activations as activations_int8
from pallas_kernels.matmul.bit_mma.activations import GROUP, columns_of_lane, store_group


@functools.partial(jax.jit, static_argnames=("eps", "interleaved", "gated", "integers", "scores"))
def decode_attention(
    qkv,
    k_pages,
    v_pages,
    block_table,
    positions,
    layer,
    cos,
    sin,
    norms,
    workspace,
    eps,
    interleaved,
    gated=False,
    integers=False,
    scores=PLAIN,
) -> tuple[Any, cache_layouts.Pages, cache_layouts.Pages, jax.Array]:
    """The kernel behind pallas_kernels.attention.attend; arguments and results are described there.

    qkv may be several arrays, columns beside columns, each [splits, rows or more, width]: parts that nobody
    has added yet. With integers the output is
    (q, scale), as `activations_int8` makes them of it: by the same launch, where its blocks make whole
    groups."""
    page_size, kv_heads, head_dim = cache_layouts.shape(k_pages)[2:]
    beside = tuple(qkv) if isinstance(qkv, (tuple, list)) else (qkv,)
    assert not gated or len(beside) == 1
    width = sum(part.shape[-1] for part in beside)
    batch, width = len(positions), (width - 2 * kv_heads * head_dim) // (1 + gated)
    phase = Attention(
        rows=batch, kv_heads=kv_heads, group=width // (kv_heads * head_dim), head_dim=head_dim,
        page_size=page_size, pages=block_table.shape[1], most_blocks=device.multiprocessors(),
        normed=norms is not None, eps=eps, interleaved=interleaved,
        pairs=0 if cos is None else cos.shape[-1], gated=gated, scores=scores,
    )  # fmt: skip
    if workspace is not None and workspace.size < phase.partials:
        raise ValueError(
            f"attend: workspace has {workspace.size} words, but {phase.partials} are exchanged; make it by "
            "empty_workspace"
        )
    pages = jax.tree.map(jax.new_ref, (k_pages, v_pages))
    workspace = jax.new_ref(jnp.zeros(phase.partials, jnp.int32) if workspace is None else workspace)
    refs, structure = jax.tree.flatten(pages)
    layout, out_type = cache_layouts.of(k_pages), jax.ShapeDtypeStruct((batch, width), jnp.float32)
    if integers and phase.makes_groups:
        out_type = tuple(activations_int8.results_of(batch, width).values())
    slots = _slots_of_warp(phase, layout)
    kernel = plgpu.kernel(
        functools.partial(
            _body, phase=phase, layout=layout, structure=structure, beside=len(beside), slots=slots
        ),
        out_type=out_type,
        grid=(phase.blocks,),
        grid_names=("block",),
        num_threads=phase.warps // 4,
        thread_name="warpgroup",
        kernel_name="decode_attention",  # as profilers show it
        scratch_types=[
            plgpu.SMEM((phase.scratch,), jnp.float32),
            plgpu.SMEM((max(4, phase.warps * slots * visit_bytes(phase, layout) // 4),), jnp.int32),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    angles = (cos, sin) if phase.turned else ()
    operands = [*beside, *angles, positions, block_table, jnp.asarray(layer, jnp.int32).reshape(1)]
    out = kernel(*operands, *(norms or ()), *refs, workspace)
    if integers and not phase.makes_groups:
        out = activations_int8.activations_int8(out)
    return out, *jax.tree.map(jax.freeze, pages), jax.freeze(workspace)


def _slots_of_warp(phase: "Attention", layout) -> int:
    """Two, if a multiprocessor has room for them with as many blocks as are to be on it at once."""
    scratch, keys = 4 * phase.scratch, 2 * phase.warps * visit_bytes(phase, layout)
    blocks = 1 if phase.team == WARPS else BLOCKS_AT_ONCE
    return 2 if blocks * shared_memory.bytes_taken(scratch, keys) <= device.shared_bytes() else 1


def _body(*refs, phase: "Attention", layout, structure, beside: int, slots: int):
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
    def kernel(ctx, *refs):
        qkv, refs = refs[:beside], refs[beside:]
        cos, sin, *refs = refs if phase.turned else (None, None, *refs)
        positions, table, layer_gmem, *refs = refs
        q_gamma, k_gamma, *refs = refs if phase.normed else (None, None, *refs)
        of_pages = structure.num_leaves
        pages, workspace, *out, scratch_smem, slots_smem = refs[:of_pages], *refs[of_pages:]
        keys, values = jax.tree.unflatten(structure, pages)

        def load_qkv(row, columns):
            parts, *others = qkv
            if others:
                return [v for first, i in columns for v in load_beside(qkv, row, first, i)]
            if len(parts.type.shape) == 2:
                return [v for first, i in columns for v in memory.load_reals(4, parts, [row, first + i])]
            splits = range(parts.type.shape[0])
            of_each = (
                [memory.load_reals(4, parts, [s, row, first + i]) for s in splits] for first, i in columns
            )
            return [total(of) for of_column in of_each for of in zip(*of_column, strict=True)]

        def store_out(value, row, n):
            if phase.gated:
                head, at = n // phase.head_dim, n % phase.head_dim
                gate = memory.load(qkv[0], row, head * (2 * phase.head_dim) + at + phase.head_dim)
                value = value * lanes.reciprocal(exp(-gate) + 1)
            memory.store(value, out[0], row, n)

        def pass_on(row, heads, load):
            """Of the block's heads whole groups, a warp's each."""
            groups = phase.heads * phase.head_dim // GROUP
            for first in range(0, groups, phase.team):
                group = team_warp(phase) + first
                with lanes.when(group < groups):
                    group = heads * groups + group
                    store_group(load(columns_of_lane(group)), row, group, *out)

        cache = Cache(layout, keys, values, table, positions, cos, sin, q_gamma, k_gamma)
        layer = index(memory.load(layer_gmem, 0))
        # The layer before had another tag, and before the first there are zeros.
        tag = integer(layer % 3 + 1)
        exchange = Exchange(workspace, 0, tag)
        size = visit_bytes(phase, layout)

        def slots_of(warp):
            first = memory.shared_address(slots_smem) + warp * (slots * size)
            return first, first ^ (first + size) if slots == 2 else None

        phase.run(
            cache, phase.keep(cache), layer, scratch_smem, load_qkv, store_out, exchange,
            pass_on=pass_on if len(out) > 1 else None, slots=slots_of if size else None,
        )  # fmt: skip

    kernel(*refs)


def load_beside(refs, row, first, i: int) -> list:
    """4 float32 from column first + i on, of parts [splits, rows, width] that lie beside each other: their
    sum, in order. Lanes may want different ones; a head is of one."""
    begin, values = 0, []
    for ref in refs:
        splits, _, width = ref.type.shape
        inside = integer(first - begin) < width  # what is below 0 is large
        at = select(inside, first - begin, index(0))
        parts = [memory.load_reals(4, ref, [s, row, at + i]) for s in range(splits)]
        added = [total(list(of)) for of in zip(*parts, strict=True)]
        if values:
            added = [select(inside, new, old) for new, old in zip(added, values, strict=True)]
        values = added
        begin += width
    return values


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a team knows of its share from one layer to the next, as i32: few registers.

    position     of the new token, or -1
    start, stop  of the split's keys, the new one among them
    page, second_page  of this warp's first keys, and of its second visit's, where pages have whole 16 keys
    """

    position: Any
    start: Any
    stop: Any
    page: Any
    second_page: Any


@dataclasses.dataclass(frozen=True)
class Attention(Plan):
    """The phase. Its methods are called while a kernel is traced."""

    def keep(self, cache: Cache) -> Kept:
        """Before the first layer."""
        _, row, _, split = self._owner()
        position = memory.load(cache.positions, row)
        keys, _, _, splits = self._splits(position)
        # In whole 16, so that a warp's keys are of one page.
        first = self._first_key(keys)
        chunk = of(arith.ceildivui(arith.ceildivui(keys - first, splits), index(KEYS))) * KEYS
        start = minimum(keys, first + split * chunk)
        stop = minimum(keys, start + chunk)
        length = index(arith.maxsi(position, integer(0)))
        pages = []
        for visit in (0, 1):
            base = stored_key(length, start + (team_warp(self) + visit * self.team) * KEYS)
            pages.append(memory.load(cache.table, row, base // self.page_size))
        return Kept(position, integer(start), integer(stop), *pages)

    def run(
        self, cache: Cache, kept: Kept, layer, smem, load_qkv, store_out, exchange, next_layer=None,
        most_ahead=None, pass_on=None, behind_keys=None, slots=None, asked=None,
    ):  # fmt: skip
        """A layer's share of this team.

        load_qkv    (row, columns) -> list of float32, 4 from each column on (an index and a constant)
        store_out   (value, row, column)
        exchange    where splits meet (Exchange)
        next_layer  its first keys and values are asked for, into the L2 cache
        most_ahead  if a row has fewer keys than its share of so many; None: always
        pass_on     in place of store_out where a row has one split: called by all warps with the row, the
                    block of query heads, and columns (an index and a constant each) -> outputs
        behind_keys  called by all threads when all keys have been read; of one team only
        slots       a warp's places in shared memory by its number, as `attend` has `slot`; None: keys and
                    values go to registers
        asked       whether this warp's first keys have been asked for (`ask`)
        """
        share = self._share(kept)
        with lanes.when(share.split < share.splits):  # all threads of a team alike
            slot = None if slots is None else slots(integer(lanes.thread() // 32))
            ahead = None
            if next_layer is not None:
                few = true() if most_ahead is None else share.length < most_ahead // self.rows
                ahead = next_layer, few
            of_heads = attend(self, cache, share, layer, smem, slot, load_qkv, ahead, asked)
            combine(self, share, smem, of_heads, store_out, exchange, pass_on, behind_keys)

    def ask(self, cache: Cache, kept: Kept, layer, slots, late):
        """Ask for the first keys of a layer, before `run`; not by warps that are late. (Values have time: to
        ask for them would keep back the making of q.)"""
        share = self._share(kept)
        with lanes.when((lanes.block() < self.blocks) & (share.split < share.splits)):
            copy_first(0, self, cache, share, layer, slots(integer(lanes.thread() // 32))[0], late)

    def has_share(self, kept: Kept):
        """Whether this block has a share of a layer's work."""
        mine = lanes.block() < self.blocks
        if self.teams > 1:  # the first team's is enough
            return mine
        return mine & (self._owner()[-1] < self._splits(kept.position)[-1])

    @property
    def makes_groups(self) -> bool:
        """Whether each block makes whole groups of 128 outputs, and all of them, in whole fours."""
        of_block, width = self.heads * self.head_dim, self.kv_heads * self.group * self.head_dim
        return self.splits == 1 and not self.gated and of_block % GROUP == 0 and width % (4 * GROUP) == 0

    def has_one_split(self, position):
        """Whether a row's keys are one block's."""
        return self._splits(position)[-1] == 1

    def _owner(self):
        """(owner, row, block of query heads, split) of this team; a split that no row has, of those without a
        share."""
        block, of_row = lanes.block(), self.owners // self.rows
        owner, split = block // self.splits, block % self.splits
        if self.teams > 1:
            team = lanes.thread() // (32 * self.team)
            owner = team * self.blocks + block if self.of_launch else block * self.teams + team
            split = select(owner < self.owners, index(0), index(1))
        owner = minimum(owner, self.owners - 1)
        return owner, owner // of_row, owner % of_row, split

    def _splits(self, position):
        """(keys with the new one, keys before it, whether there is a new one, splits) of a row."""
        active = of(arith.cmpi(arith.CmpIPredicate.sge, position, integer(0)))  # signed
        length = index(arith.maxsi(position, integer(0)))
        keys = length + select(active, index(1), index(0))
        visible = keys - self._first_key(keys)
        return keys, length, active, select(visible <= KEYS_PER_SPLIT, index(1), index(self.splits))

    def _first_key(self, keys):
        """The first key that a row's splits share out, of so many: the first of the 16 among which the window
        begins."""
        window = self.scores.window
        return 0 if window is None else (maximum(keys, window) - window) // KEYS * KEYS

    def _share(self, kept: Kept) -> Share:
        owner, row, heads, split = self._owner()
        words = (kept.position, kept.start, kept.stop, kept.page)
        position, start, stop, page = (lanes.anew(word) for word in words)
        _, length, active, splits = self._splits(position)
        pages = page, kept.second_page
        return Share(owner, row, heads, split, splits, integer(length), active, start, stop, *pages)
