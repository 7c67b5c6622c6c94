"""What decode attention makes of a new token's q, k and v, once for a team of warps: a lane has 8
neighbouring numbers of a head, so that 3 warps have 4 heads of 128, their key and their value.

    queries -> norm, rope -> pairs of 16-bit numbers, as tensor cores take them    -> shared memory
    key     -> norm, rope -> as it will be stored  -> the cache                    -> shared memory
    value                 -> as it will be stored  -> the cache                    -> shared memory

Warps read from there what their lanes need (decode_warp.py). If every warp recomputed it (32 values per
lane), the path from q to the scores would take four times the instructions, and registers that arriving keys
use now.

Where `plan.tokens` neighbouring rows are one sequence's tokens, a row attends to the keys of the rows before
it, which other teams store in this launch. Its team makes these from q, k and v too, and waits for no other
team:

    row      0    1    2    3          positions 20, 21, 22, 23; the cache has keys 0 to 19
    makes    20   20   20   20         in shared memory
                  21   21   21
                       22   22
                            23
    stores   20   21   22   23         in the cache
"""

import dataclasses
import functools
from typing import Any

from pallas_kernels.attention.decode_cache import Cache, LayerShare, team_warp
from pallas_kernels.attention.decode_plan import KEYS, Plan
from pallas_kernels.attention.lane_heads import PART, LaneHeads
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import (
    as_real,
    index,
    integer,
    minimum,
    real,
    select,
    true,
)

FIRST_WARP = 2  # that makes it, of a team: those before may have a second place for keys, and ask for these


def first_heads(plan: Plan) -> list:
    """Of queries, keys and values the first head of this warp, each time that it makes as many as its lanes
    have parts of."""
    each = 32 // (plan.head_dim // PART)
    warp = (team_warp(plan) + max(0, plan.team - FIRST_WARP)) % plan.team
    return [warp * each + at for at in range(0, plan.heads + 2 * plan.tokens, plan.team * each)]


def lane_heads(plan: Plan, cache: Cache, layer, row, heads, load_qkv) -> "list[LaneHead]":
    """What this lane loads for NewToken.make, which needs no position."""
    return [LaneHead.load(plan, cache, layer, row, heads, first, load_qkv) for first in first_heads(plan)]


