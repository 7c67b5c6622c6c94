"""Falcon-H1 (0.5B to 34B): a Llama in whose layers attention and Mamba 2 read the same input side by side.

GGUF files have the model's multipliers in their weights. Of Hugging Face folders, which do not, weights are
multiplied while they are loaded.
"""

import dataclasses

import numpy as np

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.mamba2_metadata import mamba2_from_gguf, mamba2_from_huggingface
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD
from bonsai_jax.weights.metadata import numbers, positive
from checkpoints import Changed

MODELS = "Falcon-H1"
TENSORS = (
    EMBED,
    *tensors("attention", "norm", "q", "k", "v", "o"),
    *tensors("mamba2", "norm", "inputs", "conv_weights", "dt", "decay", "skip", "out"),
    *tensors("mamba2", "conv_bias", "group_norm", optional=True),
    *tensors(
        "mlp",
        norm=("ffn_norm", "pre_ff_layernorm.weight"),
        gate=("ffn_gate.weight", "feed_forward.gate_proj.weight"),
        up=("ffn_up.weight", "feed_forward.up_proj.weight"),
        down=("ffn_down.weight", "feed_forward.down_proj.weight"),
    ),
    dataclasses.replace(FINAL_NORM, huggingface="model.final_layernorm.weight"),
    HEAD,
)


def config_from_gguf(metadata, tensors) -> ModelConfig:
    config, mamba2 = llama.config_from_gguf(metadata, tensors, interleaved=False), mamba2_from_gguf(metadata)
    layers = tuple(dataclasses.replace(layer, beside=mamba2) for layer in config.layers)
    return dataclasses.replace(config, layers=layers)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    for key in ("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"):
        if metadata.get(key):
            raise NotImplementedError(f"{key} is true; supported: false")
    if metadata.get("mamba_rms_norm") and metadata.get("mamba_norm_before_gate"):
        raise NotImplementedError("mamba_norm_before_gate is true; supported: false")
    mamba2 = mamba2_from_huggingface(metadata)
    config = llama.config_from_huggingface(metadata, tensors)
    layers = tuple(dataclasses.replace(layer, beside=mamba2) for layer in config.layers)
    return dataclasses.replace(
        config,
        layers=layers,
        embedding_scale=positive(metadata, "embedding_multiplier", 1.0),
        logit_scale=positive(metadata, "lm_head_multiplier", 1.0),
    )


def tensors_from_huggingface(metadata, tensors):
    """Each matrix times the multipliers of its input and of its output."""
    mamba2 = mamba2_from_huggingface(metadata)
    inner, bc = mamba2.inner, mamba2.groups * mamba2.state
    parts = numbers({"ssm_multipliers": 1.0, **metadata}, "ssm_multipliers", 5)
    rows = np.repeat(np.array(parts, np.float32), (inner, inner, bc, bc, mamba2.heads))[:, None]
    gate, down = numbers({"mlp_multipliers": 1.0, **metadata}, "mlp_multipliers", 2)

    def number(key: str) -> float:
        return positive(metadata, key, 1.0)

    attention = number("attention_in_multiplier")
    factors = {
        "self_attn.q_proj.weight": attention,
        "self_attn.k_proj.weight": attention * number("key_multiplier"),
        "self_attn.v_proj.weight": attention,
        "self_attn.o_proj.weight": number("attention_out_multiplier"),
        "mamba.in_proj.weight": number("ssm_in_multiplier") * rows,
        "mamba.out_proj.weight": number("ssm_out_multiplier"),
        "feed_forward.gate_proj.weight": gate,
        "feed_forward.down_proj.weight": down,
    }

    def changed(name, t):
        factor = next((factor for end, factor in factors.items() if name.endswith(end)), None)
        return t if factor is None else Changed(t, lambda w: w * np.float32(factor))

    return {name: changed(name, t) for name, t in tensors.items()}
