"""GLM-4 of April 2025 (GLM-4-0414, GLM-Z1; 9B and 32B): norms before and after both halves of a layer, gate
and up in one tensor, and an interleaved rope of half a head, in Hugging Face files too. A draft layer (MTP)
is not loaded."""

import dataclasses

import numpy as np

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD
from bonsai_jax.weights.metadata import whole

ROTATED = 0.5  # of a head, where config.json does not say

MODELS = "GLM-4-0414, GLM-Z1"
TENSORS = (
    EMBED,
    *tensors("attention", "norm", "q", "k", "v", "o"),
    *tensors("attention", "q_bias", "k_bias", "v_bias", optional=True),
    *tensors("attention", post_norm=("post_attention_norm.weight", "post_self_attn_layernorm.weight")),
    *tensors("mlp", "norm", "down", post_norm=("post_ffw_norm.weight", "post_mlp_layernorm.weight")),
    *tensors("mlp", "gate", "up", rows_of=("ffn_up.weight", "mlp.gate_up_proj.weight")),
    FINAL_NORM,
    HEAD,
)


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    if np.any(sections := metadata.get(f"{arch}.rope.dimension_sections", 0)):
        listed = np.asarray(sections).tolist()
        raise NotImplementedError(f"{arch}.rope.dimension_sections is {listed}; supported: none")
    key = f"{arch}.nextn_predict_layers"
    draft, blocks = whole(metadata, key) if metadata.get(key) else 0, whole(metadata, f"{arch}.block_count")
    config = llama.config_from_gguf(metadata, tensors, partial=True)
    skipped = tuple(f"blk.{layer}." for layer in range(blocks - draft, blocks))
    return dataclasses.replace(config, layers=config.layers[: blocks - draft], skipped=skipped)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    metadata = {"partial_rotary_factor": ROTATED, **metadata}
    config = llama.config_from_huggingface(metadata, tensors)
    rope = dataclasses.replace(config.attention.rope, interleaved=True)
    return llama.with_attention(config, rope=rope)
