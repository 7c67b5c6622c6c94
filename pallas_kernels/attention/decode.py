"""One token's attention for every row: QK-norm, rope, cache write and flash decoding over pages, in one
launch.

A team of warps has a share of the work (decode_plan.py): one row, the query heads of one KV head, and one
split of the row's keys. Its warps take 16 keys at a time (decode_warp.py):

    position, pages, q, k and v of the new token     (asked for at once, where another phase is not making q)
    first keys and values of its split -> shared memory, or registers         (on their way while q is made)
    team:   q, k and v of the new token -> norm, rope -> shared memory, cache   (decode_token.py)
    warp:   the new key in its place; scores, online softmax, weighted values   (tensor cores)
    team:   (m, l, o) of the split, through shared memory
    splits -> out

Splits meet as decode_splits.py has it, for which all blocks of a launch must run at once: one on each
multiprocessor do. `decode_attention` is this phase as a kernel of its own; step/decode_layers.py has it in
one launch with the products.
"""

import contextlib
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import cache_layouts, device
from pallas_kernels.attention.decode_cache import (
    Bounds,
    Cache,
    LayerShare,
    Share,
    stored_key,
    stored_keys,
    team_owner,
    team_warp,
)
from pallas_kernels.attention.decode_plan import BLOCKS_AT_ONCE, KEYS, KEYS_OF_SEVERAL, WARPS, Plan
from pallas_kernels.attention.decode_sources import copy_first, visit_bytes
from pallas_kernels.attention.decode_splits import Splits, put_together
from pallas_kernels.attention.decode_token import LaneHead, lane_heads
from pallas_kernels.attention.decode_warp import attend
from pallas_kernels.attention.scores import PLAIN
from pallas_kernels.gpu import lanes, memory, shared_memory
from pallas_kernels.gpu.exchange import Exchange, tag
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import (
    ceil_divided,
    exp,
    index,
    integer,
    larger_signed,
    maximum,
    minimum,
    not_negative,
    select,
    total,
    true,
)
from pallas_kernels.matmul.bit_mma import activations as activations_int8
from pallas_kernels.matmul.bit_mma.activations import GROUP, columns_of_lane, store_group


