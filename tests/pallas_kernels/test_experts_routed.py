"""The choice of experts inside of their first product, and the shared expert as one of the chosen, in numpy
(lockstep), against float64."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import GELU_TANH, SILU, LayerStack, Products, device
from pallas_kernels.experts import Normed, can_route, route_logits, routed_ffn
from pallas_kernels.experts import int_experts as int_experts
from tests.pallas_kernels.lockstep import lockstep
from tests.pallas_kernels.stacks import drawn
from tests.pallas_kernels.test_activations import DEFINITIONS

EXPERTS, HIDDEN, FFN = 6, 512, 256
BITS_16 = Products(((None, "int_decode"),), activation_bits=16, tiled=True)


def layers_of(formats_of_down=("q6_k", "q4_k"), shared_down=("q6_k", "q4_k"), products=BITS_16):
    """Gate, up and down of a layer's experts and of its shared one, stacked by format, with their values: of
    down the layers differ."""

    def stack(formats, lead, n, k, seed):
        parts, where, dense = [], [], []
        for format in dict.fromkeys(formats):
            own = [layer for layer, name in enumerate(formats) if name == format]
            w = drawn(format, (len(own), *lead, n, k), seed)
            parts.append(w.tiled.replace(products=products))
            dense.append(w.dense.astype(np.float64))
        for layer, format in enumerate(formats):
            where.append((list(dict.fromkeys(formats)).index(format), formats[:layer].count(format)))
        return LayerStack(tuple(parts), tuple(where)), [dense[part][at] for part, at in where]

    both = ("q4_k", "q4_k")
    sizes = (both, FFN, HIDDEN), (both, FFN, HIDDEN), (formats_of_down, HIDDEN, FFN)
    experts = [stack(formats, (EXPERTS,), n, k, i) for i, (formats, n, k) in enumerate(sizes)]
    sizes = *sizes[:2], (shared_down, HIDDEN, FFN)
    shared = [stack(formats, (), n, k, 3 + i) for i, (formats, n, k) in enumerate(sizes)]
    return experts, shared


def expected(n, row, chosen, weights, experts, shared, layer, activation):
    """float64 [tokens, HIDDEN]; chosen, weights: without the shared expert."""
    out = np.zeros((len(n), HIDDEN))
    for token, numbers in enumerate(chosen):
        if numbers[0] < 0:
            continue
        pairs = [(weight, [dense[layer][e] for _, dense in experts])
                 for e, weight in zip(numbers, weights[token], strict=True)]  # fmt: skip
        if shared is not None:
            s = 1 if row is None else 1 / (1 + np.exp(-row[token]))
            pairs.append((s, [dense[layer] for _, dense in shared]))
        v = n[token].astype(np.float64)
        for weight, (gate, up, down) in pairs:
            out[token] += weight * (down @ DEFINITIONS[activation](gate @ v, up @ v))
    return out


def stacks_of(matrices):
    return tuple(w for w, _ in matrices)


def made_of(tokens: int, seed: int = 0) -> Normed:
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal((tokens, *shape)).astype(np.float32)  # noqa: E731
    return Normed(draw(HIDDEN), draw(EXPERTS), draw())


RULES = {"normalized": True, "gating": "sigmoid", "scale": 1.8}


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("with_shared", ["none", "whole", "sigmoid"])
@pytest.mark.parametrize(("tokens", "activation"), [(1, SILU), (3, GELU_TANH)], ids=str)
def test_both_launches_are_float64_s(tokens, activation, with_shared, layer):
    """Layers whose down differs in format; a token of padding."""
    experts, shared = layers_of()
    made = made_of(tokens)
    if with_shared != "sigmoid":
        made = made._replace(row=None)
    positions = np.array([3, -1, 0], np.int32)[:tokens]
    bias = np.linspace(-1, 1, EXPERTS).astype(np.float32)
    stacks, others = stacks_of(experts), None if with_shared == "none" else stacks_of(shared)
    gpu = dataclasses.replace(device.GPUS["sm_90"], multiprocessors=9)
    with mock.patch.object(device, "default", lambda: gpu), lockstep():
        assert can_route(stacks, others, layer, tokens, 2)
        got = routed_ffn(
            made,
            positions,
            stacks,
            others,
            layer,
            2,
            biases=np.stack([-bias, bias])[[1 - layer, layer]],
            activation=activation,
            **RULES,
        )
    weights, chosen = route_logits(made.logits, positions, 2, kernel="reference", bias=bias, **RULES)
    used_shared = None if others is None else shared
    want = expected(
        made.normed, made.row, chosen, np.float64(weights), experts, used_shared, layer, activation
    )
    assert np.linalg.norm(got - want) < 1e-4 * np.linalg.norm(want)
    np.testing.assert_array_equal(got[1:2], 0)


def test_derivatives_are_those_of_products_one_by_one():
    """The kernels' value is 0 here, the derivative that of a sum in float32."""
    experts, shared = layers_of(products=Products())
    stacks, others, made = stacks_of(experts), stacks_of(shared), made_of(2)
    made = Normed(*map(jnp.asarray, made))
    positions = np.array([0, 5])

    def composed(made):
        weights, chosen = route_logits(made.logits, positions, 2, kernel="reference", normalized=True)
        chosen, total = jax.lax.stop_gradient(chosen), 0.0
        for token in range(2):
            pairs = [
                (jax.nn.sigmoid(made.row[token]), [jnp.asarray(dense[1], jnp.float32) for _, dense in shared])
            ]
            for j in range(2):
                one = [jnp.asarray(dense[1], jnp.float32)[chosen[token, j]] for _, dense in experts]
                pairs.append((weights[token, j], one))
            n = made.normed[token]
            for weight, (gate, up, down) in pairs:
                total += (weight * (down @ (jax.nn.silu(gate @ n) * (up @ n)))).sum()
        return total

    def chooses(x, weights, logits, choice, *_):
        pairs = len(x) * choice.columns
        chosen = jnp.zeros((len(x), choice.columns))
        return jnp.zeros((pairs, FFN)), chosen, chosen.astype(jnp.int32)

    zeros = lambda x, weights, pairs, *_, **__: jnp.zeros((len(pairs), weights[0].shape[0]))  # noqa: E731
    with (
        mock.patch.object(int_experts, "run", zeros),
        mock.patch.object(int_experts, "run_and_choose", chooses),
    ):
        by_op = lambda made: routed_ffn(made, positions, stacks, others, 1, 2, normalized=True).sum()  # noqa: E731
        value, gradients = jax.value_and_grad(by_op)(made)
    assert value == 0
    want = jax.grad(composed)(made)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), gradients, want)


def test_which_layers_and_how_many_tokens():
    experts, shared = layers_of(shared_down=("q6_k", "q5_k"))
    stacks, others, gpu = stacks_of(experts), stacks_of(shared), device.GPUS["sm_90"]
    with mock.patch.object(device, "default", lambda: gpu):
        assert can_route(stacks, others, 0, 1, 2) and can_route(stacks, None, 1, 5, 2)
        assert not can_route(stacks, others, 1, 1, 2)  # another format
        assert not can_route(stacks, None, jnp.asarray(0), 1, 2)  # known at run time
        assert not can_route(stacks, others, 0, 5, 1)  # many tokens for a shared one
        assert not can_route(stacks, None, 0, 6, 2)  # several rows to a tile
        assert not can_route((None, *stacks[1:]), None, 0, 1, 2)  # no gate
        assert not can_route(stacks, None, 0, 1, 2, groups=3)  # the choice is the reference's
