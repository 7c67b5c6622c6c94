"""DeepSeek V2, V3 and R1, and models made like them: GLM-4.7-Flash, Moonlight, Kimi K2, Mistral Large 3.
Latent attention; the first layers are dense, the others have experts and a shared one beside them.

YaRN leaves the cosines as they are, and scales scores by the square of its factor instead. GGUF files from
before April 2025 have keys and values in one matrix, in blocks that cannot be transposed: they are refused.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from bonsai_jax.config import Layer, ModelConfig
from bonsai_jax.network import experts_metadata
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.kinds.experts import Experts
from bonsai_jax.network.kinds.latent_attention import LatentAttention
from bonsai_jax.network.kinds.mlp import Mlp
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD
from bonsai_jax.network.rope import Rope, yarn_mscale
from bonsai_jax.network.rope_metadata import rope_from_gguf, rope_from_huggingface
from bonsai_jax.weights import specs
from bonsai_jax.weights.metadata import nested, positive, whole

MODELS = "GLM-4.7-Flash; Moonlight; DeepSeek V2, V2 Lite, V3 and R1; Kimi K2; Mistral Large 3"
TENSORS = (
    EMBED,
    *tensors("latent_attention", "norm", "q_a", "kv_a", "q_a_norm", "kv_a_norm", "q", "q_b"),
    *tensors("latent_attention", "k_b", "v_b", "o"),
    *tensors("mlp", "norm", "gate", "up", "down"),
    *tensors(
        "experts", "norm", "router", "gate", "up", "down",
        shared_gate=("ffn_gate_shexp.weight", "mlp.shared_experts.gate_proj.weight"),
        shared_up=("ffn_up_shexp.weight", "mlp.shared_experts.up_proj.weight"),
        shared_down=("ffn_down_shexp.weight", "mlp.shared_experts.down_proj.weight"),
    ),
    *tensors("experts", "choice_bias", optional=True),
    FINAL_NORM,
    HEAD,
)  # fmt: skip
GLM_VOCABULARY = 154880  # GLM-4.7-Flash; its first files do not say that the router has sigmoids


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    number = functools.partial(_number, metadata, arch)
    if metadata.get(f"{arch}.attention.key_length_mla") is None:
        raise NotImplementedError(
            f"{arch}.attention.key_length_mla is missing: an old file, in which attn_kv_b is one matrix; use "
            "a GGUF file that was converted after April 2025"
        )
    keys, rope_dim = number("attention.key_length_mla"), number("rope.dimension_count")
    rope = rope_from_gguf(metadata, rope_dim, interleaved=True)
    _check_scaling(rope, f"{arch}.rope.scaling")
    key, factor = f"{arch}.rope.scaling.yarn_log_multiplier", rope.mscale
    if metadata.get(key) and rope.scaling == "yarn":
        own = rope.mscale / yarn_mscale(rope.factor)  # rope.scaling.attn_factor
        factor = own * yarn_mscale(rope.factor, 10 * positive(metadata, key))  # a tenth is in the file
        rope = dataclasses.replace(rope, mscale=own)
    temperature, key = None, f"{arch}.attention.temperature_scale"
    if metadata.get(key):
        if not metadata.get(length := f"{arch}.attention.temperature_length"):
            raise ValueError(f"{key} is {metadata[key]}, which needs {length}; it is missing")
        temperature = positive(metadata, key), whole(metadata, length)
    mixer = LatentAttention(
        num_heads=number("attention.head_count"),
        q_rank=experts_metadata.count(metadata, f"{arch}.attention.q_lora_rank"),
        kv_rank=number("attention.kv_lora_rank"),
        nope_dim=keys - rope_dim,
        value_dim=number("attention.value_length_mla"),
        rope=rope,
        scale=factor**2 / keys**0.5,
        temperature=temperature,
    )
    vocab_size, blocks = tensors["token_embd.weight"].shape[0], number("block_count")
    # Draft layers (MTP) are among them, the last ones.
    layers = blocks - experts_metadata.count(metadata, f"{arch}.nextn_predict_layers")
    dense = experts_metadata.count(metadata, f"{arch}.leading_dense_block_count")
    channels: list[Any] = [Mlp(number("feed_forward_length"))] * min(dense, layers)
    if dense < blocks:
        is_glm = vocab_size == GLM_VOCABULARY
        shared = experts_metadata.count(metadata, f"{arch}.expert_shared_count")
        experts = experts_metadata.from_gguf(
            metadata, gating="sigmoid" if is_glm else "softmax", normalized=False,
            shared=shared * number("expert_feed_forward_length"),
        )  # fmt: skip
        channels += [experts] * (layers - dense)
    return ModelConfig(
        architecture=arch,
        hidden=number("embedding_length"),
        vocab_size=vocab_size,
        context_length=number("context_length"),
        rms_norm_eps=positive(metadata, f"{arch}.attention.layer_norm_rms_epsilon"),
        layers=tuple(Layer(mixer, half) for half in channels),
        skipped=tuple(f"blk.{layer}." for layer in range(layers, blocks)),
    )


def _number(metadata: Mapping[str, Any], arch: str, name: str) -> int:
    return whole(metadata, f"{arch}.{name}")


def _check_scaling(rope: Rope, where: str) -> None:
    if rope.scaling not in ("none", "yarn"):
        raise NotImplementedError(
            f"{where}.factor is {rope.factor}, of type {rope.scaling!r}; with latent attention none and "
            "yarn are supported"
        )


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    model_type = metadata["model_type"]
    if model_type == "mistral4":
        raise NotImplementedError("folders of mistral4 are not read; use a GGUF file of it")
    if metadata.get("hidden_act", "silu") != "silu":
        raise NotImplementedError(f"hidden_act is {metadata['hidden_act']!r}; supported: silu")
    number = functools.partial(whole, metadata)
    nope_dim, rope_dim = number("qk_nope_head_dim"), number("qk_rope_head_dim")
    rope = rope_from_huggingface(metadata, rope_dim)
    _check_scaling(rope, "rope_scaling")
    rope = dataclasses.replace(rope, interleaved=bool(metadata.get("rope_interleave", True)))
    name = "rope_parameters" if metadata.get("rope_parameters") else "rope_scaling"
    scaling, factor = nested(metadata, name), 1.0
    if scaling.get(f"{name}.mscale_all_dim") and rope.scaling == "yarn":
        factor = yarn_mscale(rope.factor, positive(scaling, f"{name}.mscale_all_dim"))
    mixer = LatentAttention(
        num_heads=number("num_attention_heads"),
        q_rank=experts_metadata.count(metadata, "q_lora_rank"),
        kv_rank=number("kv_lora_rank"),
        nope_dim=nope_dim,
        value_dim=number("v_head_dim"),
        rope=rope,
        scale=factor**2 / (nope_dim + rope_dim) ** 0.5,
    )
    layers, experts = number("num_hidden_layers"), _experts(metadata, model_type)
    mlp, sparse = Mlp(number("intermediate_size")), _sparse_layers(metadata, layers)
    drafts = experts_metadata.count(metadata, "num_nextn_predict_layers")
    return ModelConfig(
        architecture="deepseek2",
        hidden=number("hidden_size"),
        vocab_size=specs.text_tensor(tensors, "model.embed_tokens.weight").shape[0],
        context_length=number("max_position_embeddings"),
        rms_norm_eps=positive(metadata, "rms_norm_eps", 1e-6),
        layers=tuple(Layer(mixer, experts if experts and has else mlp) for has in sparse),
        skipped=tuple(f"model.layers.{layers + i}." for i in range(drafts)),
    )


def _experts(metadata: Mapping[str, Any], model_type: str) -> Experts | None:
    """None: all layers are dense."""
    if metadata.get("n_routed_experts") is None:
        return None
    is_v2 = model_type == "deepseek_v2"
    gating = metadata.get("scoring_func", "softmax" if is_v2 else "sigmoid")
    if gating not in ("softmax", "sigmoid"):
        raise NotImplementedError(f"scoring_func is {gating!r}; supported: softmax, sigmoid")
    ffn, groups = whole(metadata, "moe_intermediate_size"), metadata.get("n_group") or 1
    groups_used = metadata.get("topk_group") or 1
    method = metadata.get("topk_method", "group_limited_greedy" if is_v2 else None)
    if method == "greedy":  # among all experts, whatever the file says of groups
        groups = groups_used = 1
    if groups != 1 and method == "group_limited_greedy":
        raise NotImplementedError(
            f"topk_method is 'group_limited_greedy' with n_group {groups}: groups by their best expert are "
            "not supported; supported: noaux_tc, or one group"
        )
    return Experts(
        count=whole(metadata, "n_routed_experts"),
        used=whole(metadata, "num_experts_per_tok"),
        ffn=ffn,
        normalized=bool(metadata.get("norm_topk_prob", not is_v2)),
        gating=gating,
        scale=positive(metadata, "routed_scaling_factor", 1.0),
        groups=whole({"n_group": groups}, "n_group"),
        groups_used=whole({"topk_group": groups_used}, "topk_group"),
        shared=ffn * experts_metadata.count(metadata, "n_shared_experts"),
    )


def _sparse_layers(metadata: Mapping[str, Any], count: int) -> list[bool]:
    """Which layers have experts."""
    if (types := metadata.get("mlp_layer_types")) is not None:
        if not isinstance(types, list) or len(types) != count or not {*types} <= {"dense", "sparse"}:
            raise ValueError(f"mlp_layer_types: {count} are expected, each dense or sparse")
        return [one == "sparse" for one in types]
    first, every = (
        experts_metadata.count(metadata, "first_k_dense_replace"),
        whole(metadata, "moe_layer_freq", 1),
    )
    return [layer >= first and layer % every == 0 for layer in range(count)]
