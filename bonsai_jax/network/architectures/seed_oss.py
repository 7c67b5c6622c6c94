"""Seed-OSS (ByteDance): a Llama whose q, k and v have biases; rope in halves in GGUF files too, which call
the norm before the feed-forward post_attention_norm."""

from bonsai_jax.network.architectures import llama, qwen2
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD

MODELS = "Seed-OSS 36B"
TENSORS = (
    EMBED,
    *tensors("attention", "norm", "q", "k", "v", "o"),
    *tensors("attention", "q_bias", "k_bias", "v_bias", "o_bias", optional=True),
    *tensors(
        "mlp", "gate", "up", "down", norm=("post_attention_norm.weight", "post_attention_layernorm.weight")
    ),
    FINAL_NORM,
    HEAD,
)

config_from_gguf = qwen2.config_from_gguf
config_from_huggingface = llama.config_from_huggingface
