"""Qwen3 with a mixture of experts, as Qwen3-30B-A3B: for each token a softmax router takes the likeliest
experts of a layer, whose SwiGLU feed-forwards are weighted and summed.

GGUF files stack a layer's experts; Hugging Face files hold them one by one, and may have layers with one
feed-forward in their place (mlp_only_layers, decoder_sparse_step).
"""

import dataclasses
from typing import Any

from bonsai_jax.config import Layer, ModelConfig
from bonsai_jax.network.architectures import llama, qwen3
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.kinds.experts import Experts
from bonsai_jax.weights.metadata import whole

MODELS = "Qwen3-30B-A3B"
TENSORS = (*qwen3.TENSORS, *tensors("experts", "norm", "router", "gate", "up", "down"))
SOFTMAX = 1  # of llama.cpp's gating functions


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    for name, able in (("expert_gating_func", SOFTMAX), ("expert_weights_scale", 1.0)):
        if (value := metadata.get(f"{arch}.{name}") or able) != able:
            raise NotImplementedError(f"{arch}.{name} is {value}; supported: {able}")
    experts = Experts(
        count=whole(metadata, f"{arch}.expert_count"),
        used=whole(metadata, f"{arch}.expert_used_count"),
        ffn=whole(metadata, f"{arch}.expert_feed_forward_length"),
        normalized=bool(metadata.get(f"{arch}.expert_weights_norm", True)),
    )
    rest = {key: value for key, value in metadata.items() if key != f"{arch}.expert_count"}
    rest.setdefault(f"{arch}.feed_forward_length", experts.ffn)  # of dense layers; there are none
    config = llama.config_from_gguf(rest, tensors, interleaved=False)
    layers = tuple(dataclasses.replace(layer, channels=experts) for layer in config.layers)
    return dataclasses.replace(config, layers=layers)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    config = llama.config_from_huggingface(metadata, tensors)
    if metadata.get("attention_bias"):
        raise NotImplementedError("attention_bias is true; supported: false")
    dense, every = _dense_layers(metadata), whole(metadata, "decoder_sparse_step", 1)
    experts = Experts(
        count=whole(metadata, "num_experts"),
        used=whole(metadata, "num_experts_per_tok"),
        ffn=whole(metadata, "moe_intermediate_size"),
        normalized=bool(metadata.get("norm_topk_prob", False)),
    )
    layers = tuple(
        layer if number in dense or (number + 1) % every else Layer(layer.mixer, experts)
        for number, layer in enumerate(config.layers)
    )
    return dataclasses.replace(config, architecture="qwen3moe", layers=layers)


def _dense_layers(metadata) -> list[Any]:
    dense = metadata.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(not isinstance(layer, int) for layer in dense):
        raise ValueError(f"mlp_only_layers is {dense!r}; a list of layers is expected")
    return dense
