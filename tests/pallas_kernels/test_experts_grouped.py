"""Experts of a prefill: places and tiles, rows at their places, and the feed-forward made of them, in numpy
(lockstep), with the GEMM's own definition in the place of the GEMM, which only a GPU runs."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    GELU_TANH,
    SILU,
    LayerStack,
    Products,
    QTensor,
    dequantize,
    device,
    experts_ffn,
    formats,
)
from pallas_kernels.activations import swiglu_oai
from pallas_kernels.experts import api, grouped, grouped_decode, places
from pallas_kernels.matmul.int_mma import activations_float16
from pallas_kernels.matmul.int_mma import float16 as int_float16
from pallas_kernels.matmul.int_mma import prefill_plan as int_prefill_plan
from tests.pallas_kernels.lockstep import lockstep
from tests.pallas_kernels.stacks import drawn
from tests.pallas_kernels.test_activations import DEFINITIONS
from tests.pallas_kernels.test_experts import expected
from tests.pallas_kernels.test_gemm import in_group_order, tile_words

EXPERTS = 6


def routed(how: str, tokens: int, used: int, experts: int = EXPERTS) -> np.ndarray:
    rng = np.random.default_rng(tokens)
    chosen = rng.permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)[:, :used]
    match how:
        case "one has all":
            chosen[:, 0] = 3
        case "some have none":
            chosen = chosen % 2 + 2
        case "padding":
            chosen[rng.random(chosen.shape) < 0.3] = -1
            chosen[-1] = experts
    return chosen.astype(np.int32)


ROUTINGS = ["even", "one has all", "some have none", "padding"]


@pytest.mark.parametrize("how", ROUTINGS)
@pytest.mark.parametrize(("tokens", "used", "experts", "most", "step"), [
    (512, 8, 128, 48, 16), (7, 3, 6, 16, 16), (173, 2, 6, 32, 32), (700, 2, 40, 64, 1), (32, 8, 128, 4, 4),
])  # fmt: skip
def test_pairs_have_places_by_expert_and_tiles_that_cover_them(how, tokens, used, experts, most, step):
    chosen = routed(how, tokens, used, experts).reshape(-1)
    with lockstep():
        found = places.expert_places(chosen, experts=experts, tokens=most, step=step, used=used)
    got, tiles, count, rows = map(np.asarray, found)
    want, listed, first = np.full(chosen.size, -1), [], 0
    for expert in range(experts):
        own = np.flatnonzero(chosen == expert)
        want[own] = first + np.arange(len(own))
        listed += [(expert, first + i, first + len(own)) for i in range(0, len(own), most)]
        first += -(-len(own) // step) * step
    np.testing.assert_array_equal(got, want)
    assert count == len(listed) <= len(tiles) and first <= places.rows_of(chosen.size, experts, step)
    np.testing.assert_array_equal(tiles[: len(listed)], listed)
    assert (tiles[len(listed) :, 0] == -1).all()
    tokens_of_rows = np.zeros(first, np.int32)
    tokens_of_rows[want[want >= 0]] = np.flatnonzero(want >= 0) // used
    np.testing.assert_array_equal(rows[:first], tokens_of_rows)


def test_more_experts_than_threads_are_refused():
    with pytest.raises(NotImplementedError, match="1025 experts; the kernel has a thread for each of up to"):
        places.expert_places(jnp.zeros(64, jnp.int32), experts=1025, tokens=16, step=16)


@pytest.mark.parametrize("group", [16, 32])
def test_a_row_is_at_all_of_its_places(group):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 288)).astype(np.float32)
    at = rng.permutation(24)[:15].reshape(5, 3).astype(np.int32)
    at[2, 1] = -1
    with lockstep():
        rows, scales = activations_float16.activations_float16(x, group=group)
        got, got_scales = activations_float16.activations_float16(x, places=at, group=group, rows=24)
    for token, copy in np.ndindex(*at.shape):
        if at[token, copy] >= 0:
            np.testing.assert_array_equal(got[at[token, copy]], rows[token])
            assert got_scales[at[token, copy]] == scales[token]
    free = np.setdiff1d(np.arange(24), at)
    assert np.isnan(np.asarray(got_scales)[free]).all()  # as numpy's kernel begins


def gemm_as_defined(a, scale, fields, layer, n, residual, listed, *, format, activation, tiles_of, **_):
    """int_prefill_sm90 of tiles from a list; NaN in rows of none."""
    (tiles, count), group = map(np.asarray, listed), formats.get(format).LANES.group
    y, k = np.full((len(a), n), np.nan, np.float32), a.shape[1]
    dense = [dequantize(QTensor(of, format, (n, k), tiled=True)) for of in fields]
    for expert, begin, end in tiles[: count[0]]:
        rows = slice(begin, min(begin + tiles_of.tokens, end))
        x = np.asarray(a[rows], np.float64) * np.asarray(scale[rows], np.float64)[:, None]
        own = [in_group_order(np.asarray(w[layer * EXPERTS + expert], np.float64), group) for w in dense]
        each = [x @ w.T for w in own]
        y[rows] = each[0] if len(each) == 1 else DEFINITIONS[activation](*each)
    return jnp.asarray(y)


def taken(w: QTensor) -> QTensor:
    kernels = ((8, "int_decode"), (None, "int_prefill_sm90"))
    return w.replace(products=Products(kernels, activation_bits=16))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("how", ROUTINGS)
@pytest.mark.parametrize(
    ("by", "batch"), [(grouped, (5, 10)), (grouped_decode, (5, 10)), (grouped_decode, (3, 3))]
)
def test_the_feed_forward_is_float64_s(how, biased, by, batch):
    """Of the second of two layers, down in another format than in the first. With 16 bits. Large steps have
    tiles of 8 pairs with 50 tokens, and of 4 with 9."""
    activation = swiglu_oai() if biased else GELU_TANH if how == "even" else SILU
    tokens, k, ffn = batch[0] * batch[1], 256, 512
    rng = np.random.default_rng(0)
    gate, up = (drawn("q4_k", (2, EXPERTS, ffn, k), seed) for seed in (0, 1))
    downs = [drawn(format, (1, EXPERTS, k, ffn), 2) for format in ("q4_k", "q6_k")]
    x = rng.standard_normal((*batch, k)).astype(np.float32)
    chosen = routed(how, tokens, 2)
    weights = rng.random((*batch, 2)).astype(np.float32)
    biases = None
    if biased:
        biases = tuple(rng.standard_normal((EXPERTS, n)).astype(np.float32) for n in (ffn, ffn, k))
    stacks = [LayerStack((taken(w.tiled),), ((0, 0), (0, 1))) for w in (gate, up)]
    stacks.append(LayerStack(tuple(taken(w.tiled) for w in downs), ((0, 0), (1, 0))))
    gpu = mock.patch.object(device, "default", lambda: device.GPUS["sm_90"])
    rest = chosen.reshape(*batch, 2), weights, 1, activation, jax.tree.map(jnp.asarray, biases)
    with mock.patch.object(grouped, "int_prefill_sm90", gemm_as_defined), gpu, lockstep():
        got = by.feed_forward(x, tuple(stacks), *rest)

    def plus(y, number):
        """With the bias of each pair's expert."""
        has_one = (chosen >= 0) & (chosen < EXPERTS)
        bias = 0.0 if biases is None else biases[number][np.clip(chosen, 0, EXPERTS - 1)]
        return np.where(has_one[..., None], y + bias, 0.0)

    products = (expected(x.reshape(-1, k), [w.dense[1]], chosen) for w in (gate, up))
    hidden = DEFINITIONS[activation](*(plus(y, number) for number, y in enumerate(products)))
    each = plus(expected(hidden, [downs[1].dense[0]], chosen), 2)
    want = np.einsum("bj,bjn->bn", weights.reshape(-1, 2), each).reshape(*batch, k)
    assert np.linalg.norm(got - want) < 1e-3 * np.linalg.norm(want)
    if how == "padding":  # the last token has no expert
        assert not np.asarray(got)[-1, -1].any()


