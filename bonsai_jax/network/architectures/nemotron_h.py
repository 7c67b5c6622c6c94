"""Nemotron-H, Nemotron Nano 2 (4B to 56B) and Nemotron 3 Nano (30B-A3B): each layer is one half, Mamba 2,
attention without a rope, or a feed-forward with the squared ReLU and without a gate; in Nemotron 3 experts of
that form are in its place, chosen by sigmoids with a bias for the choice, beside a shared one.

GGUF files give two numbers for each layer, its KV heads and the width of its feed-forward or its experts. At
most one of them is not 0; a layer with two zeros is Mamba 2.
"""

import dataclasses
from typing import Any

from bonsai_jax.config import Layer, ModelConfig
from bonsai_jax.network import experts_metadata
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.kinds.attention import Attention
from bonsai_jax.network.kinds.experts import Experts
from bonsai_jax.network.kinds.mamba2 import Mamba2
from bonsai_jax.network.kinds.plain_mlp import PlainMlp
from bonsai_jax.network.mamba2_metadata import mamba2_from_gguf
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD
from bonsai_jax.weights.metadata import counts, positive, whole
from pallas_kernels import RELU_SQUARED

MODELS = "Nemotron-H and Nemotron Nano 2; Nemotron 3 Nano 30B-A3B"
_NORM = ("attn_norm.weight", "norm.weight")
_OF_LAYERS = (
    *tensors("attention", "q", "k", "v", "o", norm=_NORM),
    *tensors("mamba2", "inputs", "conv_weights", "dt", "decay", "skip", "group_norm", "out", norm=_NORM),
    *tensors("mamba2", "conv_bias", optional=True),
    *tensors("plain_mlp", "up", "down", norm=_NORM),
    *tensors(
        "experts", "router", "choice_bias", "up", "down", norm=_NORM,
        shared_up=("ffn_up_shexp.weight", "mlp.shared_experts.up_proj.weight"),
        shared_down=("ffn_down_shexp.weight", "mlp.shared_experts.down_proj.weight"),
    ),
)  # fmt: skip


def _named(spec):
    """With its name in Hugging Face files, where every half is a layer's mixer."""
    name = str(spec.huggingface).replace("model.layers", "backbone.layers")
    for half in ("self_attn.", "mamba.", "mlp."):
        name = name.replace(half, "mixer.")
    return dataclasses.replace(spec, huggingface=name, half_of=None, fused=None)


TENSORS = (
    dataclasses.replace(EMBED, huggingface="backbone.embeddings.weight"),
    *map(_named, _OF_LAYERS),
    dataclasses.replace(FINAL_NORM, huggingface="backbone.norm_f.weight"),
    HEAD,
)


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    experts = None
    if metadata.get(f"{arch}.expert_count"):
        experts = dataclasses.replace(
            experts_metadata.from_gguf(metadata, gating="sigmoid", normalized=False), activation=RELU_SQUARED
        )
    blocks, hidden = whole(metadata, f"{arch}.block_count"), whole(metadata, f"{arch}.embedding_length")
    num_layers = blocks - experts_metadata.count(metadata, f"{arch}.nextn_predict_layers")
    kv_heads = counts(metadata, f"{arch}.attention.head_count_kv", num_layers)
    ffn = counts(metadata, f"{arch}.feed_forward_length", num_layers)
    heads, mamba2 = whole(metadata, f"{arch}.attention.head_count"), mamba2_from_gguf(metadata)
    head_dim = whole(metadata, f"{arch}.attention.key_length", hidden // heads)
    eps = f"{arch}.attention.layer_norm_rms_epsilon"
    eps = eps if eps in metadata else f"{arch}.attention.layer_norm_epsilon"

    def layer(number: int) -> Layer:
        if ffn[number]:
            return Layer(None, experts or PlainMlp(ffn[number]))
        kv = kv_heads[number]
        return Layer(Attention(heads, kv, head_dim, rope=None) if kv else mamba2, None)

    return ModelConfig(
        architecture=arch,
        hidden=hidden,
        vocab_size=tensors["token_embd.weight"].shape[0],
        context_length=whole(metadata, f"{arch}.context_length"),
        rms_norm_eps=positive(metadata, eps),
        layers=tuple(map(layer, range(num_layers))),
        skipped=tuple(f"blk.{number}." for number in range(num_layers, blocks)),
    )


def _pattern(metadata) -> Any:
    """A letter for each layer; the newest files have words."""
    letters = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
    letters |= {"linear_attention": "M", "full_attention": "*"}  # as transformers 5 writes them
    if isinstance(words := metadata.get("layers_block_type"), list):
        return "".join(letters.get(word, "?") for word in words)
    return metadata["hybrid_override_pattern"]


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    if (activation := metadata.get("mlp_hidden_act", "relu2")) != "relu2":
        raise NotImplementedError(f"mlp_hidden_act is {activation!r}; supported: relu2")
    for key in ("attention_bias", "mlp_bias", "use_bias"):
        if metadata.get(key):
            raise NotImplementedError(f"{key} is true; supported: false")
    metadata.get("rope_theta")  # files have one, and no layer has a rope
    heads, hidden = whole(metadata, "num_attention_heads"), whole(metadata, "hidden_size")
    head_dim = whole(metadata, "attention_head_dim", whole(metadata, "head_dim", hidden // heads))
    halves = {
        "*": Layer(Attention(heads, whole(metadata, "num_key_value_heads", heads), head_dim, None), None),
        "-": Layer(None, PlainMlp(whole(metadata, "intermediate_size"))),
        "M": Layer(
            Mamba2(
                heads=whole(metadata, "mamba_num_heads"),
                head_dim=whole(metadata, "mamba_head_dim"),
                groups=whole(metadata, "n_groups"),
                state=whole(metadata, "ssm_state_size"),
                conv=whole(metadata, "conv_kernel"),
            ),
            None,
        ),
    }
    if metadata.get("n_routed_experts"):
        halves["E"] = Layer(None, _experts(metadata))
    pattern = _pattern(metadata)
    if not isinstance(pattern, str) or not pattern or (unknown := {*pattern} - halves.keys()):
        what = f"{unknown.pop()!r} in it" if isinstance(pattern, str) and pattern else repr(pattern)
        raise NotImplementedError(f"hybrid_override_pattern has {what}; supported: {' '.join(halves)}")
    return ModelConfig(
        architecture="nemotron_h",
        hidden=hidden,
        vocab_size=tensors["backbone.embeddings.weight"].shape[0],
        context_length=whole(metadata, "max_position_embeddings"),
        rms_norm_eps=positive(metadata, "layer_norm_epsilon", positive(metadata, "norm_eps", 1e-5)),
        layers=tuple(halves[letter] for letter in pattern),
        skipped=("mtp.",),
    )


def _experts(metadata) -> Experts:
    if metadata.get("moe_latent_size"):
        raise NotImplementedError(
            f"moe_latent_size is {metadata['moe_latent_size']}; experts in a latent space are not supported"
        )
    return Experts(
        count=whole(metadata, "n_routed_experts"),
        used=whole(metadata, "num_experts_per_tok"),
        ffn=whole(metadata, "moe_intermediate_size"),
        normalized=bool(metadata.get("norm_topk_prob", True)),
        activation=RELU_SQUARED,
        gating="sigmoid",
        scale=positive(metadata, "routed_scaling_factor", 1.0),
        groups=whole(metadata, "n_group", 1),
        groups_used=whole(metadata, "topk_group", 1),
        shared=whole(metadata, "moe_shared_expert_intermediate_size"),
    )
