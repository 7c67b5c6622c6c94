"""Qwen3.5 and Qwen3.6 with experts, as Qwen3.6-35B-A3B: the layers of qwen35, each with experts chosen by a
softmax router and a shared expert, which a sigmoid of every token's own weighs.
"""

import dataclasses

from bonsai_jax.config import ModelConfig
from bonsai_jax.network import experts_metadata
from bonsai_jax.network.architectures import qwen35
from bonsai_jax.network.draft_tensors import draft_layer
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.kinds.experts import Experts
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD
from bonsai_jax.weights.metadata import whole

M_ROPE = True
MODELS = "Qwen3.5 and Qwen3.6 with experts"
EXPERTS = tensors(
    "experts", "router", "gate", "up", "down", "shared_gate", "shared_up", "shared_down", "shared_router",
    norm=qwen35.NORM,
)  # fmt: skip
TENSORS = qwen35.from_huggingface(
    (EMBED, *qwen35.ATTENTION, *qwen35.DELTA_NET, *qwen35.MLP, *EXPERTS, FINAL_NORM, HEAD)
)
DRAFT = qwen35.from_huggingface(draft_layer((*qwen35.ATTENTION, *EXPERTS)))


def config_from_gguf(metadata, tensors) -> ModelConfig:
    shared = metadata.get(f"{metadata['general.architecture']}.feed_forward_length") or 0
    experts = experts_metadata.from_gguf(metadata, shared=shared)
    rest = experts_metadata.dense_part(metadata, experts)
    return experts_metadata.with_experts(qwen35.config_from_gguf(rest, tensors), experts)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    metadata = qwen35.text_part(metadata)
    experts = Experts(
        count=whole(metadata, "num_experts"),
        used=whole(metadata, "num_experts_per_tok"),
        ffn=whole(metadata, "moe_intermediate_size"),
        normalized=bool(metadata.get("norm_topk_prob", True)),
        shared=whole(metadata, "shared_expert_intermediate_size"),
    )
    config = qwen35.config_from_huggingface({"intermediate_size": experts.ffn, **metadata}, tensors)
    config = dataclasses.replace(config, architecture="qwen35moe")
    return experts_metadata.with_experts(config, experts, experts_metadata.sparse_layers(metadata))
