"""A thousand seeds by vmap: one prompt, one program, and the distribution of what the model says."""

import collections

import jax
import jax.numpy as jnp

import bonsai_jax as bj

model, new = bj.load("synth:tiny-llama:q8_0", bj.RunConfig(page_size=16)), 2
ids = model.tokenizer.encode("Heads or tails?")
sampling = bj.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
state = bj.new_state(model, 1, len(ids) + new, sampling, new, ignore_eos=True)


def answer(key, params, state):
    state = state.replace(sampler=state.sampler.replace(keys=key[None]))
    lengths = jnp.array([len(ids)])
    return bj.generate_tokens(params, state, jnp.array([ids]), lengths, model.config, size=new).tokens[0]


keys = jax.random.split(jax.random.key(0), 1000)
answers = jax.jit(jax.vmap(answer, in_axes=(0, None, None)))(keys, model.params, state)
print(collections.Counter(map(model.tokenizer.decode, answers[:, :1].tolist())).most_common(5))
