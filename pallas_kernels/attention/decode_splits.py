"""How a row's attention is put together, of what warps and blocks have of its keys (decode.py).

    warps' (m, l, o)    -> shared memory -> the split's
    splits' (m, l, o)   -> tagged words in global memory -> outputs, of which each split makes its part

m is the largest score, l the sum of weights 2^(score - m), o the weighted values. Splits meet without a
barrier: so all blocks of a launch must run at once.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

from pallas_kernels.attention.decode_plan import Plan
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import fma, minimum, real, select
from pallas_kernels.gpu.values import maximum as largest_of

LOWEST = -1e30  # stands for minus infinity, of which differences are not numbers


def team_thread(plan: Plan):
    """The thread's number in its team."""
    return lanes.thread() if plan.teams == 1 else lanes.thread() % 32


def team_begin(plan: Plan):
    """Where the team's shared memory begins."""
    return 0 if plan.teams == 1 else lanes.thread() // 32 * (plan.scratch // plan.teams)


def team_barrier(plan: Plan) -> Callable[[], None]:
    return lanes.block_barrier if plan.teams == 1 else lanes.warp_barrier


@dataclasses.dataclass(frozen=True)
class Share:
    """What a team has of a layer's attention.

    owner        row and block of query heads, as one number
    row, heads   the two
    split, splits
    length       keys before the new one, i32; active: whether the row has a new one
    start, stop, pages  as decode.Kept has them
    """

    owner: Any
    row: Any
    heads: Any
    split: Any
    splits: Any
    length: Any
    active: Any
    start: Any
    stop: Any
    pages: list


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Where the splits of a row's attention meet: words of the workspace from `begin` on, with this layer's
    tag. Each split makes its part of the outputs."""

    workspace: Any
    begin: int
    tag: Any

    def send(self, at, value):
        memory.store_tagged(value, self.workspace, at + self.begin, self.tag)

    def makes(self, share: Share, i, count: int):
        """Whether this block makes the i-th 32 outputs of `count`: neighbours, which different warps have."""
        return i * share.splits // count == share.split

    def receive(self, places) -> list:
        """What was sent to (element, constant) places."""
        wanted = [((at, constant + self.begin), 1) for at, constant in places]
        return memory.load_tagged(self.workspace, wanted, self.tag, at_once=True)


@dataclasses.dataclass(frozen=True)
class Block:
    """A team's (m, l, o) of its split: m by head, l and o in shared memory, as its warps have them.

    begin       of the team's in shared memory
    thread, warp  of the team
    first_lane  whether this lane is the first of head g's
    largest     m of head g
    """

    plan: Plan
    smem: Any
    begin: Any
    thread: Any
    warp: Any
    g: Any
    first_lane: Any
    largest: Any

    @classmethod
    def of(cls, plan: Plan, smem, maximum, total, o) -> "Block":
        """The warps' (m, l, o) into shared memory, l and o with the m of the team."""
        heads, head_dim, team = plan.heads, plan.head_dim, plan.team
        thread, begin, barrier = team_thread(plan), team_begin(plan), team_barrier(plan)
        warp, lane = thread // 32, thread % 32
        g, t = lane // 4, lane % 4
        present = g < heads
        maxima, totals = (place + begin for place in cls._places(plan))

        first_lane = present & (t == 0)
        with lanes.when(first_lane):
            memory.store(maximum, smem, g * team + maxima + warp)
        barrier()
        head = minimum(g, heads - 1)
        largest = functools.reduce(
            largest_of,
            [memory.load(smem, head * team + (maxima + w)) for w in range(team)],
        )
        weight = lanes.exp2(maximum - largest)
        with lanes.when(present):
            for c, values in enumerate(o):
                for i in range(0, 16, 4):
                    scaled = [v * weight for v in values[i : i + 4]]
                    place = warp * (heads * head_dim) + (64 * c + i) + g * head_dim + t * 16 + begin
                    memory.store_reals(scaled, smem, [place])
            with lanes.when(t == 0):
                memory.store(total * weight, smem, g * team + totals + warp)
        barrier()
        return cls(plan, smem, begin, thread, warp, g, first_lane, largest)

    @staticmethod
    def _places(plan: Plan) -> tuple[int, int]:
        """Where maxima and totals begin, behind the sums."""
        return plan.sums, plan.sums + plan.heads * plan.team

    def sum_of(self, element):
        """o of an element of [heads, head_dim]."""
        return self._over_warps(element, self.plan.heads * self.plan.head_dim)

    def total_of(self, g):
        """l of a head."""
        _, totals = self._places(self.plan)
        return self._over_warps(g * self.plan.team + totals, 1)

    def _over_warps(self, base, stride: int):
        base = base + self.begin
        parts = [memory.load(self.smem, base + w * stride) for w in range(self.plan.team)]
        return functools.reduce(operator.add, parts)

    def outputs(self, use, mine=None):
        """use(element, query head) for this thread's elements of the heads' outputs, of those 32 that are
        mine."""
        size = self.plan.heads * self.plan.head_dim
        for first in range(0, size, 32 * self.plan.team):
            element = self.thread + first
            valid = element < size
            if mine is not None:
                valid = valid & mine(self.warp + first // 32)
            with lanes.when(valid):
                use(element, element // self.plan.head_dim)


def combine(plan: Plan, share: Share, smem, maximum, total, o, store_out, exchange: Exchange, pass_on=None):
    """The warps' (m, l, o) -> the split's -> with those of the other splits, the output. A row's only split
    gives it to `pass_on` by warps, where that is not None (decode.Attention.run)."""
    size = plan.heads * plan.head_dim
    block = Block.of(plan, smem, maximum, total, o)

    def ratio(numerator, denominator):
        denominator = select(share.active, denominator, 1.0)
        return select(share.active, numerator / denominator, 0.0)

    def store(element, numerator, denominator):
        store_out(ratio(numerator, denominator), share.row, element + share.heads * size)

    def load(columns):
        """Outputs of columns of all heads, an index and a constant each."""
        elements = [first - share.heads * size + more for first, more in columns]
        return [ratio(block.sum_of(e), block.total_of(e // plan.head_dim)) for e in elements]

    alone = share.splits == 1
    with lanes.when(alone):
        if pass_on is None:
            block.outputs(lambda element, g: store(element, block.sum_of(element), block.total_of(g)))
        else:
            pass_on(share.row, share.heads, load)
    if plan.splits == 1:
        return
    with lanes.when(~alone):
        begin = _begin(plan, share, share.split)
        block.outputs(lambda element, g: exchange.send(begin + element, block.sum_of(element)))
        with lanes.when(block.first_lane & (block.warp == 0)):
            two = begin + size + block.g * 2
            exchange.send(two, block.largest)
            exchange.send(two + 1, block.total_of(block.g))
        block.outputs(
            lambda element, g: store(element, *_of_all(plan, share, exchange, element, g)),
            lambda i: exchange.makes(share, i, -(-size // 32)),
        )


def _begin(plan: Plan, share: Share, split):
    """Where a split's partial results begin in the workspace."""
    block = split + share.owner * plan.splits
    return block * plan.partial


def _of_all(plan: Plan, share: Share, exchange: Exchange, element, g):
    """o and l of an element of query head g, over all splits of the row."""
    there = [s < share.splits for s in range(plan.splits)]
    mine = share.split  # in place of a split that the row does not have
    begins = [_begin(plan, share, select(ok, s, mine)) for s, ok in enumerate(there)]
    two, behind = g * 2, plan.heads * plan.head_dim
    places = []
    for begin in begins:
        places.append((begin + element, 0))
        places += [(begin + two, behind + i) for i in (0, 1)]
    loaded = exchange.receive(places)
    values, maxima, totals = (loaded[i::3] for i in range(3))
    maxima = [select(ok, m, LOWEST) for ok, m in zip(there, maxima, strict=True)]
    largest = functools.reduce(largest_of, maxima)
    numerator, denominator = real(0), real(0)
    for maximum, total, o in zip(maxima, totals, values, strict=True):
        weight = lanes.exp2(maximum - largest)
        numerator = fma(weight, o, numerator)
        denominator = fma(weight, total, denominator)
    return numerator, denominator
