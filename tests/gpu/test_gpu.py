"""On a GPU, without gguf, xllamacpp or uv: kept oracle values, and the device-independent tests once more.

PYTHONPATH=. python -m pytest -o addopts= -m gpu
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from pallas_kernels import (
    cache_layouts,
    dequantize,
    formats,
    from_blocks,
    matmul,
)
from tests.agreement import agreement
from tests.bonsai_jax import tiny_answers

# The same tests, run again here because the mark below is this module's.
from tests.bonsai_jax.test_decoding import *  # noqa: F403
from tests.bonsai_jax.test_sampling import *  # noqa: F403
from tests.pallas_kernels import expected_blocks
from tests.pallas_kernels.test_cache_layouts import *  # noqa: F403

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("format", formats.names())
def test_decoding_is_bit_exact(format):
    raw, weights = expected_blocks.load(format)
    w = jax.jit(from_blocks, static_argnames="format")(raw, format=format)
    np.testing.assert_array_equal(np.asarray(jax.jit(dequantize)(w)).view(np.uint32), weights.view(np.uint32))


@pytest.mark.parametrize("format", formats.names())
def test_the_definition_of_matmul_is_float32_and_not_tf32(format):
    raw, weights = expected_blocks.load(format)
    x = np.random.default_rng(0).standard_normal((40, 512)).astype(np.float32)
    got = np.asarray(matmul(jnp.asarray(x), from_blocks(jnp.asarray(raw), format)), np.float64)
    want = x.astype(np.float64) @ weights.astype(np.float64).T
    assert np.linalg.norm(got - want) < 1e-6 * np.linalg.norm(want)


@pytest.mark.parametrize("source", tiny_answers.SOURCES)
@pytest.mark.parametrize("cache_dtype", cache_layouts.names())
def test_tiny_models_say_what_llama_cpp_said(source, cache_dtype):
    """llama.cpp rounds activations to 8 bits on these; the cache rounds keys and values here."""
    answers = tiny_answers.stored(source)
    found = agreement(bj.load(source, bj.RunConfig(cache_dtype=cache_dtype)), answers)
    print(f"{source} {cache_dtype}: KL {found.kl:.2e}, same top token {found.same_top:.2%}")
    assert found.kl < 2e-3 and found.same_top > 0.95


def test_the_same_input_gives_the_same_bits():
    model = bj.load("synth:tiny-qwen3:q4_k_m")
    runs = [bj.logits(model, list(range(50))) for _ in range(3)]
    np.testing.assert_array_equal(runs[0], runs[1])
    np.testing.assert_array_equal(runs[0], runs[2])
