"""Qwen3-Next and Qwen3-Coder-Next: the layers of qwen35moe, whose v heads are grouped in GGUF files too.

Files fuse inputs of the delta net, k head by k head: its values of beta and alpha in all of them, and in
Hugging Face folders and old GGUF files its queries, keys, values and output gates.
"""

import dataclasses

from bonsai_jax.config import Layer, ModelConfig
from bonsai_jax.network.architectures import qwen35moe
from bonsai_jax.network.kinds.delta_net import DeltaNet
from bonsai_jax.weights.metadata import positive
from bonsai_jax.weights.specs import Fused, Rows, Spec

MODELS = "Qwen3-Next and Qwen3-Coder-Next"


def _gates(which: int):
    """Of each k head beta of its v heads, then alpha."""

    def rows(d: DeltaNet) -> Rows:
        v = d.v_heads // d.k_heads
        return Rows(d.k_heads, 2 * v, ((which * v, (which + 1) * v),))

    return Fused("blk.{}.ssm_ba.weight", "model.layers.{}.linear_attn.in_proj_ba.weight", rows)


def _inputs(first: int, last: int):
    """Of each k head its queries, keys, values and gates z, of which those from `first` to `last`."""

    def rows(d: DeltaNet) -> Rows:
        v = d.v_heads // d.k_heads * d.v_dim
        starts = (0, d.k_dim, 2 * d.k_dim, 2 * d.k_dim + v, 2 * d.k_dim + 2 * v)
        return Rows(d.k_heads, starts[-1], tuple((starts[i], starts[i + 1]) for i in range(first, last)))

    return Fused("blk.{}.ssm_in.weight", "model.layers.{}.linear_attn.in_proj_qkvz.weight", rows)


_FUSED = {"beta": _gates(0), "alpha": _gates(1), "qkv": _inputs(0, 3), "z": _inputs(3, 4)}


def _with_fused(spec: Spec) -> Spec:
    if spec.kind != "delta_net":
        return spec
    return dataclasses.replace(spec, fused=_FUSED.get(spec.field))


TENSORS = tuple(map(_with_fused, qwen35moe.TENSORS))
DRAFT = qwen35moe.DRAFT


def config_from_gguf(metadata, tensors) -> ModelConfig:
    config = qwen35moe.config_from_gguf(metadata, tensors)
    grouped = tuple(
        Layer(dataclasses.replace(layer.mixer, grouped=True), layer.channels)
        if isinstance(layer.mixer, DeltaNet)
        else layer
        for layer in config.layers
    )
    return dataclasses.replace(config, layers=grouped)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    if metadata.get("rope_parameters") is None:  # transformers 4 has no such object
        if metadata.get("rope_scaling") is not None:
            raise NotImplementedError(f"rope_scaling is {metadata['rope_scaling']!r}; supported: none")
        rope = {
            "rope_theta": positive(metadata, "rope_theta", 10000.0),
            "partial_rotary_factor": positive(metadata, "partial_rotary_factor", 0.25),
        }
        metadata = {**metadata, "rope_parameters": rope}
    config = qwen35moe.config_from_huggingface(metadata, tensors)
    return dataclasses.replace(config, architecture="qwen3next")
