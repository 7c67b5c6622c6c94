"""Products with 1-bit weights on a GPU, of few rows and of many, and of many with ternary ones whose inputs
are rotated, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Products, QTensor, dequantize, for_device, formats, matmul
from pallas_kernels.matmul.bit_mma.group_sums import MOST_EXACT
from pallas_kernels.qtensor import tile
from tests.gpu.products import FEW, MANY, by_kernels, check, expected_product

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(
    ("N", "K", "rows", "kind"),
    [
        *FEW,
        (4096, 5120, 1, "gated"),  # 20 warps
        (4096, 6144, 3, "normed"),  # 12 warps
        (1000, 896, 3, "normed"),  # neither whole tiles nor whole pairs of groups
        (151669, 2048, 1, "normed"),
    ],
)
def test_the_1_bit_kernel_is_its_definition_on_its_own_integers(N, K, rows, kind, bits):
    rng = np.random.default_rng(N + K)
    layers, layer = (1, 0) if N > 10000 else (3, 2)
    stacks = drawn(N, K, layers, kind)
    # Powers of two times whole numbers, with the largest one in every group: quantizing them is exact, so
    # that what is compared is the product. (Of random activations, one in 1e4 lies near enough to a half to
    # go either way.)
    top = 2 ** (bits - 1) - 1
    x = rng.integers(-top, top + 1, (rows, K // 128, 128))
    x[..., 5] = top
    x = (x * 2.0 ** rng.integers(-12, -8, (rows, K // 128, 1))).reshape(rows, K)
    gamma = np.repeat(2.0 ** rng.integers(-1, 2, (layers, K // 128)), 128, axis=1).astype(np.float32)
    more = {"eps": 1e-6, "residual": rng.standard_normal((rows, N)).astype(np.float32)}
    tiled = [for_device(w, matrices=len(stacks), bits=bits) for w in stacks]
    for w, before in zip(tiled, stacks, strict=True):
        np.testing.assert_array_equal(dequantize(w), dequantize(before))
    want = expected_product(x, [dequantize(w[layer]) for w in stacks], kind, gamma=gamma[layer], **more)
    check(by_kernels(tiled, layer, kind, gamma=gamma, known=True, **more), x, want, 1e-5)


def drawn(N: int, K: int, layers: int, kind: str, format: str = "q1_0") -> list[QTensor]:
    """A stack of matrices, or two."""
    keys, blocks = map(jax.random.key, range(2 if kind == "gated" else 1)), K // formats.get(format).WEIGHTS
    each = [formats.random_fields(format, key, (layers, N, blocks), 0.0, 0.02) for key in keys]
    return [QTensor(fields, format, (N, K)) for fields in each]


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
@pytest.mark.parametrize("rows", [1, 8])  # by bit_decode_b1, by bit_decode_s8
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


def with_rounded_scales(w: QTensor) -> QTensor:
    """d -> b D / 127, b = round(d (127 / D)), D the largest |d| of a row's 512 columns."""
    d, each = np.asarray(w.fields["d"], np.float64), 512 // formats.get(w.format).WEIGHTS
    *lead, count = d.shape
    steps = np.pad(d, [(0, 0)] * len(lead) + [(0, -count % each)]).reshape(*lead, -1, each)
    largest = np.maximum(np.abs(steps).max(-1, keepdims=True), 1e-20)
    factor = np.float64(np.float32(127) / largest.astype(np.float32))  # rounded, as the kernel has it
    rounded = (np.rint(steps * factor) * largest / 127).reshape(*lead, -1)[..., :count]
    return w.replace(fields={**w.fields, "d": jnp.asarray(rounded, jnp.float32)})


TERNARY = ["pq2_0", "q2_0_g64", "tq1_0", "tq2_0"]  # a scale for 128, 64, 256 and 256 columns


@pytest.mark.parametrize("format", TERNARY)
@pytest.mark.parametrize(
    ("N", "K", "rows", "kind"),
    [
        *MANY,
        (4096, 4096, 9, "added"),
        (5120, 17408, 24, "added"),
        (5120, 17408, 64, "added"),
        (5120, 17408, 640, "added"),
        (6144, 5120, 2048, "normed"),
    ],
)
def test_many_rows_of_ternary_weights_are_their_definition(N, K, rows, kind, format):
    check_many_rows(N, K, rows, kind, "bit_prefill_sm90", 8, format)


@pytest.mark.parametrize(
    ("kernel", "bits"), [("bit_prefill_sm90", 8), ("bit_prefill_sm90", 16), ("cublas", 8)]
)
@pytest.mark.parametrize(
    ("N", "K", "rows", "kind"),
    [
        *MANY,
        (960, 896, 200, "normed"),  # neither whole tiles of outputs nor of tokens, nor whole pairs of groups
        (4096, 12288, 640, "added"),
        (6144, 4096, 64, "normed"),
        (4096, 4096, 9, "added"),
        (5120, 17408, 32, "added"),  # 34 steps in splits of 9, or of 12
        (5120, 17408, 64, "added"),
    ],
)
def test_many_rows_of_1_bit_weights_are_their_definition(N, K, rows, kind, kernel, bits):
    check_many_rows(N, K, rows, kind, kernel, bits)


def check_many_rows(N, K, rows, kind, kernel, bits, format="q1_0"):
    rng = np.random.default_rng(N + rows)
    layers, layer = 3, 2
    stacks = drawn(N, K, layers, kind, format)
    tiled = [tile(w).replace(products=Products(((None, kernel),), bits)) for w in stacks]
    # Whole numbers, the largest in each group, times a power of two for each row: integers hold them exactly,
    # of 8 bits float16 too.
    top = 2 ** (bits - 1) - 1
    x = rng.integers(-top, top + 1, (rows, K))
    x[:, 5::128] = top
    x = x * 2.0 ** rng.integers(-40, 20, (rows, 1))
    if kind == "gated":
        x = np.sign(x)  # so that its norm is exact
    residual = rng.standard_normal((rows, N)).astype(np.float32)
    more = {"eps": 1e-6 if kind == "normed" else 0.0, "residual": residual}
    # The kernel's sums of a group are exact. In the library's, tensor cores cut off what they add to a sum,
    # which shows the more the longer it is, and rows behind a norm are rounded to float16.
    limit, ternary = 5e-6, format != "q1_0"
    together = ternary or (kernel == "bit_prefill_sm90" and bits == 8 and rows > MOST_EXACT)
    if kernel == "cublas":
        limit = limit * max(1, K / 4096) if kind in ("plain", "added") else 1e-3
    if together:
        # Sums begin with 2^23, and a float32 has 24 bits. With exact scales the difference would be 2e-3.
        limit, stacks = 1e-4, list(map(with_rounded_scales, stacks))
    dense = [np.asarray(dequantize(w[layer])) for w in stacks]
    want, ones = expected_product(x, dense, kind, **more), np.ones((layers, K), np.float32)
    # A layer that is not known is a number that the kernel reads.
    check(by_kernels(tiled, layer, kind, gamma=ones, known=kind != "added", **more), x, want, limit)
