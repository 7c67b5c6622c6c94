"""Granite 4.0-H (350M to 32B-A9B) and Bamba: a Granite with Mamba 2 in most layers, experts or a feed-forward
in all, and often no rope.

GGUF files give 0 KV heads to layers with Mamba 2. In Hugging Face files the feed-forward of a dense model is
called a shared expert. Hugging Face folders of Bamba, which has other names, are not read.
"""

import dataclasses

from bonsai_jax.config import ModelConfig
from bonsai_jax.network import experts_metadata
from bonsai_jax.network.architectures import granite, granitemoe, llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.kinds.mamba2 import Mamba2
from bonsai_jax.network.mamba2_metadata import mamba2_from_gguf, mamba2_from_huggingface
from bonsai_jax.weights.metadata import counts, whole

MODELS = "Granite 4.0-H, Bamba"
# Entries of layer_types; the last two are those that transformers 5 writes.
IS_MAMBA2 = {"mamba": True, "attention": False, "linear_attention": True, "full_attention": False}
_MLP = (
    *tensors("mlp", "norm", down=("ffn_down.weight", "shared_mlp.output_linear.weight")),
    *tensors(
        "mlp",
        rows_of=(None, "shared_mlp.input_linear.weight"),
        gate=("ffn_gate.weight", "shared_mlp.gate.weight"),
        up=("ffn_up.weight", "shared_mlp.up.weight"),
    ),
)
TENSORS = (
    *(spec for spec in granite.TENSORS if spec.kind != "mlp"),
    *_MLP,
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
    return _with_mamba2(config, mamba2, [heads == 0 for heads in kv_heads])


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    if metadata["model_type"] == "bamba":
        raise NotImplementedError("Hugging Face folders of Bamba are not supported; use a GGUF file of it")
    if metadata.get("mamba_proj_bias") or metadata.get("attention_bias"):
        raise NotImplementedError("mamba_proj_bias or attention_bias is true; supported: false")
    if (groups := whole(metadata, "mamba_n_groups", 1)) != 1:  # all published models have one
        raise NotImplementedError(
            f"mamba_n_groups is {groups}; supported: 1, as transformers norms all groups together and "
            "llama.cpp each"
        )
    if experts_metadata.count(metadata, "num_local_experts"):
        config = granitemoe.config_from_huggingface(metadata, tensors)
    else:
        width = {"intermediate_size": whole(metadata, "shared_intermediate_size")}
        config = granite.config_from_huggingface({**metadata, **width}, tensors)
    if metadata.get("position_embedding_type", "rope") != "rope":
        config = llama.with_attention(config, rope=None)
    types = metadata["layer_types"]
    if not isinstance(types, list) or len(types) != config.num_layers or not {*types} <= IS_MAMBA2.keys():
        raise ValueError(f"layer_types: {config.num_layers} are expected, each one of {', '.join(IS_MAMBA2)}")
    return _with_mamba2(config, mamba2_from_huggingface(metadata), [IS_MAMBA2[kind] for kind in types])


def _with_mamba2(config: ModelConfig, mamba2: Mamba2, where: list[bool]) -> ModelConfig:
    layers = (
        dataclasses.replace(layer, mixer=mamba2) if recurrent else layer
        for layer, recurrent in zip(config.layers, where, strict=True)
    )
    return dataclasses.replace(config, layers=tuple(layers))
