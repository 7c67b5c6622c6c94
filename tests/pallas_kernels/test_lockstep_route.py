"""The choice of experts by one warp, in numpy (lockstep), against `route` of a softmax."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device, route
from pallas_kernels.experts import choice as choices
from pallas_kernels.experts import route_logits
from pallas_kernels.experts.choice import Choice, Experts, Logits, Rules
from pallas_kernels.problems import Route
from pallas_kernels.selection import choose
from tests.pallas_kernels.lockstep import lockstep


@pytest.mark.parametrize(
    ("tokens", "count", "used", "normalized", "scale"),
    [
        (1, 256, 8, True, 1.0),
        (3, 32, 4, True, 2.5),
        (5, 60, 6, False, 1.0),
        (2, 130, 1, True, 1.0),
        (2, 5, 5, False, 1.0),
    ],
)
@pytest.mark.parametrize("rows", ["random", "twins", "zeros"])
def test_the_choice_is_that_of_a_sort(tokens, count, used, normalized, scale, rows):
    rng = np.random.default_rng(count)
    logits = (3 * rng.standard_normal((tokens, count))).astype(np.float32)
    if rows == "twins":
        logits[:, 1::2] = logits[:, : count - count % 2 : 2]  # the lower index comes first
    if rows == "zeros":
        logits[:] = 0
    positions = np.arange(tokens, dtype=np.int32)
    positions[1:2] = -1
    experts = Experts(count, used, normalized)
    with lockstep():
        choice = Choice(experts, Rules(scale=scale))
        weights, chosen = choices.route(Logits(logits, positions), choice=choice)
    p = jax.nn.softmax(logits, axis=-1)
    want_weights, want = route(p, used, normalized=normalized, scale=scale)
    np.testing.assert_array_equal(chosen, np.where(positions[:, None] >= 0, want, -1))
    np.testing.assert_allclose(weights, want_weights, rtol=1e-5)


def by_numpy(logits, used, *, gating, normalized, scale, bias, groups, groups_used):
    """(weights, chosen) in float64, experts one after the other."""
    logits = logits.astype(np.float64)
    p = 1 / (1 + np.exp(-logits))
    if gating == "softmax":
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
    weights, chosen = [], []
    for row in p:
        score = row if bias is None else row + bias
        size = len(row) // groups
        two_best = [np.sort(score[g * size : g * size + size])[-2:].sum() for g in range(groups)]
        best = sorted(range(groups), key=lambda g: (-two_best[g], g))[:groups_used]
        inside = [e for e in range(len(row)) if e // size in best]
        chosen.append(sorted(inside, key=lambda e: (-score[e], e))[:used])
        own = row[chosen[-1]]
        weights.append(scale * (own / max(own.sum(), 2.0**-14) if normalized else own))
    return np.array(weights), np.array(chosen)


SCORES = [  # tokens, experts, used, gating, normalized, scale, whether there is a bias, groups, groups used
    (2, 64, 4, "sigmoid", True, 1.8, True, 1, 1),  # GLM-4.7-Flash
    (2, 256, 8, "sigmoid", True, 2.5, True, 8, 4),  # DeepSeek V3
    (1, 160, 6, "softmax", False, 16.0, False, 1, 1),
    (2, 128, 6, "softmax", False, 1.0, False, 4, 2),
    (1, 128, 32, "sigmoid", False, 1.0, False, 32, 16),
    (3, 60, 6, "softmax", True, 1.0, True, 1, 1),  # ERNIE 4.5
]


@pytest.mark.parametrize("case", SCORES, ids=str)
@pytest.mark.parametrize("twins", [False, True])
@pytest.mark.parametrize("shared", [None, "one", "sigmoid"])
def test_the_choice_by_probabilities_biases_and_groups(case, twins, shared):
    """Of equal scores the lower index comes first; the shared expert is the last of a token's."""
    tokens, count, used, gating, normalized, scale, biased, groups, groups_used = case
    rng = np.random.default_rng(count + used)
    logits = (2 * rng.standard_normal((tokens, count))).astype(np.float32)
    bias = rng.standard_normal(count).astype(np.float32) if biased else None
    if twins:
        logits[:, 1::2] = logits[:, ::2]
        bias = None if bias is None else np.repeat(bias[::2], 2)
    positions = np.arange(tokens, dtype=np.int32)
    positions[1:2] = -1
    shared_logits = rng.standard_normal(tokens).astype(np.float32) if shared == "sigmoid" else None
    with lockstep():
        rules = Rules(gating, scale, groups, groups_used)
        choice = Choice(Experts(count, used, normalized), rules, shared is not None)
        by_layer = (None, None) if bias is None else (np.stack([-bias, bias]), np.ones(1, np.int32))
        weights, chosen = choices.route(Logits(logits, positions, *by_layer, shared_logits), choice=choice)
    want_weights, want = by_numpy(
        logits, used, gating=gating, normalized=normalized, scale=scale, bias=bias, groups=groups,
        groups_used=groups_used,
    )  # fmt: skip
    if shared is not None:
        last = (
            np.ones(tokens) if shared_logits is None else 1 / (1 + np.exp(-shared_logits.astype(np.float64)))
        )
        want_weights = np.concatenate([want_weights, last[:, None]], axis=1)
        want = np.concatenate([want, np.full((tokens, 1), count)], axis=1)
    np.testing.assert_array_equal(chosen, np.where(positions[:, None] >= 0, want, -1))
    np.testing.assert_allclose(weights, want_weights, rtol=1e-5)


