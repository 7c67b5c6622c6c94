"""Arcee's AFM-4.5B: a Llama whose feed-forward has no gate, and the squared ReLU as its activation."""

import dataclasses

from bonsai_jax.config import Layer, ModelConfig
from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.kinds.plain_mlp import PlainMlp
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD

MODELS = "AFM-4.5B"
TENSORS = (
    EMBED,
    *tensors("attention", "norm", "q", "k", "v", "o"),
    *tensors("plain_mlp", "norm", "up", "down"),
    FINAL_NORM,
    HEAD,
    llama.ROPE_DIVISORS,
)


def config_from_gguf(metadata, tensors) -> ModelConfig:
    return _ungated(llama.config_from_gguf(metadata, tensors))


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    if (activation := metadata.get("hidden_act", "relu2")) != "relu2":
        raise NotImplementedError(f"hidden_act is {activation!r}; supported: relu2")
    return _ungated(llama.config_from_huggingface({**metadata, "hidden_act": "silu"}, tensors))


def _ungated(gated: ModelConfig) -> ModelConfig:
    layers = tuple(Layer(layer.mixer, PlainMlp(layer.channels.ffn)) for layer in gated.layers)
    return dataclasses.replace(gated, layers=layers)
