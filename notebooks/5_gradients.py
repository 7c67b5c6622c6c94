# %% [markdown]
# # Gradients on a frozen quantized model
#
# The weights are a few bits each and cannot move. But the model is a differentiable function of its *inputs*
# and of its *activations*, and that is enough for three kinds of research: train a prompt of vectors, ask
# which tokens mattered, and read and push the residual stream.

# %%
import os

import jax
import jax.numpy as jnp

import bonsai_jax as bj

try:
    import matplotlib.pyplot as plt  # uv run --group notebook ...
except ImportError:
    plt = None

# "demo" is SmolLM2; or "model.gguf", a Hugging Face folder, "user/repo:Q1_0". Tests put a tiny model here.
SOURCE = os.environ.get("NOTEBOOK_MODEL", "demo")
model = bj.load(SOURCE, bj.RunConfig(weights="packed"))  # the file's integers, on a CPU too
params, config = model.params, model.config


def ids_of(text):
    return jnp.array(model.tokenizer.encode(text))


def forward(params, x, taps=None):
    """Logits [T, V] of one sequence, of ids [T] or of vectors [T, H], and what taps read, [L, T, ...].

    Weights are an argument, here and in every function under jit: closed over, they would be compiled in."""
    logits, kept = bj.jitted.forward(params, x[None], jnp.array([len(x)]), config, taps=taps)
    return logits[0], {name: value[:, 0] for name, value in kept.items()}


# %% [markdown]
# ## A soft prompt
#
# Eight vectors in front of the text, trained until the frozen model says what we want behind "Q:". Tokens
# become vectors by `embed`; `forward` takes vectors in place of tokens. Adam is six lines.

# %%
prompt, target = ids_of("Q:"), ids_of(" seeds of bonsai")


def loss(soft, params):
    x = jnp.concatenate([soft, bj.embed(params, jnp.concatenate([prompt, target]))])
    logits, _ = forward(params, x)
    log_p = jax.nn.log_softmax(logits[-len(target) - 1 : -1])
    return -jnp.take_along_axis(log_p, target[:, None], axis=-1).mean()


@jax.jit
def adam(params, i, soft, m, v, rate=0.1):
    value, g = jax.value_and_grad(loss)(soft, params)
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
    soft -= rate * (m / (1 - 0.9**i)) / (jnp.sqrt(v / (1 - 0.99**i)) + 1e-8)
    return value, soft, m, v


soft = bj.embed(params, jax.random.randint(jax.random.key(0), (8,), 0, config.vocab_size))  # start at tokens
m = v = jnp.zeros_like(soft)
losses = []
for i in range(1, 41):
    value, soft, m, v = adam(params, i, soft, m, v)
    losses.append(float(value))
print("loss at steps 1, 10, 20, 40:", ", ".join(f"{losses[i]:.3f}" for i in (0, 9, 19, 39)))

# %%
x = jnp.concatenate([soft, bj.embed(params, jnp.concatenate([prompt, target]))])
said = forward(params, x)[0][-len(target) - 1 : -1].argmax(-1)
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
winner = int(forward(params, vectors)[0][-1].argmax())
print("behind", repr(model.tokenizer.decode(text.tolist())), "comes", repr(model.tokenizer.decode([winner])))
gradient = jax.jit(jax.grad(lambda x, params: forward(params, x)[0][-1, winner]))(vectors, params)
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
logits, kept = forward(params, vectors, bj.Taps({"output", "attention", "mlp"}))
lens = bj.unembed(params, kept["output"], config)[:, -1]  # [L, V]
ranks = (lens > lens[:, winner, None]).sum(axis=-1)
for layer in range(0, config.num_layers, max(1, config.num_layers // 10)):
    writes = [float(jnp.linalg.norm(kept[name][layer, -1])) for name in ("attention", "mlp")]
    print(f"after layer {layer:2} the winner has rank {int(ranks[layer]) + 1}; ", end="")
    print(f"attention wrote {writes[0]:.2f}, mlp {writes[1]:.2f}")
assert int(lens[-1].argmax()) == winner

# %% [markdown]
# ## Steering it
#
# The same taps edit: here, in the middle of a layer two thirds of the way up, the stream is pushed toward a
# token's output vector. With nothing but a function of (name, layer, x), no layer's code is touched.
#
# How hard to push depends on how long the stream's vectors are, and that differs from model to model and from
# layer to layer (SmolLM2's grow from 40 to 700). So the strength is a share of the vector's own length: 0.1
# nudges, 1 shouts. Watch the probability of " green" go from less than one percent to nearly all.

# %%
LAYER = 2 * config.num_layers // 3
wanted = int(ids_of(" green")[0])
toward = jax.grad(lambda x: bj.unembed(params, x, config)[wanted])
direction = toward(kept["output"][LAYER, -1])
direction /= jnp.linalg.norm(direction)


def pushed(strength):
    def push(name, layer, x):
        length = jnp.linalg.norm(x, axis=-1, keepdims=True)
        return x + strength * length * direction * (layer == LAYER)

    return bj.Taps(edit=push, at="middle")


@jax.jit
def steered(params, strength):
    """Log-probability of the wanted token."""
    logits, _ = bj.forward(params, vectors[None], jnp.array([len(vectors)]), config, taps=pushed(strength))
    return jax.nn.log_softmax(logits[0, -1])[wanted]


strengths = jnp.linspace(0, 1, 11)
probabilities = [float(jnp.exp(steered(params, strength))) for strength in strengths]
for strength, p in zip(strengths.tolist(), probabilities, strict=True):
    print(f"strength {strength:4.1f}: p = {p:.4f} {'#' * int(50 * p)}")
assert probabilities[-1] > 5 * probabilities[0]

# %% [markdown]
# `generate` takes taps too. The push goes on at every token: a little of it bends the sentence, more of it
# breaks the language.

# %%
for strength in (0.0, 0.2, 0.4):
    taps = pushed(strength) if strength else None
    output = bj.generate(
        model, [text.tolist()], max_new_tokens=16, sampling=bj.SamplingParams(temperature=0.0), taps=taps
    )[0]
    print(f"strength {strength}: {model.tokenizer.decode(text.tolist() + output.tokens)!r}")

# %% [markdown]
# The push itself is differentiable as well: how much would the probability grow with a little more of it?

# %%
print(f"d log p / d strength at 0: {float(jax.grad(steered, argnums=1)(params, 0.0)):+.3f}")

# %%
if plt:
    figure, axes = plt.subplots(2, 2, figsize=(10, 6), layout="constrained")
    (training, attributed), (ranked, steering) = axes
    training.plot(range(1, len(losses) + 1), losses)
    training.set(xlabel="step", ylabel="loss, nats a token", yscale="log", title="training a soft prompt")
    attributed.barh(range(len(text)), attribution)
    attributed.set_yticks(range(len(text)), [repr(model.tokenizer.decode([t])) for t in text.tolist()])
    attributed.invert_yaxis()
    attributed.set(xlabel="gradient x input", title="which tokens mattered")
    ranked.plot(range(config.num_layers), ranks + 1, marker=".")
    ranked.set(xlabel="layer", ylabel="rank of the winner", title="the logit lens")
    ranked.set_yscale("log", base=2)
    ranked.yaxis.set_major_formatter("{x:g}")
    ranked.invert_yaxis()
    steering.plot(strengths, probabilities, marker="o")
    steering.set(xlabel="strength", ylabel='p(" green")', ylim=(0, 1.05), title=f"steering layer {LAYER}")
    plt.show()
