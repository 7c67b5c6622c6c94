"""An adapter of rank 4 beside the frozen 1-bit MLP of every layer, trained through bj.Taps."""

import jax
import jax.numpy as jnp

import bonsai_jax as bj

model = bj.load("synth:tiny-qwen3:q1_0", bj.RunConfig(weights="packed"))
ids, c = jnp.array([model.tokenizer.encode("The tree in the pot is a bonsai.")]), model.config
a = jax.random.normal(jax.random.key(0), (c.num_layers, c.hidden, 4)) / c.hidden**0.5
adapter = {"a": a, "b": jnp.zeros((c.num_layers, 4, c.hidden))}


def loss(adapter, params):
    def beside(name, layer, x):  # what the MLP adds to the stream, and a correction that starts at zero
        return x + x @ adapter["a"][layer] @ adapter["b"][layer] if name == "mlp" else x

    logits, _ = bj.forward(params, ids, jnp.array([ids.shape[1]]), c, taps=bj.Taps(edit=beside))
    return -jnp.take_along_axis(jax.nn.log_softmax(logits[0, :-1]), ids[0, 1:, None], axis=-1).mean()


step = jax.jit(jax.value_and_grad(loss))
for i in range(20):
    value, slope = step(adapter, model.params)
    adapter = jax.tree.map(lambda w, g: w - 0.5 * g, adapter, slope)
