"""jax.export: a compiled forward pass in a file, for a process that need not know this library's layers."""

from pathlib import Path

import jax
import jax.numpy as jnp

import bonsai_jax as bj

model = bj.load("synth:tiny-llama:q8_0", bj.RunConfig(impl="reference"))  # kernels are of one machine
ids, lengths = jnp.array([model.tokenizer.encode("Once upon a time")]), jnp.array([5])


@jax.jit
def scores(params, ids, lengths):
    return bj.forward(params, ids, lengths, model.config)[0]


exported = jax.export.export(scores)(model.params, ids, lengths)
Path("scores.jax").write_bytes(exported.serialize())

again = jax.export.deserialize(bytearray(Path("scores.jax").read_bytes()))  # without the weights
print(again.call(model.params, ids, lengths).shape)
