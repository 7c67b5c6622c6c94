"""Granite 3 with experts (1B-A400M, 3B-A800M): Granite's four scales, experts in all layers, and in some
models a shared expert.

GGUF files give the experts' width as that of the feed-forward. Hugging Face folders are not read.
"""

from bonsai_jax.config import ModelConfig
from bonsai_jax.network import experts_metadata
from bonsai_jax.network.architectures import granite
from bonsai_jax.network.kinds import tensors
from bonsai_jax.weights.metadata import whole

MODELS = "Granite 3.x with experts"
EXPERTS = tensors(
    "experts", "norm", "router", "gate", "up", "down", "shared_gate", "shared_up", "shared_down"
)
TENSORS = (*granite.TENSORS, *EXPERTS)


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    width = f"{arch}.expert_feed_forward_length"
    ffn = {width: whole(metadata, f"{arch}.feed_forward_length")} if metadata.get(width) is None else {}
    experts = experts_metadata.from_gguf({**metadata, **ffn})
    config = granite.config_from_gguf(experts_metadata.dense_part(metadata, experts), tensors)
    return experts_metadata.with_experts(config, experts)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    raise NotImplementedError(
        "Hugging Face folders of Granite with experts are not supported; use a GGUF file of it"
    )
