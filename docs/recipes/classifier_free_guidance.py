"""Classifier-free guidance: two prompts in two rows, drawn from logits that lean away from the second."""

import jax.numpy as jnp

import bonsai_jax as bj

SCALE, NEW = 1.5, 16
model = bj.load("synth:tiny-llama:q8_0", bj.RunConfig(activation_bits=16))
prompts = ["Answer politely. What is a bonsai?", "What is a bonsai?"]


def guided(logits, state):
    """Both rows draw the same token: unconditional + scale * (conditional - unconditional)."""
    wanted, plain = logits
    return jnp.stack([plain + SCALE * (wanted - plain)] * 2)


greedy = bj.SamplingParams(temperature=0.0)
with_it, without = bj.generate(model, prompts, max_new_tokens=NEW, sampling=greedy, logits_processor=guided)
print(repr(with_it.text))
