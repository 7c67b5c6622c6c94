"""Rows to float16 by the kernel, in numpy (lockstep), against the definition."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gemm
from pallas_kernels.mosaic import half_rows
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
