"""A warp's keys and values: where they are, how 16 of them are asked for, and the new key in its place among
them. What of them a lane has, decode_warp.py says.

Where a launch has room, those of at most 16 bits go to shared memory: what a lane loads goes through the
multiprocessor's own cache, of which weights in shared memory leave 28 KB, and no more can be on its way; and
what is on its way to registers keeps them from other warps (benchmarks/LOG.md).
"""

import dataclasses
from types import ModuleType
from typing import Any

import jax

from pallas_kernels.attention.decode_cache import Cache, place, stored_key, team_warp
from pallas_kernels.attention.decode_plan import KEYS, Plan
from pallas_kernels.attention.decode_splits import Share
from pallas_kernels.gpu import lanes, memory, pairs
from pallas_kernels.gpu.values import index, integer, long, maximum, minimum, real, select

MOST_AHEAD = 128  # bytes of a key of which a lane has room for 16, and their values, behind those it works on
WIDEST_AT_ONCE = 128  # widest heads of which a lane has room for 16 keys and values at once


def visit_bytes(plan: Plan, layout: ModuleType) -> int:
    """Of shared memory, for 16 keys and values of a page on their way; 0 if these go to registers."""
    itemsize = jax.tree.leaves(layout.DTYPE)[0].itemsize
    in_rows = itemsize <= 2 and plan.head_dim * itemsize >= 128
    if plan.head_dim > WIDEST_AT_ONCE or plan.page_size % KEYS or not in_rows:
        return 0
    return 2 * KEYS * plan.head_dim * itemsize


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
    def of(cls, plan: Plan, cache: Cache, share: Share, layer) -> "Warp":
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
    def fetches_ahead(self) -> bool:
        """Whether what is fetched next is asked for before this has been read, else a warp waits for memory
        at each 16 keys: where registers have room for both."""
        return self.row_bytes <= MOST_AHEAD

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

    def copy(self, which: int, base, page, slot):
        """16 keys (0) or values (1) of one page into the warp's slot, in rows; pieces of 16 bytes are where
        no two of 8 lanes that read at once meet."""
        plan, numbers = self.plan, jax.tree.leaves((self.cache.keys, self.cache.values)[which])[0]
        lane, pieces = integer(lanes.thread() % 32), self.row_bytes // 16
        row, piece, together = lane // pieces, lane % pieces, 32 // pieces
        # They are of one page, from one address on; in place of a row that is not stored yet, the last.
        base = stored_key(self.share.length, base)
        last = maximum(self.share.length, 1) - 1 - base
        source = memory.address_of(numbers, self.place(base, piece * (16 // self.itemsize), page))
        for first in range(0, KEYS, together):
            at = source + long(minimum(row + first, last) * (plan.kv_heads * self.row_bytes))
            memory.copy_async(self.piece(which, slot, row, piece, first), at, 16)

    def copy_behind(self, which: int, base, page, slot):
        """When all lanes have read what is there."""
        lanes.warp_barrier()
        with lanes.when(base < self.share.stop):
            self.copy(which, base, page, slot)
        memory.commit_copies()

    def piece(self, which: int, slot, row, piece, more: int = 0):
        """Address of a piece of row + more, of which `more` has no bit at or below row's highest."""
        place = (piece ^ (row & 6) ^ (row & 1) * 4) * 16 ^ (more & 6) * 16
        return slot + row * self.row_bytes + place + (more + which * KEYS) * self.row_bytes

    def copied_keys(self, slot):
        return self._copied(0, slot, [(self.g, 0), (self.g, 8)], self.key_part)

    def copied_values(self, slot):
        rows = [(self.t * 2 + i, more) for more in (0, 8) for i in (0, 1)]
        return self._copied(1, slot, rows, self.value_part)

    def _copied(self, which: int, slot, rows, parts):
        element = jax.tree.leaves(self.cache.keys)[0].type.element_type

        def load(row, more, part):
            at = part * self.itemsize
            address = self.piece(which, slot, row, at // 16) + at % 16
            words = memory.load_shared(2 * self.itemsize, address, more * self.row_bytes)
            return [lanes.vector_of(words, element, 4 // self.itemsize)]

        return [[load(row, more, part) for part in parts] for row, more in rows]

    def nothing(self):
        """In place of what is fetched."""
        leaves = jax.tree.leaves(self.cache.keys)
        of_numbers = max(leaves, key=lambda ref: len(ref.type.shape)).type.element_type
        per_word = 32 // lanes.bits_of(of_numbers) if lanes.bits_of(of_numbers) < 32 else 1
        zero = lanes.vector_of([integer(0)] * (8 // per_word), of_numbers, per_word)
        scales = [pairs.rounded_to_bfloat16([real(0)]) if len(leaves) > 1 else None] * 2
        return [[[zero]] * len(self.key_part)] * 2, [scales] * 2, [[[zero]] * len(self.value_part)] * 4

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


def copy_first(which: int, plan: Plan, cache: Cache, share: Share, layer, slot, asked=None):
    """Ask for a warp's first keys (0) or values (1), if that has not been done."""
    warp = Warp.of(plan, cache, share, layer)
    first = share.start + warp.number * KEYS
    wanted = first < share.stop
    if asked is not None:
        wanted = wanted & ~asked
    with lanes.when(wanted):
        warp.copy(which, first, warp.first_page, slot)
        memory.commit_copies()


def ask_for(plan: Plan, cache: Cache, share: Share, layer):
    """This warp's first 16 keys and values of a layer into the L2 cache, half a row a lane. No more: what the
    cache cannot hold beside the weights is read twice."""
    lane, warp = integer(lanes.thread() % 32), integer(team_warp(plan))
    key, half = lane // 2, lane % 2
    part = half * (plan.head_dim // 2)

    j = share.start + warp * KEYS + key
    page = share.page if plan.page_size % KEYS == 0 else None
    with lanes.when(j < share.stop):
        at = place(plan, cache, share, layer, stored_key(share.length, j), part, page)
        for ref in jax.tree.leaves((cache.keys, cache.values)):
            memory.prefetch(ref, at[: len(ref.type.shape)])
