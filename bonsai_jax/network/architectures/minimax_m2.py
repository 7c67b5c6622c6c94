"""MiniMax-M2 and M2.5: QK-norm over all heads of a token together, rope that turns a part of each head, and
experts chosen by sigmoids with a bias for the choice.
"""

import dataclasses

from bonsai_jax.config import ModelConfig
from bonsai_jax.network import experts_metadata
from bonsai_jax.network.architectures import glm4moe, llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.kinds.experts import Experts
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD
from bonsai_jax.weights.metadata import whole

MODELS = "MiniMax-M2 and M2.5"
TENSORS = (
    EMBED,
    *tensors("attention", "norm", "q", "k", "v", "o", "q_row_norm", "k_row_norm"),
    *tensors(
        "experts", "norm",
        router=("ffn_gate_inp.weight", "block_sparse_moe.gate.weight"),
        choice_bias=("exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias"),
        gate=("ffn_gate_exps.weight", "block_sparse_moe.experts.{}.w1.weight"),
        up=("ffn_up_exps.weight", "block_sparse_moe.experts.{}.w3.weight"),
        down=("ffn_down_exps.weight", "block_sparse_moe.experts.{}.w2.weight"),
    ),
    FINAL_NORM,
    HEAD,
)  # fmt: skip


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    experts = experts_metadata.from_gguf(metadata, gating="sigmoid")
    rest = experts_metadata.dense_part(metadata, experts)
    turned = rest.pop(f"{arch}.rope.dimension_count", None)
    config = llama.config_from_gguf(rest, tensors, interleaved=False)
    if turned is not None:
        config = glm4moe.turning(config, whole(metadata, f"{arch}.rope.dimension_count"))
    return experts_metadata.with_experts(config, experts)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    for key, able in (("scoring_func", "sigmoid"), ("use_qk_norm", True), ("qk_norm_type", "per_layer")):
        if metadata.get(key, able) != able:
            raise NotImplementedError(f"{key} is {metadata[key]!r}; supported: {able}")
    experts = Experts(
        count=whole(metadata, "num_local_experts"),
        used=whole(metadata, "num_experts_per_tok"),
        ffn=whole(metadata, "intermediate_size"),
        gating="sigmoid",
    )
    config = llama.config_from_huggingface(metadata, tensors)
    turned = whole(metadata, "rotary_dim", config.attention.head_dim)
    config = dataclasses.replace(glm4moe.turning(config, turned), architecture="minimax-m2")
    return experts_metadata.with_experts(config, experts)
