"""Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2 with experts, whose weights stay as the softmax gives them, and a
shared expert, which a sigmoid of every token's own weighs.
"""

import dataclasses

from bonsai_jax.config import ModelConfig
from bonsai_jax.network import experts_metadata
from bonsai_jax.network.architectures import qwen2
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.kinds.experts import Experts
from bonsai_jax.weights.metadata import whole

MODELS = "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B"
TENSORS = (
    *qwen2.TENSORS,
    *tensors("experts", "norm", "router", "gate", "up", "down"),
    *tensors("experts", "shared_gate", "shared_up", "shared_down", "shared_router"),
)


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    used, ffn = f"{arch}.expert_used_count", f"{arch}.expert_feed_forward_length"
    if metadata.get(ffn) is None:  # old files have the width of all that a token uses
        metadata = {**metadata, ffn: whole(metadata, f"{arch}.feed_forward_length") // whole(metadata, used)}
    shared = metadata.get(f"{arch}.feed_forward_length") or 0
    experts = experts_metadata.from_gguf(metadata, normalized=False, shared=shared)
    rest = experts_metadata.dense_part(metadata, experts)
    return experts_metadata.with_experts(qwen2.config_from_gguf(rest, tensors), experts)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    experts = Experts(
        count=whole(metadata, "num_experts"),
        used=whole(metadata, "num_experts_per_tok"),
        ffn=whole(metadata, "moe_intermediate_size"),
        normalized=bool(metadata.get("norm_topk_prob", False)),
        shared=whole(metadata, "shared_expert_intermediate_size"),
    )
    config = dataclasses.replace(qwen2.config_from_huggingface(metadata, tensors), architecture="qwen2moe")
    return experts_metadata.with_experts(config, experts, experts_metadata.sparse_layers(metadata))
