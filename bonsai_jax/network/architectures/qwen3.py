"""Qwen3 and Bonsai: a Llama that normalizes each head of q and k (QK-norm) before the rope, which is in
halves.

head_dim is the file's own: query heads together may be wider than the hidden vector. Bonsai extends its
context by YaRN, whose mscale holds at all positions: without it even short prompts go wrong.
"""

from bonsai_jax.network import transformer
from bonsai_jax.network.architectures import llama
from bonsai_jax.weights.specs import Spec

TENSORS = (
    *llama.TENSORS,
    Spec("q_norm", "blk.{}.attn_q_norm.weight", "model.layers.{}.self_attn.q_norm.weight", ("head_dim",)),
    Spec("k_norm", "blk.{}.attn_k_norm.weight", "model.layers.{}.self_attn.k_norm.weight", ("head_dim",)),
)

forward = transformer.decoder


def config_from_gguf(metadata, tensors):
    return llama.config_from_gguf(metadata, tensors, interleaved=False)


config_from_huggingface = llama.config_from_huggingface
