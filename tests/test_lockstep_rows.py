"""RMSNorm to float16 by the kernel, in numpy (lockstep), against the definition."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gemm
from pallas_kernels.mosaic import half_rows
from pallas_kernels.norm import rms_norm
from tests.lockstep import lockstep


@pytest.mark.parametrize("layer", [None, 1])
@pytest.mark.parametrize("columns", [256, 576, 2048, 12320])  # one chunk a lane, an end within one, three
def test_rows_in_lockstep_are_normed_scaled_and_rounded_as_defined(columns, layer):
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((4, columns)).astype(np.float32) * np.float32([[1e-6], [3.0], [1e8], [0]])
    gamma = rng.uniform(0.5, 2, (2, columns)).astype(np.float32)
    want, scale = gemm.scaled_to_half(rms_norm(jnp.asarray(x), gamma[layer or 0], 1e-6))
    with lockstep():
        got, got_scale = half_rows.half_rows(x, gamma, None if layer is None else np.int32(layer), 1e-6)
    np.testing.assert_array_equal(got_scale, np.asarray(scale)[:, 0])
    # The sum of squares is in another order: a few numbers are rounded to the neighbour.
    np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=2e-3, atol=1e-7)
    assert np.mean(np.asarray(got) != np.asarray(want)) < 0.01