def test_many_rows_on_hopper_and_only_those_go_sorted():
    """Others by the two halves."""

    def w(columns):
        return [drawn("q4_k", (EXPERTS, 256, columns), seed).tiled for seed in range(3)]

    def by(rows, platform, matrices) -> str:
        called = []

        def of(module):
            take = lambda x, *_: called.append(module) or x[:, :256]  # noqa: E731
            return mock.patch.object(module, "feed_forward", side_effect=take)

        columns = matrices[0].shape[1]
        x, chosen = jnp.ones((rows, columns)), jnp.zeros((rows, 2), jnp.int32)
        gpu = mock.patch.object(device, "default", lambda: device.GPUS[platform])
        halves = mock.patch.object(
            api, "by_expert", lambda x, w, chosen, *_: jnp.zeros((*chosen.shape, w[0].shape[1]))
        )
        with gpu, of(grouped), of(grouped_decode), halves:
            jax.eval_shape(lambda: experts_ffn(x, *matrices, chosen, jnp.ones((rows, 2))))
        return called[0].__name__.rpartition(".")[2] if called else "halves"

    matrices = w(256)
    tiled, wide = ([taken(of) for of in some] for some in (matrices, w(2304)))
    mixed = [tiled[0], taken(drawn("q6_k", (EXPERTS, 256, 256)).tiled), tiled[2]]
    assert by(17, "sm_90", tiled) == by(64, "sm_90", tiled) == "grouped_decode"
    assert by(65, "sm_90", tiled) == by(17, "sm_90", wide) == "grouped"
    assert by(16, "sm_90", tiled) == by(20, "sm_80", tiled) == "halves"
    assert by(20, "sm_90", matrices) == by(20, "sm_90", mixed) == "halves"


@pytest.mark.parametrize("format", formats.names("int"))
@pytest.mark.parametrize(("tokens", "n", "k", "matrices"), [
    (17, 768, 2048, 2), (512, 768, 2048, 2), (1024, 768, 2048, 2), (2048, 2048, 768, 1),
    (32768, 2048, 768, 1), (2048, 64, 256, 2),
])  # fmt: skip
def test_plans_of_listed_tiles_fit_into_shared_memory_and_copy_what_mosaic_can(
    format, tokens, n, k, matrices
):
    tiles, shared = grouped.tiles_for(tokens * 8, 128), 227 * 1024
    assert tiles.tokens % tiles.stored == 0 and tiles.stored % 16 == 0 and tiles.tokens <= 256
    words, scales = tile_words(format), int_float16.bytes_of_scales(formats.get(format).LANES)
    plan = int_prefill_plan.planned(0, n // 16, k // 256, matrices, words, scales, tiles)
    assert int_prefill_plan.shared_bytes(plan, matrices, words, scales) <= shared
    assert (plan.tokens, plan.stored, plan.splits) == (tiles.tokens, tiles.stored, 1)
    assert 2 <= plan.slots <= int_prefill_plan.STEPS * k // 256
    assert plan.blocks * plan.tokens <= int_prefill_plan.MOST_TOKENS[plan.warpgroups]
    tiles_copied = 4 * plan.warpgroups * plan.blocks // matrices  # of a field at once
    assert all(4 * each * tiles_copied % 128 == 0 for each in words)
