"""A token's experts, from the logits of its router: those with the largest, by a warp.

A lane has as many neighbouring logits as any other, and sorts them. Then the number of the largest of all
lanes' first ones is stored, that one is left out, and so on. Steps of one launch have this in them
(step/experts_layers.py), and choice.py, which knows the other rules of routers.
"""

from collections.abc import Iterator
from typing import NamedTuple

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import (
    as_real,
    as_word,
    exp,
    integer,
    maximum,
    minimum,
    ordered,
    select,
    total,
)

LANES = 32
NONE = float("-inf")  # the logit of an expert that there is not


class Experts(NamedTuple):
    """count   of a layer
    used       of a token
    normalized  whether the weights of the used add up to 1
    """

    count: int
    used: int
    normalized: bool

    @property
    def logits(self) -> int:
        """With those of experts that there are not: four, or a multiple, for each lane."""
        return -(-self.count // (4 * LANES)) * 4 * LANES


def exchanges(count: int) -> Iterator[tuple[int, int]]:
    """The places that odd-even merge sort compares and exchanges, in order (Batcher 1968; Knuth 5.2.2, M)."""
    half = 1
    while half < count:
        distance = half
        while distance:
            for first in range(distance % half, count - distance, 2 * distance):
                for i in range(first, min(first + distance, count - distance)):
                    if i // (2 * half) == (i + distance) // (2 * half):
                        yield i, i + distance
            distance //= 2
        half *= 2


def store_largest(scores: list, lane, experts: Experts, chosen_smem):
    """The used experts' numbers, those with the largest scores first, into shared memory. Of equal scores the
    lower number comes first.

    scores  of this lane, from number lane * len(scores) on

    Each lane sorts its own, so that each turn compares the lanes' first ones alone.
    """
    keys = [ordered(v) for v in scores]
    numbers = [lane * len(scores) + i for i in range(len(scores))]
    for i, j in exchanges(len(scores)):
        moves = (keys[j] > keys[i]) | ((keys[j] == keys[i]) & (numbers[j] < numbers[i]))
        keys[i], keys[j] = maximum(keys[i], keys[j]), minimum(keys[i], keys[j])
        numbers[i], numbers[j] = (
            select(moves, numbers[j], numbers[i]),
            select(moves, numbers[i], numbers[j]),
        )
    for turn in range(experts.used):
        with_top = lanes.ballot(keys[0] == lanes.warp_max(keys[0]))
        is_first = with_top & (0 - with_top) == integer(1) << lane
        with lanes.when(is_first):
            memory.store(minimum(numbers[0], experts.count - 1), chosen_smem, turn)
        keys = [
            select(is_first, after, key) for key, after in zip(keys, [*keys[1:], integer(0)], strict=True)
        ]
        numbers = [select(is_first, b, a) for a, b in zip(numbers, [*numbers[1:], numbers[-1]], strict=True)]


def chosen_values(values: list, lane, experts: Experts, chosen_smem):
    """In lane j the value of the j-th expert in shared memory; values: of this lane's experts."""
    number = memory.load(chosen_smem, minimum(lane, experts.used - 1))
    owner, place = number // len(values), number % len(values)
    own = [as_real(lanes.from_lane(as_word(v), owner)) for v in values]
    chosen = own[0]
    for i, value in enumerate(own[1:], 1):
        chosen = select(place == i, value, chosen)
    return chosen


def softmax_weight(logits: list, lane, experts: Experts, chosen_smem):
    """That of the lane's chosen expert: exp(l) over the sum of those used, or of all; 0 behind the last."""
    logit = chosen_values(logits, lane, experts, chosen_smem)
    greatest_logit = as_real(lanes.from_lane(as_word(logit), integer(0)))
    weight = select(lane < experts.used, exp(logit - greatest_logit), 0.0)
    divided_by = weight if experts.normalized else total([exp(v - greatest_logit) for v in logits])
    return weight / lanes.warp_sum_real(divided_by)


def choose(logits: list, lane, experts: Experts, chosen_smem):
    """The used experts' numbers, the likeliest first, and behind them the bits of their weights, into shared
    memory. Of equal logits the lower number comes first.

    logits  of this lane, from number lane * len(logits) on
    """
    store_largest(logits, lane, experts, chosen_smem)
    lanes.warp_barrier()
    weight = softmax_weight(logits, lane, experts, chosen_smem)
    with lanes.when(lane < experts.used):
        memory.store(as_word(weight), chosen_smem, lane + experts.used)
