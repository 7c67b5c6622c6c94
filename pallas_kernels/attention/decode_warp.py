"""What a warp of decode attention does: 16 keys at a time.

    lane = 4 g + t    of the scores                         of the weighted values
    keys, values      keys g and g + 8,                     keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9,
                      dimensions 32 c + 8 t + i             dimensions 64 c + 8 g + i
    queries, weights  column g, the same dimensions         column g, the same keys
    results           keys g and g + 8, columns 2 t, 2 t + 1  dimensions 64 c + 8 g + i, columns 2 t, 2 t + 1

(i from 0 to 7: loads of 16 bytes, if numbers have two. Which of a head's dimensions a lane has is free, as
long as q and k agree.) Tensor cores multiply pairs of 16-bit numbers, the cache layout's OPERAND; queries and
weights are split into two of them, whose sum has 16 bits of mantissa in bfloat16 and 22 in float16. Keys, or
dimensions of values, are the 16 rows of a tensor core. Of its 8 columns a head has 2, of the high and of the
low parts, and lane 4 g + t head t; of 5 to 7 heads each has one, the parts are multiplied one after the
other, and the lane has heads 2 t and 2 t + 1.

Keys and values of a warp's first visit are on their way while q is made; those of a later one are asked for
as soon as the place that they go to has been read. Those of 16 bits go to shared memory: what a lane loads
goes through the multiprocessor's own cache, of which weights in shared memory leave 28 KB, and no more can be
on its way (benchmarks/LOG.md).
"""

import dataclasses
import functools
import operator
from types import ModuleType
from typing import Any

import jax

from pallas_kernels.attention.decode_cache import Cache, place, stored_key, team_warp
from pallas_kernels.attention.decode_plan import KEYS, Plan
from pallas_kernels.attention.decode_splits import LOWEST, Share, team_barrier, team_begin
from pallas_kernels.attention.decode_token import NewToken
from pallas_kernels.gpu import lanes, memory, pairs, tensor_cores
from pallas_kernels.gpu.values import greatest, index, integer, long, maximum, minimum, real, select

MOST_AHEAD = 128  # bytes of a key of which a lane has room for 16, and their values, behind those it works on
WIDEST_AT_ONCE = 128  # widest heads of which a lane has room for 16 keys and values at once


def visit_bytes(plan: Plan, layout: ModuleType) -> int:
    """Of shared memory, for 16 keys and values of a page on their way; 0 if these go to registers."""
    itemsize = jax.tree.leaves(layout.DTYPE)[0].itemsize
    in_rows = itemsize <= 2 and plan.head_dim * itemsize >= 128
    if plan.head_dim > WIDEST_AT_ONCE or plan.page_size % KEYS or not in_rows:
        return 0
    return 2 * KEYS * plan.head_dim * itemsize


