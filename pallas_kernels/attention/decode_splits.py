"""How a row's attention is put together, of what warps and blocks have of its keys (decode.py).

    warps' (m, l, o)    -> shared memory -> the split's
    splits' (o / l, m + log2 l)  -> tagged words in global memory -> outputs, of which each makes its part

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
from pallas_kernels.gpu.values import maximum as largest_of
from pallas_kernels.gpu.values import minimum, select

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
    start, stop, page  as decode.Kept has them
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
    page: Any


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Where the splits of a row's attention meet: words of the workspace from `begin` on, a multiple of 4,
    with this layer's tag."""

    workspace: Any
    begin: int
    tag: Any

    def send(self, at, value):
        memory.store_tagged(value, self.workspace, at + self.begin, self.tag)

    def receive(self, places) -> list:
        """What was sent to ((element, constant), count) places."""
        wanted = [((at, constant + self.begin), count) for (at, constant), count in places]
        return memory.load_tagged(self.workspace, wanted, self.tag, at_once=True)


@dataclasses.dataclass(frozen=True)
class Block:
    """A team's (m, l, o) of its split: m by head, l and o in shared memory, as its warps have them.

    begin       of the team's in shared memory
    thread, warp  of the team
    largest     (whether this lane is the first that has it, head, m) of this lane's heads
    """

    plan: Plan
    smem: Any
    begin: Any
    thread: Any
    warp: Any
    largest: list

    @classmethod
    def of(cls, plan: Plan, smem, of_heads) -> "Block":
        """The warps' (m, l, o) into shared memory, l and o with the m of the team."""
        heads, head_dim, team = plan.heads, plan.head_dim, plan.team
        thread, begin, barrier = team_thread(plan), team_begin(plan), team_barrier(plan)
        warp, lane = thread // 32, thread % 32
        g = lane // 4
        maxima, totals = (place + begin for place in cls._places(plan))

        for head, maximum, _, _ in of_heads:
            with lanes.when((head < heads) & (g == 0)):
                memory.store(maximum, smem, head * team + maxima + warp)
        barrier()
        found = []
        for head, maximum, total, o in of_heads:
            there = minimum(head, heads - 1) * team + maxima
            largest = functools.reduce(largest_of, [memory.load(smem, there + w) for w in range(team)])
            found.append(((head < heads) & (g == 0), head, largest))
            weight = lanes.exp2(maximum - largest)
            with lanes.when(head < heads):
                for c, values in enumerate(o):
                    for i in range(0, 8, 4):
                        scaled = [v * weight for v in values[i : i + 4]]
                        element = cls._spread(head * head_dim + g * 8 + (64 * c + i), head_dim)
                        memory.store_reals(scaled, smem, [element + warp * (heads * head_dim) + begin])
                with lanes.when(g == 0):
                    memory.store(total * weight, smem, head * team + totals + warp)
        barrier()
        return cls(plan, smem, begin, thread, warp, found)

    @staticmethod
    def _places(plan: Plan) -> tuple[int, int]:
        """Where maxima and totals begin, behind the sums."""
        return plan.sums, plan.sums + plan.heads * plan.team

    @staticmethod
    def _spread(element, head_dim: int):
        """Where an element of [heads, head_dim] lies: 8 lanes, of 4 heads, that store 4 each at once do not
        meet."""
        head = element // head_dim
        return element ^ (head & 1) * 4 ^ (head & 2) * 8

    def sum_of(self, element):
        """o of an element of [heads, head_dim]."""
        element = self._spread(element, self.plan.head_dim)
        return self._over_warps(element, self.plan.heads * self.plan.head_dim)

    def total_of(self, g):
        """l of a head."""
        _, totals = self._places(self.plan)
        return self._over_warps(g * self.plan.team + totals, 1)

    def _over_warps(self, base, stride: int):
        base = base + self.begin
        parts = [memory.load(self.smem, base + w * stride) for w in range(self.plan.team)]
        return functools.reduce(operator.add, parts)

    def outputs(self, use):
        """use(element, output) for this thread's elements of [heads, head_dim]; 0 without keys."""
        size, threads = self.plan.heads * self.plan.head_dim, 32 * self.plan.team

        def one(element):
            total = self.total_of(element // self.plan.head_dim)
            use(element, quotient(self.sum_of(element), total))

        for first in range(0, size, threads):
            element = self.thread + first
            if first + threads <= size:
                one(element)
                continue
            with lanes.when(element < size):
                one(element)


def quotient(x, total):
    """x / total, or 0 for a total of 0."""
    return select(total > 0.0, x * lanes.reciprocal(total), 0.0)


def combine(
    plan: Plan, share: Share, smem, of_heads, store_out, exchange: Exchange, pass_on=None, behind_keys=None
):  # fmt: skip
    """The warps' (head, m, l, o) of a lane's heads -> the split's -> with those of the other splits, the output. A row's only split
    gives it to `pass_on` by warps, where that is not None; `behind_keys` is called when all warps have read
    their keys (decode.Attention.run)."""
    size = plan.heads * plan.head_dim
    block = Block.of(plan, smem, of_heads)
    if behind_keys is not None:
        behind_keys()

    def store(element, output):
        store_out(output, share.row, element + share.heads * size)

    def load(columns):
        """Outputs of columns of all heads, an index and a constant each."""
        elements = [first - share.heads * size + more for first, more in columns]
        return [quotient(block.sum_of(e), block.total_of(e // plan.head_dim)) for e in elements]

    alone = share.splits == 1
    with lanes.when(alone):
        block.outputs(store) if pass_on is None else pass_on(share.row, share.heads, load)
    if plan.splits == 1:
        return
    with lanes.when(~alone):
        begin = (share.split + share.owner * plan.splits) * plan.partial
        block.outputs(lambda element, output: exchange.send(begin + element, output))
        for first_lane, head, largest in block.largest:
            with lanes.when(first_lane & (block.warp == 0)):
                total = block.total_of(head)
                of_head = select(total > 0.0, largest + lanes.log2(total), LOWEST)
                exchange.send(begin + size + head, of_head)
        _make(plan, share, exchange, block.thread, store)


def _make(plan: Plan, share: Share, exchange: Exchange, thread, store):
    """This split's part of the outputs, of all splits' results: as many lanes as there are splits have 4
    neighbouring outputs together."""
    size, splits = plan.heads * plan.head_dim, plan.splits
    together = min(32, 1 << (splits - 1).bit_length())
    per_lane, fours = -(-splits // together), -(-size // (4 * splits))
    lane = thread % together
    for first in range(0, fours, 32 * plan.team // together):
        number = thread // together + first
        four = share.split * fours + number
        mine = (number < fours) & (four < size // 4)
        element = minimum(four, size // 4 - 1) * 4
        head, places = element // plan.head_dim, []
        for s in range(0, splits, together):
            begin = (minimum(lane + s, splits - 1) + share.owner * splits) * plan.partial
            places += [((begin + element, 0), 4), ((begin + head, size), 1)]
        loaded = exchange.receive(places)
        of_heads = [select(lane + s * together < splits, loaded[5 * s + 4], LOWEST) for s in range(per_lane)]
        largest = lanes.largest_of_warp(functools.reduce(largest_of, of_heads), together)
        weights = [lanes.exp2(m - largest) for m in of_heads]
        sums = [functools.reduce(operator.add, weights)]
        for i in range(4):
            sums.append(
                functools.reduce(operator.add, [w * loaded[5 * s + i] for s, w in enumerate(weights)])
            )
        total, *outputs = (lanes.warp_sum_real(v, together) for v in sums)
        inverse = lanes.reciprocal(total)
        with lanes.when(mine & (lane == 0)):
            for i, output in enumerate(outputs):
                store(element + i, output * inverse)
