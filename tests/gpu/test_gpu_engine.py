"""An engine by kernels: the same bits alone and in a crowd, where it promises them."""

import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.engine import calls

pytestmark = pytest.mark.gpu

NEW = 24
ROWS = 17


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


@pytest.mark.parametrize("source", ["bonsai-1.7b:q1_0", "bonsai-1.7b:q4_k_m"])
@pytest.mark.parametrize("max_batch_size", [8, 64])
def test_the_same_bits_alone_and_in_a_crowd(source, max_batch_size):
    """One request by itself, and again among others that are longer, shorter, and there before it."""
    model = bj.load(f"synth:{source}", bj.RunConfig(context=1024))
    ids, params = prompt(100, 0), bj.SamplingParams(seed=5)
    how = {"max_new_tokens": NEW, "ignore_eos": True, "logprobs": 0}
    with bj.Engine(model, max_batch_size=max_batch_size, logprobs=0, reproducible=True) as engine:
        alone = engine.submit(ids, params, **how).result(600)
        others = [engine.submit(prompt(10 + 9 * i, 1 + i), **how) for i in range(max_batch_size - 1)]
        crowd = engine.submit(ids, params, **how).result(600)
        for other in others:
            other.result(600)
    assert crowd.tokens == alone.tokens
    np.testing.assert_array_equal(crowd.logprobs.token, alone.logprobs.token)


@pytest.mark.parametrize(
    ("source", "speculate"),
    [
        ("bonsai-1.7b:q1_0", None),
        ("tiny-llama:q4_k_m", "ngram"),
        ("tiny-qwen35:pq2_0", None),
        ("tiny-qwen3moe:q4_k_m", None),
    ],
)
def test_a_loop_inside_its_graph_draws_what_a_loop_outside_does(source, speculate, monkeypatch):
    """The first call runs without a graph, the second makes one, the third finds it."""
    model = bj.load(f"synth:{source}", bj.RunConfig(context=256, batch_size=ROWS))
    ids = [prompt(5 + 3 * i, i) for i in range(ROWS)]
    how = {"max_new_tokens": NEW, "ignore_eos": True, "speculate": speculate}

    def drawn():
        params = [bj.SamplingParams(seed=i) for i in range(len(ids))]
        return [output.tokens for output in bj.generate(model, ids, sampling=params, **how)]

    inside = [drawn() for _ in range(3)]
    monkeypatch.setattr(calls, "LOOP_IN_GRAPH", {})
    assert inside == [drawn()] * 3
