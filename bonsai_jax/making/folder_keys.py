"""The keys of a Hugging Face folder's config.json, from a ModelConfig: what key_search.py offers to an
architecture's `config_from_huggingface`. Names are transformers'."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bonsai_jax.config import ModelConfig
from bonsai_jax.making.gguf_keys import attentions, period, unprefixed, widths
from bonsai_jax.network.rope import Rope, yarn_mscale
from pallas_kernels.activations import GELU, GELU_TANH, RELU_SQUARED, SILU

ACTIVATIONS = {SILU: "silu", RELU_SQUARED: "relu2", GELU_TANH: "gelu_pytorch_tanh", GELU: "gelu"}
# Names of one value in the configs of different models.
LAYERS = ("num_hidden_layers", "num_layers")
CONTEXT = ("max_position_embeddings", "seq_length")
EPSILON = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon")
WIDTH = ("intermediate_size", "ffn_hidden_size")
HEAD = ("head_dim", "kv_channels", "attention_head_dim")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
USED = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
SHARED_WIDTH = (
    *("shared_expert_intermediate_size", "shared_intermediate_size"),
    "moe_shared_expert_intermediate_size",
)
DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
LAYER_WORDS = {"mamba2": "mamba", "delta_net": "linear_attention", "short_conv": "conv"}
LETTERS = {"mamba2": "M", "attention": "*", "plain_mlp": "-", "experts": "E"}


def offers(config: ModelConfig) -> dict[str, Sequence[Any]]:
    """Values to try by key, the usual one first."""
    return {
        **_sizes(config),
        **_attention(config),
        **_latent(config),
        **_experts(config),
        **_recurrent(config),
    }


def arrays(config: ModelConfig) -> dict[str, np.ndarray]:
    """Small tensors by name that GGUF files have as keys: xIELU's parameters."""
    shapes = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
    by_name = {key.removeprefix("xielu."): values[0] for key, values in unprefixed(config).items()}
    return {
        f"model.layers.{number}.mlp.act_fn.{name}": np.reshape(value, shapes[name])
        for name, values in by_name.items()
        for number, value in enumerate(values)
    }


def _same(names: Sequence[str], *values: Any) -> dict[str, Sequence[Any]]:
    return dict.fromkeys(names, values)


def _sizes(config: ModelConfig) -> dict[str, Sequence[Any]]:
    half = next((h for layer in config.layers for h in layer.halves if hasattr(h, "activation")), None)
    name = ACTIVATIONS.get(half.activation) if half is not None else None
    return {
        **_same(LAYERS, config.num_layers),
        **_same(CONTEXT, config.context_length),
        **_same(EPSILON, config.rms_norm_eps),
        **_same(WIDTH, *(width for width in widths(config) if isinstance(width, int)), min_width(config)),
        **_same(("hidden_act", "hidden_activation", "activation_function"), name, None),
        "mlp_hidden_act": [name],
        "hidden_size": [config.hidden],
        "vocab_size": [config.vocab_size],
        "logit_scale": [config.logit_scale],
        "logits_scaling": [1 / config.logit_scale],
        "embedding_multiplier": [config.embedding_scale],
        "residual_multiplier": [config.residual_scale],
        "scale_emb": [config.embedding_scale],
        "scale_depth": [config.residual_scale * math.sqrt(config.num_layers)],
        "dim_model_base": [config.hidden * config.logit_scale],
        "final_logit_softcapping": [config.logit_softcap],
        "hidden_size_per_layer_input": [config.layer_vector],
        "use_double_wide_mlp": [None, True],
    }


def min_width(config: ModelConfig) -> int | None:
    """The narrowest feed-forward, where layers differ (Gemma 4) or some have none (Nemotron-H)."""
    halves = (half for layer in config.layers for half in layer.halves)
    return min((half.ffn for half in halves if half.kind in ("mlp", "plain_mlp")), default=None)


