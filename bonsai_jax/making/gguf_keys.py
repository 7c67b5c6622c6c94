"""The keys of a GGUF file's metadata, from a ModelConfig: what key_search.py offers to an architecture's
`config_from_gguf`. Names are llama.cpp's, without the architecture's before them."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bonsai_jax.config import ModelConfig
from bonsai_jax.making.key_search import Offers
from bonsai_jax.network.rope import Rope, yarn_mscale
from pallas_kernels.activations import RELU_SQUARED

GATINGS = {"softmax": 1, "sigmoid": 2}  # llama.cpp's expert_gating_func


def offers(config: ModelConfig) -> dict[str, Sequence[Any]]:
    """Values to try by key, the usual one first."""
    return {
        **_sizes(config),
        **_attention(config),
        **_latent_attention(config),
        **_experts(config),
        **_recurrent(config),
    }


def unprefixed(config: ModelConfig) -> Offers:
    """Keys that do not begin with the architecture's name: xIELU's parameters, before the softplus."""
    plain = [half for layer in config.layers for half in layer.halves if half.kind == "plain_mlp"]
    if not plain or not plain[0].constants:
        return {}
    alpha_p, alpha_n, beta, eps = (np.array(values) for values in zip(*plain[0].constants, strict=True))
    values = {
        "alpha_p": np.log(np.expm1(alpha_p)),
        "alpha_n": np.log(np.expm1(alpha_n - beta)),
        "beta": beta,
        "eps": eps,
    }
    return {f"xielu.{name}": [value.astype(np.float32)] for name, value in values.items()}


def _sizes(config: ModelConfig) -> dict[str, Sequence[Any]]:
    mlp = config.mlp or next(iter(_halves(config, "plain_mlp")), None)
    return {
        "block_count": [config.num_layers],
        "context_length": [config.context_length],
        "embedding_length": [config.hidden],
        "vocab_size": [config.vocab_size],
        "attention.layer_norm_rms_epsilon": [config.rms_norm_eps],
        "attention.layer_norm_epsilon": [config.rms_norm_eps],
        "embedding_scale": [config.embedding_scale],
        "residual_scale": [config.residual_scale],
        "logit_scale": [config.logit_scale, 1 / config.logit_scale],
        "final_logit_softcapping": [config.logit_softcap],
        "embedding_length_per_layer_input": [config.layer_vector],
        "feed_forward_length": widths(config),
        "hidden_activation": ["relu2" if mlp is not None and mlp.activation == RELU_SQUARED else "silu"],
    }


def widths(config: ModelConfig) -> list[Any]:
    """What files call the feed-forward's width: that of all layers, or of each; or that of experts."""
    by_layer = [
        next((half.ffn for half in layer.halves if hasattr(half, "ffn")), 0) for layer in config.layers
    ]
    experts = config.experts
    return [
        *([config.mlp.ffn] if config.mlp is not None else []),
        by_layer[0] if len({*by_layer}) == 1 else by_layer,
        *([experts.shared, experts.ffn] if experts is not None else []),
        *([experts.ffn * experts.used] if experts is not None else []),
    ]


def _halves(config: ModelConfig, kind: str) -> Iterator[Any]:
    return (half for layer in config.layers for half in layer.halves if half.kind == kind)


def attentions(config: ModelConfig) -> tuple[Any, Any]:
    """Settings of a layer that sees all keys, and of one that has a window; None where there is none."""
    each = list(_halves(config, "attention"))
    own = [one for one in each if one.reads is None]
    full, windowed = (next((a for a in own if (a.window is None) == sees), None) for sees in (True, False))
    return full, windowed


def _attention(config: ModelConfig) -> dict[str, Sequence[Any]]:
    full, windowed = attentions(config)
    main = full or windowed
    if main is None:
        return {}
    by_layer = [next((h for h in layer.halves if h.kind == "attention"), None) for layer in config.layers]
    kv_heads = [0 if a is None else a.num_kv_heads for a in by_layer]
    made: dict[str, Sequence[Any]] = {
        "attention.head_count": [main.num_heads],
        "attention.head_count_kv": [kv_heads[0] if len({*kv_heads}) == 1 else kv_heads, main.num_kv_heads],
        "attention.key_length": [main.head_dim],
        "attention.value_length": [main.head_dim],
        "attention.scale": [main.scale],
        "attn_logit_softcapping": [main.softcap],
        "attention.shared_kv_layers": [sum(a is not None and a.reads is not None for a in by_layer)],
        "rope.scaling.finetuned": [None, any(a is not None and a.rope is not None for a in by_layer)],
    }
    if main.temperature is not None:
        made["attention.temperature_scale"], made["attention.temperature_length"] = (
            [value] for value in main.temperature
        )
    ropes = [a.rope for a in (full, windowed) if a is not None and a.rope is not None]
    made |= rope_keys(ropes[0]) if ropes else {"rope.dimension_count": [main.head_dim]}
    if windowed is not None:
        pattern = np.array([a is not None and a.window is not None for a in by_layer])
        made |= {
            "attention.sliding_window": [windowed.window],
            "attention.sliding_window_pattern": [None, period(pattern), pattern],
            "attention.key_length_swa": [windowed.head_dim],
            "attention.value_length_swa": [windowed.head_dim],
        }
        if windowed.rope is not None:
            made |= {
                "rope.freq_base_swa": [windowed.rope.base],
                "rope.dimension_count_swa": [windowed.rope.dim],
            }
    return made


