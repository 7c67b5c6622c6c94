"""GRPO (Shao et al. 2024, arXiv:2402.03300) of a model with 1-bit weights: rollouts use the very weights that
are trained, packed. The task: answer an even token with even tokens, and an odd one with odd tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bonsai_jax as bj
from bonsai_jax import training

PROMPTS, GROUP, NEW, STEPS = [[2], [3], [8], [9]], 8, 8, 9
run = bj.RunConfig(context=64, activation_bits=16, cache_dtype="float32")
plan = training.plan("synth:tiny-llama:f32", "q1_0", run, pure=True)
weights = plan.weights()  # float32, by tensor name; Q1_0 is what runs
policy, packed = plan.model(weights), jax.jit(plan.packed)
optimizer = optax.adam(2e-3)
moments = optimizer.init(weights)


def reward(prompt, answer):
    return np.mean([token % 2 == prompt[0] % 2 for token in answer])


@jax.jit
def train(weights, moments, params, texts, sampled, advantages):
    """A step of PPO's clipped objective. params: the weights, packed; sampled: log p at the draw."""
    lengths = jnp.full(len(texts), texts.shape[1])
    values = training.rollout_logprobs(params, texts, lengths, plan.config, policy.run)

    def loss(weights):
        logits, _ = bj.forward(plan.rounded(weights), texts, lengths, plan.config)
        scores = training.with_values(training.token_logprobs(logits, texts), values)[:, -NEW:]
        ratio, gain = jnp.exp(scores - sampled), advantages[:, None]
        return -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain).mean(), ratio

    slope, ratio = jax.grad(loss, has_aux=True)(weights)
    changes, moments = optimizer.update(slope, moments, weights)
    return optax.apply_updates(weights, changes), moments, ratio


rewards, ratios = [], []
with bj.Engine(policy, max_batch_size=32, context=32, logprobs=0, sampled_logprobs=True) as engine:
    for step in range(STEPS):
        sampling = bj.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1000 * step)
        how = {"max_new_tokens": NEW, "n": GROUP, "logprobs": 0, "ignore_eos": True}
        handles = [engine.submit(prompt, sampling, **how) for prompt in PROMPTS]
        groups = [(prompt, handle.results()) for prompt, handle in zip(PROMPTS, handles)]
        each = np.array([[reward(prompt, out.tokens) for out in outs] for prompt, outs in groups])
        gains = (each - each.mean(1, keepdims=True)) / (each.std(1, keepdims=True) + 1e-6)
        texts = np.array([[*prompt, *out.tokens] for prompt, outs in groups for out in outs])
        sampled = np.array([out.logprobs.sampled for _, outs in groups for out in outs])
        for _ in range(2):
            batch = texts, sampled, gains.reshape(-1)
            weights, moments, ratio = train(weights, moments, packed(weights), *batch)
            ratios.append(np.asarray(ratio))
        engine.update_params(packed(weights))
        rewards.append(each.mean())
print([round(float(value), 2) for value in rewards])
