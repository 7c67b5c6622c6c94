"""MiniCPM 1 and MiniCPM4 (OpenBMB): a Granite whose scales have other names in config.json. Old GGUF files
lack them; the models' own values are used there.
"""

import math

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.architectures import granite, llama
from bonsai_jax.weights.metadata import positive, whole

MODELS = "MiniCPM 1B and 2B, MiniCPM4"
TENSORS = (*granite.TENSORS, *llama.ROPE_FACTORS)
EMBEDDINGS, DEPTH, BASE = 12.0, 1.4, 256  # scale_emb, scale_depth, dim_model_base where the file does not say


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    layers, hidden = whole(metadata, f"{arch}.block_count"), whole(metadata, f"{arch}.embedding_length")
    defaults = {
        f"{arch}.embedding_scale": EMBEDDINGS,
        f"{arch}.residual_scale": DEPTH / math.sqrt(layers),
        f"{arch}.logit_scale": hidden / BASE,
    }
    # Granite files without a rope say so by this key.
    has_rope = {f"{arch}.rope.scaling.finetuned": True}
    return granite.config_from_gguf(defaults | dict(metadata) | has_rope, tensors)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    if metadata.get("num_experts"):
        raise NotImplementedError(f"num_experts is {metadata['num_experts']}; MiniCPM-MoE is not supported")
    heads, hidden = whole(metadata, "num_attention_heads"), whole(metadata, "hidden_size")
    layers = whole(metadata, "num_hidden_layers")
    scales = {
        "embedding_multiplier": positive(metadata, "scale_emb", 1.0),
        "residual_multiplier": positive(metadata, "scale_depth", 1.0) / math.sqrt(layers),
        "attention_multiplier": (hidden // heads) ** -0.5,
        "logits_scaling": hidden / positive(metadata, "dim_model_base", 1.0),
    }
    return granite.config_from_huggingface({**metadata, **scales}, tensors)
