"""Products by expert at the widths of Qwen3-30B-A3B, by the kernels that are chosen for them, against the
reference on the same weights and the same choice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from pallas_kernels import LayerStack, QTensor, experts_ffn, for_device, formats, gated, matmul
from pallas_kernels.activations import swiglu_oai
from pallas_kernels.experts import Normed, can_route, normed_logits, route_logits, routed_ffn
from tests.agreement import divergence
from tests.gpu.steps import kl_of_schedules, log_p_of_steps

pytestmark = pytest.mark.gpu

LAYERS, EXPERTS, USED, HIDDEN, FFN = 2, 128, 8, 2048, 768


def stack(format: str, n: int, k: int, seed: int) -> QTensor:
    lead = (LAYERS, EXPERTS, n, k // formats.get(format).WEIGHTS)
    draw = jax.jit(lambda: formats.random_fields(format, jax.random.key(seed), lead, 0.0, k**-0.5))
    return QTensor(draw(), format, (n, k))


def routed(how: str, rows: int) -> jax.Array:
    rng = np.random.default_rng(rows)
    chosen = rng.permuted(np.tile(np.arange(EXPERTS), (rows, 1)), axis=1)[:, :USED]
    if how == "ragged":  # one has every token, some a few, most none; a token of padding
        chosen[:, 0] = EXPERTS - 1
        chosen[:, 1:] = 7 * (chosen[:, 1:] % 5)
        chosen[rows // 3] = -1
    return jnp.asarray(chosen, jnp.int32).at[rows // 2, 1].set(-1)


@pytest.mark.parametrize("how", ["even", "ragged"])
@pytest.mark.parametrize("format", ["q4_k", "q6_k", "q8_0", "q1_0"])
def test_experts_by_kernels_are_the_reference(format, how):
    """A token, eight, the steps whose experts have tiles of four and of eight tokens, and the prompts of a
    prefill; layers by number and traced."""
    blocks = [stack(format, FFN, HIDDEN, 0), stack(format, FFN, HIDDEN, 1), stack(format, HIDDEN, FFN, 2)]
    tiled = [for_device(w, matrices=2 if i < 2 else 1, bits=16) for i, w in enumerate(blocks)]

    def layer(x, gate, up, down, chosen, weights, index):
        return experts_ffn(x, gate, up, down, chosen, weights, index)

    for rows in (1, 8, 17, 40, 64, 100, 512) if how == "even" else (17, 64, 100, 600):
        rng = np.random.default_rng(rows)
        x = jnp.asarray(rng.standard_normal((rows, HIDDEN)), jnp.float32)
        chosen = routed(how, rows)
        weights = jnp.asarray(rng.random((rows, USED)), jnp.float32)
        want = np.asarray(jax.jit(layer)(x, *blocks, chosen, weights, 1))
        by_number = jax.jit(layer, static_argnums=6)(x, *tiled, chosen, weights, 1)
        traced = jax.jit(layer)(x, *tiled, chosen, weights, 1)
        for got in map(np.asarray, (by_number, traced)):
            assert np.linalg.norm(got - want) < 2e-3 * np.linalg.norm(want), (format, rows)


@pytest.mark.parametrize("width", [2880, 1024])
def test_biases_are_added_in_every_number_of_rows(width):
    """With gpt-oss's number of experts, format and activation, and its width or a smaller one, for which
    experts have tiles of four tokens (17 rows) and of eight (60)."""
    count, activation = 32, swiglu_oai()
    draw = jax.jit(
        lambda key: formats.random_fields("mxfp4", key, (1, count, width, width // 32), 0.0, width**-0.5)
    )
    blocks = [QTensor(draw(jax.random.key(seed)), "mxfp4", (width, width)) for seed in range(3)]
    tiled = [for_device(w, matrices=2 if i < 2 else 1, bits=16) for i, w in enumerate(blocks)]
    biases = tuple(jax.random.normal(jax.random.key(seed), (count, width)) for seed in range(3))

    @jax.jit
    def layer(x, gate, up, down, chosen, weights):
        return experts_ffn(x, gate, up, down, chosen, weights, 0, activation=activation, biases=biases)

    for rows in (1, 17, 60, 300):
        rng = np.random.default_rng(rows)
        x = jnp.asarray(rng.standard_normal((rows, width)), jnp.float32)
        chosen = rng.permuted(np.tile(np.arange(count), (rows, 1)), axis=1)[:, :4].astype(np.int32)
        chosen[rows // 2, 1] = -1
        weights = jnp.asarray(rng.random((rows, 4)), jnp.float32)
        want, got = (np.asarray(layer(x, *w, jnp.asarray(chosen), weights)) for w in (blocks, tiled))
        assert np.linalg.norm(got - want) < 2e-3 * np.linalg.norm(want), rows


@pytest.mark.parametrize(("count", "used", "tokens"), [(256, 8, 1), (32, 4, 9), (60, 6, 700), (5, 5, 3)])
def test_the_choice_is_that_of_a_sort(count, used, tokens):
    """Also of a token whose logits are NaN: other tokens' are theirs."""
    rng = np.random.default_rng(count)
    logits = jnp.asarray(3 * rng.standard_normal((tokens, count)), jnp.float32)
    positions = jnp.arange(tokens).at[1:2].set(-1)
    rules = {"normalized": True, "scale": 2.5}

    @functools.partial(jax.jit, static_argnames="kernel")
    def chosen(logits, kernel):
        return route_logits(logits, positions, used, kernel=kernel, **rules)

    weights, experts = chosen(logits, "int_decode")
    want_weights, want = chosen(logits, "reference")
    np.testing.assert_array_equal(experts, want)
    np.testing.assert_allclose(weights, want_weights, rtol=1e-5)
    harmed = chosen(logits.at[-1].set(np.nan), "int_decode")
    assert np.isnan(harmed[0][-1]).any() and (harmed[1][-1] >= 0).all() and (harmed[1][-1] < count).all()
    np.testing.assert_array_equal(harmed[1][:-1], want[:-1])


