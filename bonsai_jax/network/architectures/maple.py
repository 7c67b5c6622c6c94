"""Maple 20B-A1B, a ternary mixture of experts: Qwen3-MoE with a clamped SwiGLU, windows in most layers, and
no rope in the others, which see all keys.
"""

import dataclasses

import numpy as np

from bonsai_jax.config import Layer, ModelConfig
from bonsai_jax.network import experts_metadata
from bonsai_jax.network.architectures import llama, qwen3moe
from bonsai_jax.network.kinds.experts import Experts
from bonsai_jax.weights.metadata import flags, positive, whole
from pallas_kernels.activations import clamped_swiglu

MODELS = "Maple 20B-A1B"
TENSORS = qwen3moe.TENSORS
LIMIT = 7.0  # of the reference's SwiGLU; its config.json does not say


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    turned = metadata.get(f"{arch}.rope.dimension_count")
    whole_heads = {key: v for key, v in metadata.items() if key != f"{arch}.rope.dimension_count"}
    config = qwen3moe.config_from_gguf(whole_heads, tensors)
    limits = np.atleast_1d(np.asarray(metadata[f"{arch}.swiglu_clamp_exp"], np.float64))
    if len({*limits.tolist()}) != 1:
        raise NotImplementedError(f"{arch}.swiglu_clamp_exp is {limits.tolist()}; supported: one value")
    full, rope = config.attention, config.attention.rope
    base = positive(metadata, f"{arch}.rope.freq_base_swa", rope.base)
    dim = rope.dim if turned is None else whole(metadata, f"{arch}.rope.dimension_count")
    windowed = dataclasses.replace(
        full,
        window=whole(metadata, f"{arch}.attention.sliding_window"),
        rope=dataclasses.replace(rope, base=base, dim=dim),
    )
    has_window = flags(metadata, f"{arch}.attention.sliding_window_pattern", config.num_layers)
    return _config(config, windowed, has_window, float(limits[0]))


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    for key, able in (("num_shared_experts", 0), ("nope_on_global_attention", True)):
        if metadata.get(key, able) != able:
            raise NotImplementedError(f"{key} is {metadata[key]!r}; supported: {able}")
    num_layers, types = whole(metadata, "num_hidden_layers"), metadata["layer_types"]
    if len(types) != num_layers or not {*types} <= {"sliding_attention", "full_attention"}:
        kinds = "sliding_attention, full_attention"
        raise ValueError(f"layer_types: {num_layers} are expected, each one of {kinds}")
    alike = {key: value for key, value in metadata.items() if key != "sliding_window"}
    experts = Experts(
        count=whole(metadata, "num_experts"),
        used=whole(metadata, "num_experts_per_tok"),
        ffn=whole(metadata, "moe_intermediate_size"),
        normalized=bool(metadata.get("norm_topk_prob", True)),
    )
    config = llama.config_from_huggingface({"intermediate_size": experts.ffn, **alike}, tensors)
    windowed = dataclasses.replace(config.attention, window=whole(metadata, "sliding_window"))
    config = experts_metadata.with_experts(config, experts)
    return _config(config, windowed, [kind == "sliding_attention" for kind in types], LIMIT)


def _config(config: ModelConfig, windowed, has_window: list[bool], limit: float) -> ModelConfig:
    """The config with these windows; the layers without one have no rope."""
    full = dataclasses.replace(windowed, window=None, rope=None)
    experts = config.experts
    if limit > 1e-6:  # as in llama.cpp, where 0 is no limit
        experts = dataclasses.replace(experts, activation=clamped_swiglu(limit))
    layers = tuple(Layer(windowed if windows else full, experts) for windows in has_window)
    return dataclasses.replace(config, layers=layers)
