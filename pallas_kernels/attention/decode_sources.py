"""Where 16 keys and values of a warp come from. A launch has one kind of source:

    Source     memory, and nothing is on its way: of wide heads a lane has no room for 16 keys and values
    Slots      the warp's shared memory, one place or two; a place is filled again as soon as it has been read
    Doubled    registers, and the next 16 are on their way to others meanwhile
    Registers  registers, which are loaded again as soon as they have been used

Where a launch has room, those of at most 16 bits go to shared memory: what a lane loads goes through the
multiprocessor's own cache, of which weights in shared memory leave 28 KB, and no more can be on its way; and
what is on its way to registers keeps them from other warps (benchmarks/LOG.md).
"""

import dataclasses
import functools
from types import ModuleType
from typing import Any

import jax

from pallas_kernels.attention.decode_cache import LayerShare, team_warp
from pallas_kernels.attention.decode_keys import Warp
from pallas_kernels.attention.decode_plan import KEYS, Plan
from pallas_kernels.attention.decode_token import NewToken
from pallas_kernels.gpu import lanes, memory, pairs
from pallas_kernels.gpu.values import integer, long, maximum, minimum, not_negative, real, select

DOUBLED_BYTES = 128  # the widest keys of which a lane has room for 16, their values, and the next 16 of both
WIDEST_AT_ONCE = 128  # the widest heads of which a lane has room for 16 keys and values


def visit_bytes(plan: Plan, layout: ModuleType) -> int:
    """Shared memory for 16 keys and values of a page; 0 if they go to registers."""
    itemsize = jax.tree.leaves(layout.DTYPE)[0].itemsize
    in_rows = itemsize <= 2 and plan.head_dim * itemsize >= 128
    if plan.head_dim > WIDEST_AT_ONCE or plan.page_size % KEYS or not in_rows:
        return 0
    return 2 * KEYS * plan.head_dim * itemsize


@dataclasses.dataclass
class Source:
    """A visit's 16 keys and values, from `base` on; the warp's next are `step` further.

    carry  what the visit before left, and after `request_values` what this one leaves: traced values, or None
    """

    warp: Warp
    token: NewToken
    base: Any
    step: int
    carry: Any

    def __post_init__(self):
        self.key_js, self.value_js = self.warp.keys_at(self.base), self.warp.values_at(self.base)
        self.has_new = self.token.among(self.base) & self.token.has_new
        self.next = self.base + self.step
        self.more = self.next < self.warp.share.stop

    def keys(self) -> tuple[list, list, list]:
        """(keys, their scales, scales of the values), the new ones in their places."""
        stored, stored_scales = self._stored_keys()
        scales = [[None if x is None else lanes.reals(x)[0] for x in each] for each in stored_scales]
        warp, token, js = self.warp, self.token, self.key_js

        def placed():
            new_scales = warp.with_new_scales(token, js, scales)
            return [warp.with_new(token, 0, js, warp.key_part, stored), new_scales]

        self.placed, (key_scales, value_scales) = chosen(self.has_new, placed, [stored, scales])
        return self.placed, key_scales, value_scales

    def values(self) -> list:
        warp, stored = self.warp, self._stored_values()
        placed = lambda: warp.with_new(self.token, 1, self.value_js, warp.value_part, stored)  # noqa: E731
        self.placed = chosen(self.has_new, placed, stored)
        return self.placed

    def request_keys(self):
        """When the keys have been used."""

    def request_values(self):
        """When the values have been used."""

    def _stored_keys(self) -> tuple[list, list]:
        """Keys, and scales of keys and of values, as they are stored."""
        self.page = self.warp.page_of(self.base)
        return self.warp.fetch_keys(self.base, self.page), self.warp.fetch_scales(self.base, self.page)

    def _stored_values(self) -> list:
        return self.warp.fetch_values(self.base, self.page)


class Registers(Source):
    """carry: keys, scales and values as they are stored."""

    def _stored_keys(self):
        self.page = self.warp.page_of(self.next)
        keys, self.scales, self.loaded_values = self.carry
        return keys, self.scales

    def _stored_values(self):
        return self.loaded_values

    def request_keys(self):
        warp, at = self.warp, (self.next, self.page)
        load = lambda: [warp.fetch_keys(*at), warp.fetch_scales(*at)]  # noqa: E731
        self.loaded = chosen(self.more, load, [self.placed, self.scales])

    def request_values(self):
        load = lambda: self.warp.fetch_values(self.next, self.page)  # noqa: E731
        self.carry = *self.loaded, chosen(self.more, load, self.placed)


