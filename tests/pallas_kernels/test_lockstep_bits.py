"""The 1-bit kernels in numpy (lockstep) against float64: bit_decode_b1 for 1 and 2 rows, bit_decode_s8 for
more; bit_decode_ring."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import SILU, Products, device
from pallas_kernels.matmul.bit_mma import decode_b1, decode_ring, decode_s8, quantize_rows
from pallas_kernels.matmul.prologue import Parts
from tests.pallas_kernels.lockstep import lockstep
from tests.pallas_kernels.stacks import drawn

CASES = [
    (48, 256, 1, "normed", 8),
    (40, 384, 3, "added", 8),  # neither whole tiles nor whole pairs of groups
    (32, 2304, 2, "gated", 8),
    (32, 4096, 1, "gated", 16),
    (16, 640, 8, "plain", 16),
    (4112, 256, 1, "added", 8),  # 257 tiles: two of a block, the last block has one
    (48, 4096, 8, "gated", 8),
    (32, 3072, 5, "normed", 8),  # 12 warps
    (12800, 256, 4, "plain", 8),  # 800 tiles: four of a block
    (32, 4096, 4, "added", 16),
    (40, 384, 6, "added", 8),
    (32, 2304, 3, "gated", 16),
    (48, 17408, 1, "added", 8),  # nine pairs of groups for a warp
    (40, 17408, 6, "added", 16),  # columns in two splits, whose integers have room
    (32, 34560, 3, "normed", 16),  # in three
]


@pytest.fixture
def two(monkeypatch):
    """An H200 with two multiprocessors."""
    few = dataclasses.replace(device.GPUS["sm_90"], multiprocessors=2)
    monkeypatch.setattr(device, "default", lambda: few)


@pytest.mark.parametrize(("N", "K", "rows", "kind", "bits"), CASES)
def test_the_1_bit_kernel_in_lockstep_is_the_product(N, K, rows, kind, bits):
    check(decode_b1 if rows < 3 else decode_s8, N, K, rows, kind, bits)


@pytest.mark.parametrize(
    ("N", "K", "rows", "kind"),
    [
        (632, 5120, 1, "gated"),  # 20 warps; 40 tiles: three waves of blocks, of seven tiles each
        (600, 6144, 1, "normed"),  # 24 warps; 38 tiles: ten of a block, the last block has eight
        (600, 2560, 2, "added"),  # 12 warps; 38 tiles: ten of a block, the last block has eight
        (632, 1024, 4, "plain"),  # ten tiles of a block, in two rounds
        (600, 1536, 3, "normed"),  # 19 tiles of a block in rounds of seven
    ],
)
def test_blocks_of_many_tiles_in_lockstep_are_the_product(N, K, rows, kind, two):
    check(decode_b1 if rows < 3 else decode_s8, N, K, rows, kind, 8)


@pytest.mark.parametrize(
    ("N", "K", "rows", "kind"),
    [
        (2100, 384, 1, "added"),  # neither whole tiles nor whole pairs of groups; three warps have columns
        (5000, 256, 3, "normed"),  # twice around the ring
        (200, 2560, 4, "normed"),  # 12 warps
        (640, 4096, 8, "plain"),
    ],
)
def test_the_ring_in_lockstep_is_the_product(N, K, rows, kind, two):
    """By two blocks, the second of which has fewer tiles."""
    check(decode_ring, N, K, rows, kind, 8)


def check(kernel, N, K, rows, kind, bits):
    rng = np.random.default_rng(K + rows)
    top, layer = 2 ** (bits - 1) - 1, 1
    x = rng.integers(-top, top + 1, (rows, K // 128, 128))  # exact for groups of 128
    x[..., 5] = top
    x = x * 2.0 ** rng.integers(-12, -8, (rows, K // 128, 1))
    x, normed = x.reshape(rows, K).astype(np.float32), kind in ("normed", "gated")
    gamma = np.repeat(2.0 ** rng.integers(-1, 2, (2, K // 128)), 128, axis=1).astype(np.float32)
    residual = rng.standard_normal((rows, N)).astype(np.float32)
    stacks = [drawn("q1_0", (2, N, K), m) for m in range(1 + (kind == "gated"))]
    tiled = tuple(w.tiled.replace(products=Products(activation_bits=bits)) for w in stacks)
    codes, norm = (x * gamma[layer] if normed else x).astype(np.float64), 1.0
    if normed:
        norm = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
    want = [norm * codes @ w.dense[layer].astype(np.float64).T for w in stacks]
    want = want[0] / (1 + np.exp(-want[0])) * want[1] if kind == "gated" else want[0]
    want = want + residual if kind == "added" else want
    with lockstep(at_a_time=16):
        got = kernel.run(
            jnp.asarray(x), tiled, layer, layer, jnp.asarray(gamma) if normed else None,
            1e-6, jnp.asarray(residual) if kind == "added" else None, SILU,
        )  # fmt: skip
    assert np.linalg.norm(got - want) < 1e-6 * np.linalg.norm(want)


@pytest.mark.parametrize(("kernel", "bound"), [(decode_s8, 5e-6), (decode_ring, 3e-5)])
def test_coefficients_of_sums_are_rounded_as_said(kernel, bound):
    """8 rows whose scales are no powers of two. A block of the ring passes coefficients on with 22 bits of
    their mantissa, that is 0.01 steps of an activation for a group (byte_product.py)."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((8, 2048)).astype(np.float32), drawn("q1_0", (1, 320, 2048), 0)
    groups = x.reshape(8, -1, 128)
    scales = (abs(groups).max(-1, keepdims=True) / 127).astype(np.float64)
    inputs = (np.rint(groups / np.float32(scales)) * scales).reshape(8, 2048)
    want = inputs @ w.dense[0].astype(np.float64).T
    tiled = w.tiled.replace(products=Products(activation_bits=8))
    with lockstep(at_a_time=16):
        got = kernel.run(jnp.asarray(x), (tiled,), 0, 0, None, 0.0, None, SILU)
    assert np.linalg.norm(got - want) < bound * np.linalg.norm(want)


