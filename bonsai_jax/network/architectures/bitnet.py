"""BitNet b1.58 (2B4T and models before it): a Llama whose weights have three values, with norms before the
output matrix of both halves of a layer. The activation is SiLU, or the squared ReLU where the file says so.
"""

import dataclasses

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD
from pallas_kernels import RELU_SQUARED, SILU

MODELS = "BitNet b1.58"
TENSORS = (
    EMBED,
    *tensors("attention", "norm", "q", "k", "v", "sub_norm", "o"),
    *tensors("mlp", "norm", "gate", "up", "sub_norm", "down"),
    FINAL_NORM,
    HEAD,
)
ACTIVATIONS = {"silu": SILU, "relu2": RELU_SQUARED}


def config_from_gguf(metadata, tensors) -> ModelConfig:
    plain = llama.config_from_gguf(metadata, tensors, interleaved=False)
    return _activated(plain, metadata, f"{plain.architecture}.hidden_activation")


def _activated(plain: ModelConfig, metadata, key: str) -> ModelConfig:
    if (name := metadata.get(key, "silu")) not in ACTIVATIONS:
        raise NotImplementedError(f"{key} is {name!r}; supported: {', '.join(ACTIVATIONS)}")
    mlp = dataclasses.replace(plain.mlp, activation=ACTIVATIONS[name])
    layers = tuple(dataclasses.replace(layer, channels=mlp) for layer in plain.layers)
    return dataclasses.replace(plain, layers=layers)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    raise NotImplementedError(
        "BitNet from a Hugging Face folder: its weights get their three values while they are loaded, which "
        "is not supported; convert the folder to GGUF with llama.cpp's convert_hf_to_gguf.py"
    )
