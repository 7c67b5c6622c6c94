"""A token's choice of experts by all rules of routers (routing.py), by a warp: probabilities, biases, groups,
and weights. It is part of int_experts.py; `run` is a launch of its own, where XLA would sort all scores, and
take four to six.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.experts.router import LANES, NONE, Experts, chosen_values, softmax_weight, store_largest
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import (
    as_real,
    as_value,
    as_word,
    exp,
    integer,
    maximum,
    minimum,
    not_negative,
    real,
    select,
    total,
)

LEAST_SUM = 2.0**-14  # of weights that are divided by it, as in llama.cpp


class Rules(NamedTuple):
    """How `route` differs from the largest of a softmax; its arguments have these names."""

    gating: Literal["softmax", "sigmoid"] = "softmax"
    scale: float = 1.0
    groups: int = 1
    groups_used: int = 1


PLAIN = Rules()


class Logits(NamedTuple):
    """What tokens choose by: arrays, or their refs in a kernel.

    logits     float32 [T, count]
    positions  int32 [T]; tokens with one below 0 choose -1
    bias       float32 [L, count], added to probabilities for the choice alone; None: there is none
    layer      int32 [1], the index into it
    shared     float32 [T]: the weight of the shared expert is its sigmoid; None: it is 1
    """

    logits: Any
    positions: Any
    bias: Any = None
    layer: Any = None
    shared: Any = None


class Choice(NamedTuple):
    """with_shared  behind the used experts comes the shared one, number `count`"""

    experts: Experts
    rules: Rules = PLAIN
    with_shared: bool = False

    @property
    def columns(self) -> int:
        return self.experts.used + self.with_shared

    def is_plain(self, logits: Logits) -> bool:
        """Whether it is the largest logits, weighted by their softmax."""
        return logits.bias is None and self.rules._replace(scale=1.0) == PLAIN


def refuses_groups(count: int, groups: int) -> str | None:
    """Why lanes cannot compare groups of experts, or None."""
    if groups == 1 or (count % (4 * LANES) == 0 and LANES % groups == 0):
        return None
    return (
        f"{count} experts are in {groups} groups; a group must be the experts of 1, 2, 4, .. of {LANES} lanes"
    )


class Token:
    """One token's choice by `route`, by a warp, of which this is a lane."""

    def __init__(self, token, lane, gmem: Logits, choice: Choice, chosen_smem):
        self.token, self.lane, self.gmem, self.choice = token, lane, gmem, choice
        self.chosen_smem, self.is_plain = chosen_smem, choice.is_plain(gmem)
        (experts, rules, _), each = choice, choice.experts.logits // LANES
        numbers = [lane * each + i for i in range(each)]
        places = [minimum(n, experts.count - 1) for n in numbers]
        loaded = [memory.load(gmem.logits, token, place) for place in places]
        self.is_token = not_negative(memory.load(gmem.positions, token))
        if gmem.bias is not None:
            layer = memory.load(gmem.layer, 0)
            biases = [memory.load(gmem.bias, layer, place) for place in places]
        exists = [n < experts.count for n in numbers]
        self.values = self.scores = [select(e, v, NONE) for e, v in zip(exists, loaded, strict=True)]
        if self.is_plain:
            return
        self.values = self.scores = probabilities_of(self.values, rules)
        if gmem.bias is not None:
            self.scores = [p + bias for p, bias in zip(self.values, biases, strict=True)]
        self.scores = [select(e, v, NONE) for e, v in zip(exists, self.scores, strict=True)]
        if rules.groups > 1:
            self.scores = in_best_groups(self.scores, lane, rules)

    def store_numbers(self):
        """To shared memory, those of all columns, for other warps behind a barrier; -1 for padding."""
        used = self.choice.experts.used
        store_largest(self.scores, self.lane, self.choice.experts, self.chosen_smem)
        if self.choice.with_shared:
            with lanes.when(self.lane == 0):
                memory.store(integer(self.choice.experts.count), self.chosen_smem, used)
        lanes.warp_barrier()

    def number(self, column):
        """Behind that barrier."""
        return select(self.is_token, memory.load(self.chosen_smem, column), -1)

    def store(self, weights_gmem, chosen_gmem):
        """The token's row of both, after `store_numbers`."""
        experts, rules, with_shared = self.choice
        with lanes.when(self.lane < experts.used):
            memory.store(self.number(self.lane), chosen_gmem, self.token, self.lane)
        weight = self._weight()
        with lanes.when(self.lane < experts.used):
            memory.store(
                weight if rules.scale == 1 else weight * rules.scale, weights_gmem, self.token, self.lane
            )
        if with_shared:
            with lanes.when(self.lane == 0):
                shared = self.gmem.shared
                weight = real(1) if shared is None else sigmoid(memory.load(shared, self.token))
                memory.store(weight, weights_gmem, self.token, experts.used)
                memory.store(self.number(experts.used), chosen_gmem, self.token, experts.used)

    def _weight(self):
        """Of the lane's chosen expert."""
        experts = self.choice.experts
        if self.is_plain:
            return softmax_weight(self.values, self.lane, experts, self.chosen_smem)
        weight = chosen_values(self.values, self.lane, experts, self.chosen_smem)
        if not experts.normalized:
            return weight
        return weight / maximum(lanes.warp_sum_real(select(self.lane < experts.used, weight, 0.0)), LEAST_SUM)


