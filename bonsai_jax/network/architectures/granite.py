"""Granite 3 and the dense Granite 4 (IBM): a Llama with four scales, of embeddings, of scores, of what each
half of a layer adds, and of logits, which are divided by theirs."""

import dataclasses

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.architectures import llama
from bonsai_jax.weights.metadata import positive

MODELS = "Granite 3.x, Granite 4.0"
TENSORS = llama.TENSORS


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    config = llama.config_from_gguf(metadata, tensors)
    if not metadata.get(f"{arch}.rope.scaling.finetuned", True):
        config = llama.with_attention(config, rope=None)
    return _scaled(
        config,
        embeddings=_optional(metadata, f"{arch}.embedding_scale") or 1.0,
        scores=_optional(metadata, f"{arch}.attention.scale"),
        residual=_optional(metadata, f"{arch}.residual_scale") or 1.0,
        logits=positive(metadata, f"{arch}.logit_scale"),
    )


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    plain = {key: value for key, value in metadata.items() if key != "head_dim"}  # which is not used
    return _scaled(  # transformers' defaults are all 1, that of scores too
        llama.config_from_huggingface(plain, tensors),
        embeddings=positive(metadata, "embedding_multiplier", 1.0),
        scores=positive(metadata, "attention_multiplier", 1.0),
        residual=positive(metadata, "residual_multiplier", 1.0),
        logits=positive(metadata, "logits_scaling", 1.0),
    )


def _optional(metadata, key: str) -> float | None:
    """None for a key that is absent or 0."""
    return positive(metadata, key) if metadata.get(key) else None


def _scaled(
    config: ModelConfig, *, embeddings: float, scores: float | None, residual: float, logits: float
) -> ModelConfig:
    config = llama.with_attention(config, scale=scores)
    return dataclasses.replace(
        config, embedding_scale=embeddings, residual_scale=residual, logit_scale=1 / logits
    )
