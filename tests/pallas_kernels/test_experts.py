"""Products by expert: the reference's tiles, the kernel of CPUs and the GPU's in numpy (lockstep), against
numpy in float64."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    GELU_TANH,
    RELU_SQUARED,
    SILU,
    LayerStack,
    Products,
    QTensor,
    device,
    each_matmul,
    experts_ffn,
    experts_gated,
    experts_matmul,
    route,
    swiglu_oai,
)
from pallas_kernels.experts import int_experts as int_experts
from pallas_kernels.experts.groups import each, rows_of_tile, tiles_of
from tests.pallas_kernels.lockstep import lockstep
from tests.pallas_kernels.stacks import drawn
from tests.pallas_kernels.test_activations import DEFINITIONS

EXPERTS = 6


def chosen_of(rows: int, used: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    found = np.stack([rng.permutation(EXPERTS)[:used] for _ in range(rows)])
    found[rng.random(found.shape) < 0.1] = rng.choice([-1, EXPERTS])  # none
    return found.astype(np.int32)


def expected(x, matrices, chosen, activation=SILU):
    """float64 [rows, used, N], x [rows, K] or [rows, used, K]."""
    out = np.zeros((*chosen.shape, matrices[0].shape[1]))
    for row, of_row in enumerate(chosen):
        for j, e in enumerate(of_row):
            if 0 <= e < EXPERTS:
                v = x[row] if x.ndim == 2 else x[row, j]
                y = [w[e].astype(np.float64) @ v for w in matrices]
                out[row, j] = y[0] if len(y) == 1 else DEFINITIONS[activation](*y)
    return out


@pytest.mark.parametrize("rows, used", [(1, 3), (5, 2), (40, 3), (301, 2)])
def test_tiles_have_every_pair_once_and_of_one_expert(rows, used):
    pairs = chosen_of(rows, used).reshape(-1)
    pairs = np.where((pairs >= 0) & (pairs < EXPERTS), pairs, EXPERTS)
    tiles = jax.device_get(jax.jit(tiles_of, static_argnums=1)(pairs, EXPERTS))
    height = rows_of_tile(pairs.size, EXPERTS)
    assert tiles.pairs.shape == (len(tiles.expert), height)
    of_place = tiles.pairs.reshape(-1)[tiles.places]
    for pair, expert in enumerate(pairs):
        if expert < EXPERTS:
            assert of_place[pair] == pair and tiles.expert[tiles.places[pair] // height] == expert
    pair_places = [tiles.places[pair] for pair, expert in enumerate(pairs) if expert < EXPERTS]
    assert len(set(pair_places)) == len(pair_places)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("activation", [SILU, GELU_TANH], ids=str)
def test_products_of_mixed_stacks_are_float64_s(rows, known, activation):
    """Of a layer that is known and of a traced one; gate and up in one format, down in two."""
    rng, layer = np.random.default_rng(rows), 1
    gate, up = (drawn("q8_0", (2, EXPERTS, 48, 64), seed) for seed in (0, 1))
    downs = [drawn(format, (1, EXPERTS, 64, 64), 2) for format in ("q8_0", "q4_0")]
    stacks = [LayerStack((w.blocks,), ((0, 0), (0, 1))) for w in (gate, up)]
    down = LayerStack(tuple(w.blocks for w in downs), ((0, 0), (1, 0)))
    x = rng.standard_normal((rows, 64)).astype(np.float32)
    h = rng.standard_normal((rows, 3, 64)).astype(np.float32)
    chosen, weights = chosen_of(rows, 3), rng.random((rows, 3)).astype(np.float32)

    @jax.jit
    def run(stacks, down, x, h, chosen, weights, index):
        index = layer if known else index
        return (
            experts_gated(x, *stacks, chosen, index, activation=activation),
            experts_matmul(h, down, chosen, weights, index),
        )

    made, summed = run(stacks, down, x, h, chosen, weights, layer)
    want = expected(x, [gate.dense[1], up.dense[1]], chosen, activation)
    np.testing.assert_allclose(made, want, atol=1e-5)
    each = expected(h, [downs[1].dense[0]], chosen)
    np.testing.assert_allclose(summed, np.einsum("bj,bjn->bn", weights, each), atol=1e-5)


def test_a_router_takes_the_likeliest_and_may_divide_by_their_sum():
    p = np.array([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]], np.float32)
    weights, chosen = route(p, 2, normalized=True)
    np.testing.assert_array_equal(chosen, [[1, 3], [0, 1]])
    np.testing.assert_allclose(weights, [[4 / 7, 3 / 7], [0.5, 0.5]], rtol=1e-6)
    np.testing.assert_array_equal(route(p, 2, normalized=False)[0], np.float32([[0.4, 0.3], [0.25, 0.25]]))
    with pytest.raises(ValueError, match=r"experts_gated: x is \[2, 32\] but experts are 48 x 64"):
        w = drawn("q8_0", (EXPERTS, 48, 64)).blocks
        experts_gated(jnp.zeros((2, 32)), w, w, jnp.zeros((2, 1), jnp.int32))


def test_a_router_s_bias_groups_and_scale():
    """Beside loops in numpy: the bias chooses and does not weigh; a group counts by its two best."""
    rng = np.random.default_rng(0)
    p, bias = rng.random((50, 12)).astype(np.float32), rng.standard_normal(12).astype(np.float32) * 0.3
    weights, chosen = route(p, 3, normalized=True, scale=2.5, bias=bias, groups=4, groups_used=2)
    for token, (row, experts) in enumerate(zip(p, np.asarray(chosen), strict=True)):
        score = row + bias
        group = [np.sort(score[3 * g : 3 * g + 3])[-2:].sum() for g in range(4)]
        inside = [e for g in np.argsort(group)[-2:] for e in range(3 * g, 3 * g + 3)]
        want = sorted(inside, key=lambda e: -score[e])[:3]
        np.testing.assert_array_equal(experts, want)
        np.testing.assert_allclose(weights[token], 2.5 * row[want] / row[want].sum(), rtol=1e-5)
    assert (np.asarray(chosen) != np.asarray(route(p, 3, normalized=True)[1])).any()


def test_biases_of_experts():
    """In both halves; a token without an expert has none of them."""
    rng, chosen = np.random.default_rng(1), chosen_of(7, 3)
    gate, up, down = (drawn("q8_0", (EXPERTS, 64, 64), seed) for seed in range(3))
    x, weights = jnp.array(rng.standard_normal((7, 64))), rng.random((7, 3)).astype(np.float32)
    biases = jnp.array(rng.standard_normal((3, EXPERTS, 64)))
    activation = swiglu_oai()
    made = experts_gated(
        x, gate.blocks, up.blocks, chosen, activation=activation, biases=(biases[0], biases[1])
    )
    summed = experts_matmul(made, down.blocks, chosen, weights, bias=biases[2])
    for token in range(7):
        total = np.zeros(64)
        for j, e in enumerate(chosen[token]):
            hidden = np.zeros(64)
            if 0 <= e < EXPERTS:
                g, u = (
                    w.dense[e].astype(np.float64) @ x[token] + b[e]
                    for w, b in ((gate, biases[0]), (up, biases[1]))
                )
                g, u = np.minimum(g, 7), np.clip(u, -7, 7)
                hidden = g / (1 + np.exp(-1.702 * g)) * (u + 1)
                total += weights[token, j] * (down.dense[e].astype(np.float64) @ hidden + biases[2][e])
            np.testing.assert_allclose(made[token, j], hidden, atol=1e-4)
        np.testing.assert_allclose(summed[token], total, atol=1e-4)


def test_experts_without_a_gate():
    """Beside loops in numpy; a token without an expert has zeros."""
    rng, chosen = np.random.default_rng(2), chosen_of(5, 3)
    up, down = (drawn("q8_0", (EXPERTS, 64, 64), seed) for seed in range(2))
    x, weights = jnp.array(rng.standard_normal((5, 64))), rng.random((5, 3)).astype(np.float32)
    made = experts_gated(x, None, up.blocks, chosen, activation=RELU_SQUARED)
    both = experts_ffn(x, None, up.blocks, down.blocks, chosen, weights, activation=RELU_SQUARED)
    for token in range(5):
        total = np.zeros(64)
        for j, e in enumerate(chosen[token]):
            hidden = np.zeros(64)
            if 0 <= e < EXPERTS:
                hidden = np.maximum(up.dense[e].astype(np.float64) @ x[token], 0) ** 2
                total += weights[token, j] * (down.dense[e].astype(np.float64) @ hidden)
            np.testing.assert_allclose(made[token, j], hidden, atol=1e-4)
        np.testing.assert_allclose(both[token], total, atol=1e-4)
    with pytest.raises(ValueError, match="gate is None; biases need a gate"):
        experts_gated(x, None, up.blocks, chosen, biases=(weights, weights))


CASES = [  # format, N, K, matrices, rows of x, tiles of so many rows, bits, multiprocessors, activation
    ("q4_k", 48, 512, 2, 1, (4, 1), 8, 132),
    ("q6_k", 64, 256, 1, 4, (4, 1), 8, 10),  # two blocks a tile, of two tiles of 16 outputs each
    ("q8_0", 32, 768, 1, 3, (6, 1), 16, 4),  # less than a block a tile
    ("q4_1", 40, 320, 2, 2, (4, 2), 8, 9, GELU_TANH),  # no whole tiles
    ("q4_k", 32, 512, 2, 20, (3, 16), 8, 132, swiglu_oai()),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiles_in_one_launch_are_their_products(case):
    """In lockstep; two have no expert, and the stack has two layers."""
    format, n, k, matrices, rows, shape, bits, blocks, *others = case
    (activation,) = others or (SILU,)
    rng = np.random.default_rng(n)
    x = (rng.integers(-127, 128, (rows, k)) / 64).astype(np.float32)
    x[:, ::16] = 127 / 64  # the largest of every group: 8 bits hold all
    stacks = [drawn(format, (2, EXPERTS, n, k), seed) for seed in range(matrices)]
    experts = rng.integers(0, EXPERTS, shape[0]).astype(np.int32)
    tile_rows = rng.integers(0, rows, shape).astype(np.int32)
    experts[1], experts[2:3] = -1, EXPERTS

    def flat(w: QTensor) -> QTensor:
        fields = {name: field.reshape(-1, *field.shape[2:]) for name, field in w.fields.items()}
        return w.replace(fields=fields, products=Products(activation_bits=bits))

    weights = tuple(flat(w.tiled) for w in stacks)
    gpu = dataclasses.replace(device.GPUS["sm_90"], multiprocessors=blocks)
    with mock.patch.object(device, "default", lambda: gpu), lockstep():
        assert int_experts.most_rows(weights) == 16
        got = int_experts.run(x, weights, experts, tile_rows, EXPERTS, EXPERTS, activation)
    got = np.asarray(got).reshape(*shape, n)
    chosen = np.repeat(experts[:, None], shape[1], axis=1)
    want = expected(x[tile_rows], [w.dense[1] for w in stacks], chosen, activation)
    valid = (experts >= 0) & (experts < EXPERTS)
    assert np.linalg.norm(got[valid] - want[valid]) < 1e-5 * np.linalg.norm(want[valid])


@pytest.mark.parametrize("known", [True, False])
def test_each_matrix_has_an_input_of_its_own(known):
    """Of a stack of two formats, in a layer that is known and in a traced one; and its derivative."""
    stacks = [drawn(format, (1, EXPERTS, 48, 64), 2) for format in ("q8_0", "q4_0")]
    w = LayerStack(tuple(stack.blocks for stack in stacks), ((0, 0), (1, 0)))
    x = np.random.default_rng(0).standard_normal((2, 3, EXPERTS, 64)).astype(np.float32)

    @jax.jit
    def run(x, w, layer):
        return each_matmul(x, w, 1 if known else layer)

    dense = stacks[1].dense[0].astype(np.float64)
    np.testing.assert_allclose(run(x, w, 1), np.einsum("enk,abek->aben", dense, x), atol=1e-5)
    slope = jax.grad(lambda x: run(x, w, 1).sum())(x)
    np.testing.assert_allclose(slope, np.broadcast_to(dense.sum(1), x.shape), atol=1e-5)
    with pytest.raises(ValueError, match=r"x is \[3, 5, 64\] but there are 6 matrices of 48 x 64"):
        each_matmul(x[0, :, 1:], w, 1)


@pytest.mark.parametrize("more", [0, 64, 96])
@pytest.mark.parametrize("rows", [1, 20])
def test_each_matrix_in_one_launch(rows, more):
    """In lockstep, in tiles of up to 16 rows; columns are no whole tile, and behind them may be others."""
    w = drawn("q8_0", (2, EXPERTS, 32, 192), 3)
    x = (np.random.default_rng(rows).integers(-127, 128, (rows, EXPERTS, 192)) / 64).astype(np.float32)
    x[..., ::16] = 127 / 64  # the largest of every group: 8 bits hold all
    gpu = dataclasses.replace(device.GPUS["sm_90"], multiprocessors=20)
    with mock.patch.object(device, "default", lambda: gpu), lockstep():
        tiled = w.tiled.replace(products=Products(((None, "int_decode"),), tiled=True))
        behind = np.full((rows, EXPERTS, more), 1e3, np.float32)
        got = np.asarray(each(np.concatenate([x, behind], axis=-1), tiled, 1))
    expected = np.einsum("enk,rek->ren", w.dense[1].astype(np.float64), x)
    assert np.linalg.norm(got - expected) < 1e-5 * np.linalg.norm(expected)
