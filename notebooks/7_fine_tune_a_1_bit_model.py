# %% [markdown]
# # Fine-tune a 1-bit model
#
# Bits have no gradient, but a small change beside them has one: an adapter (LoRA), two thin float matrices
# beside each packed matrix. Here SmolLM2 is first made worse: in ten of its layers a third of the
# feed-forward is rounded to one bit a weight. Then adapters learn from the first pages of Moby Dick to make
# up for it. It takes two minutes on a CPU.

# %%
import os
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bonsai_jax as bj
from bonsai_jax import training

try:
    import matplotlib.pyplot as plt  # uv run --group notebook ...
except ImportError:
    plt = None

# "demo" is SmolLM2; or a GGUF file in Q1_0, "bonsai.gguf". Tests put a tiny model here, and take few steps.
SOURCE = os.environ.get("NOTEBOOK_MODEL", "demo")
STEPS = 20 if SOURCE.startswith("synth:") else 80
WIDTH, ROWS, WINDOWS = 64, 4, 72  # tokens of a window; windows of a step, and in all

folder = pathlib.Path(tempfile.mkdtemp())
if SOURCE == "demo":  # rows of Q1_0 are blocks of 128 weights, which fit `ffn_down` alone
    from checkpoints.demo import demo_path

    bits = [(r"blk\.1.\.ffn_down", "q1_0")]  # layers 10 to 19
    SOURCE = folder / "worse.gguf"
    bj.quantize_file(demo_path(), SOURCE, "q4_1", tensor_formats=bits, requantize=True)
model = bj.load(SOURCE, bj.RunConfig(context=256, weights="packed"))
text = pathlib.Path("tests/data/moby_dick.txt").read_text()
ids = model.tokenizer.encode(text[: 8 * WIDTH * WINDOWS])[: WIDTH * WINDOWS]
windows = np.array(ids, np.int32).reshape(WINDOWS, WIDTH)
seen, unseen = windows[:-8], windows[-8:]
print(f"{model.config.num_layers} layers; {seen.size} tokens to learn from, {unseen.size} to be judged by")

# %% [markdown]
# ## An adapter
#
# y = W x + (alpha / rank) B A x, with W in its packed format. A is random and B zero, so at first nothing
# changes. It is a pytree, which any optimizer of optax trains; the packed weights are an argument.

# %%
adapter = bj.lora(model.config, rank=8, key=jax.random.key(0), alpha=16)
size = sum(x.size for x in jax.tree.leaves(adapter))
packed = sum(x.nbytes for x in jax.tree.leaves(model.params))
print(f"{size / 1e6:.2f} million numbers are trained, beside {packed / 1e6:.0f} MB of packed weights")


def loss(adapter, params, tokens):
    lengths = jnp.full(len(tokens), tokens.shape[1])
    logits, _ = bj.forward(params.replace(adapter=adapter), tokens, lengths, model.config, remat=True)
    return training.cross_entropy(logits, tokens, jnp.ones(tokens.shape, bool))


judge = jax.jit(loss)
before = float(judge(adapter, model.params, unseen))
print(f"before: {before:.2f} nats a token on the unseen pages")
if (folder / "worse.gguf").exists():
    original = bj.load("demo", bj.RunConfig(context=256, weights="packed")).params
    print(f"SmolLM2 as it was: {float(judge(adapter, original, unseen)):.2f}")

# %% [markdown]
# ## Training

# %%
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(3e-3, STEPS)))
moments, rng, losses = optimizer.init(adapter), np.random.default_rng(0), []


@jax.jit
def step(adapter, moments, params, tokens):
    value, slope = jax.value_and_grad(loss)(adapter, params, tokens)
    changes, moments = optimizer.update(slope, moments, adapter)
    return optax.apply_updates(adapter, changes), moments, value


for number in range(STEPS):
    rows = rng.choice(len(seen), ROWS, replace=False)
    adapter, moments, value = step(adapter, moments, model.params, seen[rows])
    losses.append(float(value))
    if (number + 1) % (STEPS // 4) == 0:
        print(f"step {number + 1:3}: {np.mean(losses[-5:]):.2f} nats a token")
after = float(judge(adapter, model.params, unseen))
print(f"after: {after:.2f} nats a token on the unseen pages")
assert after < 0.9 * before, (before, after)

# %% [markdown]
# ## Its file
#
# llama.cpp's and PEFT's, which both read it too. Beside the same packed weights the loaded one writes the
# same text.

# %%
bj.save_adapter(folder / "adapter.gguf", adapter, model.config)
bj.save_adapter(folder / "adapter", adapter, model.config)
prompt = "Some years ago--never mind how long"


def written(model):
    """Forty tokens, greedy, in one jitted call."""
    tokens = jnp.array([model.tokenizer.encode(prompt)])
    state = bj.new_state(model, 1, 128, bj.SamplingParams(temperature=0.0), max_new_tokens=40)
    drawn = bj.jitted.generate_tokens(
        model.params, state, tokens, jnp.array([tokens.shape[1]]), model.config, size=40
    )
    return model.tokenizer.decode([token for token in drawn.tokens[0].tolist() if token >= 0])


adapted = bj.load(SOURCE, bj.RunConfig(context=256, weights="packed"), lora=f"{folder / 'adapter.gguf'}")
print("without:", prompt + written(model))
print("with:   ", prompt + written(adapted))
assert written(adapted) == written(model.with_adapter(adapter))
print(f"{(folder / 'adapter.gguf').stat().st_size / 1e6:.1f} MB")

# %% [markdown]
# [docs/adapters.md](../docs/adapters.md) says more: several adapters at once, one for each request of an
# engine or a server, and merging one into the weights, which then are rounded to their format again.

# %%
if plt:
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(losses, label="pages that it learns from")
    axes.plot([0, STEPS - 1], [before, after], "o", label="unseen pages")
    axes.set(xlabel="step", ylabel="nats a token", title="adapters beside packed weights")
    axes.legend()
    plt.show()
