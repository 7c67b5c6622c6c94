"""Products with 1-bit weights on a GPU, of few rows and of many, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    LayerStack,
    Products,
    QTensor,
    dequantize,
    for_device,
    formats,
    gated,
    matmul,
)
from pallas_kernels.qtensor import tile

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(
    ("N", "K", "rows", "kind"),
    [
        (64, 256, 1, "plain"),
        (1000, 896, 3, "normed"),  # neither whole tiles nor whole pairs of groups
        (4096, 4096, 1, "added"),
        (2048, 2560, 8, "gated"),
        (2560, 9728, 2, "added"),
        (151669, 2048, 1, "normed"),
    ],
)
def test_the_1_bit_kernel_is_its_definition_on_its_own_codes(N, K, rows, kind, bits):
    rng = np.random.default_rng(N + K)
    layers, layer = (1, 0) if N > 10000 else (3, 2)
    stacks = []
    for seed in range(2 if kind == "gated" else 1):
        fields = formats.random_fields("q1_0", jax.random.key(seed), (layers, N, K // 128), 0.0, 0.02)
        stacks.append(QTensor(fields, "q1_0", (N, K)))
    # Powers of two times whole numbers, with the largest code in every group: quantizing them is exact, so
    # that what is compared is the product. (Of random activations, one code in 1e4 lies near enough to a half
    # to go either way.)
    top = 2 ** (bits - 1) - 1
    x = rng.integers(-top, top + 1, (rows, K // 128, 128))
    x[..., 5] = top
    x = (x * 2.0 ** rng.integers(-12, -8, (rows, K // 128, 1))).reshape(rows, K).astype(np.float32)
    gamma = np.repeat(2.0 ** rng.integers(-1, 2, (layers, K // 128)), 128, axis=1).astype(np.float32)
    residual = rng.standard_normal((rows, N)).astype(np.float32)
    dense = [np.asarray(dequantize(w[layer]), np.float64) for w in stacks]
    codes, norm = (x * gamma[layer] if kind in ("normed", "gated") else x).astype(np.float64), 1.0
    if kind in ("normed", "gated"):
        norm = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
    want = [norm * codes @ w.T for w in dense]
    want = want[0] / (1 + np.exp(-want[0])) * want[1] if kind == "gated" else want[0]
    tiled = [for_device(w, matrices=len(stacks), bits=bits) for w in stacks]
    for w, before in zip(tiled, stacks, strict=True):
        np.testing.assert_array_equal(dequantize(w), dequantize(before))
    if kind == "gated":
        gate, up = (LayerStack((w,), tuple((0, i) for i in range(layers))) for w in tiled)
        run = jax.jit(lambda x: gated(x, gate, up, layer, gamma=jnp.asarray(gamma), eps=1e-6))
    else:
        norms = {"gamma": jnp.asarray(gamma), "eps": 1e-6} if kind == "normed" else {}
        added = {"residual": jnp.asarray(residual)} if kind == "added" else {}
        run = jax.jit(lambda x: matmul(x, tiled[0], layer, **norms, **added))
        want = want + residual if kind == "added" else want
    got = [np.asarray(run(x)) for _ in range(3)]
    assert np.linalg.norm(got[0] - want) < 1e-5 * np.linalg.norm(want)
    np.testing.assert_array_equal(got[0], got[1])
    np.testing.assert_array_equal(got[0], got[2])


def single_bits(K: int) -> QTensor:
    """Q1_0 weights whose products give activations away: for each group of 128 columns, which alone has a
    scale (1), a row without a bit and a row for each column, with that bit only.

    y[bit k] - y[no bit] = (2 q_k - total) s - (0 - total) s = 2 s q_k
    """
    groups = K // 128
    d = np.repeat(np.eye(groups, dtype=np.float16), 129, axis=0)
    qs = np.zeros((groups, 129, groups, 16), np.uint8)
    for k in range(128):
        qs[np.arange(groups), 1 + k, np.arange(groups), k // 8] = 1 << k % 8
    fields = {"d": jnp.asarray(d), "qs": jnp.asarray(qs.reshape(-1, groups, 16))}
    return QTensor(fields, "q1_0", (groups * 129, K))


def codes_in(y: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Codes [rows, groups, 128] from products with `single_bits` and each group's step [rows, groups, 1]."""
    y = y.astype(np.float64).reshape(len(y), -1, 129)
    return (y[:, :, 1:] - y[:, :, :1]) / (2 * step)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("rows", [1, 8])  # by q1_decode_b1, by q1_decode_s8
