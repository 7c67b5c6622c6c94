"""Qwen3 with a mixture of experts, as Qwen3-30B-A3B: for each token a softmax router takes the likeliest
experts of a layer, whose SwiGLU feed-forwards are weighted and summed.

GGUF files stack a layer's experts; Hugging Face files hold them one by one or stacked, and may have layers
with one feed-forward in their place (mlp_only_layers, decoder_sparse_step).
"""

import dataclasses

from bonsai_jax.config import ModelConfig
from bonsai_jax.network import experts_metadata
from bonsai_jax.network.architectures import llama, qwen3
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.kinds.experts import Experts
from bonsai_jax.weights.metadata import whole

MODELS = "Qwen3-30B-A3B"
TENSORS = (*qwen3.TENSORS, *tensors("experts", "norm", "router", "gate", "up", "down"))


def config_from_gguf(metadata, tensors) -> ModelConfig:
    experts = experts_metadata.from_gguf(metadata)
    rest = experts_metadata.dense_part(metadata, experts)
    return experts_metadata.with_experts(llama.config_from_gguf(rest, tensors, interleaved=False), experts)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    config = llama.config_from_huggingface(metadata, tensors)
    if metadata.get("attention_bias"):
        raise NotImplementedError("attention_bias is true; supported: false")
    # transformers 5 writes num_local_experts.
    key = "num_experts" if metadata.get("num_local_experts") is None else "num_local_experts"
    experts = Experts(
        count=whole(metadata, key),
        used=whole(metadata, "num_experts_per_tok"),
        ffn=whole(metadata, "moe_intermediate_size"),
        normalized=bool(metadata.get("norm_topk_prob", False)),
    )
    config = dataclasses.replace(config, architecture="qwen3moe")
    return experts_metadata.with_experts(config, experts, experts_metadata.sparse_layers(metadata))
