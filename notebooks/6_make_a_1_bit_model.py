# %% [markdown]
# # Make a 1-bit model
#
# A model whose weights were trained as floats is ruined when each becomes one bit. A model that is trained
# with 1-bit weights is not. Here a small one learns from SmolLM2, the teacher, what comes next in the first
# pages of Moby Dick, and becomes a GGUF file. It takes five to ten minutes on a CPU; on a GPU make it
# larger, below.

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
from checkpoints import Tensor, open_checkpoint, write_gguf

try:
    import matplotlib.pyplot as plt  # uv run --group notebook ...
except ImportError:
    plt = None

# "demo" is SmolLM2; or another GGUF file, "model.gguf". Tests put a tiny model here, and take few steps.
SOURCE = os.environ.get("NOTEBOOK_MODEL", "demo")
TINY = SOURCE.startswith("synth:")
LAYERS, HIDDEN, FFN, STEPS = (2, 128, 256, 30) if TINY else (4, 256, 768, 800)
WIDTH, ROWS, WINDOWS = 64, 4, 8 if TINY else 64  # tokens of a window; windows of a step, and in all

teacher = bj.load(SOURCE, bj.RunConfig(context=256))
words = pathlib.Path("tests/data/moby_dick.txt").read_text()
ids = teacher.tokenizer.encode(words[: 6 * WIDTH * WINDOWS])[: WIDTH * WINDOWS]
windows = np.array(ids, np.int32).reshape(WINDOWS, WIDTH)
print(f"{windows.size} tokens of {len(set(ids))} kinds, from", repr(words[22:59]), "on")

# %% [markdown]
# ## A new model
#
# A GGUF file of random weights, with the teacher's tokenizer. Rows of Q1_0 are blocks of 128 weights, so
# widths are multiples of 128. Only the embedding begins with what the teacher knows: its directions of
# largest variance.

# %%
old, heads = open_checkpoint(SOURCE).metadata, HIDDEN // 64
sizes = {"block_count": LAYERS, "embedding_length": HIDDEN, "feed_forward_length": FFN, "context_length": 256}
sizes |= {"attention.head_count": heads, "attention.head_count_kv": heads // 2}
sizes |= {"attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": teacher.config.vocab_size}
metadata = {"general.architecture": "llama", "general.name": "one bit"}
metadata |= {f"llama.{key}": value for key, value in sizes.items()}
metadata |= {key: value for key, value in old.items() if key.startswith("tokenizer.")}

embedding = np.asarray(bj.embed(teacher.params, jnp.arange(teacher.config.vocab_size)))
_, directions = np.linalg.eigh(embedding.T @ embedding)
arrays = {"token_embd": embedding @ directions[:, -HIDDEN:], "output_norm": np.ones(HIDDEN)}
rng = np.random.default_rng(0)
for layer in range(LAYERS):
    shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN // 2, HIDDEN), "attn_v": (HIDDEN // 2, HIDDEN)}
    shapes |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN)}
    for name, shape in (shapes | {"ffn_down": (HIDDEN, FFN)}).items():
        arrays[f"blk.{layer}.{name}"] = rng.normal(0, 1 / shape[1] ** 0.5, shape)
    arrays |= {f"blk.{layer}.{name}": np.ones(HIDDEN) for name in ("attn_norm", "ffn_norm")}


def tensor(name, x):
    x = np.ascontiguousarray(x, np.float32)
    return Tensor(name, "f32", x.shape, x.view(np.uint8))


folder = pathlib.Path(tempfile.mkdtemp())
write_gguf(folder / "new.gguf", metadata, [tensor(f"{name}.weight", x) for name, x in arrays.items()])
run = bj.RunConfig(context=256, weights="packed")
plan = training.plan(folder / "new.gguf", "q1_0", run, tensor_formats=[("token_embd", "q4_0")])
weights = plan.weights()  # float32, by the names of tensors: what is trained
for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_norm.weight"):
    print(f"{name:24} {weights[name].shape!s:14} runs in {plan.formats[name]}")