def period(pattern: np.ndarray) -> int | None:
    """n where all but each n-th layer are true."""
    false = np.flatnonzero(~pattern)
    every = int(false[0]) + 1 if false.size else len(pattern) + 1
    made = np.arange(len(pattern)) % every < every - 1
    return every if every > 1 and np.array_equal(made, pattern) else None


def rope_keys(rope: Rope) -> dict[str, Sequence[Any]]:
    made: dict[str, Sequence[Any]] = {
        "rope.freq_base": [rope.base],
        "rope.dimension_count": [rope.dim],
        "rope.scaling.original_context_length": [rope.original_context or None],
    }
    own = yarn_mscale(rope.factor) if rope.scaling == "yarn" else 1.0
    factor = rope.mscale / own
    made["rope.scaling.attn_factor"] = [None if math.isclose(factor, 1.0, rel_tol=1e-7) else factor, None]
    if rope.scaling in ("linear", "yarn"):
        made |= {"rope.scaling.type": [rope.scaling], "rope.scaling.factor": [rope.factor]}
    if rope.scaling == "yarn":
        made |= {
            "rope.scaling.yarn_beta_fast": [rope.beta_fast],
            "rope.scaling.yarn_beta_slow": [rope.beta_slow],
            "rope.scaling.yarn_log_multiplier": [None, (own / rope.mscale - 1) / (own - 1) or None],
        }
    return made


def _latent_attention(config: ModelConfig) -> dict[str, Sequence[Any]]:
    latent = next(_halves(config, "latent_attention"), None)
    if latent is None:
        return {}
    keys, rope = latent.nope_dim + latent.rope.dim, latent.rope
    made = {
        **rope_keys(rope),
        "attention.head_count": [latent.num_heads],
        "attention.head_count_kv": [1],
        "attention.q_lora_rank": [latent.q_rank or None],
        "attention.kv_lora_rank": [latent.kv_rank],
        "attention.key_length": [latent.kv_rank + rope.dim],
        "attention.value_length": [latent.kv_rank],
        "attention.key_length_mla": [keys],
        "attention.value_length_mla": [latent.value_dim],
    }
    if rope.scaling == "yarn":  # scores have the square of a factor in place of the cosines
        factor = math.sqrt(latent.scale * math.sqrt(keys)) / rope.mscale
        made["rope.scaling.attn_factor"] = [None if math.isclose(rope.mscale, 1) else rope.mscale]
        multiplier = (factor - 1) / (yarn_mscale(rope.factor) - 1) / 10
        made["rope.scaling.yarn_log_multiplier"] = [multiplier if multiplier > 0 else None]
    return made


def _experts(config: ModelConfig) -> dict[str, Sequence[Any]]:
    experts = config.experts
    if experts is None:
        return {}
    shared, limits = experts.shared // experts.ffn, experts.activation.constants
    return {
        "expert_count": [experts.count],
        "expert_used_count": [experts.used],
        "expert_feed_forward_length": [experts.ffn],
        "expert_gating_func": [GATINGS[experts.gating]],
        "expert_weights_norm": [experts.normalized],
        "expert_weights_scale": [None if experts.scale == 1 else experts.scale],
        "expert_group_count": [None if experts.groups == 1 else experts.groups],
        "expert_group_used_count": [None if experts.groups == 1 else experts.groups_used],
        "expert_shared_count": [shared or None],
        "expert_shared_feed_forward_length": [experts.shared or None, experts.ffn, None],
        "leading_dense_block_count": [config.layers_with("experts")[0]],
        "interleave_moe_layer_step": [1, 2, 3, 4],
        "swiglu_clamp_exp": [[limits[0] if limits else 0.0] * config.num_layers],
    }


def _recurrent(config: ModelConfig) -> dict[str, Sequence[Any]]:
    made: dict[str, Sequence[Any]] = {}
    for half in _halves(config, "mamba2"):
        made |= {
            "ssm.conv_kernel": [half.conv],
            "ssm.state_size": [half.state],
            "ssm.group_count": [half.groups],
            "ssm.time_step_rank": [half.heads],
            "ssm.inner_size": [half.inner],
        }
    for half in _halves(config, "delta_net"):
        made |= {
            "ssm.conv_kernel": [half.conv],
            "ssm.state_size": [half.k_dim],
            "ssm.group_count": [half.k_heads],
            "ssm.time_step_rank": [half.v_heads],
            "ssm.inner_size": [half.v_width],
        }
        delta = np.array([layer.mixer.kind == "delta_net" for layer in config.layers])
        every = period(delta)
        made["full_attention_interval"] = [every]
        made["attention.recurrent_layers"] = [None if every else delta]
    for half in _halves(config, "short_conv"):
        made["shortconv.l_cache"] = [half.conv]
    return made
