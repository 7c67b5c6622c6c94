"""Log-probabilities that an engine returns, as training computes them again: the same bits by
`rollout_logprobs`, and by `forward` nearly so. Weights that a training plan packs go to a running engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax import training
from bonsai_jax.decoding.sampling import log_softmax
from tests.bonsai_jax.test_training import SHAPE
from tests.bonsai_jax.tiny_files import tiny_gguf

pytest.importorskip("llvmlite")  # the kernels whose bits do not depend on rows

PLAIN = bj.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
PROMPTS, NEW = [[5] * 3, [6, 7] * 9, [8, 9, 10] * 4], 12
LENGTHS = np.array([len(prompt) + NEW for prompt in PROMPTS])
FILE = tiny_gguf("llama", SHAPE)


def answers(engine: bj.Engine) -> tuple[np.ndarray, list[bj.Output]]:
    """Texts int32 [B, T] and outputs."""
    handles = [
        engine.submit(ids, PLAIN, max_new_tokens=NEW, ignore_eos=True, logprobs=512) for ids in PROMPTS
    ]
    outputs = [handle.result(60) for handle in handles]
    texts = np.zeros((len(PROMPTS), max(LENGTHS)), np.int32)
    for row, ids, output in zip(texts, PROMPTS, outputs, strict=True):
        row[: len(ids) + NEW] = [*ids, *output.tokens]
    return texts, outputs


def drawn(values) -> np.ndarray:
    """Of values of the token after each position, [B, T - 1, ...], those of drawn tokens, [B, NEW, ...]."""
    return np.stack([row[n - NEW - 1 : n - 1] for row, n in zip(np.asarray(values), LENGTHS, strict=True)])


@pytest.mark.parametrize(
    ("format", "bits", "reproducible"),
    [("q1_0", 16, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in
     [("q1_0", 8, True), ("q1_0", 8, False), ("tq2_0", 16, False), ("q8_0", 16, True), ("q4_k", 8, True)])],
)  # fmt: skip
def test_an_engines_are_those_of_training(format, bits, reproducible):
    """Also after an update to weights that the plan packs inside jit."""
    how = bj.RunConfig(context=64, activation_bits=bits, cache_dtype="float32")
    file = FILE if format in ("q1_0", "q8_0") else tiny_gguf("llama", SHAPE | {"embedding_length": 256})
    plan = training.plan(file, format, how, pure=True)
    weights, packed = plan.weights(), jax.jit(plan.packed)
    model = plan.model(weights)
    rollout = jax.jit(training.rollout_logprobs, static_argnames=("config", "run"))
    options = {"max_batch_size": 4, "context": 64, "logprobs": 512, "sampled_logprobs": True}
    with bj.Engine(model, **options, reproducible=reproducible) as engine:
        for version in range(2):
            params = packed(weights)
            if version:
                assert engine.update_params(params) == 1
            texts, outputs = answers(engine)
            assert {v for out in outputs for v in out.versions} == {version}
            got = drawn(rollout(params, texts, LENGTHS, model.config, model.run))
            for row, out in zip(got, outputs, strict=True):
                np.testing.assert_array_equal(row, out.logprobs.token)
                np.testing.assert_array_equal(row, out.logprobs.sampled)
            if bits == 16:
                check_forward(params, texts, outputs, model.config)
            weights = {k: w + 0.02 * jnp.sin(jnp.arange(w.size)).reshape(w.shape) for k, w in weights.items()}
    first, second = (training.rollout_logprobs(p, texts, LENGTHS, model.config, model.run) for p in
                     (model.params, params))  # fmt: skip
    assert abs(first - second).max() > 1e-3


def check_forward(params, texts, outputs, config):
    """KL(engine || forward) of the whole distribution at every drawn token, in float64."""
    logits = bj.jitted.forward(params, texts, LENGTHS, config)[0][:, :-1]
    scores = drawn(jax.nn.log_softmax(logits)).astype(np.float64)
    for row, out in zip(scores, outputs, strict=True):
        own = np.zeros_like(row)
        np.put_along_axis(own, np.array(out.logprobs.ids), np.array(out.logprobs.top, np.float64), -1)
        own -= np.log(np.exp(own).sum(-1, keepdims=True))
        row = row - np.log(np.exp(row).sum(-1, keepdims=True))
        assert 0 <= (np.exp(own) * (own - row)).sum(-1).max() < 1e-6


def test_values_of_one_and_derivatives_of_another():
    x, values = jnp.array([1.0, 2.0]), jnp.array([1.5, 0.1])
    value, slope = jax.jit(jax.value_and_grad(lambda x: (training.with_values(x**2, values) ** 3).sum()))(x)
    np.testing.assert_allclose(value, (values**3).sum(), rtol=1e-6)
    np.testing.assert_allclose(slope, 3 * values**2 * 2 * x, rtol=1e-6)
    assert not jax.grad(lambda v: training.with_values(x, v).sum())(values).any()


def test_the_sum_of_a_softmax_has_one_order():
    """Float64, and any order of the tokens."""
    x = 4 * np.random.default_rng(0).standard_normal((5, 70_000)).astype(np.float32)
    x[1, 10:], x[2] = -np.inf, 3.0
    want = x.astype(np.float64)
    want = want - np.log(np.exp(want).sum(-1, keepdims=True))
    got = np.asarray(log_softmax(x))
    np.testing.assert_allclose(got, want, atol=4e-6)
    order = np.random.default_rng(1).permutation(x.shape[1])
    np.testing.assert_array_equal(jax.jit(log_softmax)(x[:, order]), got[:, order])
