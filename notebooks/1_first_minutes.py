# %% [markdown]
# # First minutes
#
# Load a model, let it write, watch it write, look inside. Everything here runs in seconds on a laptop's
# CPU, because the model is made of random weights in a tiny shape: its text is noise, but every step is the
# one that a real model takes. For words, put a real one in the next cell.

# %%
import time

import jax
import jax.numpy as jnp

import bonsai_jax as bj

SOURCE = "synth:tiny-qwen3:q1_0"  # or "model.gguf", a Hugging Face folder, "user/repo:Q1_0"
model = bj.load(SOURCE, bj.RunConfig(weights="packed"))  # packed: 1-bit weights stay 1-bit in memory
model.config

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
# Parameters are a pytree. Matrices of all layers lie in one stack, in the blocks of their format: for Q1_0
# a bit for each weight and a float16 for each 128, 1.125 bits a weight.

# %%
layers = model.params.layers
for name in ("wo", "w_gate", "w_up", "w_down"):
    stack = getattr(layers, name)
    weights = len(stack.where) * stack.shape[0] * stack.shape[1]
    print(f"{name:7} {len(stack.where)} layers of {stack.shape[0]} x {stack.shape[1]}, "
          f"{stack.parts[0].format}: {8 * stack.nbytes / weights:.3f} bits a weight")  # fmt: skip
total = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
print(
    f"all weights: {total / 1e6:.2f} MB. A decode step reads them once: bytes over bandwidth bound its time"
)

# %% [markdown]
# Which implementation was chosen for a product, and why not another:

# %%
from pallas_kernels import dispatch

for verdict in dispatch.explain(dispatch.Problem("matmul", dispatch.platform(), "q1_0", layers.wo.shape)):
    print("->" if verdict.taken else "  ", verdict.impl, "-", verdict.reason)

# %% [markdown]
# ## By hand
#
# `generate` is made of three pure functions on arrays: `new_state`, `prefill`, `step`. Put them under
# `jit`, `vmap` or `shard_map` as you like. Here is the loop, written out; greedy, so it must agree with
# `generate`.

# %%
greedy = bj.SamplingParams(temperature=0.0)
ids = model.tokenizer.encode(prompts[0])
state = bj.new_state(model, rows=1, context=64, params=greedy, max_new_tokens=8, ignore_eos=True)
state = bj.prefill(model.params, state, jnp.array([ids]), jnp.array([len(ids)]), model.config)
step = jax.jit(bj.step, static_argnames="config")
tokens = [int(state.tokens[0])]
while int(state.remaining[0]):
    state = step(model.params, state, config=model.config)
    tokens.append(int(state.tokens[0]))
whole = bj.generate(model, [ids], max_new_tokens=8, sampling=greedy, ignore_eos=True)[0]
assert tokens == whole.tokens
tokens

# %% [markdown]
# ## Score
#
# Teacher-forced logits, one row for each token of a text: row *t* predicts token *t + 1*. (Random weights
# are sure of themselves and wrong: worse than guessing.)

# %%
scores = bj.logits(model, ids)
log_p = jax.nn.log_softmax(scores[:-1])[jnp.arange(len(ids) - 1), jnp.array(ids[1:])]
print(f"{len(ids)} tokens, logits {scores.shape}, perplexity {float(jnp.exp(-log_p.mean())):.0f} "
      f"of a vocabulary of {model.config.vocab_size}")  # fmt: skip