@pytest.mark.parametrize(
    ("gpu", "tiles"),
    [("sm_90", (6, 2, 3, 9)), ("sm_80", (8, 3, 3, 6)), ("sm_120", (5, 2, 2, 7))],
)
def test_blocks_of_one_row_are_shared_out_to_the_multiprocessors_at_hand(gpu, tiles, monkeypatch):
    """132, 108 and 170 of them. All blocks run at once, but for 1,088 tiles on 108 multiprocessors: eleven
    tiles would be 22 loads of a lane, so a multiprocessor has two blocks, one after the other."""
    monkeypatch.setattr(device, "default", lambda: device.GPUS[gpu])
    sizes = (12288, 4096, 1), (4096, 12288, 1), (5120, 17408, 1), (17408, 5120, 2)
    plans = [decode_b1.RowByRow.plan(1, k, n // 16, k // 256, matrices) for n, k, matrices in sizes]
    assert tuple(plan.tiles for plan in plans) == tiles


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize(
    ("rows", "N", "splits", "residual"), [(3, 72, 2, True), (8, 96, 1, False), (5, 7, 3, True)]
)
def test_rows_are_added_rounded_and_multiplied_group_by_group(rows, N, splits, residual, dtype):
    """Of parts of x: their sum; gamma x in integers, as of the sum alone; its products with rows of numbers
    of three types, in one block and in several for each group, the last of which may have fewer rows."""
    K, layer, rng = 640, 1, np.random.default_rng(rows)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    parts, gamma = draw(splits, 8, K), 1 + draw(2, K) / 9
    added = draw(rows, K) if residual else None
    w = jnp.asarray(draw(2, N, K), dtype)
    layers = jnp.array([0, layer, -1], jnp.int32)
    with lockstep():
        quantized, x, products = quantize_rows.quantize_rows(
            Parts(parts, added), layers, gamma, w=w, rows=rows
        )
        alone, *others = quantize_rows.quantize_rows(x, layers, gamma)
    assert others == [None, None]
    want = np.float64(parts[:, :rows]).sum(0) + (added if residual else 0)
    np.testing.assert_allclose(x, want, atol=1e-6)
    for a, b in zip(quantized, alone, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(quantized.squares[:, :rows].sum(0), (want**2).sum(1), rtol=1e-5)
    scaled = (want * gamma[layer]).reshape(rows, -1, 128)
    each = np.einsum("rgk,ngk->grn", scaled, np.float64(w[layer]).reshape(N, -1, 128))
    np.testing.assert_allclose(products, each, atol=1e-5 * np.abs(each).max())
