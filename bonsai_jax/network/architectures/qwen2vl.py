"""The language model of Qwen2-VL and Qwen2.5-VL: a Qwen2. The position of text is the same in all sections of
the rope, so they change nothing; what sees images is left aside.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.architectures import qwen2
from bonsai_jax.weights.metadata import nested

M_ROPE = True
MODELS = "Qwen2-VL, Qwen2.5-VL (text)"
TENSORS = qwen2.TENSORS
config_from_gguf = qwen2.config_from_gguf


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    config = qwen2.config_from_huggingface(text_metadata(metadata), tensors)
    return without_images(dataclasses.replace(config, architecture="qwen2vl"))


def text_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the part that reads text, whose rope has no sections."""
    text = {"model_type": metadata["model_type"], **(metadata.get("text_config") or metadata)}
    for name in ("rope_scaling", "rope_parameters"):
        rope = nested(text, name)
        kinds = (rope.get(f"{name}.type", "mrope"), rope.get(f"{name}.rope_type", "default"))
        if rope and kinds[0] in ("mrope", "default") and kinds[1] in ("mrope", "default"):
            base = rope.get(f"{name}.rope_theta")
            text |= {name: None} | ({} if base is None else {"rope_theta": base})
    return text


def without_images(config: ModelConfig) -> ModelConfig:
    """The same model, with the tensors of what sees images skipped."""
    return dataclasses.replace(config, skipped=("visual.", "model.visual."))
