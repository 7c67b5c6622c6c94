# %% [markdown]
# # A thousand samples in one jit
#
# A generation is a pure function of weights, state, key and temperature. So a thousand of them, each with
# its own seed and temperature, are one `vmap`, and the best of them by log-probability is one `argmax`: no
# server, no batching code. (On a laptop's CPU a thousand answers of SmolLM2 take a minute or two.)

# %%
import os
import time

import jax
import jax.numpy as jnp

import bonsai_jax as bj

try:
    import matplotlib.pyplot as plt  # uv run --group notebook ...
except ImportError:
    plt = None

# "demo" is SmolLM2; or "model.gguf", a Hugging Face folder, "user/repo:Q1_0". Tests put a tiny model here.
SOURCE = os.environ.get("NOTEBOOK_MODEL", "demo")
model = bj.load(SOURCE, bj.RunConfig(page_size=16))
config = model.config
SAMPLES, AT_ONCE, NEW = 1000, 250, 8

# %% [markdown]
# ## One sample, as a function
#
# A sample is a key and a temperature put into the state, the prompt read, and a loop of steps. Weights and
# state are arguments: what a jitted function closes over would be compiled into it as constants.

# %%
ids = model.tokenizer.encode("The best name for a cat is")
sampling = bj.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
state = bj.new_state(model, 1, len(ids) + NEW, sampling, NEW, ignore_eos=True)


def sample(params, state, key, temperature):
    """A key and a temperature to NEW tokens, int32 [NEW]."""
    sampler = state.sampler.replace(keys=key[None], temperature=temperature[None])
    state = state.replace(sampler=sampler)
    state, first, _ = bj.prefill(params, state, jnp.array([ids]), jnp.array([len(ids)]), config)
    rest = bj.decode(params, state, config, limit=NEW - 1, size=NEW - 1).tokens
    return jnp.concatenate([first, rest[0]])


# %% [markdown]
# ## A thousand
#
# `vmap` sees that the prompt's keys and values depend on neither key nor temperature, and computes them
# once. Steps are products with as many rows as there are samples. Each sample has a cache of its own, so
# `lax.map` takes them 250 at a time: still one jitted call, with a quarter of the memory.


# %%
@jax.jit
def many(params, state, keys, temperatures):
    """[S] keys and temperatures to int32 [S, NEW]."""
    one = lambda of: sample(params, state, *of)  # noqa: E731
    return jax.lax.map(one, (keys, temperatures), batch_size=AT_ONCE)


keys = jax.vmap(jax.random.key)(jnp.arange(SAMPLES))
temperatures = jnp.linspace(0.05, 1.5, SAMPLES)
compiled = many.lower(model.params, state, keys, temperatures).compile()
began = time.perf_counter()
answers = jax.block_until_ready(compiled(model.params, state, keys, temperatures))
elapsed = time.perf_counter() - began
print(f"{SAMPLES} answers of {NEW} tokens in {elapsed:.1f} s: {SAMPLES * NEW / elapsed:,.0f} tokens/s")
for number in (0, SAMPLES // 3, 2 * SAMPLES // 3, SAMPLES - 1):
    text = model.tokenizer.decode(answers[number].tolist())
    print(f"temperature {float(temperatures[number]):.2f}: {text!r}")

# A sample does not know of the others: alone it gives the same tokens.
alone = jax.jit(sample)(model.params, state, keys[7], temperatures[7])
assert (alone == answers[7]).all()

# %% [markdown]
# ## Best of n by log-probability
#
# `forward` scores whole sequences. The score of an answer is the sum of its tokens' log-probabilities at
# temperature 1, whatever the temperature that drew it.


# %%
@jax.jit
def log_probability(params, answers):
    """int32 [S, NEW] to float32 [S]."""
    texts = jnp.concatenate([jnp.tile(jnp.array(ids), (len(answers), 1)), answers], axis=1)
    lengths = jnp.full(len(answers), texts.shape[1])
    logits, _ = bj.forward(params, texts, lengths, config)
    log_p = jax.nn.log_softmax(logits[:, len(ids) - 1 : -1])
    return jnp.take_along_axis(log_p, answers[..., None], axis=-1)[..., 0].sum(axis=1)


# Logits of all would be gigabytes.
scores = jnp.concatenate([log_probability(model.params, part) for part in jnp.split(answers, 20)])
best = int(scores.argmax())
greedy = bj.generate(
    model, [ids], max_new_tokens=NEW, sampling=bj.SamplingParams(temperature=0.0), ignore_eos=True
)[0]
of_greedy = float(log_probability(model.params, jnp.array([greedy.tokens]))[0])
print(f"greedy:       {of_greedy:7.2f}  {greedy.text!r}")
print(f"best of {SAMPLES}: {float(scores[best]):7.2f}  {model.tokenizer.decode(answers[best].tolist())!r}, "
      f"at temperature {float(temperatures[best]):.2f}")  # fmt: skip

# %% [markdown]
# Greedy takes the likeliest token every time, which need not end at the likeliest text: sometimes a sample
# beats it. And how does the best of *n* grow with *n*, cold and hot? Expected maxima over random subsets of
# the samples:

# %%
third = SAMPLES // 3
key, bands = (
    jax.random.key(0),
    {"cold": slice(third), "warm": slice(third, 2 * third), "hot": slice(2 * third, None)},
)
sizes = [1, 4, 16, 64, 256]
curves = {}
for name, band in bands.items():
    drawn = jax.random.choice(key, scores[band], (200, sizes[-1]))
    curves[name] = [float(drawn[:, :n].max(axis=1).mean()) for n in sizes]
    said = (f"best of {n}: {value:7.2f}" for n, value in zip(sizes, curves[name], strict=True))
    print(f"{name:5}", "  ".join(said))

# %%
if plt:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    for name, band in bands.items():
        left.scatter(temperatures[band], scores[band], s=6, label=name)
    left.axhline(of_greedy, color="black", linestyle=":", label="greedy")
    left.set(xlabel="temperature", ylabel="log-probability, nats", title="every answer")
    left.legend()
    for name, values in curves.items():
        right.plot(sizes, values, marker="o", label=name)
    right.axhline(of_greedy, color="black", linestyle=":", label="greedy")
    right.set(xscale="log", xlabel="n", ylabel="log-probability, nats", title="expected best of n")
    right.set_xticks(sizes, map(str, sizes))
    right.minorticks_off()
    right.legend()
    plt.show()
