"""gpt-oss (20B and 120B): attention with a sink for each head and a window of 128 keys in every second layer,
YaRN, biases everywhere, and experts whose SwiGLU is clamped and has u + 1 in place of u.

Experts stay in MXFP4, as OpenAI's files have them. In Hugging Face folders rows of gate and up alternate.
"""

import dataclasses

from bonsai_jax.config import Layer, ModelConfig
from bonsai_jax.network import experts_metadata
from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.kinds.experts import Experts
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD
from bonsai_jax.network.rope import Rope
from bonsai_jax.weights.metadata import positive, whole, windowed_layers, windowed_types
from bonsai_jax.weights.specs import Fused, Rows, Spec
from pallas_kernels.activations import swiglu_oai

MODELS = "gpt-oss 20B and 120B"
FOLDER = "model.layers.{}.mlp.experts."
EXPERTS_IN = "mxfp4"  # folders with other formats have matrices that are turned over


def _from_folders(spec: Spec) -> Spec:
    """The same with the names that Hugging Face folders have."""
    if spec.field in ("gate", "up", "gate_bias", "up_bias"):
        first = int(spec.field.startswith("up"))

        def rows(e: Experts) -> Rows:
            return Rows(e.ffn, 2, ((first, first + 1),))

        bias = "_bias" * spec.field.endswith("_bias")
        fused = Fused(None, f"{FOLDER}gate_up_proj{bias}", rows)
        name = f"{FOLDER}{('gate', 'up')[first]}_proj{bias}"
        return dataclasses.replace(spec, huggingface=name, fused=fused)
    names = {"down": f"{FOLDER}down_proj", "down_bias": f"{FOLDER}down_proj_bias"}
    if spec.field in names:
        return dataclasses.replace(spec, huggingface=names[spec.field], fused=None)
    return spec


_EXPERTS = tensors(
    "experts", "gate", "up", "down", "gate_bias", "up_bias", "down_bias",
    norm=("post_attention_norm.weight", "post_attention_layernorm.weight"),
    router=("ffn_gate_inp.weight", "mlp.router.weight"),
    router_bias=("ffn_gate_inp.bias", "mlp.router.bias"),
)  # fmt: skip
TENSORS = (
    EMBED,
    *tensors("attention", "norm", "q", "k", "v", "q_bias", "k_bias", "v_bias", "sinks", "o", "o_bias"),
    *(_from_folders(spec) for spec in _EXPERTS),
    FINAL_NORM,
    HEAD,
)


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    # Whatever a file says: the softmax is over the experts that are used.
    experts = dataclasses.replace(
        experts_metadata.from_gguf(metadata), gating="softmax", normalized=True, activation=swiglu_oai()
    )
    rest = experts_metadata.dense_part(metadata, experts)
    plain = llama.config_from_gguf(rest, tensors, interleaved=False)
    key = f"{arch}.attention.sliding_window"
    has_window = windowed_layers(metadata, f"{key}_pattern", plain.num_layers, 2)
    rope = plain.attention.rope
    assert rope is not None
    local = dataclasses.replace(rope, base=positive(metadata, f"{arch}.rope.freq_base_swa", rope.base))
    return _config(plain, whole(metadata, key), has_window, experts, local)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    plain = llama.config_from_huggingface(
        {key: value for key, value in metadata.items() if key != "sliding_window"}, tensors
    )
    experts = Experts(
        count=whole(metadata, "num_local_experts"),
        used=whole(metadata, "num_experts_per_tok"),
        ffn=whole(metadata, "intermediate_size"),
        activation=swiglu_oai(positive(metadata, "swiglu_limit", 7.0)),
    )
    has_window = windowed_types(metadata, plain.num_layers, 2)
    plain = dataclasses.replace(plain, architecture="gpt-oss")
    rope = plain.attention.rope
    return _config(plain, whole(metadata, "sliding_window"), has_window, experts, rope)


def _config(
    plain: ModelConfig, window: int, has_window: list[bool], experts: Experts, local: Rope | None
) -> ModelConfig:
    """A Llama's config with sinks, windows, which have the rope `local`, and experts."""
    full = dataclasses.replace(plain.attention, sinks=True)
    windowed = dataclasses.replace(full, window=window, rope=local)
    layers = tuple(Layer(windowed if has else full, experts) for has in has_window)
    return dataclasses.replace(plain, layers=layers)
