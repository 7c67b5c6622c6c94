"""How a row's attention is put together, of what warps and blocks have of its keys (decode.py).

    warps' (m, l, o)    -> the split's, through shared memory or as decode_values.py has it
    splits' (o / l, m + log2 l)  -> tagged words in global memory -> outputs, of which each makes its part,
                                    or who reads them makes those that it reads (`put_together`)

m is the largest score, l the sum of weights 2^(score - m), o the weighted values. A head's sink has no value:
its weight joins l once, where o is divided by it. Splits meet without a
barrier (gpu/exchange.py): so all blocks of a launch must run at once.
"""

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallas_kernels.attention.decode_cache import Share, team_barrier, team_begin, team_thread
from pallas_kernels.attention.decode_plan import Plan
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.exchange import Exchange
from pallas_kernels.gpu.values import ceil_divided, greatest, index, minimum, real, select
from pallas_kernels.gpu.values import maximum as largest_of
from pallas_kernels.gpu.values import total as added

LOWEST = -1e30  # stands for minus infinity, of which differences are not numbers
AT_ONCE = 8  # splits that `put_together` waits for


@dataclasses.dataclass(frozen=True)
class Block:
    """A team's (m, l, o) of its split, in shared memory as its warps have them: who reads sums weighs them.

    begin   of the team's in shared memory
    thread  of the team
    """

    plan: Plan
    smem: Any
    begin: Any
    thread: Any

    @classmethod
    def store(cls, plan: Plan, smem, warp_heads) -> "Block":
        """The warps' (m, l, o) into shared memory."""
        self = cls(plan, smem, team_begin(plan), team_thread(plan))
        warp, g = self.thread // 32, self.thread % 32 // 4
        for head, maximum, total, _ in warp_heads:
            with lanes.when((head < plan.heads) & (g == 0)):
                for value, place in zip((maximum, total), self._places, strict=True):
                    memory.store(value, smem, head * plan.team + warp + place)
        team_barrier(plan)()  # all have read the new token, which lies where sums go
        for head, _, _, o in warp_heads:
            with lanes.when(head < plan.heads):
                for c, values in enumerate(o):
                    for i in (0, 4):
                        element = self._spread(head * plan.head_dim + g * 8 + (64 * c + i))
                        at = element + warp * (plan.heads * plan.head_dim) + self.begin
                        memory.store_reals(values[i : i + 4], smem, [at])
        team_barrier(plan)()
        return self

    @property
    def _places(self):
        """Where maxima and totals [heads, warps] begin, after the sums."""
        return [self.begin + self.plan.sums + k * self.plan.heads * self.plan.team for k in (0, 1)]

    def _spread(self, element):
        """Where an element of [heads, head_dim] lies: 8 lanes, of 4 heads, that store 4 each at once do not
        meet."""
        head = element // self.plan.head_dim
        return element ^ (head & 1) * 4 ^ (head & 2) * 8

    def combined(self, g):
        """(m, l, weights of its warps) of head g."""
        team = self.plan.team
        load = lambda at: memory.load_reals(min(4, team), self.smem, [at])  # noqa: E731
        maxima, totals = (
            [v for w in range(0, team, 4) for v in load(g * team + w + place)] for place in self._places
        )
        largest = functools.reduce(largest_of, maxima)
        weights = [lanes.exp2(m - largest) for m in maxima]
        return largest, weighted(weights, totals), weights

    def several(self, element, count: int, sink=None) -> tuple[list, Any, Any]:
        """Outputs of `count` (1, 2 or 4) neighbouring elements of [heads, head_dim], 0 without keys, with
        `sink` as `Splits` has it; m and l of their head."""
        plan, head = self.plan, element // self.plan.head_dim
        largest, total, weights = self.combined(head)
        divisor = with_sink(total, largest, sink, head)
        at, size = self._spread(element) + self.begin, plan.heads * plan.head_dim
        sums = [memory.load_reals(count, self.smem, [at + w * size]) for w in range(plan.team)]
        outputs = [quotient(weighted(weights, warps), divisor) for warps in zip(*sums, strict=True)]
        return outputs, largest, total

    def outputs(self, use, sink=None):
        """use(first element, outputs, m, l), the last three by `several`, for this thread's neighbouring
        elements of [heads, head_dim]."""
        size, threads = self.plan.heads * self.plan.head_dim, 32 * self.plan.team
        count = next(n for n in (1, 2, 4) if n * threads >= size or n == 4)
        for first in range(0, size, threads * count):
            element = self.thread * count + first
            if first + threads * count <= size:
                use(element, *self.several(element, count, sink))
                continue
            with lanes.when(element < size):
                use(element, *self.several(element, count, sink))

    def loader(self, sink=None):
        """element -> output. When it returns, all warps have read their keys and values."""
        return lambda element: self.several(element, 1, sink)[0][0]