# %% [markdown]
# ## Training
#
# In the forward pass each matrix has the values of its format, here -d and d in every block of 128. In the
# backward pass the gradient goes to the floats as if nothing had been rounded: a straight-through
# estimator. The teacher reads the text once; its hidden vectors are stored, for the probabilities of all
# tokens would not fit.

# %%
lengths = jnp.full(ROWS, WIDTH)
read = jax.jit(lambda params, tokens: bj.forward(params, tokens, lengths, teacher.config, logits=False)[0])
hidden = np.concatenate([read(teacher.params, windows[row : row + ROWS]) for row in range(0, WINDOWS, ROWS)])
rate = optax.cosine_decay_schedule(3e-3, STEPS)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
moments = optimizer.init(weights)


@jax.jit(donate_argnums=(0, 1))
def step(weights, moments, params, tokens, hidden):
    goal = bj.unembed(params, hidden, teacher.config)

    def loss(weights):
        logits, _ = bj.forward(plan.rounded(weights), tokens, lengths, plan.config)
        return training.distillation_loss(logits, goal, jnp.ones(tokens.shape, bool))

    value, slope = jax.value_and_grad(loss)(weights)
    changes, moments = optimizer.update(slope, moments, weights)
    return optax.apply_updates(weights, changes), moments, value


losses = []
for number in range(STEPS):
    rows = rng.choice(WINDOWS, ROWS, replace=False)
    weights, moments, value = step(weights, moments, teacher.params, windows[rows], hidden[rows])
    losses.append(float(value))
    if number in (0, 9) or (number + 1) % (STEPS // 6) == 0:
        print(f"step {number + 1:4}: KL(teacher || student) = {value:.3f} nats a token")
assert np.mean(losses[-5:]) < 0.8 * losses[0]

# %% [markdown]
# ## The file
#
# `plan.model` packs the weights on the device, for rollouts or a look at what the model writes; `plan.save`
# makes a file of them. Both have the very values that were trained, so the loaded file writes the same
# text.

# %%
packed = plan.model(weights)
plan.save(folder / "one-bit.gguf", weights)
loaded = bj.load(folder / "one-bit.gguf", run)
prompt = "Some years ago--never mind how long"


def written(model):
    """Forty tokens, greedy, in one jitted call."""
    tokens = jnp.array([model.tokenizer.encode(prompt)])
    state = bj.new_state(model, 1, 128, bj.SamplingParams(temperature=0.0), max_new_tokens=40)
    drawn = bj.jitted.generate_tokens(
        model.params, state, tokens, jnp.array([tokens.shape[1]]), model.config, size=40
    )
    return model.tokenizer.decode([token for token in drawn.tokens[0].tolist() if token >= 0])


print(prompt + written(loaded))
assert written(loaded) == written(packed)
megabytes = (folder / "one-bit.gguf").stat().st_size / 1e6
matrices = [name for name in weights if plan.formats[name] == "q1_0"]
bits = sum(weights[name].size for name in matrices)
print(
    f"{megabytes:.1f} MB; {bits / 1e6:.2f} million weights of one bit take {bits * 1.125 / 8e6:.2f} MB of it"
)

# %% [markdown]
# The floats exist for training alone: their signs, and a mean of each 128, are the model.
# [docs/training.md](../docs/training.md) says more: learnt scales, ternary weights, and reinforcement
# learning with rollouts by the packed weights.

# %%
w = np.asarray(weights["blk.0.ffn_up.weight"])
near_zero = (abs(w) < 0.1 * abs(w).mean()).mean()
print(f"{100 * near_zero:.1f} % of a matrix's floats are so near to zero that their bit may still change")
if plt:
    figure, (curve, histogram) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
    curve.plot(losses)
    curve.set(xlabel="step", ylabel="nats a token", title="KL(teacher || student)")
    histogram.hist(w.ravel() / abs(w).mean(), 80, density=True)
    histogram.set(xlabel="weight / mean |weight|", title="the floats")
    plt.show()