@dataclasses.dataclass(frozen=True)
class LaneHead:
    """8 neighbouring numbers of a head of q, k or v: what one lane loads of new tokens at a time.

    number  among the queries, keys and values of a team; part: which 8 of its numbers
    token   of a key or a value, among the sequence's tokens of this launch
    read    whether there is such a token, up to the row's own
    raw     the numbers, as q, k and v have them
    gamma   of their norm, or None
    angles  cosines and sines of their rotation, or None
    """

    number: Any
    part: Any
    token: Any
    read: Any
    raw: list
    gamma: list | None
    angles: Any

    @classmethod
    def load(cls, plan: Plan, cache: Cache, layer, row, heads, first, load_qkv) -> "LaneHead":
        """heads: the row's block of query heads; first: of this warp, as `first_heads` has it."""
        parts, lane = plan.head_dim // PART, lanes.thread() % 32
        head = cls(lane // parts + first, lane % parts, index(0), true(), [], None, None)
        is_query, qkv_row = head.is_query(plan), row
        if plan.tokens > 1:
            own = row % plan.tokens
            token = (head.number - plan.heads) % plan.tokens
            head = dataclasses.replace(head, token=token, read=token <= own)
            qkv_row = select(head.read & ~is_query, row - own + token, row)
        per_query = 1 + plan.gated
        key_head = heads // (plan.group // plan.heads) + per_query * plan.group * plan.kv_heads
        key_head = key_head + select(head.is_value(plan), index(plan.kv_heads), index(0))
        at = select(is_query, (head.number + heads * plan.heads) * per_query, key_head)
        column = at * plan.head_dim + head.part * PART
        gamma = None
        if plan.normed:
            gamma_at = layer * plan.head_dim + head.part * PART
            gamma = memory.load_either(PART, is_query, cache.gammas, gamma_at)
        rotated = LaneHeads(plan.head_dim, plan.pairs, plan.interleaved)
        angles = rotated.angles(cache.rotation, [qkv_row], head.part)
        raw = load_qkv(qkv_row, [(column, 0), (column, 4)])  # last: it may have to be waited for
        return dataclasses.replace(head, raw=raw, gamma=gamma, angles=angles)

    def is_query(self, plan: Plan):
        return self.number < plan.heads

    def is_value(self, plan: Plan):
        return plan.heads + plan.tokens - 1 < self.number


@dataclasses.dataclass(frozen=True)
class NewToken(LayerShare):
    """Where it lies in shared memory, from `begin` on, in words: of the queries' pairs [head, part, high or
    low, 4]; of keys, then of values what is stored of them, [token, part, its words]; units of the queries;
    scales of keys, then of values."""

    smem: Any
    begin: Any

    @property
    def parts(self) -> int:
        return self.plan.head_dim // PART

    @property
    def has_new(self):
        """Whether new keys are of this split, which may have no keys."""
        return (self.share.start <= self.share.length) & (self.stored < self.share.stop)

    def is_new(self, j):
        """Whether key j, up to the row's own, is one of the new ones."""
        return j == self.share.length if self.plan.tokens == 1 else self.stored <= j

    def among(self, base):
        """Whether new keys are among the 16 from `base` on, which have a key of this row."""
        if self.plan.tokens == 1:
            return self.share.length - base < KEYS
        return (base <= self.share.length) & (self.stored < base + KEYS)

    @property
    def _number(self):
        """The number of the row's own token among those of its sequence."""
        return self.share.row % self.plan.tokens

    def _number_of(self, j):
        """The number of the token whose key j is; of a stored key the row's own."""
        return minimum(index(j) - index(self.stored), self._number)

    def make(self, load_qkv, loaded: "list[LaneHead] | None" = None):
        """load_qkv: (row, columns) -> list of float32, 4 from each column on (an index and a constant).
        loaded: `lane_heads`, if they have been loaded."""
        plan, last = self.plan, self.plan.heads + 2 * self.plan.tokens
        for i, first in enumerate(first_heads(plan)):
            make = functools.partial(self._make, first, load_qkv, None if loaded is None else loaded[i])
            if plan.team == 1:
                make()
                continue
            with lanes.when((first < plan.heads) | (self.has_new & (first < last))):
                make()

    def _make(self, first, load_qkv, loaded: "LaneHead | None"):
        """Of heads `first` and following, as many as a warp's lanes have: queries, keys, values."""
        plan, share, layout = self.plan, self.share, self.cache.layout
        page = memory.load(self.cache.table, share.row, share.length // plan.page_size)
        if (head := loaded) is None:
            head = LaneHead.load(plan, self.cache, self.layer, share.row, share.heads, first, load_qkv)
        number, part, token, read, raw = head.number, head.part, head.token, head.read, head.raw
        is_query, is_value = head.is_query(plan), head.is_value(plan)
        heads = LaneHeads(plan.head_dim, plan.pairs, plan.interleaved)
        x = raw
        if head.gamma is not None:
            x = heads.normed(x, head.gamma, plan.eps)
        if head.angles is not None:
            x = heads.rotated(x, part, *head.angles)
        distances = heads.distances
        (x,) = layout.rotate_lanes([x], distances)
        scale = real(plan.scores.query_factor(plan.head_dim))
        (query,), unit = layout.in_range([[v * scale for v in x]], self.parts)
        with lanes.when(is_query):
            pairs = [layout.split(*query[i : i + 2]) for i in range(0, PART, 2)]
            for low, words in enumerate(zip(*pairs, strict=True)):
                memory.store_reals(
                    list(map(as_real, words)), self.smem, [self._query_place(number, part, low)]
                )
            if unit is not None:
                with lanes.when(part == 0):
                    memory.store(unit, self.smem, self._units + number)
        stored = [select(is_value, old, v) for old, v in zip(raw, x, strict=True)]
        (stored,), scale = layout.narrow([stored], distances)
        with lanes.when(~is_query & (number < plan.heads + 2 * plan.tokens) & self.has_new & read):
            words = [as_real(word) for v in stored for word in lanes.words(v)]
            after_keys = select(is_value, index(plan.tokens * plan.head_dim), index(0))
            begin = self._token_place(token, after_keys + self._stored_place(0), plan.head_dim)
            at = begin + part * len(words)
            for i in range(0, len(words), 4):
                memory.store_reals(words[i : i + 4], self.smem, [at + i])
            if scale is not None:
                with lanes.when(part == 0):
                    after_keys = select(is_value, index(plan.tokens), index(0))
                    memory.store(scale, self.smem, self._token_place(token, after_keys + self._scales))
            at = self.place(share.length, part * PART, page)
            conditions = ~is_value, is_value
            if plan.tokens > 1:
                own = (token == self._number) & (share.length < share.stop)
                conditions = [condition & own for condition in conditions]
            for refs, condition in zip(self.cache.pages, conditions, strict=True):
                with lanes.when(condition):
                    layout.store(stored, refs, at)
                    if scale is not None:
                        with lanes.when(part == 0):
                            layout.store_scale(scale, refs, at[:-1])

    # Places

    def _query_place(self, head, part, low):
        return self.begin + ((head * self.parts + part) * 2 + low) * 4

    def _stored_place(self, which: int):
        """Of the first key, or of the first value: as many words as a float32 would have."""
        return self.begin + (self.plan.heads + which * self.plan.tokens) * self.plan.head_dim

    def _token_place(self, token, at, each: int = 1):
        """Where a token's words begin, if the first token's begin at `at` and each token has `each` words."""
        return at if self.plan.tokens == 1 else token * each + at

    @property
    def _units(self):
        return self._stored_place(2)

    @property
    def _scales(self):
        return self._units + self.plan.heads

    # What warps take of it

    def queries(self, g, t):
        """Pairs of column g, of this lane's dimensions: a list of words for each product that scores are the
        sum of. Each visit loads them again."""
        columns = self.plan.columns
        head, low = minimum(g // columns, self.plan.heads - 1), g % columns
        address = memory.shared_address(self.smem) + integer(self._query_place(head, t, low)) * 4
        return [
            [
                word
                for part in range(0, self.parts, 4)
                for word in memory.load_shared(4, address, (2 * part + more) * 16)
            ]
            for more in range(3 - columns)
        ]

    def units(self, heads) -> list:
        """What scores of these heads are to be multiplied by, or None."""
        if self.cache.layout.in_range([[real(0)]], 1)[1] is None:
            return [None] * len(heads)
        return [memory.load(self.smem, self._units + minimum(head, self.plan.heads - 1)) for head in heads]

    def as_stored(self, which: int, j, part, like):
        """A part of new key j, or of its value, as it is stored: a list as `like`."""
        sizes = [len(lanes.words(v)) for v in like]
        begin = self._token_place(self._number_of(j), self._stored_place(which), self.plan.head_dim)
        at, out = part * sum(sizes) + begin, []
        for old, size in zip(like, sizes, strict=True):
            loaded = [
                word
                for i in range(0, size, 4)
                for word in lanes.words(memory.load_stored(min(size, 4), self.smem, [at + i]))
            ]
            out.append(lanes.vector_like(old, loaded))
            at = at + size
        return out

    def new_value(self, number: int) -> tuple:
        """(which key's, address) of the value of a new token as it is stored."""
        j = self.share.length if self.plan.tokens == 1 else self.stored + number
        begin = self._stored_place(1) + number * self.plan.head_dim
        return j, memory.shared_address(self.smem) + integer(begin) * 4

    def scale(self, which: int, j):
        begin = self._scales + which * self.plan.tokens
        return memory.load(self.smem, self._token_place(self._number_of(j), begin))