@functools.partial(jax.jit, static_argnames=("eps", "interleaved", "gated", "integers", "scores", "tokens"))
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
    sinks=None,
    tokens=1,
) -> tuple[Any, cache_layouts.Pages, cache_layouts.Pages, jax.Array]:
    """The kernel behind pallas_kernels.attention.attend; arguments and results are described there.

    qkv may be several arrays whose columns are joined, each [splits, rows or more, width]: parts that nobody
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
        pairs=0 if cos is None else cos.shape[-1], gated=gated, scores=scores, tokens=tokens,
    )  # fmt: skip
    if workspace is not None and workspace.size < phase.partials:
        raise ValueError(
            f"attend: workspace has {workspace.size} words, but {phase.partials} are exchanged; make it by "
            "empty_workspace"
        )
    pages = jax.tree.map(jax.new_ref, (k_pages, v_pages))
    workspace = jax.new_ref(jnp.zeros(phase.partials, jnp.int32) if workspace is None else workspace)
    layout, slots = cache_layouts.recognize(k_pages), 2
    results = {"out": jax.ShapeDtypeStruct((batch, width), jnp.float32)}
    if integers and phase.makes_groups:
        results = activations_int8.results_of(batch, width)
    slot_bytes, at_once = visit_bytes(phase, layout), 1 if phase.team == WARPS else BLOCKS_AT_ONCE
    taken = shared_memory.bytes_taken(4 * phase.scratch, slots * phase.warps * slot_bytes)
    if at_once * taken > device.shared_bytes():
        slots = 1
    out = launch(
        functools.partial(_body, phase, layout, slots),
        {
            "qkv": beside,
            "rotation": (cos, sin) if phase.turned else None,
            "positions": positions,
            "table": block_table,
            "layer": jnp.asarray(layer, jnp.int32).reshape(1),
            "gammas": norms,
            "sinks": sinks,
            "pages": pages,
            "workspace": workspace,
        },
        results,
        name="decode_attention",
        blocks=phase.blocks,
        threads=32 * phase.warps,
        scratch={
            "scratch_smem": plgpu.SMEM((phase.scratch,), jnp.float32),
            "slots_smem": plgpu.SMEM((max(4, phase.warps * slots * slot_bytes // 4),), jnp.int32),
        },
    )
    if integers and not phase.makes_groups:
        out = activations_int8.activations_int8(out)
    return out, *jax.tree.map(jax.freeze, pages), jax.freeze(workspace)


def _body(
    phase: "Attention", layout, slots: int,
    *, qkv, rotation, positions, table, layer, gammas, sinks, pages, workspace, scratch_smem, slots_smem,
    **out,
):  # fmt: skip
    """slots  that a warp has for keys and values in shared memory: two, if a multiprocessor has room for them
    with as many blocks as are to be on it at once"""

    def load_qkv(row, columns):
        return [v for first, i in columns for v in load_joined(qkv, row, first, i)]

    def store_out(value, row, n):
        if phase.gated:
            head, at = n // phase.head_dim, n % phase.head_dim
            gate = memory.load(qkv[0], row, head * (2 * phase.head_dim) + at + phase.head_dim)
            value = value * lanes.reciprocal(exp(-gate) + 1)
        memory.store(value, out["out"], row, n)

    def pass_on(row, heads, load):
        def store(group):
            store_group(load(columns_of_lane(group)), row, group, *out.values())

        phase.each_group(heads, store)

    size = visit_bytes(phase, layout)

    def slots_of(warp):
        first = memory.shared_address(slots_smem) + warp * (slots * size)
        return first, first ^ (first + size) if slots == 2 else None

    cache = Cache(layout, pages, table, positions, rotation, gammas, sinks)
    # All that is loaded without knowing anything else, then what takes one of these to know where it is.
    look, layer = phase.look(cache), index(memory.load(layer, 0))
    loaded = phase.load_new(cache, layer, load_qkv)
    # The layer before had another tag, and before the first there are zeros.
    exchange = Exchange(workspace, 0, integer(tag(layer)))
    phase.run(
        cache, phase.keep(cache, look), layer, scratch_smem, load_qkv, store_out, exchange,
        pass_on=pass_on if len(out) > 1 else None, slots=slots_of if size else None, loaded=loaded,
    )  # fmt: skip


def load_joined(refs, row, first, i: int) -> list:
    """4 float32 from column first + i on, of arrays whose columns are joined: [rows, width], or parts
    [splits, rows, width], whose sum is taken in order. Lanes may ask for different ones; a head is of one."""
    begin, values = 0, []
    for ref in refs:
        *splits, _, width = ref.type.shape
        at = first
        if len(refs) > 1:
            inside = integer(first - begin) < width  # what is below 0 is large
            at = select(inside, first - begin, index(0))
        if not splits:
            return memory.load_reals(4, ref, [row, at + i])
        parts = [memory.load_reals(4, ref, [s, row, at + i]) for s in range(splits[0])]
        added = [total(list(column)) for column in zip(*parts, strict=True)]
        if values:
            added = [select(inside, new, old) for new, old in zip(added, values, strict=True)]
        values = added
        begin += width
    return values


class Look(NamedTuple):
    """What a team loads before anything else.

    position  of the new token, or -1
    likely    for each of two visits (the number of its page, the page), should the row be that long; (None,
              None) where splits or a window leave it open
    """

    position: Any
    likely: list[tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Attention(Plan):
    """The phase. Its methods are called while a kernel is traced."""

    def look(self, cache: Cache) -> Look:
        """The loads that `keep` begins with."""
        _, row, *_ = team_owner(self)
        position, likely = memory.load(cache.positions, row), [(None, None)] * 2
        if self.splits == 1 and self.scores.window is None:
            numbers = [minimum(first // self.page_size, self.pages - 1) for first in self._visits()]
            likely = [(number, memory.load(cache.table, row, number)) for number in numbers]
        return Look(position, likely)

    def keep(self, cache: Cache, look: Look | None = None) -> Bounds:
        """Before the first layer."""
        position, likely = self.look(cache) if look is None else look
        _, row, _, split = team_owner(self)
        keys, length, splits = self._splits(position)
        # In whole 16, so that a warp's keys are of one page.
        first = self._first_key(keys)
        chunk = ceil_divided(ceil_divided(keys - first, splits), KEYS) * KEYS
        start = minimum(keys, first + split * chunk)
        stop = minimum(keys, start + chunk)
        pages, stored = [], stored_keys(self, row, length)
        for at, (number, page) in zip(self._visits(), likely, strict=True):
            own = stored_key(stored, start + at) // self.page_size
            load = lambda own=own: [memory.load(cache.table, row, own)]  # noqa: E731
            pages += load() if page is None else lanes.choose(own != number, load, [page])
        return Bounds(position, integer(start), integer(stop), *pages)

    def _visits(self) -> list:
        """Where this warp's first two visits begin, from its split's first key on."""
        return [(team_warp(self) + visit * self.team) * KEYS for visit in (0, 1)]

    def run(
        self, cache: Cache, bounds: Bounds, layer, smem, load_qkv, store_out, exchange, next_layer=None,
        prefetch_below=None, pass_on=None, after_keys=None, slots=None, asked=None, around=None, loaded=None,
    ):  # fmt: skip
        """A layer's share of this team.

        load_qkv    (row, columns) -> list of float32, 4 from each column on (an index and a constant)
        store_out   (value, row, column); not for a row whose splits are left apart
        exchange    where splits meet (Exchange)
        next_layer  its first keys and values are asked for, into the L2 cache
        prefetch_below  if a row has fewer keys than its share of so many; None: always
        pass_on     in place of store_out where a row has one split: called by all warps with the row, the
                    block of query heads, and columns (an index and a constant each) -> outputs
        after_keys  called by all threads when all keys have been read; of one team only
        slots       a warp's places in shared memory by its number, as `attend` has them; None: keys and
                    values go to registers
        asked       whether this warp's first keys have been asked for (`ask`)
        around      (share, whether it has all keys of its row) -> a context, in which outputs are stored
        loaded      of q, k and v what `load_new` has loaded
        """
        share = self._share(bounds)
        with lanes.when(share.split < share.splits):  # all threads of a team alike
            if next_layer is not None:
                few = true() if prefetch_below is None else share.length < prefetch_below // self.rows
                next_layer = next_layer, few
            work = LayerShare(self, cache, share, layer)
            sink = None
            if cache.sinks is not None:
                sink = lambda head: cache.sink(layer, share.heads * self.heads + head)  # noqa: E731
            around = contextlib.nullcontext if around is None else functools.partial(around, share)
            splits = Splits(self, share, store_out, exchange, pass_on, after_keys, sink, around)
            attend(work, smem, slots, load_qkv, splits.give, next_layer, asked, loaded)
            splits.meet()

    def load_new(self, cache: Cache, layer, load_qkv) -> list[LaneHead] | None:
        """What a team has of new tokens' q, k and v, which nobody is making any more. To load it first makes
        one wait of two, since where keys are is known later, and many keys are then on their way. None for a
        warp that makes all of them, which has no registers for that."""
        _, row, heads, _ = team_owner(self)
        return lane_heads(self, cache, layer, row, heads, load_qkv) if self.team > 1 else None

    def ask(self, cache: Cache, bounds: Bounds, layer, slots, late):
        """Ask for the first keys of a layer, before `run`; not by warps that are late. (Values have time: to
        ask for them would keep back the making of q.)"""
        share = self._share(bounds)
        with lanes.when((lanes.block() < self.blocks) & (share.split < share.splits)):
            slot, _ = slots(integer(lanes.thread() // 32))
            copy_first(0, LayerShare(self, cache, share, layer), slot, late)

    def has_share(self, bounds: Bounds):
        """Whether this block has a share of a layer's work."""
        active = lanes.block() < self.blocks
        if self.teams > 1:  # the first team's is enough
            return active
        return active & (team_owner(self)[-1] < self._splits(bounds.position)[-1])

    @property
    def makes_groups(self) -> bool:
        """Whether each block makes whole groups of 128 outputs, and all of them, in whole fours."""
        outputs, width = self.heads * self.head_dim, self.kv_heads * self.group * self.head_dim
        return self.splits == 1 and not self.gated and outputs % GROUP == 0 and width % (4 * GROUP) == 0

    def each_group(self, heads, use):
        """use(group), by a warp each, of the groups of 128 outputs that this block of heads makes."""
        groups = self.heads * self.head_dim // GROUP

        def one(group, _):
            use(heads * groups + group)
            return []

        lanes.loop(team_warp(self), groups, self.team, [], one)

    def has_one_split(self, position):
        """Whether a row's keys are one block's."""
        return self._splits(position)[-1] == 1

    def received(self, exchange: Exchange, row, position, columns: list[tuple]) -> list:
        """Wait for the splits of a row that has several, where they are left apart: its outputs at columns,
        an index and a constant each."""
        return put_together(self, exchange, row, self._splits(position)[-1], columns)

    def _splits(self, position):
        """(keys with the new one, if there is one, keys before it, splits) of a row."""
        active = not_negative(position)
        length = index(larger_signed(position, 0))
        keys = length + select(active, index(1), index(0))
        visible = keys - self._first_key(keys)
        several = index(self.splits)
        if not self.all_splits:
            several = minimum(ceil_divided(visible, KEYS_OF_SEVERAL), several)
        return keys, length, select(visible <= self.keys_of_one_split, index(1), several)

    def _first_key(self, keys):
        """The first key that a row's splits share out, of so many: the first of the 16 among which the window
        begins."""
        window = self.scores.window
        return 0 if window is None else (maximum(keys, window) - window) // KEYS * KEYS

    def _share(self, bounds: Bounds) -> Share:
        owner, row, heads, split = team_owner(self)
        words = (bounds.position, bounds.start, bounds.stop, bounds.page)
        position, start, stop, page = map(lanes.opaque, words)
        _, length, splits = self._splits(position)
        words = position, start, stop, page, bounds.second_page
        return Share(*words, owner, row, heads, split, splits, integer(length))