def _attention(config: ModelConfig) -> dict[str, Sequence[Any]]:
    full, windowed = attentions(config)
    main = full or windowed
    if main is None:
        return {}
    by_layer = [next((h for h in layer.halves if h.kind == "attention"), None) for layer in config.layers]
    local, wide = windowed or main, full or main
    scale = main.scale or main.head_dim**-0.5
    scalar = float(round(scale**-2, 4))
    made: dict[str, Sequence[Any]] = {
        "num_attention_heads": [main.num_heads],
        "num_key_value_heads": [local.num_kv_heads],
        "multi_query_attention": [True],
        "multi_query_group_num": [main.num_kv_heads],
        "num_global_key_value_heads": [wide.num_kv_heads],
        "global_head_dim": [wide.head_dim],
        "attention_k_eq_v": [any(a is not None and a.keys_as_values for a in by_layer)],
        "num_kv_shared_layers": [sum(a is not None and a.reads is not None for a in by_layer)],
        "attention_multiplier": [scale],
        "query_pre_attn_scalar": [int(scalar) if scalar.is_integer() else scalar],
        "attn_logit_softcapping": [main.softcap],
        **_same(HEAD, local.head_dim),
    }
    has_rope = [a is not None and a.rope is not None for a in by_layer]
    ropes = [a.rope for a in (full, windowed) if a is not None and a.rope is not None]
    if ropes:
        both = tuple(a.rope if a is not None and a.rope is not None else None for a in (full, windowed))
        made |= _rope(ropes[0], ropes[-1], both, main.head_dim, main.temperature)
    made["position_embedding_type"] = ["rope" if ropes else "nope"]
    made["no_rope_layers"] = [list(map(int, has_rope))]
    words = [_word(layer, config) for layer in config.layers]
    if windowed is not None:
        pattern = np.array([a is not None and a.window is not None for a in by_layer])
        made["sliding_window"] = [windowed.window]
        made["sliding_window_pattern"] = [period(pattern)]
        made["use_sliding_window"] = [True]
        made["max_window_layers"] = [0]
    old = ["attention" if word == "full_attention" else word for word in words]
    made["layer_types"] = [words, old]
    made["hybrid_override_pattern"] = [
        "".join(LETTERS.get(layer.halves[0].kind, "?") for layer in config.layers)
    ]
    return made


def _word(layer: Any, config: ModelConfig) -> str:
    kinds = [half.kind for half in layer.mixers]
    word = next((LAYER_WORDS[kind] for kind in kinds if kind in LAYER_WORDS), None)
    if word is not None:
        return word
    return "sliding_attention" if any(getattr(m, "window", None) for m in layer.mixers) else "full_attention"


def _rope(
    rope: Rope, local: Rope, both: Sequence[Rope | None], head_dim: int, temperature: Any
) -> dict[str, Sequence[Any]]:
    scaling = rope_scaling(rope, head_dim, temperature)
    part = rope.dim / head_dim if rope.scaling != "proportional" else 1.0
    plain = {"rope_type": "default", "rope_theta": rope.base, "partial_rotary_factor": part}
    names = ("full_attention", "sliding_attention")
    by_type = {
        name: {"rope_theta": one.base, **(rope_scaling(one, head_dim, None) or {"rope_type": "default"})}
        for name, one in zip(names, both, strict=True)
        if one is not None
    }
    in_one = None if scaling is None else {**scaling, "rope_theta": rope.base}
    return {
        "rope_theta": [rope.base],
        "rope_ratio": [rope.base / 10000.0],
        "rope_local_base_freq": [local.base],
        "partial_rotary_factor": [part],
        "rotary_dim": [rope.dim],
        "rope_scaling": [scaling],
        "rope_parameters": [None, in_one, plain, by_type],
        "original_max_position_embeddings": [rope.original_context if rope.scaling == "longrope" else None],
    }


def rope_scaling(rope: Rope, head_dim: int, temperature: Any) -> dict[str, Any] | None:
    """The object of a rope that is stretched; None: it is not."""
    if rope.scaling == "none":
        return None
    if rope.scaling == "proportional":
        return {"rope_type": "proportional", "partial_rotary_factor": 2 * rope.turned / head_dim}
    made: dict[str, Any] = {"rope_type": rope.scaling}
    if rope.scaling == "longrope":
        made |= {"short_factor": list(rope.short_factors), "long_factor": list(rope.long_factors)}
        return made | {"attention_factor": rope.mscale}
    made["factor"] = rope.factor
    if rope.scaling != "linear":
        made["original_max_position_embeddings"] = rope.original_context
    if rope.scaling == "llama3":
        made |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.scaling == "yarn":
        made |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if not math.isclose(rope.mscale, yarn_mscale(rope.factor), rel_tol=1e-7):
            made["attention_factor"] = rope.mscale
        if not rope.truncate:
            made["truncate"] = False
    if temperature is not None:
        made["llama_4_scaling_beta"] = temperature[0]
    return made


