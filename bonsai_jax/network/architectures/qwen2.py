"""Qwen2 and Qwen2.5: a Llama whose q, k and v have biases; rope in halves in GGUF files too."""

from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors

MODELS = "Qwen2, Qwen2.5"
TENSORS = (*llama.TENSORS, *tensors("attention", "q_bias", "k_bias", "v_bias"))


def config_from_gguf(metadata, tensors):
    return llama.config_from_gguf(metadata, tensors, interleaved=False)


config_from_huggingface = llama.config_from_huggingface
