"""An engine by kernels: the same bits alone and in a crowd, where it promises them."""

import numpy as np
import pytest

import bonsai_jax as bj

pytestmark = pytest.mark.gpu

NEW = 24


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


@pytest.mark.parametrize("source", ["bonsai-1.7b:q1_0", "bonsai-1.7b:q4_k_m"])
@pytest.mark.parametrize("max_rows", [8, 64])
def test_the_same_bits_alone_and_in_a_crowd(source, max_rows):
    """One request by itself, and again among others that are longer, shorter, and there before it."""
    model = bj.load(f"synth:{source}", bj.RunConfig(context=1024))
    ids, params = prompt(100, 0), bj.SamplingParams(seed=5)
    how = {"max_new_tokens": NEW, "ignore_eos": True, "logprobs": 0}
    with bj.Engine(model, max_rows=max_rows, logprobs=0, reproducible=True) as engine:
        alone = engine.submit(ids, params, **how).result(600)
        others = [engine.submit(prompt(10 + 9 * i, 1 + i), **how) for i in range(max_rows - 1)]
        crowd = engine.submit(ids, params, **how).result(600)
        for other in others:
            other.result(600)
    assert crowd.tokens == alone.tokens
    np.testing.assert_array_equal(crowd.logprobs.token, alone.logprobs.token)
