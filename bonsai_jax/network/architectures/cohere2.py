"""Command R7B and Command A (Cohere 2): a Command R with windows in three of four layers, which alone have a
rope."""

import dataclasses

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.architectures import command_r
from bonsai_jax.weights.metadata import positive, whole, windowed_layers, windowed_types

MODELS = "Command R7B and Command A"
TENSORS = command_r.PLAIN
PATTERN = 4  # every how manyth layer sees all keys, where the file does not say


def config_from_gguf(metadata, tensors) -> ModelConfig:
    plain = command_r.config_from_gguf(metadata, tensors)
    key = f"{plain.architecture}.attention.sliding_window"
    has_window = windowed_layers(metadata, f"{key}_pattern", plain.num_layers, PATTERN)
    base = positive(metadata, f"{plain.architecture}.rope.freq_base_swa", plain.attention.rope.base)
    return _with_windows(plain, whole(metadata, key), base, has_window)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    if (part := positive(metadata, "rotary_pct", 1.0)) != 1:
        raise NotImplementedError(f"rotary_pct is {part}; supported: 1")
    plain = command_r.config_from_huggingface(metadata, tensors)
    has_window = windowed_types(metadata, plain.num_layers, PATTERN)
    return _with_windows(plain, whole(metadata, "sliding_window"), plain.attention.rope.base, has_window)


def _with_windows(plain: ModelConfig, window: int, base: float, has_window: list[bool]) -> ModelConfig:
    rope = dataclasses.replace(plain.attention.rope, base=base)
    windowed = dataclasses.replace(plain.attention, window=window, rope=rope)
    full = dataclasses.replace(plain.attention, rope=None)
    return plain.with_mixers(windowed if has else full for has in has_window)