class Doubled(Source):
    """carry: keys, scales and values as they are stored, and the page of the next."""

    def _stored_keys(self):
        stored, page = self.carry
        page_after = self.warp.page_of(self.next + self.step)
        load = lambda: self.warp.fetch(self.next, page)  # noqa: E731
        self.carry = chosen(self.more, load, stored), page_after
        keys, scales, self.loaded_values = stored
        return keys, scales

    def _stored_values(self):
        return self.loaded_values


@dataclasses.dataclass
class Slots(Source):
    """carry: address of the place, scales, and the page of the keys that will be copied to it.

    flip  the place xor the warp's other one, 0 if this warp has none; None: no warp has
    """

    flip: Any = None

    def __post_init__(self):
        super().__post_init__()
        self.following = self.next
        self.next = next_copied(self.following, self.step, self.flip)

    def _stored_keys(self):
        warp, (self.slot, scales, self.page) = self.warp, self.carry
        self.page_after = warp.page_of(self.next + self.step)
        page = lambda: self.page if self.flip is None else warp.page_of(self.following)  # noqa: E731
        load = lambda: warp.fetch_scales(self.following, page())  # noqa: E731
        self.scales = chosen(self.following < warp.share.stop, load, scales)
        self._wait_oldest()
        rows = [(warp.g, 0), (warp.g, 8)]
        return self._copied(0, rows, warp.key_part), scales

    def _stored_values(self):
        self._wait_oldest()
        rows = [(self.warp.t * 2 + i, more) for more in (0, 8) for i in (0, 1)]
        return self._copied(1, rows, self.warp.value_part)

    def bring_values(self):
        """Of the last visit: all its values into their place, the new ones too, for other warps to read."""
        warp, lane, pieces = self.warp, integer(lanes.thread() % 32), self.warp.row_bytes // 16
        memory.wait_copies(0)
        lanes.warp_barrier()
        with lanes.when(self.has_new):
            for number in range(warp.plan.tokens):
                j, address = self.token.new_value(number)
                row = integer(j) - integer(self.base)
                visited = not_negative(row) & (row < KEYS) & (j <= warp.share.length)
                with lanes.when(visited & (lane < pieces)):
                    words = memory.load_shared(4, address + lane * 16)
                    memory.store_shared(words, *piece_address(warp, 1, self.slot, row, lane))

    def request_keys(self):
        copy_next(self.warp, 0, self.next, self.page, self.slot)

    def request_values(self):
        copy_next(self.warp, 1, self.next, self.page, self.slot)
        slot = self.slot if self.flip is None else self.slot ^ self.flip
        self.carry = slot, self.scales, self.page_after

    def _wait_oldest(self):
        """Until the oldest keys or values on their way to the warp's places have arrived."""
        if self.flip is None:
            memory.wait_copies(1)
        else:
            for condition, pending in ((self.flip == 0, 1), (self.flip != 0, 3)):
                with lanes.when(condition):
                    memory.wait_copies(pending)
        lanes.warp_barrier()

    def _copied(self, which: int, rows, parts):
        warp = self.warp
        element = jax.tree.leaves(warp.cache.pages[0])[0].type.element_type

        def load(row, more, part):
            at = part * warp.itemsize
            address, offset = piece_address(warp, which, self.slot, row, at // 16, more)
            words = memory.load_shared(2 * warp.itemsize, address + at % 16, offset)
            return [lanes.vector_of(words, element, 4 // warp.itemsize)]

        return [[load(row, more, part) for part in parts] for row, more in rows]


def begin(warp: Warp, first, step: int, slot, asked):
    """Ask for a warp's first keys and values, from `first` on: (its source, without warp, token, base and
    carry; what its first visit carries). slot: this warp's of `decode_warp.attend`'s; asked: as there."""
    following, make = first + step, functools.partial
    if slot is not None:
        slot, flip = slot
        copy_first(0, warp, slot, asked)
        copy_first(1, warp, slot)
        if warp.plan.in_one_visit:
            clear_values(warp, slot)
        copied_next = next_copied(following, step, flip)
        if flip is not None:
            with lanes.when((first < warp.share.stop) & (flip != 0)):
                for which in (0, 1):
                    copy_next(warp, which, following, warp.share.second_page, slot ^ flip)
        load = lambda: warp.fetch_scales(first, warp.first_page)  # noqa: E731
        scales = chosen(first < warp.share.stop, load, zeros(warp)[1])
        carry = slot, scales, warp.page_of(copied_next)
        return make(Slots, step=step, flip=flip), carry
    if warp.plan.head_dim > WIDEST_AT_ONCE:
        return make(Source, step=step), None
    carry = chosen(first < warp.share.stop, lambda: warp.fetch(first, warp.first_page), zeros(warp))
    if warp.row_bytes > DOUBLED_BYTES:
        return make(Registers, step=step), carry
    return make(Doubled, step=step), (carry, warp.page_of(following))


def next_copied(following, step: int, flip):
    """The first of the keys that are copied to the place of this visit's: with one place, the following; with
    two, those of the visit after."""
    return following if flip is None else following + select(flip != 0, step, 0)


def zeros(warp: Warp):
    """In place of what is fetched."""
    leaves = jax.tree.leaves(warp.cache.pages[0])
    element = max(leaves, key=lambda ref: len(ref.type.shape)).type.element_type
    per_word = max(1, 32 // lanes.bits_of(element))
    zero = lanes.vector_of([integer(0)] * (8 // per_word), element, per_word)
    scales = [pairs.rounded_to_bfloat16([real(0)]) if len(leaves) > 1 else None] * 2
    return [[[zero]] * len(warp.key_part)] * 2, [scales] * 2, [[[zero]] * len(warp.value_part)] * 4


def chosen(condition, values, otherwise):
    """values() where the condition holds for a whole warp, else `otherwise`: lists of lists of values."""
    leaves, structure = jax.tree.flatten(otherwise)
    if not leaves:
        return otherwise
    return jax.tree.unflatten(structure, lanes.choose(condition, lambda: jax.tree.leaves(values()), leaves))


# Copies to shared memory


def piece_address(warp: Warp, which: int, slot, row, piece, more: int = 0):
    """Address of 16 bytes of key or value row + more, and what is to be added to it; `more` has no bit at or
    below row's highest."""
    at = (piece ^ turned(warp.plan, row)) * 16 ^ turned(warp.plan, more) * 16
    return slot + row * warp.row_bytes + at, (more + which * KEYS) * warp.row_bytes


def turned(plan: Plan, row):
    """What the number of a piece of 16 bytes is turned by (xor) in a row. What lanes read at once are four
    neighbouring pieces of keys of two neighbouring rows; two neighbouring pieces of values of four rows, all
    even or all odd; or, in one visit, a piece of all even rows, or of all odd ones (decode_values.py)."""
    at = row & 6 ^ (row & 1) << 2
    return at ^ (row & 8) >> 3 if plan.in_one_visit else at


def clear_values(work: LayerShare, slot):
    """Zeros in place of a warp's first values, if it has no keys: others multiply them by weights of 0."""
    warp = Warp.locate(work)
    with lanes.when(~(work.share.start + warp.number * KEYS < work.share.stop)):
        for at in range(0, KEYS * warp.row_bytes, 512):
            address = slot + integer(lanes.thread() % 32) * 16
            memory.store_shared([integer(0)] * 4, address, KEYS * warp.row_bytes + at)


def copy(warp: Warp, which: int, base, page, slot):
    """16 keys (0) or values (1) of one page to a place, in rows."""
    numbers = jax.tree.leaves(warp.cache.pages[which])[0]
    lane, pieces = integer(lanes.thread() % 32), warp.row_bytes // 16
    row, piece, together = lane // pieces, lane % pieces, 32 // pieces
    # They are of one page, from one address on; in place of a row that is not stored yet, the last.
    base = warp.stored_key(base)
    last = maximum(warp.stored, 1) - 1 - base
    source = memory.address_of(numbers, warp.place(base, piece * (16 // warp.itemsize), page))
    for first in range(0, KEYS, together):
        at = source + long(minimum(row + first, last) * (warp.plan.kv_heads * warp.row_bytes))
        to, offset = piece_address(warp, which, slot, row, piece, first)
        memory.copy_async(to, at, 16, offset, source_at=0)


def copy_next(warp: Warp, which: int, base, page, slot):
    """When all lanes have read what the place holds."""
    lanes.warp_barrier()
    with lanes.when(base < warp.share.stop):
        copy(warp, which, base, page, slot)
    memory.commit_copies()


def copy_first(which: int, work: LayerShare, slot, asked=None):
    """Ask for a warp's first keys (0) or values (1), if that has not been done."""
    warp = Warp.locate(work)
    first = work.share.start + warp.number * KEYS
    missing = first < work.share.stop
    if asked is not None:
        missing = missing & ~asked
    with lanes.when(missing):
        copy(warp, which, first, warp.first_page, slot)
        memory.commit_copies()


def prefetch(work: LayerShare):
    """This warp's first 16 keys and values of a layer into the L2 cache, half a row a lane. No more: what the
    cache cannot hold beside the weights is read twice."""
    lane, warp = integer(lanes.thread() % 32), integer(team_warp(work.plan))
    key, half = lane // 2, lane % 2
    part = half * (work.plan.head_dim // 2)

    j = work.share.start + warp * KEYS + key
    with lanes.when(j < work.share.stop):
        at = work.place(work.stored_key(j), part, work.first_page)
        for ref in jax.tree.leaves(work.cache.pages):
            memory.prefetch(ref, at[: len(ref.type.shape)])
