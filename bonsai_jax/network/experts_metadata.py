"""What architectures with experts have in common: llama.cpp's keys, and which layers have experts."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from bonsai_jax.config import Layer, ModelConfig
from bonsai_jax.network.kinds.experts import Experts
from bonsai_jax.weights.metadata import positive, whole

# llama.cpp's gating functions. The third, a softmax over the experts that are used, is that over all experts,
# normalized.
GATINGS: dict[int, Literal["softmax", "sigmoid"]] = {1: "softmax", 2: "sigmoid", 3: "softmax"}


def from_gguf(
    metadata: Mapping[str, Any],
    *,
    gating: Literal["softmax", "sigmoid"] = "softmax",
    normalized: bool = True,
    shared: int = 0,
) -> Experts:
    """Settings of a GGUF file's experts; `gating`, `normalized` and `shared` where the file does not say.

    Raises NotImplementedError for a gating function that we lack.
    """
    arch = metadata["general.architecture"]

    def number(name: str, default: int | None = None) -> int:
        return whole(metadata, f"{arch}.{name}", default)

    code = metadata.get(f"{arch}.expert_gating_func") or 0
    if code and code not in GATINGS:
        known = "1 (softmax), 2 (sigmoid), 3 (softmax over those used)"
        raise NotImplementedError(f"{arch}.expert_gating_func is {code}; supported: {known}")
    scale = metadata.get(f"{arch}.expert_weights_scale") or None  # 0: none
    shared = metadata.get(f"{arch}.expert_shared_feed_forward_length") or shared
    return Experts(
        count=number("expert_count"),
        used=number("expert_used_count"),
        ffn=number("expert_feed_forward_length"),
        normalized=code == 3 or bool(metadata.get(f"{arch}.expert_weights_norm", normalized)),
        gating=GATINGS.get(code, gating),
        scale=1.0 if scale is None else positive(metadata, f"{arch}.expert_weights_scale"),
        groups=number("expert_group_count", 1),
        groups_used=number("expert_group_used_count", 1),
        shared=whole({"shared": shared}, "shared") if shared else 0,
    )


def dense_part(metadata: Mapping[str, Any], experts: Experts) -> dict[str, Any]:
    """A GGUF file's metadata as those of a model without experts; where no layer has a feed-forward in their
    place, files may lack its width."""
    arch = metadata["general.architecture"]
    rest = {key: value for key, value in metadata.items() if key != f"{arch}.expert_count"}
    return {f"{arch}.feed_forward_length": experts.ffn, **rest}


def with_experts(
    config: ModelConfig, experts: Experts, has: Callable[[int], bool] = lambda layer: True
) -> ModelConfig:
    """The same model with experts in the layers that have them."""
    layers = (
        Layer(layer.mixer, experts) if has(number) else layer for number, layer in enumerate(config.layers)
    )
    return dataclasses.replace(config, layers=tuple(layers))


def count(metadata: Mapping[str, Any], key: str) -> int:
    """metadata[key], a whole number; 0 where it is absent: of layers without experts, of shared experts."""
    return whole(metadata, key) if metadata.get(key) else 0


def sparse_layers(metadata: Mapping[str, Any]) -> Callable[[int], bool]:
    """Which layers have experts by the keys of Qwen's Hugging Face folders, decoder_sparse_step and
    mlp_only_layers."""
    dense, every = metadata.get("mlp_only_layers") or [], whole(metadata, "decoder_sparse_step", 1)
    if not isinstance(dense, list) or any(not isinstance(layer, int) for layer in dense):
        raise ValueError(f"mlp_only_layers is {dense!r}; a list of layers is expected")
    return lambda layer: layer not in dense and (layer + 1) % every == 0
