"""Granite 3 with experts (1B-A400M, 3B-A800M): Granite's four scales, experts in all layers, and in some
models a shared expert.

GGUF files give the experts' width as that of the feed-forward. Hugging Face files have gate and up in one
tensor, also of a shared expert.
"""

from bonsai_jax.config import ModelConfig
from bonsai_jax.network import experts_metadata
from bonsai_jax.network.architectures import granite
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.kinds.experts import Experts
from bonsai_jax.weights.metadata import whole

MODELS = "Granite 3.x with experts"
EXPERTS = (
    *tensors(
        "experts", "norm",
        router=("ffn_gate_inp.weight", "block_sparse_moe.router.layer.weight"),
        down=("ffn_down_exps.weight", "block_sparse_moe.output_linear.weight"),
        shared_down=("ffn_down_shexp.weight", "shared_mlp.output_linear.weight"),
    ),
    *tensors(
        "experts",
        rows_of=("ffn_gate_up_exps.weight", "block_sparse_moe.input_linear.weight"),
        gate=("ffn_gate_exps.weight", "block_sparse_moe.gate.weight"),
        up=("ffn_up_exps.weight", "block_sparse_moe.up.weight"),
    ),
    *tensors(
        "experts",
        rows_of=(None, "shared_mlp.input_linear.weight"),
        shared_gate=("ffn_gate_shexp.weight", "shared_mlp.gate.weight"),
        shared_up=("ffn_up_shexp.weight", "shared_mlp.up.weight"),
    ),
)  # fmt: skip
TENSORS = (*granite.TENSORS, *EXPERTS)


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    width = f"{arch}.expert_feed_forward_length"
    ffn = {width: whole(metadata, f"{arch}.feed_forward_length")} if metadata.get(width) is None else {}
    experts = experts_metadata.from_gguf({**metadata, **ffn})
    config = granite.config_from_gguf(experts_metadata.dense_part(metadata, experts), tensors)
    return experts_metadata.with_experts(config, experts)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    experts = Experts(
        count=whole(metadata, "num_local_experts"),
        used=whole(metadata, "num_experts_per_tok"),
        ffn=whole(metadata, "intermediate_size"),
        shared=experts_metadata.count(metadata, "shared_intermediate_size"),
    )
    return experts_metadata.with_experts(granite.config_from_huggingface(metadata, tensors), experts)
