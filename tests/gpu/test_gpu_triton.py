"""Attention in Triton on the GPU, against the reference; needs the extra `triton`."""

import functools
import importlib.util

import jax
import numpy as np
import pytest

from pallas_kernels import attention, device, problems, selection
from tests.pallas_kernels.test_triton import case
from tests.refused_cases import unless_refused

# A mark, not importorskip, which would be a skipped test also where tests of GPUs are not selected.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="needs the extra `triton`"),
]


@unless_refused(
    lambda heads, dtype, options: (
        "triton",
        problems.Attention(device.platform(), "decode", *heads, 16, dtype, **options),
    )
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", [{}, {"window": 37, "scale": 0.2}, {"softcap": 20.0}], ids=str)
@pytest.mark.parametrize("heads", [(32, 32, 96), (4, 2, 80), (14, 2, 112), (8, 4, 256)], ids=str)
@pytest.mark.parametrize(("tokens", "lengths"), [(1, (1000, 3, 17)), (300, (300, 23))])
def test_it_equals_the_reference(heads, tokens, lengths, options, dtype):
    kernel = selection.get(problems.Attention, "triton")
    arguments = jax.device_put(case(heads, tokens, dtype, lengths))
    call = functools.partial(
        kernel, num_keys=max(lengths), **{"window": None, "scale": None, "softcap": None} | options
    )
    got = np.asarray(jax.jit(call)(*arguments))
    q, k, v, table, positions, layer = arguments
    k, v = (jax.numpy.nan_to_num(x) for x in (k, v))  # the reference masks scores, not what it reads
    want = np.asarray(attention(q, k, v, table, positions, layer[0], num_keys=max(lengths), **options))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_it_is_chosen_before_the_reference():
    problem = problems.Attention(device.platform(), "decode", 32, 32, 96, 16, "bfloat16")
    assert selection.choose(problem) == "triton"
