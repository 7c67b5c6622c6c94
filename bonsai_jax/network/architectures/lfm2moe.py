"""LFM2 with experts (8B-A1B, 24B-A2B): an LFM2 whose layers, after a few dense ones, have experts that a
sigmoid router and a bias choose."""

from bonsai_jax.config import ModelConfig
from bonsai_jax.network import experts_metadata
from bonsai_jax.network.architectures import lfm2
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.kinds.experts import Experts
from bonsai_jax.weights.metadata import positive, whole

MODELS = "LFM2-8B-A1B"
TENSORS = (
    *lfm2.TENSORS,
    *tensors(
        "experts",
        norm=("ffn_norm.weight", "ffn_norm.weight"),
        router=("ffn_gate_inp.weight", "feed_forward.gate.weight"),
        choice_bias=("exp_probs_b.bias", "feed_forward.expert_bias"),
        gate=("ffn_gate_exps.weight", "feed_forward.experts.{}.w1.weight"),
        up=("ffn_up_exps.weight", "feed_forward.experts.{}.w3.weight"),
        down=("ffn_down_exps.weight", "feed_forward.experts.{}.w2.weight"),
    ),
)


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    experts = experts_metadata.from_gguf(metadata, gating="sigmoid")
    config = lfm2.config_from_gguf(experts_metadata.dense_part(metadata, experts), tensors)
    first = experts_metadata.count(metadata, f"{arch}.leading_dense_block_count")
    return experts_metadata.with_experts(config, experts, lambda layer: layer >= first)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    for key in ("norm_topk_prob", "use_expert_bias"):
        if not metadata.get(key, True):
            raise NotImplementedError(f"{key} is false; supported: true")
    experts = Experts(
        count=whole(metadata, "num_experts"),
        used=whole(metadata, "num_experts_per_tok"),
        ffn=whole(metadata, "moe_intermediate_size"),
        gating="sigmoid",
        scale=positive(metadata, "routed_scaling_factor", 1.0),
    )
    config = lfm2.config_from_huggingface(metadata, tensors)
    first = experts_metadata.count(metadata, "num_dense_layers")
    return experts_metadata.with_experts(config, experts, lambda layer: layer >= first)
