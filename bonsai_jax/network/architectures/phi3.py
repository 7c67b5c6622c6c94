"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: a Llama whose q, k and v are one tensor, as are gate and up; the
rope may turn a part of a head, and longrope divides its frequencies by other factors in long contexts.

llama.cpp leaves out the window of Phi-3-mini-4k (2,047 keys), which the model was trained with and has here.
"""

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD
from bonsai_jax.weights.metadata import whole

MODELS = "Phi-3, Phi-3.5, Phi-4, Phi-4-mini"
TENSORS = (
    EMBED,
    *tensors("attention", "norm", "o"),
    *tensors("attention", "q", "k", "v", rows_of=("attn_qkv.weight", "self_attn.qkv_proj.weight")),
    *tensors("mlp", "norm", "down"),
    *tensors("mlp", "gate", "up", rows_of=("ffn_up.weight", "mlp.gate_up_proj.weight")),
    FINAL_NORM,
    HEAD,
    *llama.ROPE_FACTORS,
)


def config_from_gguf(metadata, tensors) -> ModelConfig:
    key = f"{metadata['general.architecture']}.attention.sliding_window"
    config = llama.config_from_gguf(metadata, tensors, interleaved=False, partial=True)
    return _windowed(config, whole(metadata, key) if metadata.get(key) else None)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    config = llama.config_from_huggingface(metadata, tensors)
    return _windowed(config, config.attention.window)


def _windowed(config: ModelConfig, window: int | None) -> ModelConfig:
    """128k models have windows of twice their context: none."""
    hides = window is not None and window < config.context_length
    return llama.with_attention(config, window=window if hides else None)
