"""EXAONE 4 (1.2B, 32B): norms after both halves of a layer and none before, and QK-norm. The 32B model has
windows in three of four layers, which alone have a rope.

GGUF files hold Llama 3's scaling of the rope as divisors. Draft layers (MTP) of EXAONE 4.5 are not loaded.
"""

import dataclasses

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD
from bonsai_jax.weights.metadata import positive, whole, windowed_layers, windowed_types

MODELS = "EXAONE 4"
TENSORS = (
    EMBED,
    *tensors("attention", "q", "k", "v", "q_norm", "k_norm", "o", "post_norm"),
    *tensors("mlp", "gate", "up", "down", "post_norm"),
    FINAL_NORM,
    HEAD,
    llama.ROPE_DIVISORS,
)
LARGEST, WINDOW, PATTERN = 64, 4096, 4  # layers of the 32B, and its windows where the file does not say


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    plain = llama.config_from_gguf(metadata, tensors, interleaved=False)
    blocks, key = plain.num_layers, f"{arch}.attention.sliding_window"
    count = blocks - int(metadata.get(f"{arch}.nextn_predict_layers") or 0)
    skipped = tuple(f"blk.{number}." for number in range(count, blocks))
    plain = dataclasses.replace(plain, layers=plain.layers[:count], skipped=skipped)
    if not metadata.get(key) and count != LARGEST:
        return plain
    has_window = windowed_layers(metadata, f"{key}_pattern", count, PATTERN)
    base = positive(metadata, f"{arch}.rope.freq_base_swa", plain.attention.rope.base)
    return _with_windows(plain, whole(metadata, key, WINDOW), base, has_window)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    plain = llama.config_from_huggingface({**metadata, "sliding_window": None}, tensors)
    if not metadata.get("sliding_window"):
        return plain
    if isinstance(
        pattern := metadata.get("sliding_window_pattern"), str
    ):  # LLLG: local, local, local, global
        kinds = {"L": "sliding_attention", "G": "full_attention"}
        types = [kinds.get(pattern[i % len(pattern)]) for i in range(plain.num_layers)] if pattern else []
        metadata = {**metadata, "layer_types": metadata.get("layer_types") or types}
    has_window = windowed_types(metadata, plain.num_layers, PATTERN)
    return _with_windows(plain, whole(metadata, "sliding_window"), plain.attention.rope.base, has_window)


def _with_windows(plain: ModelConfig, window: int, base: float, has_window: list[bool]) -> ModelConfig:
    rope = dataclasses.replace(plain.attention.rope, base=base)
    windowed = dataclasses.replace(plain.attention, window=window, rope=rope)
    full = dataclasses.replace(plain.attention, rope=None)
    return plain.with_mixers(windowed if has else full for has in has_window)
