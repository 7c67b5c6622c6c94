"""The language model of Qwen3-VL with experts (30B-A3B, 235B-A22B): a Qwen3-MoE. What sees images is left
aside. Hugging Face folders, whose experts' matrices are transposed, are not read.
"""

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.architectures import qwen3moe

M_ROPE = True
MODELS = "Qwen3-VL with experts (text)"
TENSORS = qwen3moe.TENSORS
config_from_gguf = qwen3moe.config_from_gguf


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    raise NotImplementedError(
        "Hugging Face folders of Qwen3-VL with experts are not supported, because their matrices are "
        "transposed; use a GGUF file of it"
    )
