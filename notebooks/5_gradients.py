# %% [markdown]
# # Gradients on a frozen 1-bit model
#
# The weights are bits and cannot move. But the model is a differentiable function of its *inputs* and of
# its *activations*, and that is enough for three kinds of research: train a prompt of vectors, ask which
# tokens mattered, and read and push the residual stream.

# %%
import jax
import jax.numpy as jnp

import bonsai_jax as bj
from bonsai_jax import layers

try:
    import matplotlib.pyplot as plt  # uv run --group notebook ...
except ImportError:
    plt = None

# Random weights; a real model works alike. Weights stay bits in memory ("packed").
model = bj.load("synth:tiny-qwen3:q1_0", bj.RunConfig(weights="packed"))
params, config = model.params, model.config


def ids_of(text):
    return jnp.array(model.tokenizer.encode(text))


def forward(x, taps=None):
    """Logits [T, V] of one sequence, of ids [T] or of vectors [T, H], and what taps read, [L, T, H]."""
    logits, kept = bj.forward(params, x[None], jnp.array([len(x)]), config, taps=taps)
    return logits[0], {name: value[:, 0] for name, value in kept.items()}


# %% [markdown]
# ## A soft prompt
#
# Eight vectors in front of the text, trained until the frozen model says what we want behind "Q:". Tokens
# become vectors by `embed`; `forward` takes vectors in place of tokens. Adam is six lines.

# %%
prompt, target = ids_of("Q:"), ids_of(" seeds of bonsai")


def loss(soft):
    x = jnp.concatenate([soft, bj.embed(params, jnp.concatenate([prompt, target]))])
    logits, _ = forward(x)
    log_p = jax.nn.log_softmax(logits[-len(target) - 1 : -1])
    return -jnp.take_along_axis(log_p, target[:, None], axis=-1).mean()


@jax.jit
def adam(i, soft, m, v, rate=0.1):
    value, g = jax.value_and_grad(loss)(soft)
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
    soft -= rate * (m / (1 - 0.9**i)) / (jnp.sqrt(v / (1 - 0.99**i)) + 1e-8)
    return value, soft, m, v


soft = bj.embed(params, jax.random.randint(jax.random.key(0), (8,), 0, 256))  # start at tokens' vectors
m = v = jnp.zeros_like(soft)
losses = []
for i in range(1, 61):
    value, soft, m, v = adam(i, soft, m, v)
    losses.append(float(value))
print("loss at steps 1, 20, 40, 60:", ", ".join(f"{losses[i]:.3f}" for i in (0, 19, 39, 59)))

# %%
x = jnp.concatenate([soft, bj.embed(params, jnp.concatenate([prompt, target]))])
said = forward(x)[0][-len(target) - 1 : -1].argmax(-1)
print("wanted:", repr(model.tokenizer.decode(target.tolist())))
print("said:  ", repr(model.tokenizer.decode(said.tolist())))
assert losses[-1] < losses[0] / 4

# %% [markdown]
# ## Attribution
#
# Which tokens of a text made the model predict what it predicts? The gradient of the winning logit times
# the input, for each token (Shrikumar et al. 2017): a first-order answer to "what if this token's vector
# were zero?"

# %%
text = ids_of("The trees in the garden are")
vectors = bj.embed(params, text)
winner = int(forward(vectors)[0][-1].argmax())
gradient = jax.jit(jax.grad(lambda x: forward(x)[0][-1, winner]))(vectors)
attribution = (gradient * vectors).sum(axis=-1)
longest = float(jnp.abs(attribution).max())
for token, share in zip(text.tolist(), attribution.tolist(), strict=True):
    print(f"{model.tokenizer.decode([token])!r:8} {share:+7.3f} {'#' * round(20 * abs(share) / longest)}")

# %% [markdown]
# ## Reading the residual stream
#
# `Taps` name what to return. A layer's output goes through the final norm and the output matrix as if the
# model ended there: the logit lens. When does the model make up its mind?

# %%
logits, kept = jax.jit(lambda x: forward(x, bj.Taps(frozenset({"output", "attention", "mlp"}))))(vectors)
lens = layers.logits(params, kept["output"], config)[:, -1]  # [L, V]
for layer, scores in enumerate(lens):
    rank = int((scores > scores[winner]).sum())
    writes = [float(jnp.linalg.norm(kept[name][layer, -1])) for name in ("attention", "mlp")]
    print(f"after layer {layer} the winner has rank {rank}; ", end="")
    print(f"attention wrote {writes[0]:.2f}, mlp {writes[1]:.2f}")
assert int(lens[-1].argmax()) == winner

# %% [markdown]
# ## Steering it
#
# The same taps edit: here, in the middle of one layer, the stream is pushed toward a token's output vector.
# With nothing but a function of (name, layer, x), no layer's code is touched; and it works under jit, in
# `prefill` and `decode` too.

# %%
LAYER = 1
wanted = int(ids_of(" bonsai")[0])
toward = jax.grad(lambda x: layers.logits(params, x, config)[wanted])
direction = toward(kept["output"][LAYER, -1])
direction /= jnp.linalg.norm(direction)


@jax.jit
def steered(strength):
    def push(name, layer, x):
        return x + strength * direction * (layer == LAYER) if name == "middle" else x

    return jax.nn.softmax(forward(vectors, bj.Taps(edit=push))[0][-1])[wanted]


strengths = jnp.linspace(0, 8, 9)
probabilities = [float(steered(s)) for s in strengths]
for strength, p in zip(strengths.tolist(), probabilities, strict=True):
    print(f"strength {strength:4.0f}: p = {p:.4f} {'#' * int(50 * p)}")
assert probabilities[-1] > 5 * probabilities[0]

# %% [markdown]
# The push itself is differentiable as well: how much would the probability grow with a little more of it?

# %%
print(f"d log p / d strength at 0: {float(jax.grad(lambda s: jnp.log(steered(s)))(0.0)):+.3f}")

# %%
if plt:
    figure, axes = plt.subplots(1, 3, figsize=(12, 3))
    axes[0].plot(losses)
    axes[0].set(xlabel="step", ylabel="loss of the soft prompt", yscale="log")
    axes[1].barh(range(len(text)), attribution)
    axes[1].set_yticks(range(len(text)), [model.tokenizer.decode([t]) for t in text.tolist()])
    axes[1].set(xlabel="gradient x input")
    axes[2].plot(strengths, probabilities, marker="o")
    axes[2].set(xlabel="strength", ylabel="p of the wanted token")
    plt.show()
