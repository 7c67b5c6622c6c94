"""The integer tensor-core kernel on a GPU: every format that has it, against float64 on its own codes.

PYTHONPATH=. python -m pytest -o addopts= -m gpu tests/gpu/test_gpu_int.py
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from pallas_kernels import (
    LayerStack,
    Products,
    QTensor,
    Rows,
    dequantize,
    device,
    for_device,
    formats,
    matmul,
    problems,
    qtensor,
)
from pallas_kernels.matmul.int_mma import prefill_sm90
from pallas_kernels.matmul.int_mma.prefill_plan import Plan
from pallas_kernels.step import layer_products_stacks
from pallas_kernels.step.layer_products import workspace_words
from pallas_kernels.step.layer_products_stacks import OfLayer
from tests.agreement import divergence, log_softmax
from tests.gpu.products import FEW, MANY, by_kernels, check, expected_product
from tests.gpu.steps import log_p_of_steps
from tests.pallas_kernels.test_gemm import has_float16_scales
from tests.refused_cases import unless_refused

pytestmark = pytest.mark.gpu
tile, dequantized = jax.jit(qtensor.tile), jax.jit(dequantize)
BY_CUBLAS = Products(((None, "cublas"),))

INTEGER = formats.names("int")


def stack(format, N, K, layers, seed=0, bits=8):
    lead = (layers, N, K // formats.get(format).WEIGHTS)
    draw = jax.jit(lambda key: formats.random_fields(format, key, lead, 0.0, 0.02))
    return QTensor(draw(jax.random.key(seed)), format, (N, K), products=Products(activation_bits=bits))


def exact_activations(rng, rows, K, group, bits):
    """Powers of two times whole numbers, with the largest code in every group: quantizing them is exact, so
    that what is compared is the product. K may end within a group."""
    top = 127 if bits == 8 else 127 * 257
    groups = -(-K // group)
    x = rng.integers(-top, top + 1, (rows, groups, group))
    x[..., 5] = top
    x = x * 2.0 ** rng.integers(-12, -8, (rows, groups, 1))
    return x.reshape(rows, -1)[:, :K].astype(np.float32)


@pytest.mark.parametrize("format", INTEGER)
def test_the_identity_prints_the_decoded_weights(format):
    """One product and a power of two a sum: float32 holds it without rounding, up to the last bit of w
    itself."""
    w = stack(format, 96, 512, 1)[0]
    got = np.concatenate(
        [np.asarray(matmul(jnp.eye(512)[i : i + 8] * 127, for_device(w))) for i in range(0, 512, 8)]
    )
    want = np.asarray(dequantize(w)).T.astype(np.float64) * 127
    np.testing.assert_allclose(got, want, rtol=3e-7, atol=3e-7 * np.abs(want).max())


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("format", "N", "K"),
    [
        (format, N, K)
        for format in INTEGER
        for N, K in [(96, 512), (1000, 768), (72, 576)]
        if K % formats.get(format).WEIGHTS == 0
    ],
)
def test_the_identity_of_many_rows_prints_the_weights_as_float16(format, known, N, K):
    """The GEMM's weights, decoded by the kernel: the definition's bits."""
    w = stack(format, N, K, 3)
    tiled_weights = tile(w).replace(products=BY_CUBLAS)
    got = jax.jit(lambda i: matmul(jnp.eye(K), tiled_weights, 2 if known else i))(2)
    want = np.asarray(dequantized(w[2])).astype(np.float16).T
    np.testing.assert_array_equal(np.asarray(got), want)


def test_many_rows_find_each_layer_in_its_format():
    """As in a mixed file: queries, keys and values of one format or of two, the layer traced."""
    K, layers = 512, 3
    parts = (
        Rows((stack("q4_k", 96, K, 2, 1), stack("q6_k", 32, K, 2, 2))),
        stack("q5_k", 128, K, 1, 3),
    )
    where = ((0, 1), (1, 0), (0, 0))
    tiled = jax.tree.map(
        lambda w: tile(w).replace(products=BY_CUBLAS), parts, is_leaf=lambda leaf: isinstance(leaf, QTensor)
    )
    product = jax.jit(lambda layer: matmul(jnp.eye(K), LayerStack(tiled, where), layer))
    for layer in range(layers):
        part, index = where[layer]
        pieces = parts[0].pieces if part == 0 else (parts[1],)
        want = np.concatenate([np.asarray(dequantized(w[index])).astype(np.float16) for w in pieces])
        np.testing.assert_array_equal(np.asarray(product(layer)), want.T)


@pytest.mark.parametrize("format", INTEGER)
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(
    ("N", "K", "rows", "kind"),
    [
        *FEW,
        (320, 1536, 16, "added"),
        (512, 12288, 4, "plain"),
        (512, 12288, 9, "added"),
        (6144, 4096, 1, "gated"),
        (40000, 512, 1, "normed"),
    ],
)
def test_the_kernel_is_its_definition_on_its_own_integers(format, N, K, rows, kind, bits):
    check_product(format, N, K, rows, kind, bits)


@pytest.mark.parametrize("format", [f for f in INTEGER if formats.get(f).WEIGHTS == 32])
@pytest.mark.parametrize("rows", [1, 5])
def test_columns_need_no_whole_tile(format, rows):
    check_product(format, 576, 576, rows, "normed", 8)
    check_product(format, 40, 96, rows, "added", 16)


def check_product(format, N, K, rows, kind, bits):
    rng = np.random.default_rng(N + K)
    layers, layer = (1, 0) if N > 10000 else (3, 2)
    group = formats.get(format).LANES.activation_group
    stacks = [stack(format, N, K, layers, seed, bits) for seed in range(2 if kind == "gated" else 1)]
    x = exact_activations(rng, rows, K, group, bits)
    gamma = np.repeat(2.0 ** rng.integers(-1, 2, (layers, K // group)), group, axis=1).astype(np.float32)
    more = {"eps": 1e-6, "residual": rng.standard_normal((rows, N)).astype(np.float32)}
    want = expected_product(x, [dequantized(w[layer]) for w in stacks], kind, gamma=gamma[layer], **more)
    kernel = Products(((None, "int_decode"),), bits)  # for so many rows on any GPU
    tiled = [tile(w).replace(products=kernel) for w in stacks]
    check(by_kernels(tiled, layer, kind, gamma=gamma, known=kind != "added", **more), x, want, 1e-5)


@pytest.mark.parametrize("rows", [1, 6])
def test_parts_of_other_formats_are_one_product(rows):
    """Rows below rows, as queries, keys and values of a mixed file: the same bits as one by one."""
    K, formats_of = 2048, (("q4_k", 640), ("q6_k", 128), ("q5_k", 48))
    pieces = [for_device(stack(format, N, K, 3, N)) for format, N in formats_of]
    parts = (Rows(tuple(pieces)),)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((rows, K)), jnp.float32)
    gamma = jnp.ones((3, K))
    together = matmul(x, LayerStack(parts, tuple((0, i) for i in range(3))), 1, gamma=gamma, eps=1e-6)
    alone = [matmul(x, piece, 1, gamma=gamma, eps=1e-6) for piece in pieces]
    # Another number of warps sums in another order.
    np.testing.assert_allclose(together, np.concatenate(alone, -1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("formats_of", [("q2_k",) * 4, ("q4_k", "q4_k", "q6_k", "iq4_xs")], ids=str)
def test_activations_passed_on_as_integers_are_those_of_float32(formats_of, rows):
    """But for what falls to the other side of .5 for the 22 bits of float32 on their way."""
    hidden, ffn = 4096, 4096
    shapes = ((hidden, hidden), (ffn, hidden), (ffn, hidden), (hidden, ffn), (6144, hidden))
    o, gate_up, down, qkv = formats_of
    stacks = [
        LayerStack((for_device(stack(format, *shape, 2, seed)),), ((0, 0), (0, 1)))
        for seed, (format, shape) in enumerate(zip((o, gate_up, gate_up, down, qkv), shapes, strict=True))
    ]
    attended, x = jax.random.normal(jax.random.key(1), (2, rows, hidden))
    norms = 1 + 0.1 * jax.random.normal(jax.random.key(2), (2, 2, hidden))
    workspace = jnp.zeros(workspace_words(rows, hidden, ffn), jnp.int32)
    o, gate, up, down, qkv = stacks

    of_layer = tuple(OfLayer(of, 0) for of in (norms[1], gate, up, down))
    following = OfLayer(norms[0], 1), OfLayer(qkv, 1)
    integers = layer_products_stacks.rounded_vectors([o], (gate, up, down), [qkv])
    assert any(integers)

    def run(rounded):
        return layer_products_stacks.run(
            attended, x, OfLayer(o, 0), of_layer, following, 0, workspace, 1e-6, rounded
        )[:2]

    got, again, want = run(integers), run(integers), run((False,) * 3)
    jax.tree.map(np.testing.assert_array_equal, got, again)
    for a, b in zip(got, want, strict=True):
        assert 0 < np.linalg.norm(a - b) < 1e-3 * np.linalg.norm(b)


@unless_refused(lambda format, N, K: ("int_prefill_sm90", problems.Matmul(device.platform(), format, N, K)))
@pytest.mark.parametrize("format", INTEGER)
@pytest.mark.parametrize(
    ("N", "K", "rows", "kind"),
    [
        *MANY,
        (904, 768, 200, "normed"),  # neither whole tiles of outputs nor of tokens
        (4096, 1024, 2000, "added"),
        (1000, 12288, 640, "added"),
    ],
)
def test_many_rows_of_integer_weights_are_their_definition(N, K, rows, kind, format):
    """Of the weights rounded to float16, which the kernel has too, but where a scale is not float16 in the
    file."""
    rng = np.random.default_rng(N + rows)
    layers, layer = 3, 2
    stacks = [stack(format, N, K, layers, seed) for seed in range(2 if kind == "gated" else 1)]
    x = rng.integers(-2047, 2048, (rows, K))  # float16 holds them exactly
    x[:, 5::128] = 2047
    x = x * 2.0 ** rng.integers(-40, 20, (rows, 1))
    if kind == "gated":
        x = np.sign(x) + (x == 0)  # so that its norm is exact
    more = {"eps": 0.0, "residual": rng.standard_normal((rows, N)).astype(np.float32)}
    want = expected_product(
        x, [np.asarray(dequantized(w[layer])).astype(np.float16) for w in stacks], kind, **more
    )
    limit = 2.0**-24 * (K / 16 + 4)  # of 16 products at a time tensor cores cut off what they add to a sum
    if kind in ("normed", "gated"):  # rows behind a norm are rounded to float16
        limit = 1e-3
    elif not has_float16_scales(format):
        limit = 6e-4
    chosen, ones = [for_device(w, matrices=len(stacks)) for w in stacks], np.ones((layers, K), np.float32)
    check(by_kernels(chosen, layer, kind, gamma=ones, known=False, **more), x, want, limit)


@pytest.mark.parametrize(("warpgroups", "splits"), [(2, 16), (3, 16), (4, 8), (4, 16)])
@pytest.mark.parametrize("tokens", [16, 32])
@unless_refused(lambda: ("int_prefill_sm90", problems.Matmul(device.platform(), "q4_k", 6144, 4096)))
def test_a_plan_gives_the_same_sums_each_time(warpgroups, splits, tokens, monkeypatch):
    """Tiles with few columns, several for each pair of blocks. ptxas made wrong code of one with four
    warpgroups and one item of columns: it read a copy's coordinates from registers that nobody had set."""
    rng, N, K = np.random.default_rng(tokens), 6144, 4096
    w = tile(stack("q4_k", N, K, 1))
    plan = Plan(warpgroups, 1, tokens, 4, tokens, splits)
    monkeypatch.setattr(prefill_sm90, "planned", lambda *_: plan)
    run = functools.partial(prefill_sm90.int_prefill_sm90.__wrapped__, n=N, format="q4_k", summed=False)
    # As int_prefill_sm90 wants columns: any numbers do, if each plan has the same.
    a = jnp.asarray(rng.standard_normal((tokens, K)), jnp.float16)
    arguments = a, jnp.ones(tokens), (w.fields,), jnp.int32(0)
    parts = [np.asarray(call(*arguments)) for call in [jax.jit(run)] * 20]
    for again in parts[1:]:
        np.testing.assert_array_equal(again, parts[0])
    whole = Plan(2, 1, tokens, 4, tokens, 1)
    monkeypatch.setattr(prefill_sm90, "planned", lambda *_: whole)
    (want,) = np.asarray(jax.jit(lambda *args: run(*args))(*arguments))
    limit = 2.0**-24 * (K / 16 + 4)  # as above
    np.testing.assert_allclose(parts[0].sum(axis=0), want, rtol=0, atol=limit * np.abs(want).max())


@pytest.mark.parametrize(
    "source", ["synth:tiny-qwen3:q4_k_m", "synth:tiny-llama:q4_k_m", "synth:tiny-qwen2:q8_0"]
)
@pytest.mark.parametrize(("bits", "limit"), [(8, 5e-3), (16, 1e-5)])
def test_steps_through_kernels_are_near_the_exact_definition(source, bits, limit):
    ids = np.random.default_rng(3).integers(0, 256, 40).tolist()
    run = bj.RunConfig(cache_dtype="float32", activation_bits=bits)
    kernels = bj.load(source, run)
    assert all(part.tiled for part in kernels.params.layers["mlp"][0].down.parts)
    exact = bj.logits(bj.load(source, dataclasses.replace(run, impl="reference")), ids)
    assert exact.std() > 2
    kl = divergence(log_softmax(exact), log_p_of_steps(kernels, [ids])[0]).mean()
    print(f"{source}, {bits} bits: KL {kl:.2e}")
    assert 0 < kl < limit
