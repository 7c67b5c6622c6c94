"""InternLM2 and 2.5 (1.8B to 20B): a Llama whose Hugging Face files have q, k and v in one tensor: of each KV
head the rows of its queries, then its key's and its value's.

Its dynamic scaling of the rope begins beyond the context of the file, so it is not needed within.
"""

import dataclasses

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.kinds.attention import Attention
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD
from bonsai_jax.weights.metadata import nested
from bonsai_jax.weights.specs import Fused, Rows, Spec

MODELS = "InternLM2 and 2.5"
EMBEDDING, FUSED = "model.tok_embeddings.weight", "model.layers.{}.attention.wqkv.weight"


def _rows(part: str):
    def rows(a: Attention) -> Rows:
        queries, head = a.num_heads // a.num_kv_heads * a.head_dim, a.head_dim
        runs = {"q": (0, queries), "k": (queries, queries + head), "v": (queries + head, queries + 2 * head)}
        return Rows(a.num_kv_heads, queries + 2 * head, (runs[part],))

    return rows


def _fused(spec: Spec) -> Spec:
    return dataclasses.replace(spec, fused=Fused(None, FUSED, _rows(spec.field)))


TENSORS = (
    dataclasses.replace(EMBED, huggingface=EMBEDDING),
    *tensors(
        "attention",
        norm=("attn_norm.weight", "attention_norm.weight"),
        o=("attn_output.weight", "attention.wo.weight"),
    ),
    *map(_fused, tensors("attention", "q", "k", "v")),
    *tensors(
        "mlp",
        norm=("ffn_norm.weight", "ffn_norm.weight"),
        gate=("ffn_gate.weight", "feed_forward.w1.weight"),
        up=("ffn_up.weight", "feed_forward.w3.weight"),
        down=("ffn_down.weight", "feed_forward.w2.weight"),
    ),
    FINAL_NORM,
    dataclasses.replace(HEAD, huggingface="output.weight"),
)


def config_from_gguf(metadata, tensors) -> ModelConfig:
    return llama.config_from_gguf(metadata, tensors)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    if metadata.get("bias"):
        raise NotImplementedError("bias is true; supported: false")
    rope = nested(metadata, "rope_scaling")
    if rope.get("rope_scaling.rope_type", rope.get("rope_scaling.type")) == "dynamic":
        metadata = {**metadata, "rope_scaling": None}
    return llama.config_from_huggingface(metadata, {"model.embed_tokens.weight": tensors[EMBEDDING]})
