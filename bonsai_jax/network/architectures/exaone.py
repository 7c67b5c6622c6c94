"""EXAONE 3 and 3.5 (2.4B to 32B): a Llama whose Hugging Face files have names of their own."""

import dataclasses

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD
from bonsai_jax.weights.metadata import positive, whole

MODELS = "EXAONE 3 and 3.5"
_OF_LAYERS = (
    *tensors(
        "attention",
        norm=("attn_norm.weight", "ln_1.weight"),
        q=("attn_q.weight", "attn.attention.q_proj.weight"),
        k=("attn_k.weight", "attn.attention.k_proj.weight"),
        v=("attn_v.weight", "attn.attention.v_proj.weight"),
        o=("attn_output.weight", "attn.attention.out_proj.weight"),
    ),
    *tensors(
        "mlp",
        norm=("ffn_norm.weight", "ln_2.weight"),
        gate=("ffn_gate.weight", "mlp.c_fc_0.weight"),
        up=("ffn_up.weight", "mlp.c_fc_1.weight"),
        down=("ffn_down.weight", "mlp.c_proj.weight"),
    ),
)
EMBEDDING = "transformer.wte.weight"
TENSORS = (
    dataclasses.replace(EMBED, huggingface=EMBEDDING),
    *(
        dataclasses.replace(spec, huggingface=str(spec.huggingface).replace("model.layers", "transformer.h"))
        for spec in _OF_LAYERS
    ),
    dataclasses.replace(FINAL_NORM, huggingface="transformer.ln_f.weight"),
    HEAD,
    llama.ROPE_DIVISORS,
)


def config_from_gguf(metadata, tensors) -> ModelConfig:
    return llama.config_from_gguf(metadata, tensors, interleaved=False)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    same = {
        "num_hidden_layers": whole(metadata, "num_layers"),
        "rms_norm_eps": positive(metadata, "layer_norm_epsilon"),
        "hidden_act": metadata.get("activation_function", "silu"),
    }
    return llama.config_from_huggingface(
        {**metadata, **same}, {"model.embed_tokens.weight": tensors[EMBEDDING]}
    )