RULES = [  # experts, used, tokens; rules
    (64, 4, 1, {"gating": "sigmoid", "normalized": True, "scale": 1.8}),
    (256, 8, 70, {"gating": "sigmoid", "normalized": True, "scale": 2.5, "groups": 8, "groups_used": 4}),
    (160, 6, 3, {"gating": "softmax", "normalized": False, "scale": 16.0}),
]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("case", RULES, ids=str)
def test_the_choice_by_other_rules(case, biased):
    count, used, tokens, rules = case
    rng = np.random.default_rng(count)
    logits = jnp.asarray(3 * rng.standard_normal((tokens, count)), jnp.float32)
    bias = jnp.asarray(rng.standard_normal(count), jnp.float32) if biased else None
    positions = jnp.arange(tokens).at[2:3].set(-1)

    @functools.partial(jax.jit, static_argnames="kernel")
    def chosen(logits, bias, kernel):
        return route_logits(logits, positions, used, kernel=kernel, bias=bias, **rules)

    weights, experts = chosen(logits, bias, "int_decode")
    want_weights, want = chosen(logits, bias, "reference")
    np.testing.assert_array_equal(experts, want)
    np.testing.assert_allclose(weights, want_weights, rtol=2e-5)


@pytest.mark.parametrize("tokens", [1, 3, 9, 16, 17, 40, 64])
@pytest.mark.parametrize(("count", "hidden", "format"), [(256, 2048, "f32"), (65, 2880, "bf16")])
def test_logits_of_a_router(count, hidden, format, tokens):
    rng = np.random.default_rng(tokens)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    fields = formats.get(format).quantize(draw(3, count, hidden, 1) * hidden**-0.5)
    w = LayerStack((QTensor(fields, format, (count, hidden)),), tuple((0, i) for i in range(3)))
    norms, bias, row = 1 + draw(3, hidden) / 8, draw(3, count), draw(3, hidden) * hidden**-0.5

    @functools.partial(jax.jit, static_argnames="kernel")
    def logits(x, norms, w, bias, row, kernel):
        return normed_logits(x, norms, w, 1, eps=1e-6, kernel=kernel, bias=bias, row=row)

    x = 4 * draw(tokens, 1, hidden)
    got, want = (logits(x, norms, w, bias, row, kernel) for kernel in ("int_decode", "reference"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


@pytest.mark.parametrize(("tokens", "with_shared"), [(1, True), (4, True), (1, False), (15, False)])
@pytest.mark.parametrize("format", ["q4_k", "q6_k", "q8_0"])
def test_choice_and_products_in_two_launches(format, tokens, with_shared):
    """Against the reference's choice and products, one by one; a token of padding."""
    blocks = [stack(format, FFN, HIDDEN, 0), stack(format, FFN, HIDDEN, 1), stack(format, HIDDEN, FFN, 2)]
    alone = [jax.tree.map(lambda field: field[:, 5], w) for w in blocks]
    where = tuple((0, layer) for layer in range(LAYERS))

    def layers(weights, impl="auto"):
        tiled = [for_device(w, matrices=2 if i < 2 else 1, bits=16, impl=impl) for i, w in enumerate(weights)]
        return tuple(LayerStack((w,), where) for w in tiled)

    rng = np.random.default_rng(tokens)
    draw = lambda *shape: jnp.asarray(rng.standard_normal((tokens, 1, *shape)), jnp.float32)  # noqa: E731
    made, bias = Normed(draw(HIDDEN), draw(EXPERTS), draw()), jnp.linspace(-1, 1, EXPERTS)
    positions = jnp.arange(tokens)[:, None].at[2:3].set(-1)
    rules = {"gating": "sigmoid", "normalized": True, "scale": 2.0}
    biases = jnp.stack([-bias, bias])
    stacks, shared = layers(blocks), layers(alone) if with_shared else None
    assert can_route(stacks, shared, 1, tokens, USED)
    got = jax.jit(lambda *given: routed_ffn(*given, 1, USED, biases=biases, **rules))(
        made, positions, stacks, shared
    )

    @jax.jit
    def reference(made, stacks, alone):
        chosen = route_logits(made.logits, positions, USED, kernel="reference", bias=bias, **rules)
        y = experts_ffn(made.normed, *stacks, *chosen[::-1], 1)
        if not with_shared:
            return y
        beside = matmul(gated(made.normed, alone[0], alone[1], 1), alone[2], 1)
        return y + jnp.where(positions >= 0, jax.nn.sigmoid(made.row), 0.0)[..., None] * beside

    want = reference(made, layers(blocks, "reference"), layers(alone, "reference"))
    assert np.linalg.norm(got - want) < 2e-3 * np.linalg.norm(want)


@pytest.mark.parametrize(
    ("format", "rows"), [("q4_k_m", 1), ("q8_0", 1), *(("q4_k_m", rows) for rows in (2, 3, 5, 8))]
)
def test_the_one_launch_is_the_step_by_launches(format, rows):
    """But for 22 bits of mantissa between blocks; 300 tokens, so that attention has several splits. A router
    with two experts that are nearly as likely may take the other one: the median is of all tokens."""
    ids = np.random.default_rng(7).integers(0, 256, (rows, 300))
    load = lambda **options: bj.load(f"synth:tiny-qwen3moe:{format}", bj.RunConfig(**options))  # noqa: E731
    kl = kl_of_schedules(load, "one_launch", ids)
    print(f"{format}, {rows} rows: KL {np.median(kl):.1e}, at most {kl.max():.1e}")
    assert np.median(kl) < 1e-6 and kl.mean() < 1e-4


@pytest.mark.parametrize("rows", [2, 3, 16, 17, 40, 64])
def test_rows_of_a_step_have_experts_of_their_own(rows):
    """Each row's distributions are the reference's. From 17 rows on q, k, v, o and the output matrix multiply
    activations of float16, which have 11 bits of mantissa: 1.7e-6 was measured."""
    ids = np.random.default_rng(rows).integers(0, 256, (rows, 6))
    scores = []
    for impl in ("auto", "reference"):
        run = bj.RunConfig(cache_dtype="float32", activation_bits=16, impl=impl)
        scores.append(log_p_of_steps(bj.load("synth:tiny-qwen3moe:q4_k_m", run), ids))
    kernels, reference = scores
    kl = divergence(reference, kernels)
    print(f"{rows} rows: KL {np.median(kl):.1e}, at most {kl.max():.1e}")
    assert np.median(kl) < (1e-6 if rows <= 16 else 5e-6) and kl.mean() < 1e-4
