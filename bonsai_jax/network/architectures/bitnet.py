"""BitNet b1.58 (2B4T and models before it): a Llama whose weights have three values, with norms before the
output matrix of both halves of a layer. The activation is SiLU, or the squared ReLU where the file says so.

Hugging Face folders have the weights of the training, of which their three values are made while they are
loaded: w -> s clamp(round(w / s), -1, 1), s = mean |w|. They stay in 16 bits; GGUF files have 2 bits or less.
"""

import dataclasses

import numpy as np

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD
from bonsai_jax.weights.metadata import nested
from checkpoints import Changed
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
    key = "quantization_config.quantization_mode"
    if (mode := nested(metadata, "quantization_config").get(key, "online")) != "online":
        raise NotImplementedError(
            f"{key} is {mode!r}: packed weights are not supported; use the folder with bf16 weights, or a "
            "GGUF file"
        )
    activation = metadata.get("hidden_act", "silu")
    plain = llama.config_from_huggingface({**metadata, "hidden_act": "silu"}, tensors)
    return _activated(plain, {"hidden_act": activation}, "hidden_act")


def tensors_from_huggingface(metadata, tensors):
    """Each matrix of a layer with three values."""
    return {name: Changed(t, _ternary) if name.endswith("_proj.weight") else t for name, t in tensors.items()}


def _ternary(w: np.ndarray) -> np.ndarray:
    scale = np.maximum(np.abs(w).mean(dtype=np.float64), 1e-5).astype(np.float32)
    return np.clip(np.round(w / scale), -1, 1) * scale