def attend(plan: Plan, cache: Cache, share: Share, layer, smem, slot, load_qkv, next_layer=None, asked=None):
    """(head, maximum, sum of weights, weighted values) of a warp's keys, for each of a lane's heads: of these
    values [c][i].

    slot        address of this warp's `visit_bytes` of shared memory, and the same xor that of its second, 0
                if it has none, None if no warp has; None: keys and values go to registers
    load_qkv    (row, columns) -> list of float32, 4 from each column on (an index and a constant)
    next_layer  its first keys and values are asked for, into the L2 cache
    asked       whether this warp's first keys are on their way to the slot (`copy_first`); None: they are not
    """
    warp, fetched, flip = Warp.of(plan, cache, share, layer), None, None
    first, step = share.start + warp.number * KEYS, KEYS * plan.team
    behind = first + step
    # Before q is asked for, which other blocks may still be making.
    if slot is not None:
        slot, flip = slot
        copy_first(0, plan, cache, share, layer, slot, asked)
        copy_first(1, plan, cache, share, layer, slot)
        if flip is not None:
            behind = behind + select(flip != 0, step, 0)
            with lanes.when((first < share.stop) & (flip != 0)):
                for which in (0, 1):
                    warp.copy_behind(which, first + step, share.second_page, slot ^ flip)
        fetch = functools.partial(warp.fetch_scales, first, warp.first_page)
        fetched = None, chosen(first < share.stop, fetch, warp.nothing()[1]), None
    elif plan.head_dim <= WIDEST_AT_ONCE:
        fetch = functools.partial(warp.fetch, first, warp.first_page)
        fetched = chosen(first < share.stop, fetch, warp.nothing())
    page_behind = warp.page_of(behind) if slot is not None or warp.fetches_ahead else None
    if next_layer is not None:
        ask_for(plan, cache, share, next_layer)
    token = NewToken(plan, cache, share, layer, smem, team_begin(plan))
    token.make(load_qkv)
    team_barrier(plan)()

    def next_visit(base, carry):
        warp = Warp.of(plan, cache, share, index(lanes.anew(integer(layer))))  # few registers
        base = lanes.anew(integer(base))
        state = jax.tree.unflatten(structure, carry)
        return jax.tree.leaves(visit(warp, token, base, step, flip, *state))

    heads = warp.heads
    state = [real(LOWEST)] * len(heads), [real(0)] * len(heads), [real(0)] * (plan.head_dim // 4)
    carry, structure = jax.tree.flatten((state, slot, fetched, page_behind))
    carry = lanes.loop(first, share.stop, step, carry, next_visit)
    maxima, totals, o = jax.tree.unflatten(structure, carry)[0]
    totals = [lanes.warp_sum_real(total, 32, first=4) for total in totals]
    # Of results two columns of each row: of one head what is to be added, or of two heads.
    rows = [of_columns(plan, o[i : i + 2]) for i in range(0, len(o), 2)]
    values = [[of_head[i : i + 8] for i in range(0, len(of_head), 8)] for of_head in zip(*rows, strict=True)]
    return list(zip(heads, maxima, totals, values, strict=True))


def of_columns(plan: Plan, two) -> list:
    """What this lane's heads have of a row of results, of which it has two columns."""
    return [two[0] + two[1]] if plan.columns == 2 else two


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


def ask_for(plan: Plan, cache: Cache, share: Share, layer):
    """This warp's first 16 keys and values of a layer into the L2 cache, half a row a lane. No more: what the
    cache cannot hold beside the weights is read twice."""
    lane, warp = integer(lanes.thread() % 32), integer(lanes.thread() // 32)
    key, half = lane // 2, lane % 2
    part = half * (plan.head_dim // 2)

    j = share.start + warp * KEYS + key
    page = share.page if plan.page_size % KEYS == 0 else None
    with lanes.when(j < share.stop):
        at = place(plan, cache, share, layer, stored_key(share.length, j), part, page)
        for ref in jax.tree.leaves((cache.keys, cache.values)):
            memory.prefetch(ref, at[: len(ref.type.shape)])


def visit(warp: Warp, token: NewToken, base, step, flip, state, slot, fetched: Any, page_behind: Any):
    """16 keys and values from `base` on. As soon as what holds them has been read, those `step` behind them
    are asked for: it is the warp's slot, or what is fetched, or, of heads too wide for a lane's registers,
    none, and they are asked for when they are wanted. Where registers have room for both, they are asked for
    at once.

    state    of this lane's heads the largest scores; its shares of the sums of weights; of the weighted
             values for each (c, i) two columns of dimension 64 c + 8 g + i
    fetched  (keys, scales, values), or None
    page_behind  `page_of` the keys `step` behind, if it must be known at once
    Returns state, slot, fetched and page_behind of the next visit.
    """
    share, layout, zero = warp.share, warp.cache.layout, real(0)
    key_js, value_js = warp.keys_of(base)
    has_new = (share.length - base < KEYS) & token.has_new
    copied, wide, behind = slot is not None, slot is None and fetched is None, base + step
    if flip is not None:
        behind = behind + select(flip != 0, step, 0)
    more, ahead = behind < share.stop, not copied and not wide and warp.fetches_ahead
    page = page_behind if ahead or copied else warp.page_of(base if wide else behind)
    if ahead or copied:
        page_behind = warp.page_of(behind + step)
    if wide:
        fetched = warp.fetch_keys(base, page), warp.fetch_scales(base, page), None
    assert fetched is not None
    keys, stored_scales, values = fetched
    if copied:
        following = base + step
        of_scales = lambda: page if flip is None else warp.page_of(following)  # noqa: E731
        fetch = lambda: warp.fetch_scales(following, of_scales())  # noqa: E731
        next_scales = chosen(following < share.stop, fetch, stored_scales)
        wait_oldest(flip)
        keys = warp.copied_keys(slot)
    elif ahead:
        next_fetched = chosen(more, lambda: warp.fetch(behind, page), fetched)
    scales = [[None if x is None else lanes.reals(x)[0] for x in of] for of in stored_scales]
    keys, scales = chosen(has_new, lambda: warp.with_new(token, key_js, keys, scales), [keys, scales])
    key_scales, value_scales = scales
    sums = multiplied(layout, token.queries(index(warp.g), index(warp.t)), keys)
    scores = [of_columns(warp.plan, sums[i : i + 2]) for i in (0, 2)]  # [key][head]
    scores = [
        scaled([s if unit is None else s * unit for s in of_head], key_scales)
        for of_head, unit in zip(zip(*scores, strict=True), token.units(warp.heads), strict=True)
    ]
    if copied:
        warp.copy_behind(0, behind, page, slot)
    elif not wide and not ahead:
        keys, stored_scales = chosen(
            more,
            lambda: [warp.fetch_keys(behind, page), warp.fetch_scales(behind, page)],
            [keys, stored_scales],
        )
    valid = [j < share.stop for j in key_js]
    scores = [[select(ok, s, LOWEST) for ok, s in zip(valid, of, strict=True)] for of in scores]
    largest = [greatest(with_exponents(of, value_scales)) - layout.WEIGHT_EXPONENT for of in scores]
    maxima, totals, o = raised(state, largest)
    weights = [
        [select(ok, lanes.exp2(s - m), zero) for ok, s in zip(valid, of, strict=True)]
        for of, m in zip(scores, maxima, strict=True)
    ]
    totals = [functools.reduce(operator.add, of, total) for of, total in zip(weights, totals, strict=True)]
    weights = across_keys(layout, [scaled(of, value_scales) for of in weights])
    if copied:
        wait_oldest(flip)
        values = warp.copied_values(slot)
    elif wide:
        values = warp.fetch_values(base, page)
    values = chosen(has_new, lambda: warp.placed(token, 1, value_js, warp.value_part, values), values)
    state = maxima, totals, weighted(layout, weights, values, o)
    if copied:
        warp.copy_behind(1, behind, page, slot)
        return state, slot if flip is None else slot ^ flip, (None, next_scales, None), page_behind
    if wide:
        return state, None, None, None
    if ahead:
        return state, None, next_fetched, page_behind
    values = chosen(more, lambda: warp.fetch_values(behind, page), values)
    return state, None, (keys, stored_scales, values), None


def wait_oldest(flip):
    """Until the oldest keys or values on their way to the warp's slots, one or two, are there."""
    if flip is None:
        memory.wait_copies(1)
    else:
        for condition, pending in ((flip == 0, 1), (flip != 0, 3)):
            with lanes.when(condition):
                memory.wait_copies(pending)
    lanes.warp_barrier()


def chosen(condition, values, otherwise):
    """values() where the condition holds for a whole warp, else `otherwise`: lists of lists of values."""
    leaves, structure = jax.tree.flatten(otherwise)
    if not leaves:
        return otherwise
    return jax.tree.unflatten(structure, lanes.choose(condition, lambda: jax.tree.leaves(values()), leaves))


def scaled(numbers, scales) -> list:
    """Scores by the scales of their keys, or weights by those of their values."""
    return [x if scale is None else x * scale for x, scale in zip(numbers, scales, strict=True)]


def with_exponents(scores, scales) -> list:
    """log2 of what 2^score is behind the scale of its value: the largest is what weights are held against, so
    that with their scales they stay in range. A scale below 2^-60 counts as that."""
    pairs = zip(scores, scales, strict=True)
    return [s if scale is None else s + lanes.log2(maximum(scale, 2.0**-60)) for s, scale in pairs]


def multiplied(layout, queries, keys) -> list:
    """Products of keys g and g + 8 with columns 2 t and 2 t + 1 of the queries, [key, column]."""
    c = [[real(0)] * 4 for _ in range(2)]  # a chain each for half of the dimensions
    first, second = ([pair for part in of_key for pair in layout.pairs(part)] for of_key in keys)
    for i in range(0, len(first), 2):
        for a in zip(first[i], second[i], first[i + 1], second[i + 1], strict=True):
            for b in queries:
                c[i // 2 % 2] = tensor_cores.add_product(c[i // 2 % 2], a, b[i : i + 2], layout.OPERAND)
    return [x + y for x, y in zip(*c, strict=True)]


def raised(state, largest):
    """The state with the largest scores of the warp; where none grows, as it mostly is, nothing is done."""
    maxima, _, _ = state
    grows = functools.reduce(operator.or_, [new > m for new, m in zip(largest, maxima, strict=True)])

    def scaled_to_new():
        maxima, totals, o = state
        new = [
            maximum(m, lanes.largest_of_warp(of, 32, first=4)) for m, of in zip(maxima, largest, strict=True)
        ]
        keep = [lanes.exp2(m - of) for m, of in zip(maxima, new, strict=True)]
        totals = [total * k for total, k in zip(totals, keep, strict=True)]
        return new, totals, [v * keep[i % len(keep)] for i, v in enumerate(o)]

    return chosen(lanes.any_lane(select(grows, 1, 0)), scaled_to_new, state)


def across_keys(layout, weights) -> list:
    """Weights [head][key] of keys g and g + 8 -> pairs of column g, of keys 2 t and 2 t + 1 and of those + 8,
    for each product that values are to be weighted by."""
    if len(weights) == 1:
        high, low = layout.split(*weights[0])
        products = [[lanes.bytes_of(high, low, selector) for selector in (0x5410, 0x7632)]]
    else:
        products = zip(*(layout.split(*of_key) for of_key in zip(*weights, strict=True)), strict=True)
    return [[lanes.transposed_pairs(word) for word in words] for words in products]


def weighted(layout, weights, values, o) -> list:
    """The sums o, and the values weighted by pairs of weights added."""
    out = []
    for c in range(len(values[0])):
        ahead, behind = (layout.pairs_across(values[k][c], values[k + 1][c]) for k in (0, 2))
        for i in range(0, 8, 2):
            at = 2 * (8 * c + i)
            acc = o[at : at + 4]
            for a in zip(ahead[i], ahead[i + 1], behind[i], behind[i + 1], strict=True):
                for b in weights:
                    acc = tensor_cores.add_product(acc, a, b, layout.OPERAND)
            out += acc
    return out
