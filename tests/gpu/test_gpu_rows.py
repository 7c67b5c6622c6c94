"""Decode steps of every number of rows that batches have, at the widths of a real model, against the
reference."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax import cache as kv
from bonsai_jax import jitted
from checkpoints import synth
from tests.agreement import log_softmax

pytestmark = pytest.mark.gpu

ROWS = (*range(1, 18), 32, 64, 200)
MOST, STEPS, CONTEXT = ROWS[-1], 3, 512
KL = 5e-3  # nats, of activations rounded to 8 bits; one of 16 rows read as another costs above 1


@pytest.fixture(scope="module")
def models():
    """The same weights by kernels and by the reference: layers and vocabulary of the 8B are fewer, and all
    else is as it is."""
    with pytest.MonkeyPatch.context() as patch:
        few = dataclasses.replace(synth._MODELS["bonsai-8b"], layers=2, vocab=2048, specials=2000)
        patch.setitem(synth._MODELS, "few-8b", few)
        load = lambda impl: bj.load(  # noqa: E731
            "synth:few-8b:q1_0", bj.RunConfig(impl=impl, cache_dtype="float32", rows=MOST, context=CONTEXT)
        )
        yield load("auto"), load("reference")


def log_p(model, tokens: np.ndarray) -> np.ndarray:
    """[step, row, vocabulary] behind each token of rows that are read token by token."""
    rows = tokens.shape[1]
    cache, out = kv.empty(model.config, model.run, rows, CONTEXT), []
    for of_step in tokens:
        ones = jnp.ones(rows, jnp.int32)
        scores, cache = jitted.extend(model.params, cache, jnp.array(of_step)[:, None], ones, model.config)
        out.append(log_softmax(np.asarray(scores[:, 0])))
    return np.stack(out)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(7).integers(0, 2000, (STEPS, MOST)).astype(np.int32)


@pytest.fixture(scope="module")
def want(models, tokens):
    return log_p(models[1], tokens)


@pytest.mark.parametrize("rows", ROWS)
def test_a_step_of_any_number_of_rows_is_its_definition(rows, models, tokens, want):
    kernels, _ = models
    assert kernels.params.step.schedule(rows) == ("one_launch" if rows <= 16 else "layer_gemms")
    p, q = want[:, :rows], log_p(kernels, tokens[:, :rows])
    kl = (np.exp(p) * (p - q)).sum(-1)
    print(f"{rows} rows: KL {kl.mean():.2e}, of a row at most {kl.max():.2e}")
    assert 0 < kl.max() < KL
