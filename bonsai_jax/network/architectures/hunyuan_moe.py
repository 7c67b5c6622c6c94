"""Hunyuan A13B (Tencent): a dense Hunyuan with experts and a shared expert in all layers.

GGUF files hold the base of the rope as it is used. Hugging Face folders are not read.
"""

from bonsai_jax.config import ModelConfig
from bonsai_jax.network import experts_metadata
from bonsai_jax.network.architectures import hunyuan_dense
from bonsai_jax.network.kinds import tensors
from bonsai_jax.weights.metadata import whole

MODELS = "Hunyuan A13B"
TENSORS = (
    *hunyuan_dense.TENSORS,
    *tensors("experts", "norm", "router", "gate", "up", "down", "shared_gate", "shared_up", "shared_down"),
)


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    shared = whole(metadata, f"{arch}.feed_forward_length")
    experts = experts_metadata.from_gguf(metadata, shared=shared)
    config = hunyuan_dense.config_from_gguf(experts_metadata.dense_part(metadata, experts), tensors)
    return experts_metadata.with_experts(config, experts)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    raise NotImplementedError(
        "Hugging Face folders of Hunyuan with experts are not supported; use a GGUF file of it"
    )
