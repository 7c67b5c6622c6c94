"""Classifier-free guidance: two prompts in two rows, drawn from logits that lean away from the second."""

import jax.numpy as jnp

import bonsai_jax as bj

SCALE, NEW, WIDTH = 1.5, 16, 64
model = bj.load("synth:tiny-llama:q8_0", bj.RunConfig(activation_bits=16))
prompts = ["Answer politely. What is a bonsai?", "What is a bonsai?"]


def guided(logits, state):
    """Both rows draw the same token: unconditional + scale * (conditional - unconditional)."""
    wanted, plain = logits
    return jnp.stack([plain + SCALE * (wanted - plain)] * 2)


# Rows that look at each other are rows of one state; `generate` answers each prompt by itself.
ids = [model.tokenizer.encode(prompt) for prompt in prompts]
tokens, lengths = jnp.array([i + [0] * (WIDTH - len(i)) for i in ids]), jnp.array([*map(len, ids)])
state = bj.new_state(model, 2, WIDTH + NEW, bj.SamplingParams(temperature=0.0), NEW)
options = {"size": NEW, "logits_processor": guided}
drawn = bj.jitted.generate_tokens(model.params, state, tokens, lengths, model.config, **options)
answer = [token for token in drawn.tokens[0].tolist() if token >= 0]
print(repr(model.tokenizer.decode(answer)))
