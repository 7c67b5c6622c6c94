"""Mistral Small 3, Ministral 3 and Devstral: a Llama whose queries may be scaled by their position, with YaRN
whose factor on cosines is divided by that of `mscale_all_dim`. The text of models that also see images."""

import dataclasses

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.rope import yarn_mscale
from bonsai_jax.weights.metadata import nested, positive

MODELS = "Mistral Small 3.x, Ministral 3, Devstral"
TENSORS = (
    *llama.TENSORS,
    *tensors("attention", "q_bias", "k_bias", "v_bias", "o_bias", optional=True),
)


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    config = llama.config_from_gguf(metadata, tensors)
    key, rope = f"{arch}.rope.scaling.yarn_log_multiplier", config.attention.rope
    if metadata.get(key) and rope.scaling == "yarn":
        mscale = rope.mscale / yarn_mscale(rope.factor, positive(metadata, key))
        config = llama.with_attention(config, rope=dataclasses.replace(rope, mscale=mscale))
    return _with_temperature(config, metadata, f"{arch}.attention.temperature_scale")


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    metadata = {"model_type": metadata["model_type"], **(metadata.get("text_config") or metadata)}
    config = llama.config_from_huggingface(metadata, tensors)
    rope = nested(metadata, "rope_parameters")
    config = _with_temperature(config, rope, "rope_parameters.llama_4_scaling_beta")
    sees = tuple(
        f"{start}{part}" for start in ("", "model.") for part in ("vision_tower.", "multi_modal_projector.")
    )
    return dataclasses.replace(config, architecture="mistral3", skipped=sees)


def _with_temperature(config: ModelConfig, metadata, key: str) -> ModelConfig:
    if not metadata.get(key):
        return config
    temperature = positive(metadata, key), config.attention.rope.original_context
    return llama.with_attention(config, temperature=temperature)
