"""Gemma 3 (270M to 27B, text only): norms before and after both halves of a layer, GELU, embeddings scaled by
sqrt(hidden), QK-norm, and of every six layers five that see a window of keys, with a rope of their own.

GGUF files hold norms as they are multiplied, Hugging Face files norms less 1.
"""

import dataclasses
import math

from bonsai_jax.config import Layer, ModelConfig
from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.kinds.attention import Attention
from bonsai_jax.network.kinds.mlp import Mlp
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD
from bonsai_jax.network.rope import Rope
from bonsai_jax.weights.metadata import positive, whole, windowed_layers, windowed_types
from bonsai_jax.weights.specs import Spec
from pallas_kernels.activations import GELU_TANH

MODELS = "Gemma 3"
LOCAL_BASE = 10000.0  # of the rope of layers with a window, where the file does not say
LARGEST = 62  # layers of the 27B, whose scale is not that of its heads


def _plus_1(norm):
    return 1 + norm


def _minus_1(norm):
    return norm - 1


def _from_huggingface(specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
    return tuple(
        dataclasses.replace(s, from_huggingface=_plus_1, to_huggingface=_minus_1)
        if s.field.endswith("norm")
        else s
        for s in specs
    )


_ATTENTION = tensors("attention", "norm", "q", "k", "v", "o", "post_norm")
_MLP = tensors(
    "mlp", "gate", "up", "down", "post_norm", norm=("ffn_norm.weight", "pre_feedforward_layernorm.weight")
)
PLAIN = _from_huggingface((EMBED, *_ATTENTION, *_MLP, FINAL_NORM, HEAD))
TENSORS = (*PLAIN, *_from_huggingface(tensors("attention", "q_norm", "k_norm")))


def config_from_gguf(metadata, tensors, *, pattern: int = 6, largest: int = LARGEST) -> ModelConfig:
    """pattern   every how manyth layer sees all keys, unless the file says so
    largest   layers of the model whose scores are scaled by its hidden vector's width over its heads"""
    arch = metadata["general.architecture"]
    plain = llama.config_from_gguf(metadata, tensors, interleaved=False)
    full, key = plain.attention, f"{arch}.attention.sliding_window"
    if plain.num_layers == largest:
        full = dataclasses.replace(full, scale=(plain.hidden / full.num_heads) ** -0.5)
    full = dataclasses.replace(full, softcap=_optional(metadata, f"{arch}.attn_logit_softcapping"))
    windowed = full
    if metadata.get(key):
        rope = Rope(positive(metadata, f"{arch}.rope.freq_base_swa", LOCAL_BASE), full.rope.dim)
        windowed = dataclasses.replace(full, window=whole(metadata, key), rope=rope)
    has_window = windowed_layers(metadata, f"{key}_pattern", plain.num_layers, pattern)
    return _config(plain, full, windowed, has_window, _optional(metadata, f"{arch}.final_logit_softcapping"))


def config_from_huggingface(metadata, tensors, *, pattern: int = 6) -> ModelConfig:
    # Of a model that also sees images, the part that reads text.
    metadata = {"model_type": metadata["model_type"], **(metadata.get("text_config") or metadata)}
    activation = metadata.get("hidden_activation") or metadata.get("hidden_act", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise NotImplementedError(f"hidden_activation is {activation!r}; supported: gelu_pytorch_tanh")
    if metadata.get("attention_bias"):
        raise NotImplementedError("attention_bias is true; supported: false")
    embedding = next(t for name, t in tensors.items() if name.endswith("embed_tokens.weight"))
    heads, head_dim = whole(metadata, "num_attention_heads"), whole(metadata, "head_dim", 256)
    num_layers, ropes = whole(metadata, "num_hidden_layers"), _ropes_from_huggingface(metadata, head_dim)
    full = Attention(
        heads,
        whole(metadata, "num_key_value_heads", heads),
        head_dim,
        ropes["full_attention"],
        scale=positive(metadata, "query_pre_attn_scalar", head_dim) ** -0.5,
        softcap=_optional(metadata, "attn_logit_softcapping"),
    )
    windowed = full
    if metadata.get("sliding_window"):
        window = whole(metadata, "sliding_window")
        windowed = dataclasses.replace(full, window=window, rope=ropes["sliding_attention"])
    has_window = windowed_types(metadata, num_layers, pattern)
    plain = ModelConfig(
        architecture=metadata["model_type"].removesuffix("_text"),
        hidden=whole(metadata, "hidden_size"),
        vocab_size=embedding.shape[0],
        context_length=whole(metadata, "max_position_embeddings"),
        rms_norm_eps=positive(metadata, "rms_norm_eps"),
        layers=(Layer(full, Mlp(whole(metadata, "intermediate_size"))),) * num_layers,
        skipped=tuple(
            f"{start}{part}"
            for start in ("", "model.")
            for part in ("vision_tower.", "multi_modal_projector.")
        ),
    )
    return _config(plain, full, windowed, has_window, _optional(metadata, "final_logit_softcapping"))


def _config(
    plain: ModelConfig, full: Attention, windowed: Attention, has_window: list[bool], softcap: float | None
) -> ModelConfig:
    """A Llama's config with the layers, the embedding's scale and the logits' softcap of a Gemma."""
    mlp = dataclasses.replace(plain.mlp, activation=GELU_TANH)
    layers = tuple(Layer(windowed if window else full, mlp) for window in has_window)
    scale = math.sqrt(plain.hidden)
    return dataclasses.replace(plain, layers=layers, embedding_scale=scale, logit_softcap=softcap)


def _ropes_from_huggingface(metadata, head_dim: int) -> dict[str, Rope]:
    """The rope of each type of layer. transformers 5 lists both; before it, layers with a window had a base
    of their own and no scaling."""
    both = metadata.get("rope_parameters") or {}
    if "full_attention" in both:
        return {
            kind: llama.rope_from_huggingface(dict(metadata) | {"rope_parameters": both[kind]}, head_dim)
            for kind in ("full_attention", "sliding_attention")
        }
    full = llama.rope_from_huggingface(metadata, head_dim)
    local = Rope(positive(metadata, "rope_local_base_freq", LOCAL_BASE), head_dim)
    return {"full_attention": full, "sliding_attention": local}


def _optional(metadata, key: str) -> float | None:
    return positive(metadata, key) if metadata.get(key) else None
