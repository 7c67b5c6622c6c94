"""NaN and infinity among a row's activations on a GPU: products, and whole models, through kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.decoding import jitted
from bonsai_jax.network import cache as kv
from pallas_kernels import for_device, matmul
from tests.pallas_kernels.stacks import drawn

pytestmark = pytest.mark.gpu
ROWS = (1, 3, 6, 12, 40, 300)  # of every kernel of few rows, and of GEMMs


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("format", ["q1_0", "q4_k", "q2_k", "q8_0"])
def test_products_of_a_row_are_not_finite(format, bits):
    w = for_device(drawn(format, (1, 256, 1024)).blocks, bits=bits)
    gamma = jnp.ones((1, 1024))
    for rows in ROWS:
        for norm in ({}, {"gamma": gamma, "eps": 1e-6}):
            product = jax.jit(lambda x, norm=norm: matmul(x, w, 0, **norm))
            for bad in (np.nan, np.inf, -np.inf):
                x = np.random.default_rng(rows).standard_normal((rows, 1024)).astype(np.float32)
                x[rows // 2, 5] = bad
                finite = np.isfinite(np.asarray(product(jnp.asarray(x))))
                assert not finite[rows // 2].any(), (rows, norm, bad)
                assert np.delete(finite, rows // 2, axis=0).all(), (rows, norm, bad)


@pytest.mark.parametrize(
    "source", ["synth:tiny-qwen3:q1_0", "synth:tiny-llama:q4_k_m", "synth:tiny-qwen3moe:q4_k_m"]
)
def test_logits_of_a_row_are_not_finite(source):
    """Of steps in every schedule, and of prefill: the third row reads a vector with NaN, others do not."""
    for schedule in ("auto", "launches"):
        model = bj.load(source, bj.RunConfig(schedule=schedule))
        for rows, tokens in ((1, 1), (4, 1), (4, 70)):
            vectors = np.random.default_rng(rows).standard_normal((rows, tokens, model.config.hidden))
            vectors[rows // 2, tokens // 2, 3] = np.nan
            cache = kv.empty(model.config, model.run, rows, 128)
            lengths = jnp.full(rows, tokens, jnp.int32)
            logits, _ = jitted.extend(
                model.params, cache, jnp.asarray(vectors, jnp.float32), lengths, model.config
            )
            finite = np.isfinite(np.asarray(logits[:, -1]))
            assert not finite[rows // 2].any(), (schedule, rows, tokens)
            assert np.delete(finite, rows // 2, axis=0).all(), (schedule, rows, tokens)
