"""Ling 2.0 and Ring 2.0 (Bailing MoE v2): a GLM-4.5 with QK-norm, q, k and v in one tensor, and experts of
groups of which a token uses some. Draft layers are left aside.
"""

import dataclasses

from bonsai_jax.config import ModelConfig
from bonsai_jax.network import experts_metadata
from bonsai_jax.network.architectures import glm4moe
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD
from bonsai_jax.weights.metadata import whole

MODELS = "Ling 2.0, Ring 2.0"
EMBEDDING = "model.word_embeddings.weight"
TENSORS = (
    dataclasses.replace(EMBED, huggingface=EMBEDDING),
    *tensors(
        "attention",
        "norm",
        q_norm=("attn_q_norm.weight", "attention.query_layernorm.weight"),
        k_norm=("attn_k_norm.weight", "attention.key_layernorm.weight"),
        o=("attn_output.weight", "attention.dense.weight"),
    ),
    *tensors("attention", "q", "k", "v", rows_of=("attn_qkv.weight", "attention.query_key_value.weight")),
    *tensors("mlp", "norm", "gate", "up", "down"),
    *tensors("experts", "norm", "router", "gate", "up", "down", **glm4moe.SHARED),
    *tensors("experts", optional=True, choice_bias=("exp_probs_b.bias", "mlp.gate.expert_bias")),
    FINAL_NORM,
    HEAD,
)


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    key, count = f"{arch}.expert_shared_feed_forward_length", f"{arch}.expert_shared_count"
    if metadata.get(key) and metadata.get(count):  # llama.cpp takes the first as the width of each
        metadata = {**metadata, key: whole(metadata, key) * whole(metadata, count)}
    return glm4moe.config_from_gguf(metadata, tensors)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    for key, able in (
        ("score_function", "sigmoid"),
        ("use_qk_norm", True),
        ("use_bias", False),
        ("use_qkv_bias", False),
    ):
        if metadata.get(key, able) != able:
            raise NotImplementedError(f"{key} is {metadata[key]!r}; supported: {able}")
    width = whole(metadata, "moe_intermediate_size")
    shared = experts_metadata.count(metadata, "num_shared_experts")
    if whole(metadata, "moe_shared_expert_intermediate_size", width * shared or 1) != (width * shared or 1):
        raise NotImplementedError(
            f"moe_shared_expert_intermediate_size is {metadata['moe_shared_expert_intermediate_size']}; "
            f"supported: moe_intermediate_size times num_shared_experts ({width * shared})"
        )
    same = {"n_routed_experts": whole(metadata, "num_experts"), "n_shared_experts": shared}
    config = glm4moe.config_from_huggingface(
        {**metadata, **same}, {"model.embed_tokens.weight": tensors[EMBEDDING]}
    )
    return dataclasses.replace(config, architecture="bailingmoe2")