@pytest.mark.parametrize(("K", "normed"), [(4096, False), (4096, True), (896, True), (9728, False)])
def test_codes_that_a_kernel_makes_are_the_definition_s(K, normed, rows, bits):
    """q = round(x top / absmax) in float32; at most one in 1e4 may be off, and by one."""
    rng = np.random.default_rng(K + bits)
    x = rng.standard_normal((rows, K)).astype(np.float32)
    x[:, rng.integers(0, K, 20)] *= 30  # a few outliers, as real activations have
    gamma = rng.uniform(0.5, 2, (1, K)).astype(np.float32)
    codes = (x * gamma if normed else x).reshape(rows, -1, 128)
    largest, top = np.abs(codes).max(-1, keepdims=True), np.float32(2 ** (bits - 1) - 1)
    want = np.rint(codes * (top / largest))
    norm = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(-1) + 1e-6) if normed else np.ones(rows)
    w = for_device(single_bits(K), bits=bits)
    norms = {"gamma": jnp.asarray(gamma[0]), "eps": 1e-6} if normed else {}
    y = np.asarray(jax.jit(lambda x: matmul(x, w, **norms))(x))
    found = codes_in(y, norm[:, None, None] * largest.astype(np.float64) / top)
    assert np.abs(found - np.rint(found)).max() < 0.1  # the difference gives whole numbers
    off = np.abs(np.rint(found) - want)
    print(f"{rows} rows of {K} columns, {bits} bits: {(off > 0).sum()} of {off.size} codes differ")
    assert off.max() <= 1 and (off > 0).mean() <= 1e-4


@pytest.mark.parametrize(("kernel", "bits"), [("q1_prefill_sm90", 8), ("q1_prefill_sm90", 16), ("cublas", 8)])
@pytest.mark.parametrize(
    ("N", "K", "rows", "kind"),
    [
        (64, 256, 9, "plain"),
        (960, 896, 200, "normed"),  # neither whole tiles of outputs nor of tokens, nor whole pairs of groups
        (1013, 512, 70, "plain"),  # as many as no instruction likes
        (4096, 4096, 512, "added"),
        (2560, 2560, 300, "gated"),
        (4096, 12288, 640, "added"),
        (4096, 4096, 16, "added"),  # columns in splits
        (1013, 12288, 33, "plain"),
        (6144, 4096, 64, "normed"),
        (2560, 2560, 17, "gated"),
    ],
)
def test_many_rows_of_1_bit_weights_are_their_definition(N, K, rows, kind, kernel, bits):
    rng = np.random.default_rng(N + rows)
    layers, layer = 3, 2
    stacks = []
    for seed in range(2 if kind == "gated" else 1):
        fields = formats.random_fields("q1_0", jax.random.key(seed), (layers, N, K // 128), 0.0, 0.02)
        products = Products(((None, kernel),), bits)
        stacks.append(tile(QTensor(fields, "q1_0", (N, K))).replace(products=products))
    # Whole numbers, the largest in each group, times a power of two for each row: codes hold them exactly, of
    # 8 bits float16 too.
    top = 2 ** (bits - 1) - 1
    x = rng.integers(-top, top + 1, (rows, K))
    x[:, 5::128] = top
    x = x * 2.0 ** rng.integers(-40, 20, (rows, 1))
    residual = rng.standard_normal((rows, N)).astype(np.float32)
    dense = [np.asarray(dequantize(w[layer]), np.float64) for w in stacks]
    x32 = jnp.asarray(x, jnp.float32)
    options = {"plain": {}, "normed": {"gamma": jnp.ones((layers, K)), "eps": 1e-6}, "gated": {}}
    if kind == "gated":
        x32 = jnp.asarray(np.sign(x), jnp.float32)  # so that its norm is exact
        gate, up = (LayerStack((w,), tuple((0, i) for i in range(layers))) for w in stacks)
        run = jax.jit(lambda x: gated(x, gate, up, layer, gamma=jnp.ones((layers, K)), eps=0.0))
        want = [np.sign(x) / np.sqrt((np.sign(x) ** 2).mean(-1, keepdims=True)) @ w.T for w in dense]
        want = want[0] / (1 + np.exp(-want[0])) * want[1]
    else:
        more = {"residual": jnp.asarray(residual)} if kind == "added" else options[kind]
        run = jax.jit(lambda x: matmul(x, stacks[0], layer, **more))
        norm = np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) if kind == "normed" else 1.0
        want = (x / norm) @ dense[0].T + (residual if kind == "added" else 0)
    got = [np.asarray(run(x32)) for _ in range(3)]
    # The kernel's sums of a group are exact. In the library's, tensor cores cut off what they add to a sum,
    # which shows the more the longer it is, and rows behind a norm are rounded to float16.
    limit = 5e-6
    if kernel == "cublas":
        limit = limit * max(1, K / 4096) if kind in ("plain", "added") else 1e-3
    for row_got, row_want in zip(got[0], want, strict=True):  # rows differ by many orders of magnitude
        assert np.linalg.norm(row_got - row_want) < limit * np.linalg.norm(row_want)
    np.testing.assert_array_equal(got[0], got[1])
    np.testing.assert_array_equal(got[0], got[2])
