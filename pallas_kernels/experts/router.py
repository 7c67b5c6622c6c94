"""A token's experts, from the logits of its router: softmax, the choice and the weights, by a warp.

A lane has as many neighbouring logits as any other. The number of the largest logit is stored, that logit is
left out, and so on. Steps of one launch have this in them (step/experts_layers.py); `run` is a launch of its
own, where XLA would sort all logits and take four.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import (
    as_real,
    as_word,
    exp,
    from_ordered,
    integer,
    maximum,
    minimum,
    not_negative,
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


def run(logits, positions, used: int, normalized: bool, scale: float):
    """As api.route_logits, with a launch for each entry of vmap."""
    kernel = functools.partial(route, experts=Experts(logits.shape[-1], used, normalized), scale=scale)
    tokens = logits.reshape(-1, logits.shape[-1])
    weights, chosen = jax.custom_batching.sequential_vmap(kernel)(tokens, positions.reshape(-1))
    shape = (*logits.shape[:-1], used)
    return weights.reshape(shape), chosen.reshape(shape)


@functools.partial(jax.jit, static_argnames=("experts", "scale"))
def route(
    logits: jax.Array, positions: jax.Array, *, experts: Experts, scale: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """(weights float32 [T, used], chosen int32 [T, used]) of each token, the likeliest expert first.

    weights, chosen = the `used` largest of softmax(logits);  scale * weights / sum(weights) where normalized

    logits     float32 [T, count]
    positions  int32 [T]; tokens with one below 0 choose -1
    Of equal logits the lower index comes first. At most 32 experts are used (refusals.py).
    """
    tokens = logits.shape[0]
    return launch(
        functools.partial(_body, experts=experts, scale=scale),
        {"logits_gmem": logits, "positions_gmem": positions},
        {
            "weights_gmem": jax.ShapeDtypeStruct((tokens, experts.used), jnp.float32),
            "chosen_gmem": jax.ShapeDtypeStruct((tokens, experts.used), jnp.int32),
        },
        name="route",
        blocks=tokens,
        threads=128,
        scratch={"chosen_smem": plgpu.SMEM((2 * experts.used,), jnp.int32)},
    )


def _body(logits_gmem, positions_gmem, weights_gmem, chosen_gmem, chosen_smem, *, experts: Experts, scale):
    token, thread = integer(lanes.block()), integer(lanes.thread())
    lane, each = thread % LANES, experts.logits // LANES
    with lanes.when(thread < LANES):
        is_token = not_negative(memory.load(positions_gmem, token))
        numbers = [lane * each + i for i in range(each)]
        loaded = [memory.load(logits_gmem, token, minimum(n, experts.count - 1)) for n in numbers]
        logits = [select(n < experts.count, v, NONE) for n, v in zip(numbers, loaded, strict=True)]
        choose(logits, lane, experts, chosen_smem)
        lanes.warp_barrier()
        with lanes.when(lane < experts.used):
            weight = as_real(memory.load(chosen_smem, lane + experts.used))
            memory.store(weight if scale == 1 else weight * scale, weights_gmem, token, lane)
            chosen = select(is_token, memory.load(chosen_smem, lane), -1)
            memory.store(chosen, chosen_gmem, token, lane)
