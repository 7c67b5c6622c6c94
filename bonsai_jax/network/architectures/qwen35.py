"""Qwen3.5 and Bonsai 27B: of every four layers three mix tokens by a gated delta net, the fourth by
attention, whose heads are gated and partly rotated; all have SwiGLU.

GGUF files hold v heads tiled (v head h uses k head h % k heads), A as -exp(A_log) and norms as they are
multiplied; Hugging Face files v heads grouped, A_log, and norms less 1. A draft layer (MTP) is loaded where
RunConfig.draft asks for it; it and what sees images are left aside else.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from bonsai_jax.config import Layer, ModelConfig
from bonsai_jax.network.delta_net_metadata import (
    delta_layers_from_gguf,
    delta_layers_from_huggingface,
    delta_net_from_gguf,
    delta_net_from_huggingface,
)
from bonsai_jax.network.draft_tensors import draft_layer
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.kinds.attention import Attention
from bonsai_jax.network.kinds.mlp import Mlp
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD
from bonsai_jax.network.rope import Rope
from bonsai_jax.weights.metadata import nested, positive, whole
from bonsai_jax.weights.specs import Spec

M_ROPE = True
MODELS = "Qwen3.5's dense models, text only; Bonsai 27B; Bonsai 2"


def _plus_1(norm: jax.Array) -> jax.Array:
    return 1 + norm


def _minus_1(norm: jax.Array) -> jax.Array:
    return norm - 1


def _decay(log: jax.Array) -> jax.Array:
    return -jnp.exp(log)


def _log(decay: jax.Array) -> jax.Array:
    return jnp.log(-decay)


def from_huggingface(specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
    """With what Hugging Face files hold otherwise: norms less 1, but not that of delta heads, and log A."""
    norms = ("norm", "q_norm", "k_norm", "final_norm", "embed_norm", "hidden_norm")
    how = dict.fromkeys(norms, (_plus_1, _minus_1)) | {"decay": (_decay, _log)}

    def stored(spec: Spec) -> Spec:
        forward, inverse = how.get(spec.field, (None, None))
        return dataclasses.replace(spec, from_huggingface=forward, to_huggingface=inverse)

    return tuple(map(stored, specs))


NORM = (
    "post_attention_norm.weight",
    "post_attention_layernorm.weight",
)  # before the feed-forward or the experts
ATTENTION = tensors("attention", "norm", "q", "k", "v", "q_norm", "k_norm", "o")
DELTA_NET = tensors(
    "delta_net", "norm", "qkv", "z", "alpha", "beta", "dt", "decay", "head_norm", "out", "conv_weights"
)
MLP = tensors("mlp", "gate", "up", "down", norm=NORM)
TENSORS = from_huggingface((EMBED, *ATTENTION, *DELTA_NET, *MLP, FINAL_NORM, HEAD))
DRAFT = from_huggingface(draft_layer((*ATTENTION, *MLP)))


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]

    def number(name: str, default: int | None = None) -> int:
        return whole(metadata, f"{arch}.{name}", default)

    blocks = number("block_count")  # draft layers (MTP) among them, the last ones
    draft = number("nextn_predict_layers") if metadata.get(f"{arch}.nextn_predict_layers") else 0
    num_layers = blocks - draft
    head_dim = number("attention.key_length")
    if (width := number("attention.value_length", head_dim)) != head_dim:
        raise NotImplementedError(
            f"{arch}.attention.value_length is {width}, but only head_dim ({head_dim}) is supported"
        )
    if (scaling := metadata.get(f"{arch}.rope.scaling.type", "none")) != "none":
        raise NotImplementedError(f"{arch}.rope.scaling.type is {scaling!r}; supported: none")
    rope = Rope(
        positive(metadata, f"{arch}.rope.freq_base", 10000.0), number("rope.dimension_count", head_dim)
    )
    heads, kv_heads = number("attention.head_count"), number("attention.head_count_kv")
    attention = Attention(heads, kv_heads, head_dim, rope, gated=True)
    delta_net, mlp = delta_net_from_gguf(metadata), Mlp(number("feed_forward_length"))
    is_delta = delta_layers_from_gguf(metadata, num_layers)
    return ModelConfig(
        architecture=arch,
        hidden=number("embedding_length"),
        vocab_size=tensors["token_embd.weight"].shape[0],
        context_length=number("context_length"),
        rms_norm_eps=positive(metadata, f"{arch}.attention.layer_norm_rms_epsilon"),
        layers=tuple(Layer(delta_net if delta else attention, mlp) for delta in is_delta),
        skipped=tuple(f"blk.{layer}." for layer in range(num_layers, blocks)),
    )


def text_part(metadata) -> dict[str, Any]:
    """The text model's own part of the config.json of a model that sees images too."""
    return {"model_type": metadata["model_type"], **(metadata.get("text_config") or metadata)}


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    metadata = text_part(metadata)
    if metadata.get("hidden_act", "silu") != "silu":
        raise NotImplementedError(f"hidden_act is {metadata['hidden_act']!r}; supported: silu")
    if metadata.get("attention_bias"):
        raise NotImplementedError("attention_bias is true; supported: false")
    num_layers, rope = whole(metadata, "num_hidden_layers"), nested(metadata, "rope_parameters")
    if (kind := rope.get("rope_parameters.rope_type", "default")) != "default":
        raise NotImplementedError(f"rope_parameters.rope_type is {kind!r}; supported: default")
    part = positive(metadata, "partial_rotary_factor", 0.25)
    part = positive(rope, "rope_parameters.partial_rotary_factor", part)
    head_dim = whole(metadata, "head_dim", 256)
    attention = Attention(
        whole(metadata, "num_attention_heads"),
        whole(metadata, "num_key_value_heads"),
        head_dim,
        Rope(positive(rope, "rope_parameters.rope_theta"), int(head_dim * part)),
        gated=True,
    )
    delta_net, mlp = delta_net_from_huggingface(metadata), Mlp(whole(metadata, "intermediate_size"))
    is_delta = delta_layers_from_huggingface(metadata, num_layers)
    embedding = (
        tensors.get("model.embed_tokens.weight") or tensors["model.language_model.embed_tokens.weight"]
    )
    return ModelConfig(
        architecture="qwen35",
        hidden=whole(metadata, "hidden_size"),
        vocab_size=embedding.shape[0],
        context_length=whole(metadata, "max_position_embeddings"),
        rms_norm_eps=positive(metadata, "rms_norm_eps"),
        layers=tuple(Layer(delta_net if delta else attention, mlp) for delta in is_delta),
        skipped=("mtp.", "model.mtp.", "model.visual."),
    )
