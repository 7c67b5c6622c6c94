"""bonsai_jax/tunix.py in Tunix itself, whose trainer draws by the engine. Needs google-tunix:

uv run --with google-tunix==0.1.7 pytest -m slow tests/bonsai_jax/test_tunix.py

XLA_FLAGS=--xla_force_host_platform_device_count=2 before it: the trainer has two devices, the engine one.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import bonsai_jax as bj
from bonsai_jax import training

NEEDED = ("tunix", "llvmlite")  # the latter for kernels whose bits do not depend on rows
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(importlib.util.find_spec, NEEDED)), reason="needs google-tunix"),
    pytest.mark.filterwarnings("default"),  # of Tunix and what it imports
]

PROMPTS = ["Once upon", "a time there was"]
RUN = bj.RunConfig(context=128, activation_bits=16, cache_dtype="float32")


@pytest.fixture(scope="module")
def tunix():
    from bonsai_jax import tunix

    return tunix


@pytest.fixture(scope="module")
def sampler(tunix):
    model = bj.load("synth:tiny-llama:q8_0", RUN)
    with bj.Engine(model, max_batch_size=4, logprobs=0, sampled_logprobs=True) as engine:
        yield tunix.Sampler(engine)


def test_a_sampler_gives_the_engines_answers(tunix, sampler):
    from tunix.generate import base_sampler

    assert isinstance(sampler, base_sampler.BaseSampler)
    encoded = [sampler.tokenize(text) for text in PROMPTS]
    greedy = sampler(PROMPTS, 6, return_logprobs=True)
    answers = bj.generate(
        sampler.engine.model, PROMPTS, sampling=bj.SamplingParams(temperature=0), max_new_tokens=6
    )
    assert [row.tolist() for row in greedy.tokens] == [answer.tokens for answer in answers]
    assert greedy.text == [sampler.tokenizer.decode(answer.tokens) for answer in answers]
    drawn = {"temperature": 0.7, "top_p": 0.9, "top_k": 20}
    how = bj.SamplingParams(**drawn, min_p=0, temperature_first=True)
    again = [sampler(PROMPTS, 6, **drawn, seed=jax.random.key(5), multi_sampling=2, return_logprobs=True)
             for _ in range(2)]  # fmt: skip
    for i, prompt in enumerate(encoded):
        sampling = bj.SamplingParams(**{**how.__dict__, "seed": 5 + 2 * i})
        outputs = sampler.engine.submit(prompt, sampling, max_new_tokens=6, n=2, logprobs=0).results(60)
        for j, output in enumerate(outputs):
            for result in again:
                assert result.tokens[2 * i + j].tolist() == output.tokens
                assert result.logprobs[2 * i + j] == output.logprobs.sampled.tolist()
    assert all(value < 0 for row in greedy.logprobs for value in row)  # the model's, not of a certain draw
    assert sampler.transformer_state is not None and sampler.transformer.config.num_layers > 0


def test_padding_echo_and_ends(tunix, sampler):
    encoded, pad = [sampler.tokenize(text) for text in PROMPTS], sampler.tokenizer.pad_id()
    plain = sampler(PROMPTS, 6, return_logprobs=True)
    assert plain.padded_prompt_tokens.shape == (2, 16)  # of 8 and 9 tokens
    for row, prompt in zip(plain.padded_prompt_tokens, encoded, strict=True):
        assert row.tolist() == [pad] * (16 - len(prompt)) + prompt
    end = int(plain.tokens[0][2])
    ended = sampler(PROMPTS[0], 6, 20, eos_tokens=[end], pad_output=True, return_logprobs=True)
    count = plain.tokens[0].tolist().index(end)
    assert ended.tokens.tolist() == [plain.tokens[0][:count].tolist() + [pad] * (6 - count)]
    assert ended.logprobs == [plain.logprobs[0][:count] + [0.0] * (6 - count)]
    assert ended.padded_prompt_tokens.shape == (1, 20)
    echoed = sampler(PROMPTS, 6, echo=True)
    assert [row.tolist() for row in echoed.tokens] == [
        prompt + row.tolist() for prompt, row in zip(encoded, plain.tokens, strict=True)
    ]
    assert echoed.text[0].startswith(PROMPTS[0]) and echoed.logprobs is None
    for wrong in ({"beam_size": 2}, {"return_logits": True}):
        with pytest.raises(NotImplementedError, match=next(iter(wrong))):
            sampler(PROMPTS, 6, **wrong)


def test_a_policy_takes_texts_that_are_padded_on_the_left(tunix):
    from tunix.rl.common import build_positions_from_mask

    policy = tunix.Policy(training.plan("synth:tiny-llama:f32", "q1_0", RUN, pure=True))
    tokens, mask = np.full((2, 8), 7), np.zeros((2, 8), bool)
    tokens[0, 3:7], mask[0, 3:7] = [5, 6, 8, 9], True
    tokens[1], mask[1] = np.arange(20, 28), True
    logits, cache = policy(jnp.asarray(tokens), build_positions_from_mask(jnp.asarray(mask)), None, None)
    assert cache is None
    for row, part in enumerate((slice(3, 7), slice(0, 8))):
        text = tokens[row : row + 1, part]
        alone, _ = bj.forward(
            policy.plan.rounded(policy.arrays()), text, np.array([text.size]), policy.config
        )
        np.testing.assert_allclose(logits[row, part], alone[0], atol=2e-4)


def test_tunix_trains_a_policy_and_draws_with_its_weights(tunix):
    """By its GRPO: the engine's weights after each step are the trainer's, packed; the
    log-probabilities of a rollout are those that the worker computes again, to the bit, and those of the
    trainer's forward pass, nearly."""
    from tunix.rl import common, rl_cluster
    from tunix.rl.grpo import grpo_learner
    from tunix.rl.rollout import base_rollout

    plan = training.plan("synth:tiny-llama:f32", "q1_0", RUN, pure=True)
    role, mesh = rl_cluster.Role, jax.sharding.Mesh(np.array(jax.devices()[:2])[:, None], ("fsdp", "tp"))
    settings = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys((role.ACTOR, role.REFERENCE, role.ROLLOUT), mesh),
        rollout_engine=functools.partial(tunix.Rollout, max_batch_size=8),
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adam(2e-3), eval_every_n_steps=100, max_steps=2
        ),
        rollout_config=base_rollout.RolloutConfig(
            max_tokens_to_generate=8, max_prompt_length=16, temperature=1.0, top_p=1.0, return_logprobs=True
        ),
    )  # fmt: skip
    tokenizer = tunix.Tokenizer(bj.Tokenizer.from_checkpoint(plan.checkpoint))
    cluster = rl_cluster.RLCluster(
        actor=tunix.Policy(plan), reference=tunix.Policy(plan), tokenizer=tokenizer, cluster_config=settings
    )
    engine = cluster.rollout.engine
    try:
        before = cluster.actor_trainer.model.arrays()
        learner = grpo_learner.GRPOLearner(
            rl_cluster=cluster,
            reward_fns=lambda prompts, completions, **_: [len(set(text)) / 10 for text in completions],
            algo_config=grpo_learner.GRPOConfig(num_generations=4, num_iterations=1, beta=0.04),
        )
        learner.train([{"prompts": np.array(PROMPTS)} for _ in range(2)])
        policy = cluster.actor_trainer.model
        assert engine.version == 2
        assert any(abs(w - before[name]).max() > 1e-3 for name, w in policy.arrays().items())
        packed = jax.tree.leaves(jax.jit(plan.packed)(policy.arrays()))
        for own, its in zip(jax.tree.leaves(engine.model.params), packed, strict=True):
            np.testing.assert_array_equal(own, its)
        rollout = cluster.generate(PROMPTS)
        pad, eos = cluster.rollout.pad_id(), cluster.rollout.eos_id()
        answers = np.stack([np.pad(row, (0, 8 - len(row)), constant_values=pad) for row in rollout.tokens])
        texts = jnp.asarray(rollout.left_padded_prompt_tokens), jnp.asarray(answers)
        again = np.asarray(cluster.rollout.get_per_token_logps(*texts))
        graph, state = nnx.split(policy)
        trained = np.asarray(common.compute_per_token_logps(graph, state, *texts, pad_id=pad, eos_id=eos))
        for row, values in enumerate(rollout.logprobs):
            np.testing.assert_array_equal(again[row, : len(values)], np.array(values, np.float32))
            np.testing.assert_allclose(trained[row, : len(values)], values, atol=2e-3)
    finally:
        engine.close()
