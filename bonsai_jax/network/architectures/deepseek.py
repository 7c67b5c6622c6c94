"""DeepSeek MoE 16B, the first DeepSeek with experts: a Llama whose first layers are dense, and whose others
have experts, weighted as the softmax gives them, and a shared expert of several experts' width.
"""

from bonsai_jax.config import ModelConfig
from bonsai_jax.network import experts_metadata
from bonsai_jax.network.architectures import glm4moe, llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.kinds.experts import Experts
from bonsai_jax.weights.metadata import whole

MODELS = "DeepSeek MoE 16B"
TENSORS = (
    *llama.TENSORS,
    *tensors("experts", "norm", "router", "gate", "up", "down", **glm4moe.SHARED),
)


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    width = whole(metadata, f"{arch}.expert_feed_forward_length")
    shared = width * experts_metadata.count(metadata, f"{arch}.expert_shared_count")
    experts = experts_metadata.from_gguf(metadata, normalized=False, shared=shared)
    config = llama.config_from_gguf(experts_metadata.dense_part(metadata, experts), tensors)
    first = experts_metadata.count(metadata, f"{arch}.leading_dense_block_count")
    return experts_metadata.with_experts(config, experts, lambda layer: layer >= first)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    for key, able in (("scoring_func", "softmax"), ("moe_layer_freq", 1), ("attention_bias", False)):
        if metadata.get(key, able) != able:
            raise NotImplementedError(f"{key} is {metadata[key]!r}; supported: {able}")
    width = whole(metadata, "moe_intermediate_size")
    experts = Experts(
        count=whole(metadata, "n_routed_experts"),
        used=whole(metadata, "num_experts_per_tok"),
        ffn=width,
        normalized=bool(metadata.get("norm_topk_prob", False)),
        shared=width * experts_metadata.count(metadata, "n_shared_experts"),
    )
    config = llama.config_from_huggingface(metadata, tensors)
    first = experts_metadata.count(metadata, "first_k_dense_replace")
    return experts_metadata.with_experts(config, experts, lambda layer: layer >= first)
