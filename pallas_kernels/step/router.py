"""Which experts a token has, of all logits of a router: by a warp, of which a lane has as many neighbouring
logits as any other."""

import functools
import operator
from typing import NamedTuple

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import (
    as_word,
    exp,
    from_ordered,
    integer,
    maximum,
    minimum,
    ordered,
    real,
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


def choose(logits: list, lane, experts: Experts, chosen_smem):
    """The used experts' numbers, the likeliest first, and behind them the bits of their weights, into shared
    memory. Of equal logits the lower number comes first.

    logits  of this lane, from number lane * len(logits) on
    """
    keys, logit, largest = [ordered(v) for v in logits], real(0), real(0)
    for j in range(experts.used):
        top = lanes.warp_max(functools.reduce(maximum, keys))
        is_top = [key == top for key in keys]
        with_top = lanes.ballot(functools.reduce(operator.or_, is_top))
        first_lane = with_top & (0 - with_top) == integer(1) << lane
        place = integer(0)
        for i in reversed(range(len(keys))):
            place = select(is_top[i], i, place)
        with lanes.when(first_lane):
            number = minimum(lane * len(keys) + place, experts.count - 1)
            memory.store(number, chosen_smem, j)
        keys = [select(first_lane & (place == i), 0, key) for i, key in enumerate(keys)]
        value = from_ordered(top)
        largest = value if j == 0 else largest
        logit = select(lane == j, value, logit)
    used = lane < experts.used
    weight = select(used, exp(logit - largest), 0.0)
    divided_by = weight if experts.normalized else total([exp(v - largest) for v in logits])
    weight = weight / lanes.warp_sum_real(divided_by)
    with lanes.when(used):
        memory.store(as_word(weight), chosen_smem, lane + experts.used)
