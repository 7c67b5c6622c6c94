"""Speculative decoding by hand: a draft proposes K tokens, a target keeps what it would have said itself."""

import jax.numpy as jnp

import bonsai_jax as bj

models = bj.load("synth:tiny-llama:q8_0"), bj.load("synth:tiny-llama:q4_0")  # the target, and its draft
text, K, end = models[0].tokenizer.encode("Once upon a time"), 4, 40
caches = [bj.new_cache(m, batch_size=1, context=end + 2 * K) for m in models]


def say(i, tokens):  # the likeliest token behind each of these that model i has not read yet
    new = jnp.array([tokens[int(caches[i].lengths[0]) :]])
    lengths, config = jnp.array([new.shape[1]]), models[i].config
    logits, caches[i] = bj.jitted.extend(models[i].params, caches[i], new, lengths, config)
    return logits[0].argmax(-1).tolist()


while len(text) < end:
    guess = text
    for _ in range(K):
        guess = [*guess, say(1, guess)[-1]]
    said = say(0, guess)[-K - 1 :]  # behind text, and behind each guess
    text = text + said[: next((i for i in range(K) if guess[len(text) + i] != said[i]), K) + 1]
    caches = [cache.rewind([len(text) - 1]) for cache in caches]
