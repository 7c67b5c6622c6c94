"""LFM2 and LFM2.5 (350M to 2.6B): a Llama with QK-norm, in most of whose layers a short convolution stands in
place of attention.

GGUF files give 0 KV heads to layers with a convolution, and call the last norm token_embd_norm.
"""

import dataclasses

from bonsai_jax.config import Layer, ModelConfig
from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.kinds.mlp import Mlp
from bonsai_jax.network.kinds.short_conv import ShortConv
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD
from bonsai_jax.weights.metadata import counts, positive, whole

MODELS = "LFM2 and LFM2.5"
TENSORS = (
    EMBED,
    *tensors(
        "attention", "q", "k", "v",
        norm=("attn_norm.weight", "operator_norm.weight"),
        q_norm=("attn_q_norm.weight", "self_attn.q_layernorm.weight"),
        k_norm=("attn_k_norm.weight", "self_attn.k_layernorm.weight"),
        o=("attn_output.weight", "self_attn.out_proj.weight"),
    ),
    *tensors("short_conv", "norm", "inputs", "conv_weights", "out"),
    *tensors(
        "mlp",
        norm=("ffn_norm.weight", "ffn_norm.weight"),
        gate=("ffn_gate.weight", "feed_forward.w1.weight"),
        up=("ffn_up.weight", "feed_forward.w3.weight"),
        down=("ffn_down.weight", "feed_forward.w2.weight"),
    ),
    dataclasses.replace(
        FINAL_NORM, gguf="token_embd_norm.weight", huggingface="model.embedding_norm.weight"
    ),
    HEAD,
)  # fmt: skip


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    kv_heads = counts(metadata, f"{arch}.attention.head_count_kv", whole(metadata, f"{arch}.block_count"))
    alike = dict(metadata) | {f"{arch}.attention.head_count_kv": max(kv_heads) or None}
    config = llama.config_from_gguf(alike, tensors, interleaved=False)
    if other := {*kv_heads} - {0, max(kv_heads)}:
        raise NotImplementedError(f"{arch}.attention.head_count_kv has {max(kv_heads)} and {max(other)}")
    return _with_convolutions(config, [n > 0 for n in kv_heads], whole(metadata, f"{arch}.shortconv.l_cache"))


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    if metadata.get("conv_bias"):
        raise NotImplementedError("conv_bias is true; supported: false")
    num_layers = whole(metadata, "num_hidden_layers")
    if (kinds := metadata.get("layer_types")) is None:
        attends = [number in metadata["full_attn_idxs"] for number in range(num_layers)]
    elif len(kinds) == num_layers and {*kinds} <= {"conv", "full_attention"}:
        attends = [kind == "full_attention" for kind in kinds]
    else:
        raise ValueError(f"layer_types: {num_layers} are expected, each one of conv, full_attention")
    ffn = tensors["model.layers.0.feed_forward.w1.weight"].shape[0]  # config.json gives it before roundings
    alike = {
        **metadata,
        "rms_norm_eps": positive(metadata, "norm_eps", 1e-5),
        "intermediate_size": ffn,
        "rope_theta": positive(metadata, "rope_theta", 1e6),
    }
    config = llama.config_from_huggingface(alike, tensors)
    return _with_convolutions(config, attends, whole(metadata, "conv_L_cache"))


def _with_convolutions(config: ModelConfig, attends: list[bool], conv: int) -> ModelConfig:
    """The config with a short convolution in the layers that do not attend."""
    mlp, short_conv = Mlp(config.mlp.ffn), ShortConv(config.hidden, conv)
    mixers = [config.attention if attend else short_conv for attend in attends]
    return dataclasses.replace(config, layers=tuple(Layer(mixer, mlp) for mixer in mixers))
