"""ERNIE 4.5 with experts (21B-A3B, 300B-A47B): a Llama with interleaved rope, also in Hugging Face folders.
The first layers are dense, a bias may help to choose experts, and a shared expert is added to theirs.
"""

import dataclasses

from bonsai_jax.config import Layer, ModelConfig
from bonsai_jax.network import experts_metadata
from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.kinds.experts import Experts
from bonsai_jax.weights.metadata import whole

MODELS = "ERNIE 4.5 21B-A3B and 300B-A47B"
TENSORS = (
    *llama.TENSORS,
    *tensors("experts", "norm", "router", "gate", "up", "down"),
    *(
        dataclasses.replace(spec, huggingface_shape=(1, *spec.shape))
        for spec in tensors(
            "experts",
            choice_bias=("exp_probs_b.bias", "mlp.moe_statics.e_score_correction_bias"),
            optional=True,
        )
    ),
    *tensors(
        "experts",
        shared_gate=("ffn_gate_shexp.weight", "mlp.shared_experts.gate_proj.weight"),
        shared_up=("ffn_up_shexp.weight", "mlp.shared_experts.up_proj.weight"),
        shared_down=("ffn_down_shexp.weight", "mlp.shared_experts.down_proj.weight"),
    ),
)


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    experts = experts_metadata.from_gguf(metadata)
    config = llama.config_from_gguf(experts_metadata.dense_part(metadata, experts), tensors)
    step = whole(metadata, f"{arch}.interleave_moe_layer_step", 1)
    first = experts_metadata.count(metadata, f"{arch}.leading_dense_block_count")
    return experts_metadata.with_experts(config, experts, lambda i: i >= first and (i + 1) % step == 0)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    if metadata.get("use_bias"):
        raise NotImplementedError("use_bias is true; supported: false")
    ffn = whole(metadata, "moe_intermediate_size")
    experts = Experts(
        count=whole(metadata, "moe_num_experts"),
        used=whole(metadata, "moe_k"),
        ffn=ffn,
        shared=ffn * experts_metadata.count(metadata, "moe_num_shared_experts"),
    )
    config = llama.config_from_huggingface(metadata, tensors)
    mixer = config.attention
    mixer = dataclasses.replace(mixer, rope=dataclasses.replace(mixer.rope, interleaved=True))
    layers = tuple(Layer(mixer, layer.channels) for layer in config.layers)
    config = dataclasses.replace(config, architecture="ernie4_5-moe", layers=layers, skipped=("model.mtp_",))
    step = whole(metadata, "moe_layer_interval", 1)
    first = experts_metadata.count(metadata, "moe_layer_start_index")
    last = metadata.get("moe_layer_end_index", -1)
    last = config.num_layers - 1 if last == -1 else last
    return experts_metadata.with_experts(
        config, experts, lambda i: first <= i <= last and (i + 1) % step == 0
    )
