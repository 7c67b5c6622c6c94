"""The choice of experts by one warp, in numpy (lockstep), against `route` of a softmax."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device, route
from pallas_kernels.experts import route_logits, router
from pallas_kernels.experts.router import Experts
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
        weights, chosen = router.route(logits, positions, experts=experts, scale=scale)
    p = jax.nn.softmax(logits, axis=-1)
    want_weights, want = route(p, used, normalized=normalized, scale=scale)
    np.testing.assert_array_equal(chosen, np.where(positions[:, None] >= 0, want, -1))
    np.testing.assert_allclose(weights, want_weights, rtol=1e-5)


def test_reads_numbers_that_are_none_without_leaving_the_experts():
    """A logit that is NaN: some experts, all of which there are."""
    logits = np.full((1, 40), np.nan, np.float32)
    with lockstep():
        _, chosen = router.route(logits, np.zeros(1, np.int32), experts=Experts(40, 4, True))
    assert ((np.asarray(chosen) >= 0) & (np.asarray(chosen) < 40)).all()


def kernel_for(**more) -> str:
    return choose(Route(**{"platform": "sm_90", "count": 256, "used": 8, "kernel": "int_decode"} | more))


def test_only_softmax_s_largest_are_the_kernel_s():
    assert kernel_for() == "route"
    others = {"kernel": "reference"}, {"gating": "sigmoid"}, {"adjusted": True}, {"used": 33}
    for other in others:
        assert kernel_for(**other) == "reference"
    assert choose(Route("cpu", 256, 8, "int_decode")) == "reference"


def test_gradients_are_those_of_the_reference_and_padding_chooses_none():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 16)), jnp.float32)
    positions, used = jnp.asarray([[0, 1, -1], [4, 5, 6]]), 3

    def loss(logits, kernel):
        weights, chosen = route_logits(logits, positions, used, kernel=kernel, normalized=False)
        return (weights * jnp.arange(1, 1 + used)).sum(), chosen

    by = lambda logits, positions, used, normalized, scale: router_definition(logits, positions, used)  # noqa: E731
    (want, chosen), gradient = jax.value_and_grad(loss, has_aux=True)(logits, "reference")
    assert (chosen[0, 2] == -1).all() and (chosen[1] >= 0).all()
    with (
        mock.patch.object(device, "default", lambda: device.GPUS["sm_90"]),
        mock.patch.object(router, "run", by),
    ):
        (got, by_kernel), same = jax.value_and_grad(loss, has_aux=True)(logits, "int_decode")
    np.testing.assert_array_equal(by_kernel, chosen)
    np.testing.assert_allclose([got, 1], [want, 1], rtol=1e-6)
    np.testing.assert_array_equal(same, gradient)


def router_definition(logits, positions, used):
    """The kernel's results, without derivatives."""
    weights, chosen = route(jax.lax.stop_gradient(jax.nn.softmax(logits, axis=-1)), used, normalized=False)
    return weights, jnp.where(positions[..., None] >= 0, chosen, -1)
