"""ChatGLM 3 and the first GLM-4 9B: a Llama with biases of q, k and v, which are one tensor, as are gate and
up; the rope turns neighbours in the first half of each head.
"""

import dataclasses

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD
from bonsai_jax.weights.metadata import positive, whole

MODELS = "ChatGLM3, GLM-4 9B"
ROTATED, BASE = 0.5, 10000.0  # of a head; the rope's base, which rope_ratio multiplies
_QKV = "self_attention.query_key_value"
_OF_LAYERS = (
    *tensors("attention", "norm", o=("attn_output.weight", "self_attention.dense.weight")),
    *tensors("attention", "q", "k", "v", rows_of=("attn_qkv.weight", f"{_QKV}.weight")),
    *tensors(
        "attention", "q_bias", "k_bias", "v_bias", optional=True, rows_of=("attn_qkv.bias", f"{_QKV}.bias")
    ),
    *tensors("mlp", "norm", down=("ffn_down.weight", "mlp.dense_4h_to_h.weight")),
    *tensors("mlp", "gate", "up", rows_of=("ffn_up.weight", "mlp.dense_h_to_4h.weight")),
)
EMBEDDING = "transformer.embedding.word_embeddings.weight"


def _named(spec):
    """With its name in Hugging Face files."""
    layers = ("model.layers", "transformer.encoder.layers")
    fused = spec.fused
    if fused is not None:
        fused = dataclasses.replace(fused, huggingface=fused.huggingface.replace(*layers))
    return dataclasses.replace(spec, huggingface=spec.huggingface.replace(*layers), fused=fused)


TENSORS = (
    dataclasses.replace(EMBED, huggingface=EMBEDDING),
    *map(_named, _OF_LAYERS),
    dataclasses.replace(FINAL_NORM, huggingface="transformer.encoder.final_layernorm.weight"),
    dataclasses.replace(HEAD, huggingface="transformer.output_layer.weight"),
)


def config_from_gguf(metadata, tensors) -> ModelConfig:
    return llama.config_from_gguf(metadata, tensors, partial=True)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    for key, able in (("rmsnorm", True), ("add_bias_linear", False), ("post_layer_norm", True)):
        if metadata.get(key, able) != able:
            raise NotImplementedError(f"{key} is {metadata[key]!r}; supported: {able}")
    heads = whole(metadata, "num_attention_heads")
    groups = whole(metadata, "multi_query_group_num") if metadata.get("multi_query_attention") else heads
    same = {
        "num_hidden_layers": whole(metadata, "num_layers"),
        "num_key_value_heads": groups,
        "head_dim": whole(metadata, "kv_channels", whole(metadata, "hidden_size") // heads),
        "intermediate_size": whole(metadata, "ffn_hidden_size"),
        "max_position_embeddings": whole(metadata, "seq_length"),
        "rms_norm_eps": positive(metadata, "layernorm_epsilon"),
        "rope_theta": BASE * positive(metadata, "rope_ratio", 1.0),
        "partial_rotary_factor": ROTATED,
    }
    embedding = {"model.embed_tokens.weight": tensors[EMBEDDING]}
    config = llama.config_from_huggingface({**metadata, **same}, embedding)
    rope = dataclasses.replace(config.attention.rope, interleaved=True)
    config = llama.with_attention(config, rope=rope)
    return dataclasses.replace(config, skipped=("transformer.rotary_pos_emb.",))  # its frequencies
