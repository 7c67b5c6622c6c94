"""A tiny GGUF file of any architecture that there is, without a line of its own for most.

`tiny` offers the architecture every key of USUAL and those of the kinds of layers in its TENSORS, and the
file has the keys that the architecture reads. SPECIAL has what an architecture asks for beside these.
"""

import functools
from typing import Any

import numpy as np

from bonsai_jax.network import architectures
from bonsai_jax.weights import keys
from checkpoints import Checkpoint
from tests.bonsai_jax.tiny_files import EMBEDDING, tiny_gguf

LAYERS = 4
USUAL = {
    "block_count": LAYERS,
    "context_length": 2048,
    "embedding_length": 128,
    "feed_forward_length": 192,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.sliding_window": 24,
    "rope.freq_base": 1e4,
    "embedding_scale": 3.0,
    "residual_scale": 0.5,
    "attention.scale": 0.2,
    "logit_scale": 2.0,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "vocab_size": 512,
}
# Of architectures with recurrent layers, which these are.
SOME_ATTEND = {"attention.head_count_kv": np.array([0, 2, 0, 2], np.int32)}
BY_KIND = {
    "experts": {
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 64,
        "expert_shared_feed_forward_length": 64,
        "leading_dense_block_count": 1,
    },
    "mamba2": {
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 8,
        "ssm.inner_size": 256,
        **SOME_ATTEND,
    },
    "delta_net": {
        "ssm.conv_kernel": 4,
        "ssm.state_size": 32,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 4,
        "ssm.inner_size": 128,
        "full_attention_interval": 2,
    },
    "short_conv": {"shortconv.l_cache": 3, **SOME_ATTEND},
}
NEMOTRON = {
    "attention.head_count_kv": np.array([0, 2, 0, 0], np.int32),
    "feed_forward_length": np.array([0, 0, 192, 0], np.int32),
}
SPECIAL: dict[str, dict[str, Any]] = {
    "deepseek2": {
        "attention.q_lora_rank": 48,
        "attention.kv_lora_rank": 32,
        "attention.key_length_mla": 48,
        "attention.value_length_mla": 32,
        "rope.dimension_count": 16,
        "expert_shared_count": 1,
    },
    "falcon_h1": {"attention.head_count_kv": 2},
    "gemma3": {"attention.sliding_window_pattern": 2},
    "gemma4": {
        "attention.sliding_window_pattern": [True, False] * (LAYERS // 2),
        "attention.key_length_swa": 32,
        "attention.value_length_swa": 32,
    },
    "maple": {
        "attention.sliding_window_pattern": [True, False] * (LAYERS // 2),
        "swiglu_clamp_exp": [7.0] * LAYERS,
    },
    "nemotron_h": NEMOTRON | {"expert_count": 0},
    "nemotron_h_moe": NEMOTRON,
}
# An alias with settings of its own is another model of its architecture.
NAMES = sorted({*architectures.names(), *SPECIAL})
# Keys that do not begin with the architecture's name, though one architecture alone has them.
UNPREFIXED = {f"xielu.{name}": [0.5] * LAYERS for name in ("alpha_p", "alpha_n", "beta", "eps")}
# States that decay by about a tenth for each token, and small biases.
DRAWN = {
    **{"decay": (-0.15, 0.03), "dt": (0.0, 0.5), "skip": (0.0, 0.5), "conv_bias": (0.0, 0.1)},
    **{"choice_bias": (0.0, 0.1), "embed": (0.0, 0.3), "rope_divisors": (2.0, 0.1)},
}


def settings(name: str) -> dict[str, Any]:
    """The keys that the file has, without the architecture's name before them."""
    module, own = architectures.get(name), SPECIAL.get(name, {})
    kinds = {spec.kind for spec in module.TENSORS}
    offered = dict(USUAL)
    for kind in kinds & BY_KIND.keys():
        offered |= BY_KIND[kind]
    offered |= own
    prefixed = {f"{name}.{key}": value for key, value in offered.items()}
    metadata, read = keys.recorded({"general.architecture": name, **UNPREFIXED, **prefixed})
    module.config_from_gguf(metadata, EMBEDDING)
    return {key: value for key, value in offered.items() if key in own or f"{name}.{key}" in read}


@functools.cache
def tiny(name: str, format: str = "f32") -> Checkpoint:
    return tiny_gguf(name, settings(name), format, drawn=DRAWN, more=UNPREFIXED)
