"""OLMoE 1B-7B: QK-norm over all heads of a token together, and experts whose weights stay as the softmax
gives them. Files give the experts' width as that of the feed-forward.
"""

from bonsai_jax.config import ModelConfig
from bonsai_jax.network import experts_metadata
from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.kinds.experts import Experts
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD
from bonsai_jax.weights.metadata import whole

MODELS = "OLMoE 1B-7B"
TENSORS = (
    EMBED,
    *tensors("attention", "norm", "q", "k", "v", "o", "q_row_norm", "k_row_norm"),
    *tensors("experts", "norm", "router", "gate", "up", "down"),
    FINAL_NORM,
    HEAD,
)


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    width = {f"{arch}.expert_feed_forward_length": whole(metadata, f"{arch}.feed_forward_length")}
    experts = experts_metadata.from_gguf({**metadata, **width}, normalized=False)
    rest = experts_metadata.dense_part(metadata, experts)
    return experts_metadata.with_experts(llama.config_from_gguf(rest, tensors, interleaved=False), experts)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    experts = Experts(
        count=whole(metadata, "num_experts"),
        used=whole(metadata, "num_experts_per_tok"),
        ffn=whole(metadata, "intermediate_size"),
        normalized=bool(metadata.get("norm_topk_prob", False)),
    )
    config = llama.config_from_huggingface({"rms_norm_eps": 1e-5, **metadata}, tensors)
    return experts_metadata.with_experts(config, experts)