def _latent(config: ModelConfig) -> dict[str, Sequence[Any]]:
    halves = (half for layer in config.layers for half in layer.halves)
    latent = next((half for half in halves if half.kind == "latent_attention"), None)
    if latent is None:
        return {}
    rope, keys = latent.rope, latent.nope_dim + latent.rope.dim
    scaling = rope_scaling(rope, rope.dim, None)
    if scaling is not None and rope.scaling == "yarn":
        factor = math.sqrt(latent.scale * math.sqrt(keys))
        scaling |= {"attention_factor": rope.mscale}
        scaling |= {"mscale_all_dim": (factor - 1) / (yarn_mscale(rope.factor) - 1)}
    return {
        "num_attention_heads": [latent.num_heads],
        "num_key_value_heads": [latent.num_heads],
        "q_lora_rank": [latent.q_rank or None],
        "kv_lora_rank": [latent.kv_rank],
        "qk_nope_head_dim": [latent.nope_dim],
        "qk_rope_head_dim": [rope.dim],
        "v_head_dim": [latent.value_dim],
        "rope_interleave": [rope.interleaved],
        "rope_theta": [rope.base],
        "rope_scaling": [scaling],
    }


def _experts(config: ModelConfig) -> dict[str, Sequence[Any]]:
    experts = config.experts
    if experts is None:  # Granite's feed-forward is a shared expert
        width = None if config.mlp is None else config.mlp.ffn
        return {"num_local_experts": [0], "shared_intermediate_size": [width]}
    sparse = config.layers_with("experts")
    is_sparse = [number in sparse for number in range(config.num_layers)]
    limits = experts.activation.constants
    return {
        **_same(EXPERTS, experts.count),
        **_same(USED, experts.used),
        **_same(SHARED, experts.shared // experts.ffn if experts.shared % experts.ffn == 0 else None, 1),
        **_same(SHARED_WIDTH, experts.shared or None),
        **_same(DENSE_FIRST, sparse[0]),
        "moe_intermediate_size": [experts.ffn],
        "expert_intermediate_size": [None],
        "num_nextn_predict_layers": [0],
        "enable_moe_block": [True],
        "norm_topk_prob": [experts.normalized],
        "routed_scaling_factor": [experts.scale],
        "n_group": [experts.groups],
        "topk_group": [experts.groups_used],
        "scoring_func": [experts.gating, "noaux_tc"],
        "score_function": [experts.gating],
        "topk_method": ["noaux_tc" if experts.gating == "sigmoid" else "greedy"],
        "moe_layer_interval": [1, 2, 3, 4],
        "mlp_only_layers": [[number for number, one in enumerate(is_sparse) if not one]],
        "swiglu_limit": [limits[0] if limits else None],
    }


def _recurrent(config: ModelConfig) -> dict[str, Sequence[Any]]:
    made: dict[str, Sequence[Any]] = {}
    for half in (half for layer in config.layers for half in layer.halves):
        if half.kind == "mamba2":
            made |= {
                **_same(("mamba_n_heads", "mamba_num_heads"), half.heads),
                **_same(("mamba_d_head", "mamba_head_dim"), half.head_dim),
                **_same(("mamba_n_groups", "n_groups"), half.groups),
                **_same(("mamba_d_state", "ssm_state_size"), half.state),
                **_same(("mamba_d_conv", "conv_kernel"), half.conv),
                "mamba_d_ssm": [half.inner],
            }
        elif half.kind == "delta_net":
            made |= {
                "linear_num_key_heads": [half.k_heads],
                "linear_num_value_heads": [half.v_heads],
                "linear_key_head_dim": [half.k_dim],
                "linear_value_head_dim": [half.v_dim],
                "linear_conv_kernel_dim": [half.conv],
            }
        elif half.kind == "short_conv":
            made["conv_L_cache"] = [half.conv]
    return made
