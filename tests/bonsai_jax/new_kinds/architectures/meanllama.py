"""A Llama of which every layer but the second has a decaying mean in place of attention."""

import dataclasses

from bonsai_jax.config import Layer
from bonsai_jax.network import kinds
from bonsai_jax.network.architectures import llama

TENSORS = (*llama.TENSORS, *kinds.tensors("decaying_mean", "norm", "input", "output"))


def config_from_gguf(metadata, tensors):
    plain = llama.config_from_gguf(metadata, tensors)
    mean = kinds.get("decaying_mean").DecayingMean(64)
    layers = (Layer(layer.mixer if n == 1 else mean, layer.channels) for n, layer in enumerate(plain.layers))
    return dataclasses.replace(plain, layers=tuple(layers))
