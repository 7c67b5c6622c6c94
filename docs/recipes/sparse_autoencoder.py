"""A sparse autoencoder (SAE) of one layer's residual stream, trained while bj.harvest reads the texts."""

import jax
import jax.numpy as jnp

import bonsai_jax as bj

model, taps = bj.load("synth:tiny-llama:q8_0"), bj.Taps("output", layers=1)
texts = [f"Tree {n} in the garden is {n % 7} metres tall." for n in range(64)]
H, F = model.config.hidden, 4 * model.config.hidden
down = jax.random.normal(jax.random.key(0), (F, H)) / H**0.5
sae = {"up": down.T, "bias": jnp.zeros(F), "down": down, "mean": jnp.zeros(H)}


def loss(sae, x, mask):
    features = jax.nn.relu((x - sae["mean"]) @ sae["up"] + sae["bias"])  # [B, T, F]
    error = jnp.square(features @ sae["down"] + sae["mean"] - x).mean(-1) + 1e-3 * features.sum(-1)
    return (error * mask).sum() / mask.sum()


step, values = jax.jit(jax.value_and_grad(loss)), []
for _ in range(8):
    for activations, _, mask, _ in bj.harvest(model, texts, taps, batch_size=16):
        value, slope = step(sae, activations["output"][0], mask)
        sae, values = jax.tree.map(lambda w, g: w - 0.3 * g, sae, slope), [*values, float(value)]
print(f"loss {values[0]:.3f}, then {values[-1]:.3f}")
