"""Olmo 2 and 3: norms after both halves of a layer and none before, and QK-norm of all heads of a token
together. Olmo 3 has windows in three of four layers, whose rope is not stretched as that of the others is.
"""

import dataclasses

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD
from bonsai_jax.network.rope import Rope
from bonsai_jax.weights.metadata import positive, whole, windowed_layers, windowed_types

MODELS = "Olmo 2 and 3"
TENSORS = (
    EMBED,
    *tensors("attention", "q", "k", "v", "q_row_norm", "k_row_norm", "o", "post_norm"),
    *tensors("mlp", "gate", "up", "down", "post_norm"),
    FINAL_NORM,
    HEAD,
)
PATTERN = 4  # every how manyth layer sees all keys, where the file does not say


def config_from_gguf(metadata, tensors) -> ModelConfig:
    plain = llama.config_from_gguf(metadata, tensors, interleaved=False)
    if not metadata.get(key := f"{plain.architecture}.attention.sliding_window"):
        return plain
    has_window = windowed_layers(metadata, f"{key}_pattern", plain.num_layers, PATTERN)
    base = positive(metadata, f"{plain.architecture}.rope.freq_base_swa", plain.attention.rope.base)
    return _with_windows(plain, whole(metadata, key), base, has_window)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    ropes = metadata.get("rope_parameters") or {}
    own = {"sliding_window": None, "rope_parameters": ropes.get("full_attention", ropes)}
    plain = llama.config_from_huggingface({**metadata, **own}, tensors)
    plain = dataclasses.replace(plain, architecture="olmo2")
    if not metadata.get("sliding_window"):
        return plain
    has_window = windowed_types(metadata, plain.num_layers, PATTERN)
    return _with_windows(plain, whole(metadata, "sliding_window"), plain.attention.rope.base, has_window)


def _with_windows(plain: ModelConfig, window: int, base: float, has_window: list[bool]) -> ModelConfig:
    full = plain.attention
    windowed = dataclasses.replace(full, window=window, rope=Rope(base, full.rope.dim))
    return plain.with_mixers(windowed if has else full for has in has_window)