def weighted(weights: Sequence, values: Sequence):
    return added([w * v for w, v in zip(weights, values, strict=True)])


def quotient(x, total):
    """x / total, or 0 for a total of 0."""
    return select(total > 0.0, x * lanes.reciprocal(total), 0.0)


def with_sink(total, largest, sink, head):
    """A head's sum of weights, with its sink's."""
    return total if sink is None else total + lanes.exp2(sink(head) - largest)


@dataclasses.dataclass(frozen=True)
class Splits:
    """Where a split's (m, l, o) go.

    store_out   (output, row, column)
    exchange    where splits meet
    pass_on     gets the output of a row's only split, by warps; None: `store_out` does
    after_keys  called when all warps have read their keys and values, or None
    sink        (head of the block) -> log2(e) times its sink; None: there are none
    around      (whether it is the only split) -> a context in which outputs are stored
    """

    plan: Plan
    share: Share
    store_out: Callable
    exchange: Exchange
    pass_on: Callable | None
    after_keys: Callable | None
    sink: Callable | None
    around: Callable

    def give(self, made, may_be_alone: bool = True):
        """What warps have of a split, `Block` or decode_values.Dimensions: the output, if it is the row's
        only one (which may_be_alone=False rules out), or what all its splits wait for."""
        plan, share = self.plan, self.share
        size, alone = plan.heads * plan.head_dim, share.splits == 1
        if may_be_alone:
            with lanes.when(alone), self.around(True):
                self._give_outputs(made)
        if plan.splits == 1:
            return
        with lanes.when(~alone):
            begin = (share.split + share.owner * plan.splits) * plan.partial

            def send(element, outputs, largest, total):
                self.exchange.send(begin + element, outputs)
                with lanes.when(element % plan.head_dim == 0):
                    log_total = select(total > 0.0, largest + lanes.log2(total), LOWEST)
                    self.exchange.send(begin + size + element // plan.head_dim, [log_total])

            made.outputs(send)

    def _give_outputs(self, made):
        """The outputs of a row's only split."""
        if self.pass_on is None:
            made.outputs(self._store, self.sink)
            return
        output, size = made.loader(self.sink), self.plan.heads * self.plan.head_dim
        if self.after_keys is not None:
            self.after_keys()  # `pass_on` takes long

        def load(columns):
            """Outputs of columns of all heads, an index and a constant each."""
            return [output(first - self.share.heads * size + more) for first, more in columns]

        self.pass_on(self.share.row, self.share.heads, load)

    def meet(self):
        """Make this split's part of the outputs, if there are several, and unless `put_together` does."""
        several, passed_on = ~(self.share.splits == 1), self.pass_on is not None
        if self.after_keys is not None and not (passed_on and self.plan.splits == 1):
            with lanes.when(several) if passed_on else contextlib.nullcontext():
                team_barrier(self.plan)()
                self.after_keys()
        if self.plan.splits > 1 and not self.plan.apart:
            with lanes.when(several), self.around(False):
                self._make(team_thread(self.plan))

    def _store(self, element, outputs, *_):
        share, size = self.share, self.plan.heads * self.plan.head_dim
        for i, output in enumerate(outputs):
            self.store_out(output, share.row, element + share.heads * size + i)

    def _make(self, thread):
        """This split's part of the outputs, of all splits' results: as many neighbouring lanes as there are
        splits, or the next power of two, up to 32, have 4 neighbouring outputs together."""
        plan, share = self.plan, self.share
        size, splits, shift = plan.heads * plan.head_dim, index(share.splits), index(1)
        for n in (2, 4, 8, 16):
            if n < plan.splits:
                shift = shift + select(splits > n, index(1), index(0))
        together, fours = index(1) << shift, ceil_divided(index(size // 4), splits)
        lane, per_lane = thread & (together - 1), range(0, plan.splits, 32)

        def next_fours(first, carry):
            number = (thread >> shift) + first
            four = share.split * fours + number
            exists = (number < fours) & (four < size // 4)
            element = minimum(four, size // 4 - 1) * 4
            head, places = element // plan.head_dim, []
            for s in per_lane:
                begin = (minimum(lane + s, splits - 1) + share.owner * plan.splits) * plan.partial
                places += [((begin + element, 0), 4), ((begin + head, size), 1)]
            loaded = self.exchange.receive(places)
            totals = [select(lane + s < splits, loaded[5 * k + 4], LOWEST) for k, s in enumerate(per_lane)]
            (largest,) = self._combined(together, [functools.reduce(largest_of, totals)], largest_of)
            weights = [lanes.exp2(m - largest) for m in totals]
            sums = [added(weights), *(weighted(weights, loaded[i::5]) for i in range(4))]
            total, *outputs = self._combined(together, sums, operator.add)
            inverse = lanes.reciprocal(with_sink(total, largest, self.sink, head))
            with lanes.when(exists & (lane == 0)):
                self._store(element, [output * inverse for output in outputs])
            return carry

        lanes.loop(0, fours, index(32 * plan.team) >> shift, [], next_fours)

    def _combined(self, together, x: list, combine: Callable) -> list:
        """Each number of x put together over `together` neighbouring lanes, a power of two, by a function of
        two numbers."""
        for distance in (1, 2, 4, 8, 16):
            if distance >= self.plan.splits:
                break
            both = lambda x=x, distance=distance: [combine(v, lanes.swapped(v, distance)) for v in x]  # noqa: E731
            x = both() if distance == 1 else lanes.choose(together > distance, both, x)
        return x


def put_together(plan: Plan, exchange: Exchange, row, splits, columns: list[tuple]) -> list:
    """Wait for all of a row's splits and put them together: outputs at columns that this lane reads, an index
    and a constant each, whose remainders by 128 add up to less than 128. Heads have no sinks."""
    size, unit, at_once = plan.heads * plan.head_dim, math.gcd(plan.head_dim, 128), min(plan.splits, AT_ONCE)
    heads: dict[tuple, list] = {}  # columns of one head, by number
    for number, (at, constant) in enumerate(columns):
        heads.setdefault((id(at), constant // unit), []).append(number)

    def places(first) -> list:
        """Of the outputs and the sum of weights of each head and split."""
        out = []
        for (_, units), numbers in heads.items():
            column = columns[numbers[0]][0] + units * unit
            begin, element = (column // size + row * (plan.owners // plan.rows)) * plan.splits, column % size
            for s in range(at_once):
                at = (minimum(first + s, splits - 1) + begin) * plan.partial
                out += [((at + element, columns[number][1] % unit), 1) for number in numbers]
                out.append(((at + element // plan.head_dim, size), 1))
        return out

    def more_splits(first, carry):
        loaded, joined = iter(exchange.receive(places(first))), []
        for state, numbers in zip(jax.tree.unflatten(structure, carry), heads.values(), strict=True):
            parts = [state]
            for s in range(at_once):
                outputs, log_total = [next(loaded) for _ in numbers], next(loaded)
                parts.append((select(first + s < splits, log_total, LOWEST), 1.0, outputs))
            joined.append(_joined(parts))
        return jax.tree.leaves(joined)

    begun = [(real(LOWEST), real(0), [real(0)] * len(numbers)) for numbers in heads.values()]
    leaves, structure = jax.tree.flatten(begun)
    states = jax.tree.unflatten(structure, lanes.loop(0, splits, at_once, leaves, more_splits))
    made = {}
    for numbers, (_, total, outputs) in zip(heads.values(), states, strict=True):
        inverse = lanes.reciprocal(total)
        made |= {number: output * inverse for number, output in zip(numbers, outputs, strict=True)}
    return [made[number] for number in range(len(columns))]


def _joined(parts: list[tuple]) -> tuple:
    """(m, l, o) of parts (m, l, o) whose weights are 2^m."""
    largest = greatest([m for m, *_ in parts])
    weights = [lanes.exp2(m - largest) for m, *_ in parts]
    return (
        largest,
        weighted(weights, [total for _, total, _ in parts]),
        [weighted(weights, each) for each in zip(*(o for *_, o in parts), strict=True)],
    )
