"""Qwen2 and Qwen2.5: a Llama whose q, k and v have biases; rope in halves in GGUF files too."""

from bonsai_jax.network import transformer
from bonsai_jax.network.architectures import llama
from bonsai_jax.weights.specs import Spec

TENSORS = (
    *llama.TENSORS,
    Spec("bq", "blk.{}.attn_q.bias", "model.layers.{}.self_attn.q_proj.bias", ("q_width",)),
    Spec("bk", "blk.{}.attn_k.bias", "model.layers.{}.self_attn.k_proj.bias", ("kv_width",)),
    Spec("bv", "blk.{}.attn_v.bias", "model.layers.{}.self_attn.v_proj.bias", ("kv_width",)),
)

forward = transformer.decoder


def config_from_gguf(metadata, tensors):
    return llama.config_from_gguf(metadata, tensors, interleaved=False)


config_from_huggingface = llama.config_from_huggingface
