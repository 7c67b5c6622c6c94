"""On a CPU a greedy text is the same alone and beside others, with 8-bit activations too: SmolLM2."""

import pytest

import bonsai_jax as bj
from tests.bonsai_jax.vocabularies import smollm2_path

pytestmark = pytest.mark.usefixtures("optimized")
pytest.importorskip("llvmlite")  # the extra `cpu`

GREEDY = bj.SamplingParams(temperature=0.0)
HOW = {"max_new_tokens": 24, "ignore_eos": True}
STARTS = ("Once upon a time", "def main():", "The capital of France", "In 1969", "import numpy as np")
MOST = 33


@pytest.fixture(scope="module")
def model():
    return bj.load(str(smollm2_path()), bj.RunConfig(batch_size=MOST, context=512, weights="packed"))


@pytest.fixture(scope="module")
def prompts():
    return [f"{STARTS[i % len(STARTS)]} {i}" for i in range(MOST)]


@pytest.fixture(scope="module")
def alone(model, prompts):
    return [bj.generate(model, prompt, sampling=GREEDY, **HOW)[0].tokens for prompt in prompts[:9]]


@pytest.mark.parametrize(
    "size", [9, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 5, 6, 7, 8, 33))]
)
def test_generate(model, prompts, alone, size):
    together = bj.generate(model, prompts[:size], sampling=GREEDY, **HOW)
    assert [output.tokens for output in together[:9]] == alone[:size]


@pytest.mark.slow
def test_an_engine(model, prompts, alone):
    with bj.Engine(model) as engine:
        handles = [engine.submit(prompt, GREEDY, **HOW) for prompt in prompts]
        assert [handle.result(300).tokens for handle in handles[:9]] == alone
