"""Apertus (8B, 70B): a Llama with QK-norm whose feed-forward has no gate, and xIELU as its activation.

GGUF files hold xIELU's parameters as keys, Hugging Face files as tensors; both before the softplus. The rope
is in halves in both.
"""

import dataclasses
import math
from collections.abc import Sequence

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.kinds.plain_mlp import PlainMlp
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD
from bonsai_jax.weights.metadata import numbers
from pallas_kernels import XIELU, formats

MODELS = "Apertus"
TENSORS = (
    EMBED,
    *tensors(
        "attention",
        "q",
        "k",
        "v",
        "q_norm",
        "k_norm",
        "o",
        norm=("attn_norm.weight", "attention_layernorm.weight"),
    ),
    *tensors("plain_mlp", "up", "down", norm=("ffn_norm.weight", "feedforward_layernorm.weight")),
    FINAL_NORM,
    HEAD,
    llama.ROPE_DIVISORS,
)
PARAMETERS = ("alpha_p", "alpha_n", "beta", "eps")


def config_from_gguf(metadata, tensors) -> ModelConfig:
    plain = llama.config_from_gguf(metadata, tensors, interleaved=False)
    return _ungated(plain, *(numbers(metadata, f"xielu.{name}", plain.num_layers) for name in PARAMETERS))


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    if (activation := metadata.get("hidden_act", "xielu")) != "xielu":
        raise NotImplementedError(f"hidden_act is {activation!r}; supported: xielu")
    plain = llama.config_from_huggingface({**metadata, "hidden_act": "silu"}, tensors)
    prefixes = [f"model.layers.{number}.mlp.act_fn." for number in range(plain.num_layers)]
    values = [[_value(tensors, prefix + name) for prefix in prefixes] for name in PARAMETERS]
    return dataclasses.replace(_ungated(plain, *values), skipped=tuple(prefixes))


def _value(tensors, name: str) -> float:
    if name not in tensors:
        raise KeyError(name)
    (value,) = formats.values(tensors[name].format, tensors[name].data).reshape(-1).tolist()
    return value


def _ungated(
    gated: ModelConfig,
    alpha_p: Sequence[float],
    alpha_n: Sequence[float],
    beta: Sequence[float],
    eps: Sequence[float],
) -> ModelConfig:
    by_layer = zip(alpha_p, alpha_n, beta, eps, strict=True)
    constants = tuple((_softplus(p), b + _softplus(n), b, e) for p, n, b, e in by_layer)
    mlp = PlainMlp(gated.mlp.ffn, XIELU, constants)
    layers = tuple(dataclasses.replace(layer, channels=mlp) for layer in gated.layers)
    return dataclasses.replace(gated, layers=layers)


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
