"""Hunyuan, dense (Tencent; 0.5B to 7B): a Llama that normalizes each head of q and k after the rope, which
is in halves. Its base is multiplied by alpha^(d / (d - 2)) for long contexts (NTK-aware scaling)."""

import numpy as np

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.weights.metadata import nested, positive, whole

MODELS = "Hunyuan 0.5B"
TENSORS = (
    *llama.TENSORS,
    *tensors(
        "attention",
        q_norm=("attn_q_norm.weight", "self_attn.query_layernorm.weight"),
        k_norm=("attn_k_norm.weight", "self_attn.key_layernorm.weight"),
    ),
)


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    config = llama.config_from_gguf(metadata, tensors, interleaved=False)
    if metadata.get(f"{arch}.rope.scaling.alpha"):  # else it is in the base already
        alpha, base = positive(metadata, f"{arch}.rope.scaling.alpha"), config.attention.rope.base
        scaled = {f"{arch}.rope.freq_base": _scaled(base, alpha, config.attention.head_dim)}
        config = llama.config_from_gguf({**metadata, **scaled}, tensors, interleaved=False)
    return llama.with_attention(config, norms_after_rope=True)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    name = "rope_parameters" if metadata.get("rope_parameters") else "rope_scaling"
    rope = nested(metadata, name)
    if rope.get(f"{name}.rope_type", rope.get(f"{name}.type")) == "dynamic":
        base = positive(rope, f"{name}.rope_theta", positive(metadata, "rope_theta", 10000.0))
        head_dim = whole(
            metadata, "head_dim", whole(metadata, "hidden_size") // whole(metadata, "num_attention_heads")
        )
        scaled = _scaled(base, positive(rope, f"{name}.alpha"), head_dim)
        metadata = {**metadata, name: None, "rope_theta": scaled}
    config = llama.config_from_huggingface(metadata, tensors)
    return llama.with_attention(config, norms_after_rope=True)


def _scaled(base: float, alpha: float, head_dim: int) -> float:
    return float(np.float64(base) * np.float64(alpha) ** (head_dim / (head_dim - 2)))
