"""What a warp of decode attention does: the new token, then 16 keys at a time.

    lane = 4 g + t    of the scores                       of the weighted values
    queries, weights  head g, dimensions 32 c + 8 t + i   head g, keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9
    keys, values      keys g and g + 8, the same          the same keys, dimensions 64 c + 8 g + i

(i from 0 to 7: loads of 16 bytes, if numbers have two. Which of a head's dimensions a lane has is free, as
long as q and k agree.) Tensor cores multiply pairs of 16-bit numbers, the cache layout's OPERAND; queries and
weights are split into two of them, whose sum has 16 bits of mantissa in bfloat16 and 22 in float16. Of the 16
rows of a tensor core the first 8 have the high parts of the heads, the others the low parts. The new key is
one more head of the same lanes.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax

from pallas_kernels.attention.decode_plan import KEYS, Plan
from pallas_kernels.attention.decode_splits import LOWEST, Share
from pallas_kernels.gpu import lanes, memory, tensor_cores
from pallas_kernels.gpu.values import (
    as_real,
    as_word,
    greatest,
    index,
    integer,
    maximum,
    minimum,
    real,
    rsqrt,
    select,
    sum_of_squares,
)

MOST_AHEAD = 128  # bytes of a key of which a lane has room for 16, and their values, behind those it works on
WIDEST_AT_ONCE = 128  # widest heads of which a lane has room for 16 keys and values at once


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


def attend(plan: Plan, cache: Cache, share: Share, layer, load_qkv, next_layer=None):
    """(maximum, sum of weights, weighted values) of a warp's keys, for the heads of its lanes.

    load_qkv    (row, columns) -> list of float32, 4 from each column on (an index and a constant)
    next_layer  its first keys and values are asked for, into the L2 cache
    """
    warp, step = Warp.of(plan, cache, share, layer), KEYS * plan.team

    def attended():
        # Before q is asked for, which other blocks may still be making.
        fetched = warp.fetch(share.start, share.page if plan.page_size % KEYS == 0 else None)
        if next_layer is not None:
            ask_for(plan, cache, share, next_layer)
        token = NewToken.of(warp, load_qkv)
        second = share.start + step
        # Where the next keys are, and themselves where there is room: known before they are wanted.
        held = (warp.fetch(second), warp.page_of(second + step)) if warp.fetches_ahead else None
        if held is None and fetched is not None and next_layer is None and warp.number_bytes <= 2:
            held = warp.page_of(second)  # there is a register to spare
        held, structure = jax.tree.flatten(held)
        state = visit(warp, token, share.start, fetched, None)

        def following(first, carry):
            state, behind = carry[: len(nothing)], jax.tree.unflatten(structure, carry[len(nothing) :])
            if warp.fetches_ahead:
                of_step, page = behind
                behind = warp.fetch(first + step, page), warp.page_of(first + 2 * step)
            else:
                of_step = warp.fetch(first, behind)
                behind = None if behind is None else warp.page_of(first + step)
            return visit(warp, token, first, of_step, state) + jax.tree.leaves(behind)

        return lanes.loop(second, share.stop, step, state + held, following)[: len(nothing)]

    nothing = [real(LOWEST)] + [real(0)] * (1 + plan.head_dim // 4)
    maximum, total, *o = lanes.choose(warp.has_keys, attended, nothing)
    o = [[o[2 * (8 * c + i) + k] for k in (0, 1) for i in range(8)] for c in range(plan.head_dim // 64)]
    return maximum, lanes.warp_sum_real(total, 4), o


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
        warp, lane = team_warp(plan), lanes.thread() % 32
        g, t = lane // 4, lane % 4
        key_part = [t * 8 + c for c in range(0, plan.head_dim, 32)]
        value_part = [g * 8 + c for c in range(0, plan.head_dim, 64)]
        return cls(plan, cache, share, layer, warp, g, t, key_part, value_part)

    @property
    def has_keys(self):
        """Whether there are keys for this warp, which else would keep the others back."""
        return self.share.start + self.number * KEYS < self.share.stop

    def keys_of(self, first):
        """This warp's 16 keys behind `first`: g and g + 8 as a lane's keys, 2 t, 2 t + 1, 2 t + 8 and 2 t + 9
        as its values and scores."""
        base = first + self.number * KEYS
        return (
            [base + self.g + u * 8 for u in (0, 1)],
            [base + self.t * 2 + i for i in (0, 1, 8, 9)],
        )

    def fetch(self, first, page=None):
        """Keys and values as they are stored, [key][part], and between them their scales; the last in place
        of those that are not there yet. None for heads too wide for the registers of both: `visit` fetches
        keys, and behind the scores values."""
        if self.plan.head_dim > WIDEST_AT_ONCE:
            return None
        page = self.page_of(first) if page is None else page
        return self.fetch_keys(first, page), self.fetch_scales(first, page), self.fetch_values(first, page)

    @property
    def fetches_ahead(self) -> bool:
        """Whether keys are fetched while those before them are visited, else a warp waits for memory at each
        16: where registers have room for both."""
        return self.plan.head_dim * self.number_bytes <= MOST_AHEAD

    @property
    def number_bytes(self) -> int:
        """Of a key's numbers."""
        return jax.tree.leaves(self.cache.layout.DTYPE)[0].itemsize

    def fetch_keys(self, first, page):
        return self.load(self.cache.keys, self.keys_of(first)[0], self.key_part, page)

    def fetch_values(self, first, page):
        return self.load(self.cache.values, self.keys_of(first)[1], self.value_part, page)

    def fetch_scales(self, first, page):
        """Of keys, and of values: those of this lane's scores and weights."""
        scale, length = self.cache.layout.load_scale, self.share.length
        heads = [self.place(stored_key(length, j), 0, page)[:-1] for j in self.keys_of(first)[1]]
        return [[scale(refs, at) for at in heads] for refs in (self.cache.keys, self.cache.values)]

    def page_of(self, first):
        """Of this warp's 16 keys behind `first`; None where pages have no whole 16."""
        if self.plan.page_size % KEYS:
            return None
        base = stored_key(self.share.length, first + self.number * KEYS)
        return memory.load(self.cache.table, self.share.row, base // self.plan.page_size)

    def load(self, refs, js, parts, page):
        at = lambda j, part: self.place(stored_key(self.share.length, j), part, page)  # noqa: E731
        return [[self.cache.layout.load(refs, at(j, part)) for part in parts] for j in js]

    def place(self, j, part, page=None):
        """Of element `part` of key j, whose page may be known."""
        return place(self.plan, self.cache, self.share, self.layer, j, part, page)


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


def ask_for(plan: Plan, cache: Cache, share: Share, layer):
    """This warp's first 16 keys and values of a layer into the L2 cache, half a row a lane. No more: what the
    cache cannot hold beside the weights is read twice."""
    lane, warp = lanes.thread() % 32, lanes.thread() // 32
    key, half = lane // 2, lane % 2
    part = half * (plan.head_dim // 2)

    j = share.start + warp * KEYS + key
    with lanes.when(j < share.stop):
        at = place(plan, cache, share, layer, j, part)
        for ref in jax.tree.leaves((cache.keys, cache.values)):
            memory.prefetch(ref, at[: len(ref.type.shape)])


@dataclasses.dataclass(frozen=True)
class NewToken:
    """What the new token brings.

    operands    its queries as tensor cores take them, 16 dimensions each
    unit        what scores are to be multiplied by for it, or None
    key         (parts, scale) as it will be stored, this lane's parts; lanes behind the heads have it
    load_value  () -> the value, the same. Of 16 bits at most and no wide head, it was asked for with q and k:
                behind the scores, the warp that needs it would wait for memory once more
    """

    warp: Warp
    operands: list
    unit: Any
    key: tuple
    load_value: Callable[[], tuple]

    @classmethod
    def of(cls, warp: Warp, load_qkv) -> "NewToken":
        plan, cache, share, layout = warp.plan, warp.cache, warp.share, warp.cache.layout
        chunks = range(plan.head_dim // 32)
        # Lanes g have query head g, those behind the last the new key.
        is_key = warp.g >= plan.heads
        kv_head = share.heads // (plan.group // plan.heads)
        of_query = 1 + plan.gated  # heads' widths
        key_head = kv_head + of_query * plan.group * plan.kv_heads
        head = select(is_key, key_head, (warp.g + share.heads * plan.heads) * of_query)
        gamma = None
        if plan.normed:
            first = warp.layer * plan.head_dim
            gamma = [
                memory.load_either(8, is_key, cache.k_gamma, cache.q_gamma, first + part)
                for part in warp.key_part
            ]
        turned = angles(warp) if plan.turned else None
        first = warp.t * 8 + head * plan.head_dim
        of_value = warp.g * 8 + (key_head + plan.kv_heads) * plan.head_dim
        halves = range(plan.head_dim // 64)
        of_query = [(first, 32 * c + i) for c in chunks for i in (0, 4)]
        of_value = [(of_value, 64 * c + i) for c in halves for i in (0, 4)]

        def load(columns):
            loaded = load_qkv(share.row, columns)
            return [loaded[k : k + 8] for k in range(0, len(loaded), 8)]

        small = all(dtype.itemsize <= 2 for dtype in jax.tree.leaves(layout.DTYPE))
        if small and plan.head_dim <= WIDEST_AT_ONCE:
            loaded = load(of_value + of_query)
            value, x = layout.narrow(loaded[: len(halves)], (4, 8, 16), None), loaded[len(halves) :]
            load_value = lambda: value  # noqa: E731
        else:  # twice the registers
            x, load_value = load(of_query), lambda: layout.narrow(load(of_value), (4, 8, 16), None)
        x = normed(x, gamma, plan)
        if turned is not None:
            cos, sin = turned
            x = rotated(x, cos, sin, plan.interleaved)
        x = layout.rotate_lanes(x, (1, 2))
        # Weights are powers of two: softmax over s log2(e).
        scale = real(plan.head_dim ** (-0.5) * math.log2(math.e))
        factor = select(is_key, 1.0, scale)
        x = [[v * factor for v in part] for part in x]
        query, unit = layout.in_range(x)
        operands = []  # a0 and a2 from the high parts, a1 and a3 from the low ones
        for part in query:
            for i in (0, 4):
                (high0, low0), (high2, low2) = (layout.split(*part[k : k + 2]) for k in (i, i + 2))
                operands.append([high0, low0, high2, low2])
        high = [[operands[i][k] for i in (2 * c, 2 * c + 1) for k in (0, 2)] for c in chunks]
        key = layout.narrow(x, (1, 2), high if unit is None else None)

        return cls(warp, operands, unit, key, load_value)

    def with_key(self, js, keys, scales):
        """The new key in its place among this warp's, and in the cache; the scales with those of the new key
        and value. js: keys of this lane, and those of its scales."""
        warp, plan = self.warp, self.warp.plan
        with lanes.when(warp.g == plan.heads):
            self._store(warp.cache.keys, warp.key_part, *self.key)
        source = warp.t + plan.heads * 4  # the lane that has the new key's part
        key, scale = self.key
        key = jax.tree.map(lambda v: lanes.vector_from_lane(v, source), key)
        if scale is not None:
            scale = as_real(lanes.from_lane(as_word(scale), integer(source)))
            new = scale, self.load_value()[1]
            scales = [self._placed(js[1], of_new, old) for of_new, old in zip(new, scales, strict=True)]
        return self._placed(js[0], key, keys), scales

    def with_value(self, js, values):
        """The new value in its place among this warp's, and in the cache."""
        warp, value = self.warp, self.load_value()
        with lanes.when(warp.t == 0):
            self._store(warp.cache.values, warp.value_part, *value)
        return self._placed(js, value[0], values)

    def _store(self, refs, parts, stored, scale):
        warp, layout = self.warp, self.warp.cache.layout
        for part, values in zip(parts, stored, strict=True):
            layout.store(values, refs, warp.place(warp.share.length, part))
        layout.store_scale(scale, refs, warp.place(warp.share.length, 0)[:-1])

    def _placed(self, js, new, fetched):
        """The new token's parts among those of the keys `js`."""
        length = self.warp.share.length
        return [
            jax.tree.map(lambda v, old, j=j: select(j == length, v, old), new, of_key)
            for j, of_key in zip(js, fetched, strict=True)
        ]


def visit(warp: Warp, token: NewToken, first, fetched, state):
    """16 keys and values. The state, None before the first: of head g its largest score, this lane's share of
    the sum of weights, and of the weighted values for each (c, i) those at 64 c + 16 t + i and + 8."""
    share, layout, zero = warp.share, warp.cache.layout, real(0)
    key_js, value_js = warp.keys_of(first)
    base = first + warp.number * KEYS
    near = share.length - base < KEYS
    has_new = near & (share.length < share.stop)
    page = warp.page_of(first) if fetched is None else None
    if fetched is None:
        fetched = warp.fetch_keys(first, page), warp.fetch_scales(first, page), None
    keys, scales, values = fetched
    keys, (key_scales, value_scales) = chosen(
        has_new, lambda: token.with_key((key_js, value_js), keys, scales), (keys, scales)
    )
    scores = scaled(multiplied(layout, token, keys), key_scales)
    valid = [j < share.stop for j in value_js]
    scores = [select(ok, s, LOWEST) for ok, s in zip(valid, scores, strict=True)]
    largest = lanes.largest_of_warp(greatest(with_exponents(scores, value_scales)), 4)
    if layout.WEIGHT_EXPONENT:
        largest = largest - layout.WEIGHT_EXPONENT
    new_maximum, total, o = largest, zero, [zero] * (warp.plan.head_dim // 4)
    if state is not None:
        so_far, total, *o = state
        new_maximum = maximum(so_far, largest)
        keep = lanes.exp2(so_far - new_maximum)
        total, *o = (v * keep for v in (total, *o))
    weights = [select(ok, lanes.exp2(s - new_maximum), zero) for ok, s in zip(valid, scores, strict=True)]
    total = functools.reduce(operator.add, weights, total)
    weights = scaled(weights, value_scales)
    (high0, low0), (high2, low2) = (layout.split(*weights[k : k + 2]) for k in (0, 2))
    values = warp.fetch_values(first, page) if values is None else values
    values = chosen(has_new, lambda: token.with_value(value_js, values), values)
    return [new_maximum, total, *weighted(layout, (high0, high2), (low0, low2), values, o)]


def chosen(condition, values, otherwise):
    """values() where the condition holds for a whole warp, else `otherwise`: lists of lists of values."""
    leaves, structure = jax.tree.flatten(otherwise)
    return jax.tree.unflatten(structure, lanes.choose(condition, lambda: jax.tree.leaves(values()), leaves))


def scaled(numbers, scales) -> list:
    """Scores by the scales of their keys, or weights by those of their values."""
    return [x if scale is None else x * scale for x, scale in zip(numbers, scales, strict=True)]


def with_exponents(scores, scales) -> list:
    """log2 of what 2^score is behind the scale of its value: the largest is what weights are held against, so
    that with their scales they stay in range. A scale below 2^-60 counts as that."""
    pairs = zip(scores, scales, strict=True)
    return [s if scale is None else s + lanes.log2(maximum(scale, 2.0**-60)) for s, scale in pairs]


def multiplied(layout, token: NewToken, keys) -> list:
    """Scores of head g with the keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9."""
    scores = []
    for of_key in keys:
        c = [real(0)] * 4
        words = [pair for part in of_key for pair in layout.pairs(part)]
        for step, operand in enumerate(token.operands):
            for b in zip(words[2 * step], words[2 * step + 1], strict=True):
                c = tensor_cores.add_product(c, operand, b, layout.OPERAND)
        scores += [c[i] + c[i + 2] for i in (0, 1)]
    return scores if token.unit is None else [s * token.unit for s in scores]


def weighted(layout, high, low, values, o) -> list:
    """The sums o, and the values weighted by pairs of weights added."""
    none, zero = integer(0), real(0)
    # One after the other into the same sums, where rows 8 to 15 would be as many registers again.
    operands = [[pairs[0], none, pairs[1], none] for pairs in (high, low)]
    out = []
    for c in range(len(values[0])):
        ahead, behind = (layout.pairs_across(values[k][c], values[k + 1][c]) for k in (0, 2))
        for i in range(8):
            at = 2 * (8 * c + i)
            acc = o[at : at + 2]
            for b in zip(ahead[i], behind[i], strict=True):
                for operand in operands:
                    acc = tensor_cores.add_product([*acc, zero, zero], operand, b, layout.OPERAND)[:2]
            out += acc
    return out


def normed(x, gamma, plan: Plan):
    """RMS-norm of heads whose dimensions x [chunks][8] lie in four lanes."""
    if gamma is None:
        return x
    squares = sum_of_squares([v for part in x for v in part])
    mean = lanes.warp_sum_real(squares, 4) * (1 / plan.head_dim)
    norm = rsqrt(mean + plan.eps)
    return [[v * norm * w for v, w in zip(*part, strict=True)] for part in zip(x, gamma, strict=True)]


def angles(warp: Warp):
    """cos and sin of the pairs of which this lane has dimensions."""
    if warp.plan.interleaved:
        count, at = 4, [part // 2 for part in warp.key_part]
    else:
        pairs = warp.plan.head_dim // 2 if warp.plan.pairs is None else warp.plan.pairs
        count, at = 8, warp.key_part[: pairs // 32]
    return (
        [memory.load_reals(count, ref, [warp.share.row, first]) for first in at]
        for ref in (warp.cache.cos, warp.cache.sin)
    )


def rotated(x, cos, sin, interleaved: bool):
    """Rope of all of a head, or of its first dimensions in halves. Both of a pair are in the same lane."""
    out, half = [[*part] for part in x], len(cos)
    for c in range(len(x) if interleaved else half):
        for i in range(8):
            if interleaved and i % 2 == 0:
                u, v, (m, n) = (c, i), (c, i + 1), (c, i // 2)
            elif not interleaved:
                u, v, (m, n) = (c, i), (c + half, i), (c, i)
            else:
                continue
            a, b = x[u[0]][u[1]], x[v[0]][v[1]]
            out[u[0]][u[1]] = a * cos[m][n] - b * sin[m][n]
            out[v[0]][v[1]] = b * cos[m][n] + a * sin[m][n]
    return out
