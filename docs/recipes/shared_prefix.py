"""A long prefix is read once, saved to disk, and shared by many rows, each with a question of its own."""

import jax.numpy as jnp

import bonsai_jax as bj

model, new = bj.load("synth:tiny-llama:q8_0"), 8
prefix = model.tokenizer.encode("A bonsai is a small tree in a pot. " * 5)
questions = [model.tokenizer.encode(q, add_special=False) for q in ("Where is it?", "How tall is it then?")]
width = max(map(len, questions))

cache = bj.new_cache(model, batch_size=1, context=len(prefix) + width + new)
ids, lengths = jnp.array([prefix]), jnp.array([len(prefix)])
_, cache = bj.jitted.extend(model.params, cache, ids, lengths, model.config)
bj.save_state("prefix.safetensors", cache)

cache = bj.load_state("prefix.safetensors", model).take([0] * len(questions))
state = bj.new_state(model, len(questions), 1, bj.SamplingParams(seed=0), new).replace(cache=cache)
ids = jnp.array([q + [0] * (width - len(q)) for q in questions])
lengths = jnp.array([len(q) for q in questions])
drawn = bj.jitted.generate_tokens(model.params, state, ids, lengths, model.config, size=new)
for answer in drawn.tokens.tolist():
    print(repr(model.tokenizer.decode([t for t in answer if t >= 0])))
