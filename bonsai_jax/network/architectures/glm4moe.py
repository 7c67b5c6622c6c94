"""GLM-4.5, 4.6 and 4.7 (also Air): rope turns half of each head, the first layers are dense, and the others'
experts are chosen by sigmoids with a bias for the choice, and have a shared expert beside them. The largest
models have QK-norm. Their draft layer is left aside.
"""

import dataclasses

from bonsai_jax.config import Layer, ModelConfig
from bonsai_jax.network import experts_metadata
from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.kinds.experts import Experts
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD
from bonsai_jax.weights.metadata import nested, positive, whole

MODELS = "GLM-4.5, 4.6 and 4.7"
NORM = (
    "post_attention_norm.weight",
    "post_attention_layernorm.weight",
)  # the norm before the feed-forward or the experts
SHARED = {
    "shared_gate": ("ffn_gate_shexp.weight", "mlp.shared_experts.gate_proj.weight"),
    "shared_up": ("ffn_up_shexp.weight", "mlp.shared_experts.up_proj.weight"),
    "shared_down": ("ffn_down_shexp.weight", "mlp.shared_experts.down_proj.weight"),
}  # with "experts" where Qwen's names have "expert"
TENSORS = (
    EMBED,
    *tensors("attention", "norm", "q", "k", "v", "o"),
    *tensors("attention", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", optional=True),
    *tensors("mlp", "gate", "up", "down", norm=NORM),
    *tensors("experts", "router", "choice_bias", "gate", "up", "down", norm=NORM, **SHARED),
    FINAL_NORM,
    HEAD,
)


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    blocks = whole(metadata, f"{arch}.block_count")  # draft layers (MTP) among them, the last ones
    draft = experts_metadata.count(metadata, f"{arch}.nextn_predict_layers")
    shared = experts_metadata.count(metadata, f"{arch}.expert_shared_count")
    width = whole(metadata, f"{arch}.expert_feed_forward_length")
    experts = experts_metadata.from_gguf(metadata, gating="sigmoid", normalized=False, shared=shared * width)
    rest = experts_metadata.dense_part(metadata, experts) | {f"{arch}.block_count": blocks - draft}
    turned = rest.pop(f"{arch}.rope.dimension_count", None)
    config = llama.config_from_gguf(rest, tensors, interleaved=False)
    if turned is not None:
        config = turning(config, whole(metadata, f"{arch}.rope.dimension_count"))
    first = experts_metadata.count(metadata, f"{arch}.leading_dense_block_count")
    config = experts_metadata.with_experts(config, experts, lambda layer: layer >= first)
    skipped = tuple(f"blk.{layer}." for layer in range(config.num_layers, blocks))
    return dataclasses.replace(config, skipped=skipped)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    ffn = whole(metadata, "moe_intermediate_size")
    experts = Experts(
        count=whole(metadata, "n_routed_experts"),
        used=whole(metadata, "num_experts_per_tok"),
        ffn=ffn,
        normalized=bool(metadata.get("norm_topk_prob", True)),
        gating="sigmoid",
        scale=positive(metadata, "routed_scaling_factor", 1.0),
        groups=whole(metadata, "n_group", 1),
        groups_used=whole(metadata, "topk_group", 1),
        shared=ffn * experts_metadata.count(metadata, "n_shared_experts"),
    )
    config = llama.config_from_huggingface(metadata, tensors)
    part = positive(
        nested(metadata, "rope_parameters"),
        "rope_parameters.partial_rotary_factor",
        positive(metadata, "partial_rotary_factor", 0.5),
    )
    config = turning(config, int(config.attention.head_dim * part))
    first = experts_metadata.count(metadata, "first_k_dense_replace")
    config = experts_metadata.with_experts(config, experts, lambda layer: layer >= first)
    drafts = experts_metadata.count(metadata, "num_nextn_predict_layers")
    skipped = tuple(f"model.layers.{config.num_layers + i}." for i in range(drafts))
    return dataclasses.replace(config, architecture="glm4moe", skipped=skipped)


def turning(config: ModelConfig, dim: int) -> ModelConfig:
    """The same model with a rope that turns `dim` values of each head."""
    mixer = config.attention
    mixer = dataclasses.replace(mixer, rope=dataclasses.replace(mixer.rope, dim=dim))
    return dataclasses.replace(config, layers=tuple(Layer(mixer, layer.channels) for layer in config.layers))
