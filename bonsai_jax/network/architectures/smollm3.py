"""SmolLM3: a Llama in which every fourth layer has no rope (NoPE)."""

import dataclasses

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.architectures import llama
from bonsai_jax.weights.metadata import flags, whole

MODELS = "SmolLM3 3B"
TENSORS = llama.TENSORS
INTERVAL = 4  # GGUF files do not say it


def config_from_gguf(metadata, tensors) -> ModelConfig:
    config = llama.config_from_gguf(metadata, tensors)
    return _without_some_ropes(config, _every(INTERVAL, config.num_layers))


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    config = llama.config_from_huggingface(metadata, tensors)
    if metadata.get("no_rope_layers") is None:
        has_rope = _every(whole(metadata, "no_rope_layer_interval", INTERVAL), config.num_layers)
    else:  # 1 for layers that have one
        has_rope = flags(metadata, "no_rope_layers", config.num_layers)
    return _without_some_ropes(config, has_rope)


def _every(interval: int, num_layers: int) -> list[bool]:
    """Which layers have a rope: all but every so manyth."""
    return [(number + 1) % interval != 0 for number in range(num_layers)]


def _without_some_ropes(config: ModelConfig, has_rope: list[bool]) -> ModelConfig:
    layers = tuple(
        layer if rope else dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, rope=None))
        for layer, rope in zip(config.layers, has_rope, strict=True)
    )
    return dataclasses.replace(config, layers=layers)
