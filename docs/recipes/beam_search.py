"""Beam search: the W likeliest continuations of a prompt, by extend and KVCache.take."""

import jax
import jax.numpy as jnp

import bonsai_jax as bj

W, NEW = 4, 8
model = bj.load("synth:tiny-llama:q8_0", bj.RunConfig(activation_bits=16))  # or "demo", "user/repo:Q8_0"
ids = model.tokenizer.encode("The best tree for a small garden is")

cache = bj.new_cache(model, batch_size=1, context=len(ids) + NEW)
logits, cache = bj.jitted.extend(model.params, cache, jnp.array([ids]), jnp.array([len(ids)]), model.config)
log_p = jax.nn.log_softmax(logits[:, len(ids) - 1])  # [1, V]
scores, tokens = jax.lax.top_k(log_p[0], W)
cache, beams = cache.take([0] * W), tokens[:, None]  # one prompt, W beams
for _ in range(NEW - 1):
    logits, cache = bj.jitted.extend(model.params, cache, beams[:, -1:], jnp.ones(W, jnp.int32), model.config)
    log_p = scores[:, None] + jax.nn.log_softmax(logits[:, 0])  # [W, V]
    scores, best = jax.lax.top_k(log_p.reshape(-1), W)
    parents, tokens = best // log_p.shape[1], best % log_p.shape[1]
    cache, beams = cache.take(parents), jnp.concatenate([beams[parents], tokens[:, None]], axis=1)
for score, beam in zip(scores, beams):
    print(f"{score:8.3f} {model.tokenizer.decode(beam.tolist())!r}")