def test_reads_numbers_that_are_none_without_leaving_the_experts():
    """A logit that is NaN: some experts, all of which there are."""
    logits = np.full((1, 40), np.nan, np.float32)
    with lockstep():
        given = Logits(logits, np.zeros(1, np.int32))
        _, chosen = choices.route(given, choice=Choice(Experts(40, 4, True)))
    assert ((np.asarray(chosen) >= 0) & (np.asarray(chosen) < 40)).all()


def kernel_for(**more) -> str:
    return choose(Route(**{"platform": "sm_90", "count": 256, "used": 8, "kernel": "int_decode"} | more))


def test_what_the_kernel_refuses():
    assert kernel_for() == kernel_for(groups=8) == kernel_for(count=60) == "route"
    others = {"kernel": "reference"}, {"groups": 64}, {"groups": 8, "count": 160}, {"used": 33}
    for other in others:
        assert kernel_for(**other) == "reference"
    assert choose(Route("cpu", 256, 8, "int_decode")) == "reference"


def test_gradients_are_those_of_the_reference_and_padding_chooses_none():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 16)), jnp.float32)
    positions, used = jnp.asarray([[0, 1, -1], [4, 5, 6]]), 3

    def loss(logits, kernel):
        weights, chosen = route_logits(logits, positions, used, kernel=kernel, normalized=False)
        return (weights * jnp.arange(1, 1 + used)).sum(), chosen

    by = lambda given, choice: router_definition(given.logits, given.positions, used)  # noqa: E731
    (want, chosen), gradient = jax.value_and_grad(loss, has_aux=True)(logits, "reference")
    assert (chosen[0, 2] == -1).all() and (chosen[1] >= 0).all()
    with (
        mock.patch.object(device, "default", lambda: device.GPUS["sm_90"]),
        mock.patch.object(choices, "run", by),
    ):
        (got, by_kernel), same = jax.value_and_grad(loss, has_aux=True)(logits, "int_decode")
    np.testing.assert_array_equal(by_kernel, chosen)
    np.testing.assert_allclose([got, 1], [want, 1], rtol=1e-6)
    np.testing.assert_array_equal(same, gradient)


def router_definition(logits, positions, used):
    """The kernel's results, without derivatives."""
    weights, chosen = route(jax.lax.stop_gradient(jax.nn.softmax(logits, axis=-1)), used, normalized=False)
    return weights, jnp.where(positions[..., None] >= 0, chosen, -1)
