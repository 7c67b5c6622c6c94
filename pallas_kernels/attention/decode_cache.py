"""Where the keys and values are that a team of warps attends to; called while a kernel is traced."""

import dataclasses
from types import ModuleType
from typing import Any

from pallas_kernels.attention.decode_plan import Plan
from pallas_kernels.attention.decode_splits import Share
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import index, maximum, minimum


@dataclasses.dataclass(frozen=True)
class Cache:
    """Refs in global memory: what a token's attention needs besides its q, k and v.

    layout        of keys and values, a module of cache_layouts; each is a ref, or {field: ref}, as it says
    """

    layout: ModuleType
    keys: Any
    values: Any
    table: Any
    positions: Any
    cos: Any
    sin: Any
    q_gamma: Any
    k_gamma: Any

    @classmethod
    def of(cls, layout: ModuleType, pages, table, positions, rotation, gammas) -> "Cache":
        """pages: of keys and of values; rotation: cos and sin; gammas: of q and of k, or None."""
        (keys, values), (cos, sin), (q_gamma, k_gamma) = pages, rotation, gammas or (None, None)
        return cls(layout, keys, values, table, positions, cos, sin, q_gamma, k_gamma)


def team_warp(plan: Plan):
    """The warp's number in its team."""
    warp = lanes.thread() // 32
    return warp if plan.teams == 1 else warp % plan.team


def stored_key(length, j):
    """Key j, or the last that is stored: of the same page, if a page's first 16 keys hold both."""
    return minimum(j, maximum(length, 1) - 1)


def place(plan: Plan, cache: Cache, share: Share, layer, j, part, page=None) -> list:
    """Indices of element `part` of key j, whose page may be known."""
    if page is None:
        page = memory.load(cache.table, share.row, j // plan.page_size)
    page = index(page)
    kv_head = share.heads // (plan.group // plan.heads)
    return [layer, page, j % plan.page_size, kv_head, part]
