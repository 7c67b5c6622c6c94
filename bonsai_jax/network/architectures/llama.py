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
from bonsai_jax.network.rope_metadata import rope_from_gguf, rope_from_huggingface
from bonsai_jax.weights import specs
from bonsai_jax.weights.metadata import positive, whole
from bonsai_jax.weights.specs import Spec

MODELS = "SmolLM2, Llama 2 and 3, Mistral"
ROPE_DIVISORS = Spec("rope_divisors", "rope_freqs.weight", None, ("rope_pairs",), optional=True)
ROPE_FACTORS = tuple(
    Spec(f"rope_{length}", f"rope_factors_{length}.weight", None, ("rope_pairs",), optional=True)
    for length in ("short", "long")
)
_TYPES = ("full_attention", "sliding_attention")
TENSORS = (
    EMBED,
    *tensors("attention", "norm", "q", "k", "v", "o"),
    *tensors("mlp", "norm", "gate", "up", "down"),
    FINAL_NORM,
    HEAD,
    ROPE_DIVISORS,
)


def config_from_gguf(metadata, tensors, *, interleaved: bool = True, partial: bool = False) -> ModelConfig:
    """interleaved   as in Rope
    partial   whether the rope may turn fewer values than a head has"""
    arch = metadata["general.architecture"]
    if experts := metadata.get(f"{arch}.expert_count"):
        raise NotImplementedError(f"{arch}.expert_count is {experts}: mixtures of experts are not supported")
    heads, hidden = (
        whole(metadata, f"{arch}.attention.head_count"),
        whole(metadata, f"{arch}.embedding_length"),
    )
    head_dim = whole(metadata, f"{arch}.attention.key_length", hidden // heads)
    for key in (f"{arch}.attention.value_length", *([] if partial else [f"{arch}.rope.dimension_count"])):
        if (width := whole(metadata, key, head_dim)) != head_dim:
            raise NotImplementedError(f"{key} is {width}, but only head_dim ({head_dim}) is supported")
    rope = rope_from_gguf(metadata, head_dim, interleaved)
    mixer = Attention(heads, whole(metadata, f"{arch}.attention.head_count_kv", heads), head_dim, rope)
    return ModelConfig(
        architecture=arch,
        hidden=hidden,
        vocab_size=tensors["token_embd.weight"].shape[0],
        context_length=whole(metadata, f"{arch}.context_length"),
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
        vocab_size=specs.text_tensor(tensors, "model.embed_tokens.weight").shape[0],
        context_length=whole(metadata, "max_position_embeddings"),
        rms_norm_eps=positive(metadata, "rms_norm_eps"),
        layers=tuple(Layer(mixer, mlp) for mixer in mixers),
    )


def with_attention(config: ModelConfig, **changes) -> ModelConfig:
    """With other settings of attention in all layers."""
    layers = tuple(
        dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **changes))
        for layer in config.layers
    )
    return dataclasses.replace(config, layers=layers)
