"""Llama: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU. Also SmolLM2, Mistral, and Llama 2 and
3.

GGUF files hold q and k with their rows permuted so that rotated pairs are neighbours (interleaved rope);
Hugging Face files hold them in halves.
"""

import dataclasses

from bonsai_jax.config import Layer, ModelConfig
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.kinds.attention import Attention
from bonsai_jax.network.kinds.mlp import Mlp
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD
from bonsai_jax.network.rope import Rope, yarn_mscale
from bonsai_jax.weights.metadata import nested, positive, whole
from bonsai_jax.weights.specs import Spec

MODELS = "SmolLM2, Llama 2 and 3, Mistral"
ROPE_DIVISORS = Spec("rope_divisors", "rope_freqs.weight", None, ("rope_pairs",), optional=True)
_TYPES = ("full_attention", "sliding_attention")
TENSORS = (
    EMBED,
    *tensors("attention", "norm", "q", "k", "v", "o"),
    *tensors("mlp", "norm", "gate", "up", "down"),
    FINAL_NORM,
    HEAD,
    ROPE_DIVISORS,
)


def config_from_gguf(metadata, tensors, *, interleaved: bool = True) -> ModelConfig:
    arch = metadata["general.architecture"]
    if experts := metadata.get(f"{arch}.expert_count"):
        raise NotImplementedError(f"{arch}.expert_count is {experts}: mixtures of experts are not supported")
    heads, hidden = (
        whole(metadata, f"{arch}.attention.head_count"),
        whole(metadata, f"{arch}.embedding_length"),
    )
    head_dim = whole(metadata, f"{arch}.attention.key_length", hidden // heads)
    for key in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
        if (width := whole(metadata, key, head_dim)) != head_dim:
            raise NotImplementedError(f"{key} is {width}, but only head_dim ({head_dim}) is supported")
    # Old files have a factor without a type; it is linear, as in llama.cpp.
    scaling = metadata.get(f"{arch}.rope.scaling.type", "linear")
    if scaling not in ("none", "linear", "yarn"):
        raise NotImplementedError(
            f"{arch}.rope.scaling.type is {scaling!r}; supported: none, linear, yarn (llama3 as rope_freqs)"
        )
    # Some files say 0 where nothing is scaled; scale_linear is the key of old ones.
    keys = [f"{arch}.rope.scaling.factor", f"{arch}.rope.scale_linear"]
    factor, *_ = [*(positive(metadata, key) for key in keys if metadata.get(key)), 1.0]
    context = whole(metadata, f"{arch}.context_length")
    rope = Rope(
        base=positive(metadata, f"{arch}.rope.freq_base", 10000.0),
        dim=head_dim,
        interleaved=interleaved,
        scaling=scaling if factor != 1.0 else "none",
        factor=factor,
        original_context=whole(metadata, f"{arch}.rope.scaling.original_context_length", context),
        beta_fast=positive(metadata, f"{arch}.rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=positive(metadata, f"{arch}.rope.scaling.yarn_beta_slow", 1.0),
        mscale=(yarn_mscale(factor) if scaling == "yarn" else 1.0)
        * positive(metadata, f"{arch}.rope.scaling.attn_factor", 1.0),
    )
    mixer = Attention(heads, whole(metadata, f"{arch}.attention.head_count_kv", heads), head_dim, rope)
    return ModelConfig(
        architecture=arch,
        hidden=hidden,
        vocab_size=tensors["token_embd.weight"].shape[0],
        context_length=context,
        rms_norm_eps=positive(metadata, f"{arch}.attention.layer_norm_rms_epsilon"),
        layers=(Layer(mixer, Mlp(whole(metadata, f"{arch}.feed_forward_length"))),)
        * whole(metadata, f"{arch}.block_count"),
    )


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    heads, hidden = whole(metadata, "num_attention_heads"), whole(metadata, "hidden_size")
    if metadata.get("hidden_act", "silu") != "silu":
        raise NotImplementedError(f"hidden_act is {metadata['hidden_act']!r}; supported: silu")
    head_dim = whole(metadata, "head_dim", hidden // heads)
    kv_heads, num_layers = whole(metadata, "num_key_value_heads", heads), whole(metadata, "num_hidden_layers")
    full = Attention(heads, kv_heads, head_dim, rope_from_huggingface(metadata, head_dim))
    mlp = Mlp(whole(metadata, "intermediate_size"))
    mixers = [full] * num_layers
    if metadata.get("sliding_window") and metadata.get("use_sliding_window", True):
        windowed = dataclasses.replace(full, window=whole(metadata, "sliding_window"))
        first = metadata.get("max_window_layers") or 0  # Qwen2: the layers before it see all keys
        types = metadata.get("layer_types") or [_TYPES[number >= first] for number in range(num_layers)]
        if len(types) != num_layers or not {*types} <= {*_TYPES}:
            raise ValueError(f"layer_types: {num_layers} are expected, each one of {', '.join(_TYPES)}")
        mixers = [windowed if kind == _TYPES[True] else full for kind in types]
    return ModelConfig(
        architecture=metadata["model_type"],
        hidden=hidden,
        vocab_size=tensors["model.embed_tokens.weight"].shape[0],
        context_length=whole(metadata, "max_position_embeddings"),
        rms_norm_eps=positive(metadata, "rms_norm_eps"),
        layers=tuple(Layer(mixer, mlp) for mixer in mixers),
    )


def rope_from_huggingface(metadata, head_dim: int) -> Rope:
    # The first is transformers 5's name, and holds rope_theta too.
    name = "rope_parameters" if metadata.get("rope_parameters") else "rope_scaling"
    rope = nested(metadata, name)
    base = positive(rope, f"{name}.rope_theta", positive(metadata, "rope_theta", 10000.0))
    scaling = rope.get(f"{name}.rope_type", rope.get(f"{name}.type", "default"))
    if scaling == "default":
        return Rope(base, head_dim)
    if scaling not in ("linear", "yarn", "llama3"):
        raise NotImplementedError(
            f"{name}.rope_type is {scaling!r}; supported: default, linear, yarn, llama3"
        )
    factor = positive(rope, f"{name}.factor")
    own = whole(metadata, "max_position_embeddings")
    mscale = yarn_mscale(factor) if scaling == "yarn" else 1.0
    return Rope(
        base=base,
        dim=head_dim,
        scaling=scaling,
        factor=factor,
        original_context=whole(rope, f"{name}.original_max_position_embeddings", own),
        beta_fast=positive(rope, f"{name}.beta_fast", 32.0),
        beta_slow=positive(rope, f"{name}.beta_slow", 1.0),
        mscale=positive(rope, f"{name}.attention_factor", mscale) if scaling == "yarn" else 1.0,
        truncate=bool(rope.get(f"{name}.truncate", True)),
        low_freq_factor=positive(rope, f"{name}.low_freq_factor", 1.0),
        high_freq_factor=positive(rope, f"{name}.high_freq_factor", 4.0),
    )
