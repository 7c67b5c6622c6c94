"""What a lane has of 16 keys and values (decode_warp.py has the picture): how it loads them from their pages,
and the new key in its place among them."""

import dataclasses
from typing import Any

import jax

from pallas_kernels.attention.decode_cache import Cache, place, stored_key, team_warp
from pallas_kernels.attention.decode_plan import KEYS, Plan
from pallas_kernels.attention.decode_splits import Share
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import index, integer, select


@dataclasses.dataclass(frozen=True)
class Warp:
    """A warp's place in its team, a lane's in it, and where their keys and values are.

    key_part    first dimensions of this lane's parts of a key, 8 each; value_part: of a value
    """

    plan: Plan
    cache: Cache
    share: Share
    layer: Any
    number: Any
    g: Any
    t: Any
    key_part: list
    value_part: list

    @classmethod
    def locate(cls, plan: Plan, cache: Cache, share: Share, layer) -> "Warp":
        warp, lane = integer(team_warp(plan)), integer(lanes.thread() % 32)
        g, t = lane // 4, lane % 4
        key_part = [t * 8 + c for c in range(0, plan.head_dim, 32)]
        value_part = [g * 8 + c for c in range(0, plan.head_dim, 64)]
        return cls(plan, cache, share, layer, warp, g, t, key_part, value_part)

    @property
    def heads(self) -> list:
        """Of this lane's scores; behind the last head of a block there are more, which nobody reads."""
        columns = self.plan.columns
        return [index(self.t)] if columns == 2 else [index(self.t) * 2 + i for i in (0, 1)]

    def keys_of(self, base):
        """Of 16 keys from `base` on: g and g + 8 as a lane's keys and scores, 2 t, 2 t + 1, 2 t + 8 and
        2 t + 9 as its values."""
        return (
            [base + self.g + u * 8 for u in (0, 1)],
            [base + self.t * 2 + i for i in (0, 1, 8, 9)],
        )

    def sees(self, j):
        """Whether key j, not before the first of its 16 that is visible, has a score."""
        window, share = self.plan.scores.window, self.share
        inside = j < share.stop
        return inside if window is None else inside & (j + window > share.length)

    def fetch(self, base, page):
        """16 keys and values as they are stored, [key][part], and between them their scales; the last in
        place of those that are not there yet."""
        return self.fetch_keys(base, page), self.fetch_scales(base, page), self.fetch_values(base, page)

    @property
    def itemsize(self) -> int:
        return jax.tree.leaves(self.cache.layout.DTYPE)[0].itemsize

    @property
    def row_bytes(self) -> int:
        """Of a head's key, or value."""
        return self.plan.head_dim * self.itemsize

    def fetch_keys(self, base, page):
        return self.load(self.cache.keys, self.keys_of(base)[0], self.key_part, page)

    def fetch_values(self, base, page):
        return self.load(self.cache.values, self.keys_of(base)[1], self.value_part, page)

    def fetch_scales(self, base, page):
        """Of keys, and of values: those of this lane's scores and weights, as they are stored: to widen them
        here would be to wait for them."""
        scale, length = self.cache.layout.load_scale, self.share.length
        heads = [self.place(stored_key(length, j), 0, page)[:-1] for j in self.keys_of(base)[0]]
        return [[scale(refs, at) for at in heads] for refs in (self.cache.keys, self.cache.values)]

    @property
    def first_page(self):
        """Of this warp's first 16 keys, as `page_of`."""
        return self.share.page if self.plan.page_size % KEYS == 0 else None

    def page_of(self, base):
        """Of 16 keys from `base` on; None where pages have no whole 16."""
        if self.plan.page_size % KEYS:
            return None
        base = stored_key(self.share.length, base)
        return memory.load(self.cache.table, self.share.row, base // self.plan.page_size)

    def with_new(self, token, js, keys, scales):
        """The new key, and scales, in their place among those of js."""
        length = self.share.length
        scales = [
            [
                None if old is None else select(j == length, token.scale(which), old)
                for j, old in zip(js, of, strict=True)
            ]
            for which, of in enumerate(scales)
        ]
        return [self.placed(token, 0, js, self.key_part, keys), scales]

    def placed(self, token, which: int, js, parts, stored):
        """The new key, or value, in its place among those of js."""
        new = [token.stored(which, index(part // 8), old) for part, old in zip(parts, stored[0], strict=True)]
        return [
            jax.tree.map(lambda v, old, j=j: select(j == self.share.length, v, old), new, of_key)
            for j, of_key in zip(js, stored, strict=True)
        ]

    def load(self, refs, js, parts, page):
        at = lambda j, part: self.place(stored_key(self.share.length, j), part, page)  # noqa: E731
        return [[self.cache.layout.load(refs, at(j, part)) for part in parts] for j in js]

    def place(self, j, part, page=None):
        """Of element `part` of key j, whose page may be known."""
        return place(self.plan, self.cache, self.share, self.layer, j, part, page)
