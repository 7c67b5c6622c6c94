"""What a team of warps attends to in a layer, and where it is; called while a kernel is traced."""

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from pallas_kernels.attention.decode_plan import KEYS, Plan
from pallas_kernels.attention.scores import LOG2_E
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import index, integer, maximum, minimum, select

# A team: its shared memory, its warps and threads by number


def team_warp(plan: Plan):
    warp = lanes.thread() // 32
    return warp if plan.teams == 1 else warp % plan.team


def team_thread(plan: Plan):
    return lanes.thread() if plan.teams == 1 else lanes.thread() % (32 * plan.team)


def team_begin(plan: Plan):
    return 0 if plan.teams == 1 else lanes.thread() // (32 * plan.team) * plan.team_scratch


def team_barrier(plan: Plan) -> Callable[[], None]:
    if plan.teams == 1:
        if plan.other_warps:
            return functools.partial(lanes.first_threads_barrier, 32 * plan.warps)
        return lanes.block_barrier
    return lanes.warp_barrier if plan.team == 1 else lanes.warpgroup_barrier


def team_owner(plan: Plan) -> tuple:
    """(owner, row, block of query heads, split) of this team; a split that no row has, of those without a
    share. Each call computes them again, so that they need not stay in registers."""
    block, row_owners = lanes.block(), plan.owners // plan.rows
    owner, split = block // plan.splits, block % plan.splits
    if plan.teams > 1:
        team = lanes.thread() // (32 * plan.team)
        owner = team * plan.blocks + block if plan.one_launch else block * plan.teams + team
        split = select(owner < plan.owners, index(0), index(1))
    owner = minimum(owner, plan.owners - 1)
    return owner, owner // row_owners, owner % row_owners, split


# Its keys


@dataclasses.dataclass(frozen=True)
class Cache:
    """Refs in global memory: what a token's attention needs besides its q, k and v.

    layout    of keys and values, a module of cache_layouts
    pages     of keys, and of values: each a ref, or {field: ref}, as the layout says
    rotation  cos and sin, or None
    gammas    of q and of k, or None
    sinks     of layers and query heads, or None
    """

    layout: ModuleType
    pages: Any
    table: Any
    positions: Any
    rotation: Any
    gammas: Any
    sinks: Any = None

    def sink(self, layer, head):
        """log2(e) times the sink of a query head in a layer."""
        return memory.load(self.sinks, layer, head) * LOG2_E


@dataclasses.dataclass(frozen=True)
class Bounds:
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
class Share(Bounds):
    """A team's share of a layer's attention.

    owner        row and block of query heads, as one number
    row, heads   the two
    split, splits
    length       keys before the new one, i32
    """

    owner: Any
    row: Any
    heads: Any
    split: Any
    splits: Any
    length: Any


@dataclasses.dataclass(frozen=True)
class LayerShare:
    """A team's share of one layer, in the cache."""

    plan: Plan
    cache: Cache
    share: Share
    layer: Any

    @property
    def stored(self):
        """`stored_keys` of this row, i32."""
        return integer(stored_keys(self.plan, self.share.row, self.share.length))

    def stored_key(self, j):
        """Key j, or the last that is stored: of the same page, if a page's first 16 keys hold both."""
        return stored_key(self.stored, j)

    def page_of(self, base):
        """The page of 16 keys from `base` on; None where pages do not hold whole 16."""
        if self.plan.page_size % KEYS:
            return None
        return memory.load(self.cache.table, self.share.row, self.stored_key(base) // self.plan.page_size)

    @property
    def first_page(self):
        """`page_of` this warp's first 16 keys."""
        return self.share.page if self.plan.page_size % KEYS == 0 else None

    def place(self, j, part, page=None) -> list:
        """Indices of element `part` of key j, whose page may be known."""
        plan, share = self.plan, self.share
        if page is None:
            page = memory.load(self.cache.table, share.row, j // plan.page_size)
        page = index(page)
        kv_head = share.heads // (plan.group // plan.heads)
        return [self.layer, page, j % plan.page_size, kv_head, part]


def stored_keys(plan: Plan, row, length):
    """How many of a row's `length` earlier keys the cache has before the launch: all, but those of tokens
    that are read in the same launch, in the rows before it."""
    if plan.tokens == 1:
        return length
    return index(length) - minimum(index(row) % plan.tokens, index(length))


def stored_key(stored, j):
    return minimum(j, maximum(stored, 1) - 1)
