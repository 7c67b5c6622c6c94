"""Rows to float16 and to whole numbers by the kernels, in numpy (lockstep), against the definition."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gemm
from pallas_kernels.mosaic import code_rows, half_rows
from pallas_kernels.norm import rms_norm
from tests.lockstep import lockstep
from tests.test_gemm import in_group_order

SIZES = np.float32([[1e-6], [3.0], [1e8], [0]])  # of rows


def orders(*widths):
    """Int_gemm's where there are whole groups."""
    return [(width, group) for width in widths for group in (None, 16, 32) if not group or width % group == 0]


# 4 to 20 warps; whole 256 columns, and not.
@pytest.mark.parametrize(("columns", "group"), orders(128, 576, 896, 2560, 4096, 12288, 28672))
def test_rows_in_lockstep_are_scaled_rounded_and_ordered_as_defined(columns, group):
    x = np.random.default_rng(columns).standard_normal((4, columns)).astype(np.float32) * SIZES
    want, scale = map(np.asarray, gemm.scaled_to_half(jnp.asarray(x)))
    with lockstep():
        got, got_scale = half_rows.half_rows(x, group=group)
    np.testing.assert_array_equal(got_scale, scale[:, 0])
    want = in_group_order(want, group) if group else want
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), want.view(np.uint16))


@pytest.mark.parametrize("layer", [None, 1])
@pytest.mark.parametrize(("columns", "group"), orders(256, 576, 896, 2048, 12320, 12416))
def test_rows_in_lockstep_are_normed_as_defined(columns, layer, group):
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((4, columns)).astype(np.float32) * SIZES
    gamma = rng.uniform(0.5, 2, (2, columns)).astype(np.float32)
    want, scale = map(np.asarray, gemm.scaled_to_half(rms_norm(jnp.asarray(x), gamma[layer or 0], 1e-6)))
    index = None if layer is None else np.int32(layer)
    with lockstep():
        got, got_scale = half_rows.half_rows(x, gamma, index, 1e-6, group=group)
    np.testing.assert_array_equal(got_scale, scale[:, 0])
    want = in_group_order(want, group) if group else want
    # The sum of squares is in another order: a few numbers are rounded to the neighbour.
    np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=2e-3, atol=1e-7)
    assert np.mean(np.asarray(got) != want) < 0.01


def in_order(q, scale, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """What code_rows makes, as (whole numbers [rows, columns], scales of them [rows, groups])."""
    q, scale = np.asarray(q)[:, :, :rows], np.asarray(scale)
    digits, groups = q.shape[:2]
    m, lane = np.arange(rows), np.arange(8)
    lanes = q.reshape(digits, groups, rows, 8, 16)[:, :, m[:, None], lane ^ m[:, None] % 8]  # [..., lane, i]
    q = lanes.transpose(0, 2, 1, 4, 3).reshape(digits, rows, -1).astype(np.int64)
    assert (q[:, :, columns:] == 0).all()
    place = m & ~14 | (m & 6) << 1 | (m & 8) >> 2
    scale = scale[:, :, place].swapaxes(1, 2)[:, :, : columns // 128]
    if digits == 2:
        np.testing.assert_array_equal(scale[0], 256 * scale[1])
        q = 256 * q[:1] + q[1:] % 256
    return q[0, :, :columns], 64 * scale[-1]


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("layer", ["no norm", None, 1])
@pytest.mark.parametrize("columns", [128, 896, 4096, 12288])  # whole fours of groups, and not
def test_rows_in_lockstep_are_whole_numbers_as_in_a_decode_step(columns, layer, bits):
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((20, columns)).astype(np.float32) * np.resize(SIZES, (20, 1))
    gamma = rng.uniform(0.5, 2, (2, columns)).astype(np.float32)
    normed = layer != "no norm"
    index = np.int32(layer) if layer == 1 else None
    with lockstep():
        made = code_rows.code_rows(x, *((gamma, index, 1e-6) if normed else ()), bits=bits)
    assert (
        made[0].shape == (bits // 8, -(-columns // 512) * 4, 64, 128) and made[1].shape == made[0].shape[:3]
    )
    q, scale = in_order(*made, 20, columns)
    groups = (x * gamma[layer or 0] if normed else x).reshape(20, -1, 128)
    largest, top = np.maximum(np.abs(groups).max(-1), np.float32(1e-20)), np.float32(2 ** (bits - 1) - 1)
    np.testing.assert_array_equal(q, np.rint(groups * (top / largest)[..., None]).reshape(20, columns))
    assert np.abs(q).max() == top
    norm = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6) if normed else 1
    np.testing.assert_allclose(scale, largest.astype(np.float64) / top * norm, rtol=1e-6)
