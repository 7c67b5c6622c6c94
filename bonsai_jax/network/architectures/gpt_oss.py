"""gpt-oss (20B and 120B): attention with a sink for each head and a window of 128 keys in every second layer,
YaRN, biases everywhere, and experts whose SwiGLU is clamped and has u + 1 in place of u.

In a file of OpenAI the experts are in MXFP4, and so they stay.
"""

import dataclasses

from bonsai_jax.config import Layer, ModelConfig
from bonsai_jax.network import experts_metadata
from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD
from bonsai_jax.weights.metadata import whole, windowed_layers
from pallas_kernels.activations import swiglu_oai

TENSORS = (
    EMBED,
    *tensors("attention", "norm", "q", "k", "v", "q_bias", "k_bias", "v_bias", "sinks", "o", "o_bias"),
    *tensors(
        "experts", "router", "gate", "up", "down", "router_bias", "gate_bias", "up_bias", "down_bias",
        norm=("post_attention_norm.weight", "post_attention_layernorm.weight"),
    ),
    FINAL_NORM,
    HEAD,
)  # fmt: skip


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    # Whatever a file says: the softmax is over the experts that are used.
    experts = dataclasses.replace(
        experts_metadata.from_gguf(metadata), gating="softmax", normalized=True, activation=swiglu_oai()
    )
    rest = experts_metadata.dense_part(metadata, experts)
    plain = llama.config_from_gguf(rest, tensors, interleaved=False)
    full = dataclasses.replace(plain.attention, sinks=True)
    key = f"{arch}.attention.sliding_window"
    windowed = dataclasses.replace(full, window=whole(metadata, key))
    has_window = windowed_layers(metadata, f"{key}_pattern", plain.num_layers, 2)
    layers = tuple(Layer(windowed if window else full, experts) for window in has_window)
    return dataclasses.replace(plain, layers=layers)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    raise NotImplementedError(
        "a Hugging Face folder of gpt-oss keeps blocks and scales of its experts in separate tensors, which "
        'are not read yet; load a GGUF file of the same weights, as "ggml-org/gpt-oss-20b-GGUF"'
    )