def probabilities_of(logits: list, rules: Rules) -> list:
    """A sigmoid of each logit, or the softmax over all lanes'."""
    if rules.gating == "sigmoid":
        return [sigmoid(v) for v in logits]
    most = lanes.largest_of_warp(functools.reduce(maximum, logits))
    powers = [exp(v - most) for v in logits]
    divided_by = lanes.warp_sum_real(total(powers))
    return [power / divided_by for power in powers]


def in_best_groups(scores: list, lane, rules: Rules) -> list:
    """The same scores, NONE outside of the groups that are used: those with the largest sums of their two
    best. A group is some neighbouring lanes' (`refuses_groups`)."""
    first, second = scores[0], real(NONE)
    for score in scores[1:]:
        first, second = maximum(first, score), maximum(second, minimum(first, score))
    lanes_of_group, distance = LANES // rules.groups, 1
    while distance < lanes_of_group:
        other, next_of_other = (as_value(lanes.swapped(v, distance)) for v in (first, second))
        first, second = maximum(first, other), maximum(minimum(first, other), maximum(second, next_of_other))
        distance *= 2
    own, group, better = first + second, lane // lanes_of_group, integer(0)
    for g in range(rules.groups):
        other = as_real(lanes.from_lane(as_word(own), integer(g * lanes_of_group)))
        before = (other > own) | ((other == own) & (group > g))
        better = better + select(before, 1, 0)
    return [select(better < rules.groups_used, score, NONE) for score in scores]


def sigmoid(x):
    return real(1) / (exp(-x) + 1.0)


def results(tokens: int, choice: Choice) -> dict[str, jax.ShapeDtypeStruct]:
    """Those of a launch that chooses."""
    shape = tokens, choice.columns
    return {
        "weights_gmem": jax.ShapeDtypeStruct(shape, jnp.float32),
        "chosen_gmem": jax.ShapeDtypeStruct(shape, jnp.int32),
    }


def run(logits: Logits, choice: Choice):
    """(weights, chosen) of tokens [*batch], with a launch for each entry of vmap."""
    batch = logits.positions.shape
    flat = logits._replace(
        logits=logits.logits.reshape(-1, choice.experts.count), positions=logits.positions.reshape(-1)
    )
    both = jax.custom_batching.sequential_vmap(functools.partial(route, choice=choice))(flat)
    return tuple(y.reshape(*batch, choice.columns) for y in both)


@functools.partial(jax.jit, static_argnames="choice")
def route(logits: Logits, *, choice: Choice) -> tuple[jax.Array, jax.Array]:
    """(weights float32 [T, columns], chosen int32 [T, columns]) of each token, the likeliest expert first.

    weights, chosen = routing.route(p, used, ..),  p = softmax(logits), or the sigmoid of each

    Of equal scores the lower index comes first. At most 32 experts are used (refusals.py).
    """
    (tokens,) = logits.positions.shape
    return launch(
        functools.partial(_body, choice=choice),
        {"logits_gmem": logits},
        results(tokens, choice),
        name="route",
        blocks=tokens,
        threads=128,
        scratch={"chosen_smem": plgpu.SMEM((choice.columns,), jnp.int32)},
    )


def _body(logits_gmem: Logits, weights_gmem, chosen_gmem, chosen_smem, *, choice: Choice):
    thread = integer(lanes.thread())
    with lanes.when(thread < LANES):
        token = Token(integer(lanes.block()), thread % LANES, logits_gmem, choice, chosen_smem)
        token.store_numbers()
        token.store(weights_gmem, chosen_gmem)
