"""Direct logit attribution: what the embedding, each attention and each MLP add to a token's logit."""

import jax.numpy as jnp

import bonsai_jax as bj

model, prompt = bj.load("synth:tiny-llama:q8_0"), "The capital of Peru is"
params, c, ids = model.params, model.config, jnp.array([model.tokenizer.encode(prompt)])
taps = bj.Taps({"input", "attention", "mlp"})
stream, kept = bj.jitted.forward(params, ids, jnp.array([ids.shape[1]]), c, taps=taps, logits=False)
logits = bj.unembed(params, stream[0, -1], c)
answer = int(logits.argmax())
names = ["embedding", *(f"{site} {layer}" for site in ("attention", "mlp") for layer in range(c.num_layers))]
parts = [kept["input"][:1, 0, -1], kept["attention"][:, 0, -1], kept["mlp"][:, 0, -1]]
parts = jnp.concatenate(parts)  # [1 + 2 layers, hidden], whose sum is the stream


def rms(x):
    return jnp.sqrt(jnp.mean(x * x, axis=-1) + c.rms_norm_eps)


# unembed divides each part by its own rms. Divided by the whole stream's, the shares add up to the logit.
shares = bj.unembed(params, parts, c)[:, answer] * rms(parts) / rms(stream[0, -1])
for name, share in zip(names, shares.tolist(), strict=True):
    print(f"{name:12} {share:+.3f}")
