# %% [markdown]
# # A thousand samples in one jit
#
# A generation is a pure function of weights, prompt, key and temperature. So a thousand of them, each with
# its own seed and temperature, are one `vmap`, and the best of them by log-probability is one `argmax`: no
# server, no batching code.

# %%
import time

import jax
import jax.numpy as jnp

import bonsai_jax as bj

try:
    import matplotlib.pyplot as plt  # uv run --group notebook ...
except ImportError:
    plt = None

model = bj.load(
    "synth:tiny-llama:q8_0", bj.RunConfig(page_size=16)
)  # random weights; a real model works alike
SAMPLES, NEW = 1000, 12

# %% [markdown]
# ## One sample, as a function
#
# The prompt is read once, outside: all samples share what the cache holds of it. Inside, a sample is a key
# and a temperature put into the state, and a loop of steps.

# %%
ids = model.tokenizer.encode("The best name for a cat is")
state = bj.new_state(
    model, 1, len(ids) + NEW, bj.SamplingParams(temperature=1.0, seed=0), NEW, ignore_eos=True
)


def sample(key, temperature):
    """A key and a temperature to NEW tokens, int32 [NEW]."""
    sampler = state.sampler.replace(keys=key[None], temperature=temperature[None], top_k=jnp.array([0]))
    own = state.replace(sampler=sampler)
    own = bj.prefill(model.params, own, jnp.array([ids]), jnp.array([len(ids)]), model.config)
    first = own.tokens
    _, rest = bj.decode(model.params, own, model.config, limit=NEW - 1, size=NEW - 1)
    return jnp.concatenate([first, rest[0]])


# %% [markdown]
# ## A thousand
#
# `vmap` sees that the prompt's keys and values depend on neither key nor temperature, and computes them
# once. Steps are products with a thousand rows.

# %%
keys = jax.vmap(jax.random.key)(jnp.arange(SAMPLES))
temperatures = jnp.linspace(0.05, 1.5, SAMPLES)
many = jax.jit(jax.vmap(sample))
answers = many(keys, temperatures)  # compiles
began = time.perf_counter()
answers = jax.block_until_ready(many(keys, temperatures))
elapsed = time.perf_counter() - began
print(f"{SAMPLES} answers of {NEW} tokens in {elapsed:.2f} s: {SAMPLES * NEW / elapsed:,.0f} tokens/s")

# A sample does not know of the others: alone it gives the same tokens.
assert (jax.jit(sample)(keys[7], temperatures[7]) == answers[7]).all()

# %% [markdown]
# ## Best of n by log-probability
#
# `forward` scores whole sequences. The score of an answer is the sum of its tokens' log-probabilities at
# temperature 1, whatever the temperature that drew it.


# %%
@jax.jit
def log_probability(answers):
    """int32 [S, NEW] to float32 [S]."""
    texts = jnp.concatenate([jnp.tile(jnp.array(ids), (len(answers), 1)), answers], axis=1)
    lengths = jnp.full(len(answers), texts.shape[1])
    logits, _ = bj.forward(model.params, texts, lengths, model.config)
    log_p = jax.nn.log_softmax(logits[:, len(ids) - 1 : -1])
    return jnp.take_along_axis(log_p, answers[..., None], axis=-1)[..., 0].sum(axis=1)


chunks = [log_probability(part) for part in jnp.split(answers, 10)]  # logits of all would be a gigabyte
scores = jnp.concatenate(chunks)
best = int(scores.argmax())
greedy = bj.generate(
    model, [ids], max_new_tokens=NEW, sampling=bj.SamplingParams(temperature=0.0), ignore_eos=True
)
print(f"best of {SAMPLES}: {float(scores[best]):.2f}, at temperature {float(temperatures[best]):.2f}")
print(f"greedy:       {float(log_probability(jnp.array([greedy[0].tokens]))[0]):.2f}")

# %% [markdown]
# Greedy takes the likeliest token every time, which need not end at the likeliest text: often a sample
# beats it. And how does the best of *n* grow with *n*, cold and hot? Expected maxima over random subsets of
# the samples:

# %%
key, bands = jax.random.key(0), {"cold": slice(0, 300), "warm": slice(300, 700), "hot": slice(700, 1000)}
sizes = [1, 4, 16, 64, 256]
curves = {}
for name, band in bands.items():
    drawn = jax.random.choice(key, scores[band], (200, sizes[-1]))
    curves[name] = [float(drawn[:, :n].max(axis=1).mean()) for n in sizes]
    print(
        f"{name:5}",
        "  ".join(f"best of {n}: {value:7.2f}" for n, value in zip(sizes, curves[name], strict=True)),
    )

# %%
if plt:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5))
    left.scatter(temperatures, scores, s=4)
    left.set(xlabel="temperature", ylabel="log-probability of the answer")
    for name, values in curves.items():
        right.plot(sizes, values, marker="o", label=name)
    right.set(xscale="log", xlabel="n", ylabel="expected best of n")
    right.legend()
    plt.show()
