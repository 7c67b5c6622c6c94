"""Falcon-H1 (0.5B to 34B): a Llama in whose layers attention and Mamba 2 read the same input side by side.

GGUF files have the model's multipliers in their weights. Hugging Face folders do not, and are not read.
"""

import dataclasses

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.mamba2_metadata import mamba2_from_gguf
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD

MODELS = "Falcon-H1"
TENSORS = (
    EMBED,
    *tensors("attention", "norm", "q", "k", "v", "o"),
    *tensors("mamba2", "norm", "inputs", "conv_weights", "dt", "decay", "skip", "out"),
    *tensors("mamba2", "conv_bias", "group_norm", optional=True),
    *tensors("mlp", "gate", "up", "down", norm=("ffn_norm", None)),
    FINAL_NORM,
    HEAD,
)


def config_from_gguf(metadata, tensors) -> ModelConfig:
    config, mamba2 = llama.config_from_gguf(metadata, tensors, interleaved=False), mamba2_from_gguf(metadata)
    layers = tuple(dataclasses.replace(layer, beside=mamba2) for layer in config.layers)
    return dataclasses.replace(config, layers=layers)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    raise NotImplementedError(
        "Hugging Face folders of Falcon-H1 are not supported, because their multipliers are not applied; "
        "use a GGUF file of it"
    )
