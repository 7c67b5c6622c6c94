"""dots.llm1 (142B-A14B): a GLM-4.5 with QK-norm, whose rope turns whole heads."""

import dataclasses

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.architectures import glm4moe
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD

MODELS = "dots.llm1"
TENSORS = (
    EMBED,
    *tensors("attention", "norm", "q", "k", "v", "o", "q_norm", "k_norm"),
    *tensors("mlp", "norm", "gate", "up", "down"),
    *tensors("experts", "norm", "router", "gate", "up", "down"),
    *tensors("experts", "choice_bias", optional=True),
    *tensors("experts", **glm4moe.SHARED),
    FINAL_NORM,
    HEAD,
)
config_from_gguf = glm4moe.config_from_gguf


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    if (scoring := metadata.get("scoring_func", "noaux_tc")) not in ("noaux_tc", "sigmoid"):
        raise NotImplementedError(f"scoring_func is {scoring!r}; supported: noaux_tc, sigmoid")
    config = glm4moe.config_from_huggingface({"partial_rotary_factor": 1.0, **metadata}, tensors)
    return dataclasses.replace(config, architecture="dots1")
