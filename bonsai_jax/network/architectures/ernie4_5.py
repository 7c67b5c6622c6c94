"""ERNIE 4.5, dense (Baidu): a Llama whose rope is interleaved in Hugging Face files too."""

import dataclasses

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.architectures import llama

MODELS = "ERNIE 4.5 0.3B"
TENSORS = llama.TENSORS

config_from_gguf = llama.config_from_gguf


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    config = llama.config_from_huggingface(metadata, tensors)
    rope = dataclasses.replace(config.attention.rope, interleaved=True)
    return llama.with_attention(config, rope=rope)
