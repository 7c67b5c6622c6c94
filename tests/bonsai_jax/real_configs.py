"""Metadata as in real files: the hyperparameters that llama.cpp's converters write, and config.json."""

import numpy as np


def _gguf(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, context: int, base: float, **more):
    keys = {
        "block_count": layers,
        "context_length": context,
        "embedding_length": hidden,
        "feed_forward_length": ffn,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": base,
    }
    return keys | {name.replace("__", "."): value for name, value in more.items()}


def _head_dim(size: int) -> dict:
    return {"attention__key_length": size, "attention__value_length": size}


# By model: architecture, keys without its name.
GGUF = {
    "Llama 2 7B, of 2023": (
        "llama",
        _gguf(32, 4096, 11008, 32, 32, 4096, 1e4, rope__dimension_count=128, vocab_size=32000)
        | {"tensor_data_layout": "Meta AI original pth"},
    ),
    "Llama 3.1 8B": (
        "llama",
        _gguf(32, 4096, 14336, 32, 8, 131072, 5e5, rope__dimension_count=128, vocab_size=128256)
        | {"attention.key_length": 128, "attention.value_length": 128},
    ),
    "Mistral 7B v0.3": (
        "llama",
        _gguf(32, 4096, 14336, 32, 8, 32768, 1e6, rope__dimension_count=128, vocab_size=32768),
    ),
    "AFM 4.5B": (
        "arcee",
        _gguf(36, 2560, 18432, 20, 4, 65536, 1e4, rope__dimension_count=128, vocab_size=128004)
        | {"rope.scaling.type": "yarn", "rope.scaling.factor": 20.0, "rope.scaling.yarn_beta_fast": 32.0}
        | {"rope.scaling.yarn_beta_slow": 1.0, "rope.scaling.original_context_length": 4096},
    ),
    "Qwen2.5 7B": ("qwen2", _gguf(28, 3584, 18944, 28, 4, 32768, 1e6)),
    "Bonsai 8B": (
        "qwen3",
        _gguf(36, 4096, 12288, 32, 8, 65536, 1e6, **_head_dim(128))
        | {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
        | {"rope.scaling.original_context_length": 16384, "rope.scaling.yarn_attn_factor": 1.0},
    ),
    "Qwen3 Reranker 0.6B": (
        "qwen3",
        _gguf(28, 1024, 3072, 16, 8, 40960, 1e6, **_head_dim(128))
        | {"pooling_type": 4, "classifier.output_labels": ["yes", "no"]},
    ),
    "Qwen3 30B-A3B": (
        "qwen3moe",
        _gguf(48, 2048, 6144, 32, 4, 40960, 1e6, **_head_dim(128))
        | {"expert_count": 128, "expert_used_count": 8, "expert_feed_forward_length": 768}
        | {"expert_shared_feed_forward_length": 0},
    ),
    "Qwen3.5 9B": (
        "qwen35",
        _gguf(32, 4096, 12288, 16, 4, 262144, 1e7, **_head_dim(256))
        | {"ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 16, "ssm.time_step_rank": 32}
        | {"ssm.inner_size": 4096, "full_attention_interval": 4, "rope.dimension_count": 64}
        | {"attention.recurrent_layers": [layer % 4 < 3 for layer in range(33)], "nextn_predict_layers": 1}
        | {"block_count": 33, "rope.dimension_sections": np.array([11, 11, 10, 0], np.int32)},
    ),
    "LFM2 1.2B": (
        "lfm2",
        _gguf(16, 2048, 8192, 32, 8, 128000, 1e6, vocab_size=65536, shortconv__l_cache=3)
        | {"attention.head_count_kv": [0, 0, 8, 0, 0, 8, 0, 0, 8, 0, 8, 0, 8, 0, 8, 0]},
    ),
    "gpt-oss 20B": (
        "gpt-oss",
        _gguf(24, 2880, 2880, 64, 8, 131072, 1.5e5, **_head_dim(64), expert_count=32, expert_used_count=4)
        | {"expert_feed_forward_length": 2880, "attention.sliding_window": 128}
        | {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0}
        | {"rope.scaling.original_context_length": 4096},
    ),
    "GLM-4.7-Flash": (
        "deepseek2",
        _gguf(48, 2048, 10240, 20, 1, 202752, 1e6, vocab_size=154880, rope__dimension_count=64)
        | {"attention.q_lora_rank": 768, "attention.kv_lora_rank": 512, "attention.key_length": 576}
        | {"attention.value_length": 512, "attention.key_length_mla": 256, "attention.value_length_mla": 256}
        | {"leading_dense_block_count": 1, "expert_count": 64, "expert_used_count": 4}
        | {"expert_shared_count": 1, "expert_feed_forward_length": 1536, "expert_weights_scale": 1.8}
        | {"expert_weights_norm": True, "expert_gating_func": 2, "expert_group_count": 1}
        | {"expert_group_used_count": 1, "nextn_predict_layers": 1},
    ),
    "DeepSeek V3": (
        "deepseek2",
        _gguf(61, 7168, 18432, 128, 1, 163840, 1e4, vocab_size=129280, rope__dimension_count=64)
        | {"attention.q_lora_rank": 1536, "attention.kv_lora_rank": 512, "attention.key_length": 576}
        | {"attention.value_length": 512, "attention.key_length_mla": 192, "attention.value_length_mla": 128}
        | {"leading_dense_block_count": 3, "expert_count": 256, "expert_used_count": 8}
        | {"expert_shared_count": 1, "expert_feed_forward_length": 2048, "expert_weights_scale": 2.5}
        | {"expert_weights_norm": True, "expert_gating_func": 2, "expert_group_count": 8}
        | {"expert_group_used_count": 4, "rope.scaling.type": "yarn", "rope.scaling.factor": 40.0}
        | {"rope.scaling.original_context_length": 4096, "rope.scaling.yarn_log_multiplier": 0.1}
        | {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0},
    ),
    "Falcon-H1 1.5B": (
        "falcon-h1",
        _gguf(24, 2048, 4096, 8, 2, 131072, 1e11, **_head_dim(128), vocab_size=65537)
        | {"ssm.conv_kernel": 4, "ssm.state_size": 256, "ssm.group_count": 1, "ssm.inner_size": 3072}
        | {"ssm.time_step_rank": 48},
    ),
    "Nemotron Nano 2 9B": (
        "nemotron_h",
        _gguf(3, 4480, 0, 40, 0, 131072, 1e4, **_head_dim(128), vocab_size=131072)
        | {"attention.head_count_kv": [0, 8, 0], "feed_forward_length": [0, 0, 15680]}
        | {"ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 8, "ssm.inner_size": 10240}
        | {"ssm.time_step_rank": 128, "rope.dimension_count": 128, "attention.layer_norm_epsilon": 1e-5},
    ),
    "Gemma 2 9B": (
        "gemma2",
        {k: v for k, v in _gguf(42, 3584, 14336, 16, 8, 8192, 0).items() if k != "rope.freq_base"}
        | {"attention.key_length": 256, "attention.value_length": 256, "attention.sliding_window": 4096}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "Gemma 3 12B": (
        "gemma3",
        _gguf(48, 3840, 15360, 16, 8, 131072, 1e6, **_head_dim(256), attention__sliding_window=1024)
        | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 1e4},
    ),
    "Gemma 4 26B-A4B": (
        "gemma4",
        _gguf(30, 2816, 2112, 16, 8, 262144, 1e6, **_head_dim(512), attention__sliding_window=1024)
        | {"attention.key_length_swa": 256, "attention.value_length_swa": 256, "rope.freq_base_swa": 1e4}
        | {"rope.dimension_count": 512, "rope.dimension_count_swa": 256, "final_logit_softcapping": 30.0}
        | {"attention.sliding_window_pattern": np.arange(30) % 6 < 5, "attention.shared_kv_layers": 0}
        | {"attention.head_count_kv": np.where(np.arange(30) % 6 < 5, 8, 2), "vocab_size": 262144}
        | {"embedding_length_per_layer_input": 0, "expert_feed_forward_length": 704}
        | {"expert_count": 128, "expert_used_count": 8},
    ),
    "Gemma 4 E2B": (
        "gemma4",
        _gguf(35, 1536, 6144, 8, 1, 131072, 1e6, **_head_dim(512), attention__sliding_window=512)
        | {"attention.key_length_swa": 256, "attention.value_length_swa": 256, "rope.freq_base_swa": 1e4}
        | {"rope.dimension_count": 512, "rope.dimension_count_swa": 256, "final_logit_softcapping": 30.0}
        | {"attention.sliding_window_pattern": np.arange(35) % 5 < 4, "attention.shared_kv_layers": 20}
        | {"feed_forward_length": np.where(np.arange(35) < 15, 6144, 12288)}
        | {"embedding_length_per_layer_input": 256},
    ),
}


def _config(model_type: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, context: int):
    """What transformers writes for every decoder."""
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "pad_token_id": 0,
        "head_dim": 128,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.1",
        "use_cache": True,
        "vocab_size": 1000,
        "architectures": ["SomethingForCausalLM"],
        "quantization_config": {"quant_method": "gptq", "bits": 4},
        "unsloth_fixed": True,
    }


_QWEN = {"max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False, "use_mrope": False}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "cache_implementation": "hybrid", "head_dim": 256}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 20.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0}
_WINDOWS = ["sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(26)]
_MROPE = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default"}
_MROPE |= {"rope_theta": 1e7, "partial_rotary_factor": 0.25}
HUGGING_FACE = {
    "Llama 3.1 8B": _config("llama", 32, 4096, 14336, 32, 8, 131072)
    | {"mlp_bias": False, "pretraining_tp": 1}
    | {"rope_scaling": _LLAMA3 | {"original_max_position_embeddings": 8192}},
    "SmolLM2 135M": _config("llama", 30, 576, 1536, 9, 3, 8192)
    | {"is_llama_config": True, "rope_interleaved": False, "head_dim": 64, "pretraining_tp": 1}
    | {"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
    "Mistral 7B v0.1": _config("mistral", 32, 4096, 14336, 32, 8, 32768) | {"sliding_window": 4096},
    "AFM 4.5B": _config("arcee", 36, 2560, 18432, 20, 4, 65536)
    | {"hidden_act": "relu2", "mlp_bias": False, "rope_scaling": _YARN | {"beta_slow": 1.0}},
    "Qwen2.5 7B": _config("qwen2", 28, 3584, 18944, 28, 4, 32768) | _QWEN,
    "Qwen3 8B": _config("qwen3", 36, 4096, 12288, 32, 8, 40960)
    | _QWEN
    | {"sliding_window": None, "layer_types": ["full_attention"] * 36}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "Qwen3 30B-A3B": _config("qwen3_moe", 48, 2048, 6144, 32, 4, 40960)
    | _QWEN
    | {"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768, "num_experts": 128}
    | {"norm_topk_prob": True, "num_experts_per_tok": 8, "output_router_logits": False}
    | {"router_aux_loss_coef": 0.001},
    "GLM-4.7-Flash": _config("glm4_moe_lite", 47, 2048, 10240, 20, 20, 202752)
    | {"moe_intermediate_size": 1536, "topk_method": "noaux_tc", "norm_topk_prob": True, "n_group": 1}
    | {"topk_group": 1, "n_routed_experts": 64, "n_shared_experts": 1, "routed_scaling_factor": 1.8}
    | {"num_experts_per_tok": 4, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
    | {"partial_rotary_factor": 1.0, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192}
    | {"qk_rope_head_dim": 64, "v_head_dim": 256, "rope_theta": 1000000},
    "DeepSeek V2 Lite": _config("deepseek_v2", 27, 2048, 10944, 16, 16, 163840)
    | {"moe_intermediate_size": 1408, "moe_layer_freq": 1, "topk_method": "greedy", "n_group": 1}
    | {"topk_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "routed_scaling_factor": 1.0}
    | {"num_experts_per_tok": 6, "first_k_dense_replace": 1, "norm_topk_prob": False, "q_lora_rank": None}
    | {"scoring_func": "softmax", "seq_aux": True, "aux_loss_alpha": 0.001, "kv_lora_rank": 512}
    | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10000}
    | {"rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
                        "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}},
    "gpt-oss 20B": _config("gpt_oss", 24, 2880, 2880, 64, 8, 131072)
    | {"attention_bias": True, "experts_per_token": 4, "num_experts_per_tok": 4, "num_local_experts": 32}
    | {"head_dim": 64, "initial_context_length": 4096, "output_router_logits": False, "swiglu_limit": 7.0}
    | {"layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128}
    | {"quantization_config": {"quant_method": "mxfp4"}, "rope_theta": 150000, "router_aux_loss_coef": 0.9}
    | {"rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
                        "original_max_position_embeddings": 4096, "truncate": False}},
    "LFM2 1.2B": _config("lfm2", 16, 2048, 12288, 32, 8, 128000)
    | {"block_auto_adjust_ff_dim": True, "block_ff_dim": 12288, "block_norm_eps": 1e-5, "norm_eps": 1e-5}
    | {"conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048, "use_pos_enc": True, "head_dim": None}
    | {"layer_types": ["conv", "conv", "full_attention", *["conv"] * 13]},
    "Gemma 2 9B": _config("gemma2", 42, 3584, 14336, 16, 8, 8192)
    | _GEMMA
    | {"hidden_act": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    | {"query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_size": 4096},
    "Gemma 3 1B": _config("gemma3_text", 26, 1152, 6912, 4, 1, 32768)
    | {"hidden_act": None}
    | _GEMMA
    | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 256}
    | {"rope_local_base_freq": 10000, "sliding_window": 512, "sliding_window_pattern": 6}
    | {"_sliding_window_pattern": 6, "layer_types": _WINDOWS, "use_bidirectional_attention": False},
    "Gemma 3 4B": {
        "model_type": "gemma3",
        "boi_token_index": 255999,
        "mm_tokens_per_image": 256,
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "layer_types": ["x"], "logit_scale": 3.0},
        "torch_dtype": "bfloat16",
    },
    "Gemma 4 31B": {
        "model_type": "gemma4",
        "text_config": _config("gemma4_text", 60, 5376, 21504, 32, 16, 262144)
        | {"hidden_act": None}
        | _GEMMA
        | {"attention_k_eq_v": True, "enable_moe_block": False, "num_experts": None, "top_k_experts": None}
        | {"global_head_dim": 512, "num_global_key_value_heads": 4, "moe_intermediate_size": None}
        | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
        | {"final_logit_softcapping": 30.0, "sliding_window": 1024, "use_bidirectional_attention": "vision"}
        | {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10, "rope_scaling": None}
        | {"rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        }},
        "vision_config": {"hidden_size": 1152},
    },
    "Qwen3.5 9B": {
        "model_type": "qwen3_5",
        "image_token_id": 248056,
        "text_config": _config("qwen3_5_text", 32, 4096, 12288, 16, 4, 262144)
        | {"attn_output_gate": True, "full_attention_interval": 4, "head_dim": 256}
        | {"layer_types": ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(32)]}
        | {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16}
        | {"linear_num_value_heads": 32, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32"}
        | {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "partial_rotary_factor": 0.25}
        | {"rope_parameters": _MROPE},
        "vision_config": {"depth": 27},
    },
    "Falcon-H1 0.5B": _config("falcon_h1", 36, 1024, 2048, 8, 2, 16384)
    | {"attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "attn_layer_indices": None}
    | {"embedding_multiplier": 5.65, "head_dim": 64, "key_multiplier": 0.39, "lm_head_multiplier": 0.039}
    | {"mamba_chunk_size": 128, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64}
    | {"mamba_d_ssm": 1536, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1}
    | {"mamba_n_heads": 24, "mamba_norm_before_gate": False, "mamba_proj_bias": False}
    | {"mamba_rms_norm": False, "mamba_use_mlp": True, "mlp_bias": False, "mlp_expansion_factor": 8}
    | {"mlp_multipliers": [0.88, 0.58], "projectors_bias": False, "rope_theta": 1e11}
    | {"ssm_in_multiplier": 1.25, "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.35]}
    | {"ssm_out_multiplier": 0.23},
    "Granite 4.0-H Tiny": _config("granitemoehybrid", 40, 1536, 512, 12, 4, 131072)
    | {"attention_multiplier": 0.0078125, "embedding_multiplier": 12, "init_method": "mup"}
    | {"layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 34, "logits_scaling": 6}
    | {"mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64}
    | {"mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48}
    | {"mamba_proj_bias": False, "normalization_function": "rmsnorm", "num_experts_per_tok": 6}
    | {"num_local_experts": 64, "position_embedding_type": "nope", "residual_multiplier": 0.22}
    | {"rope_theta": 10000, "shared_intermediate_size": 1024},
    "Hunyuan A13B": _config("hunyuan_v1_moe", 3, 4096, 3072, 32, 8, 32768)
    | {"attention_head_dim": 128, "cla_share_factor": 2, "moe_intermediate_size": [3072] * 3}
    | {"moe_topk": [8] * 3, "num_experts": 64, "num_shared_expert": [1] * 3, "use_cla": False}
    | {"rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
                        "mscale_all_dim": 1.0, "type": "dynamic"}}
    | {"norm_topk_prob": True, "use_mixed_mlp_moe": True, "use_qk_norm": True, "rope_theta": 10000.0},
    "Nemotron 3 Nano 30B-A3B": _config("nemotron_h", 5, 2688, 1856, 32, 2, 262144)
    | {"hybrid_override_pattern": "MEM*E", "layer_norm_epsilon": 1e-5, "mamba_head_dim": 64}
    | {"mamba_hidden_act": "silu", "mamba_num_heads": 64, "mlp_hidden_act": "relu2", "n_groups": 8}
    | {"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1}
    | {"n_routed_experts": 128, "n_shared_experts": 1, "norm_eps": 1e-5, "norm_topk_prob": True}
    | {"num_experts_per_tok": 6, "partial_rotary_factor": 1.0, "rope_theta": 10000, "conv_kernel": 4}
    | {"routed_scaling_factor": 2.5, "sliding_window": None, "ssm_state_size": 128, "topk_group": 1}
    | {"expand": 2, "use_conv_bias": True, "hidden_act": None},
    "MiniCPM 2B": _config("minicpm", 40, 2304, 5760, 36, 36, 4096)
    | {"dim_model_base": 256, "scale_depth": 1.4, "scale_emb": 12, "head_dim": None},
    "Gemma 2B": _config("gemma", 18, 2048, 16384, 8, 1, 8192)
    | {"head_dim": 256, "hidden_act": "gelu", "hidden_activation": None},
    "OLMoE 1B-7B": _config("olmoe", 16, 2048, 1024, 16, 16, 4096)
    | {"clip_qkv": None, "norm_topk_prob": False, "num_experts": 64, "num_experts_per_tok": 8},
    "DeepSeek MoE 16B": _config("deepseek", 28, 2048, 10944, 16, 16, 4096)
    | {"aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "moe_intermediate_size": 1408}
    | {"moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False}
    | {"num_experts_per_tok": 6, "scoring_func": "softmax", "seq_aux": True},
    "dots.llm1": _config("dots1", 62, 4096, 10944, 32, 32, 32768)
    | {"first_k_dense_replace": 1, "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128}
    | {"n_shared_experts": 2, "norm_topk_prob": True, "num_experts_per_tok": 6}
    | {"routed_scaling_factor": 2.5, "scoring_func": "noaux_tc", "sliding_window": None, "topk_group": 1},
    "EXAONE 3.5 2.4B": {
        key: value
        for key, value in _config("exaone", 30, 2560, 7168, 32, 8, 32768).items()
        if key not in ("num_hidden_layers", "hidden_act", "rms_norm_eps")
    }
    | {"activation_function": "silu", "layer_norm_epsilon": 1e-5, "num_layers": 30, "head_dim": 80}
    | {"rope_scaling": _LLAMA3 | {"original_max_position_embeddings": 8192}, "embed_dropout": 0.0},
    "InternLM 2.5 7B": _config("internlm2", 32, 4096, 14336, 32, 8, 32768)
    | {"bias": False, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "attn_implementation": "eager"},
    "GLM-4 9B": {
        "model_type": "chatglm", "add_bias_linear": False, "add_qkv_bias": True, "ffn_hidden_size": 13696,
        "apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True, "hidden_size": 4096,
        "kv_channels": 128, "layernorm_epsilon": 1.5625e-07, "multi_query_attention": True,
        "multi_query_group_num": 2, "num_attention_heads": 32, "num_hidden_layers": 40, "num_layers": 40,
        "original_rope": True, "padded_vocab_size": 151552, "post_layer_norm": True, "rmsnorm": True,
        "rope_ratio": 500, "seq_length": 131072, "use_cache": True, "tie_word_embeddings": False,
    },
    "Qwen2.5-VL 7B": _config("qwen2_5_vl", 28, 3584, 18944, 28, 4, 128000)
    | _QWEN
    | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vision_config": {"depth": 32}}
    | {"image_token_id": 151655, "vision_start_token_id": 151652},
    "Qwen3-VL 8B": {
        "model_type": "qwen3_vl",
        "image_token_id": 151655,
        "text_config": _config("qwen3_vl_text", 36, 4096, 12288, 32, 8, 262144)
        | {"rope_scaling": _MROPE | {"mrope_section": [24, 20, 20], "partial_rotary_factor": 1.0}},
        "vision_config": {"depth": 27},
    },
    "Ling-mini 2.0": _config("bailing_moe_v2", 20, 2048, 5120, 16, 4, 32768)
    | {"first_k_dense_replace": 1, "moe_intermediate_size": 512, "moe_router_enable_expert_bias": True}
    | {"moe_shared_expert_intermediate_size": 512, "n_group": 8, "norm_topk_prob": True}
    | {"num_experts": 256, "num_experts_per_tok": 8, "num_nextn_predict_layers": 0, "topk_group": 4}
    | {"num_shared_experts": 1, "partial_rotary_factor": 0.5, "rotary_dim": 64, "rope_theta": 600000}
    | {"routed_scaling_factor": 2.5, "score_function": "sigmoid", "use_bias": False, "use_qk_norm": True}
    | {"use_qkv_bias": False, "use_rmsnorm": True, "router_dtype": "fp32"},
    "BitNet b1.58 2B4T": _config("bitnet", 30, 2560, 6912, 20, 5, 4096)
    | {"hidden_act": "relu2", "rope_theta": 500000.0, "head_dim": None}
    | {"quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear",
                               "quantization_mode": "online"}},
}  # fmt: skip
