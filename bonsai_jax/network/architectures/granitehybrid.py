"""Granite 4.0-H (350M to 32B-A9B) and Bamba: a Granite with Mamba 2 in most layers, experts or a feed-forward
in all, and often no rope.

GGUF files give 0 KV heads to layers with Mamba 2. Hugging Face folders are not read.
"""

import dataclasses

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.architectures import granite, granitemoe
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.mamba2_metadata import mamba2_from_gguf
from bonsai_jax.weights.metadata import counts, whole

MODELS = "Granite 4.0-H, Bamba"
TENSORS = (
    *granite.TENSORS,
    *tensors("mamba2", "norm", "inputs", "conv_weights", "dt", "decay", "skip", "group_norm", "out"),
    *tensors("mamba2", "conv_bias", optional=True),
    *granitemoe.EXPERTS,
)


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    key = f"{arch}.attention.head_count_kv"
    kv_heads = counts(metadata, key, whole(metadata, f"{arch}.block_count"))
    alike = dict(metadata) | {
        key: max(kv_heads) or None,
        f"{arch}.logit_scale": metadata.get(f"{arch}.logit_scale") or 1.0,
    }
    family = granitemoe if metadata.get(f"{arch}.expert_count") else granite
    config, mamba2 = family.config_from_gguf(alike, tensors), mamba2_from_gguf(metadata)
    layers = (
        layer if heads else dataclasses.replace(layer, mixer=mamba2)
        for layer, heads in zip(config.layers, kv_heads, strict=True)
    )
    return dataclasses.replace(config, layers=tuple(layers))


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    raise NotImplementedError(
        "Hugging Face folders of Granite 4.0-H are not supported; use a GGUF file of it"
    )
