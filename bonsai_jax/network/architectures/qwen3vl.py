"""The language model of Qwen3-VL: a Qwen3. What sees images is left aside, as in qwen2vl."""

import dataclasses

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.architectures import qwen2vl, qwen3

M_ROPE = True
MODELS = "Qwen3-VL (text)"
TENSORS = qwen3.TENSORS
config_from_gguf = qwen3.config_from_gguf


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    config = qwen3.config_from_huggingface(qwen2vl.text_metadata(metadata), tensors)
    return qwen2vl.without_images(dataclasses.replace(config, architecture="qwen3vl"))
