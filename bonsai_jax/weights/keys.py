"""Finds the keys of a file's metadata that change the result and that its architecture does not read.

`recorded` returns metadata that notes which keys are looked up, and `unread` lists keys that were not. In a
GGUF file these are the keys that begin with the architecture's name, except those in HARMLESS. A config.json
has dozens of keys about training and for other programs, so only the keys in CHANGES count there.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bonsai_jax.weights.metadata import Key

# GGUF keys, without the architecture, that change nothing where an architecture does not read them.
HARMLESS = frozenset((
    # Sizes, which the shapes of the tensors check, or the table of tensors does.
    *("vocab_size", "embedding_length", "embedding_length_out", "feed_forward_length", "context_length"),
    *("expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_shared_count"),
    *("expert_chunk_feed_forward_length", "leading_dense_block_count", "interleave_moe_layer_step"),
    *("attention.head_count_kv", "attention.key_length", "attention.value_length"),
    # Converters write whatever epsilon config.json has; an architecture reads that of its norms.
    *("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
    # Two ways to say which layers are recurrent; files have both.
    *("full_attention_interval", "attention.recurrent_layers"),
    # Settings of a scaled rope: an architecture that reads rope.scaling.type reads those that the type needs.
    # llama.cpp itself ignores yarn_attn_factor and yarn_ext_factor, except in grok.
    *("rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    *("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor", "rope.scaling.finetuned"),
    # For images; a text has the same position in every section of the rope.
    *("rope.dimension_sections", "n_deepstack_layers", "deepstack_mapping"),
    # For embeddings and rerankers, and a remark about the file.
    *("pooling_type", "classifier.output_labels", "tensor_data_layout"),
))  # fmt: skip

# Keys of config.json, of its text_config and of their rope objects that change the result.
CHANGES = frozenset((
    *("sliding_window", "layer_types", "attention_chunk_size", "use_bidirectional_attention", "alibi"),
    *("rope_scaling", "rope_parameters", "rope_theta", "rope_local_base_freq", "no_rope_layers"),
    *("partial_rotary_factor", "alpha", "short_factor", "long_factor", "attention_factor"),
    *("mscale", "mscale_all_dim", "llama_4_scaling_beta", "attn_temperature_tuning"),
    *("logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier", "attention_multiplier"),
    *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "clip_qkv"),
    *("hidden_act", "hidden_activation", "scale_emb", "scale_depth", "dim_model_base"),
    *("routed_scaling_factor", "scoring_func", "norm_topk_prob", "n_group", "topk_group"),
    *("num_kv_shared_layers", "hidden_size_per_layer_input"),
))  # fmt: skip

_ACTIVATIONS = ("hidden_act", "hidden_activation")
_ROPES = ("rope_scaling", "rope_parameters")
_NEUTRAL: tuple[Any, ...] = (None, False, 0, "", "none", "default", "full_attention")
_ONE = (  # keys whose neutral value is 1
    *("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale", "expert_group_count"),
    *("expert_group_used_count", "rope.scaling.factor", "rope.scale_linear", "rope.scaling.attn_factor"),
    *("rope.scaling.alpha", "logits_scaling", "embedding_multiplier", "residual_multiplier", "scale_emb"),
    *(
        "routed_scaling_factor",
        "n_group",
        "topk_group",
        "alpha",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
    ),
    *("partial_rotary_factor", "attention.value_scale", "attention.output_scale"),
)


def recorded(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """A copy of metadata and of the objects in it, and a set, empty at first, to which each lookup of a key
    adds its name."""
    read: set[str] = set()
    return _recorded(metadata, read), read


def _recorded(metadata: Mapping[str, Any], read: set[str]) -> dict[str, Any]:
    return {
        Key(name, name, read): _recorded(value, read) if isinstance(value, dict) else value
        for name, value in metadata.items()
    }


def unread(naming: str, metadata: Mapping[str, Any], read: set[str]) -> dict[str, Any]:
    """The keys, with their values, that change the result and are not in `read`.

    naming    "gguf" or "huggingface"
    metadata  of the file
    """
    if naming == "gguf":
        return dict(_unread_gguf(metadata, read))
    return dict(_unread_huggingface(metadata, read))


def _unread_gguf(metadata: Mapping[str, Any], read: set[str]) -> Iterator[tuple[str, Any]]:
    prefix = f"{metadata['general.architecture']}."
    window = metadata.get(f"{prefix}attention.sliding_window")
    has_rope = any(key.startswith(f"{prefix}rope.") for key in read)  # else nothing is rotated
    for key, value in metadata.items():
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or key in read or name in HARMLESS or _neutral(name, value):
            continue
        if (name.startswith("rope.") and not has_rope) or (not window and _asks_for_window(name)):
            continue
        yield key, value


def _asks_for_window(name: str) -> bool:
    return name.endswith("_swa") or name == "attention.sliding_window_pattern"


def _unread_huggingface(metadata: Mapping[str, Any], read: set[str]) -> Iterator[tuple[str, Any]]:
    # config.json of a model that also sees images has the text model in an object of its own.
    text = metadata.get("text_config")
    text = text if isinstance(text, dict) else metadata
    items = list(text.items())
    for name in _ROPES:
        if isinstance(rope := text.get(name), dict):
            own = ("rope_theta", "partial_rotary_factor") if _unscaled(rope) else rope
            items += [(key, rope[key]) for key in own if key in rope]
    for name, value in items:
        if name not in CHANGES or name in read or _neutral(name, value):
            continue
        # A file may have both names of the activation or of the rope, and one of them is read.
        if any(name in group and not read.isdisjoint(group) for group in (_ROPES, _ACTIVATIONS)):
            continue
        if name == "sliding_window" and text.get("use_sliding_window") is False:
            continue
        yield name, value


def _unscaled(rope: Mapping[str, Any]) -> bool:
    return rope.get("rope_type", rope.get("type", "default")) == "default"


def _neutral(name: str, value: Any) -> bool:
    """Whether the value is that of a model without the feature."""
    value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    if isinstance(value, list):
        return all(_neutral(name, item) for item in value)
    if isinstance(value, dict):
        return name in _ROPES and _unscaled(value)
    if name == "attention.causal":
        return bool(value)
    return value in _NEUTRAL or (name in _ONE and value == 1)
