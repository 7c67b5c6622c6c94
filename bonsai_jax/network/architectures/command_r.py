"""Command R and R+, Aya: a LayerNorm without bias whose result both halves of a layer read, and scaled
logits. R+ normalizes queries and keys by head, with weights for each. The rope turns neighbours.
"""

import dataclasses

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.params import EMBED, FINAL_NORM
from bonsai_jax.weights.metadata import positive, whole

MODELS = "Command R and R+, Aya"
PLAIN = (
    EMBED,
    *tensors("attention", "norm", "q", "k", "v", "o"),
    *tensors("mlp", "gate", "up", "down", norm=("attn_norm.weight", "input_layernorm.weight")),
    FINAL_NORM,
)
TENSORS = (*PLAIN, *tensors("attention", "q_head_norms", "k_head_norms", optional=True))


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    eps = positive(metadata, f"{arch}.attention.layer_norm_epsilon")
    own = {f"{arch}.attention.layer_norm_rms_epsilon": eps}
    plain = llama.config_from_gguf({**metadata, **own}, tensors, interleaved=True)
    return _parallel(plain, positive(metadata, f"{arch}.logit_scale", 1.0))


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    context = whole(metadata, "model_max_length", whole(metadata, "max_position_embeddings"))
    own = {"rms_norm_eps": positive(metadata, "layer_norm_eps"), "max_position_embeddings": context}
    plain = llama.config_from_huggingface({**metadata, **own, "sliding_window": None}, tensors)
    mixer = plain.attention
    mixer = dataclasses.replace(mixer, rope=dataclasses.replace(mixer.rope, interleaved=True))
    return _parallel(plain.with_mixers([mixer] * plain.num_layers), positive(metadata, "logit_scale", 0.0625))


def _parallel(plain: ModelConfig, logit_scale: float) -> ModelConfig:
    layers = tuple(dataclasses.replace(layer, parallel=True) for layer in plain.layers)
    return dataclasses.replace(plain, layers=layers, layer_norm=True, logit_scale=logit_scale)
