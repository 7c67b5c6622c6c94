"""Qwen3 and Bonsai: a Llama that normalizes each head of q and k (QK-norm) before the rope, which is in
halves.

head_dim is the file's own: query heads together may be wider than the hidden vector. Bonsai extends its
context by YaRN, whose mscale holds at all positions: without it even short prompts go wrong.
"""

from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors

MODELS = "Qwen3; Bonsai 1.7B, 4B and 8B"
TENSORS = (*llama.TENSORS, *tensors("attention", "q_norm", "k_norm"))


def config_from_gguf(metadata, tensors):
    return llama.config_from_gguf(metadata, tensors, interleaved=False)


config_from_huggingface = llama.config_from_huggingface
