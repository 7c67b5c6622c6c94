"""Hunyuan A13B (Tencent): a dense Hunyuan with experts and a shared expert in all layers.

GGUF files hold the base of the rope as it is used.
"""

from bonsai_jax.config import ModelConfig
from bonsai_jax.network import experts_metadata
from bonsai_jax.network.architectures import hunyuan_dense
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.kinds.experts import Experts
from bonsai_jax.weights.metadata import whole

MODELS = "Hunyuan A13B"
TENSORS = (
    *hunyuan_dense.TENSORS,
    *tensors(
        "experts", "norm", "gate", "up", "down",
        router=("ffn_gate_inp.weight", "mlp.gate.wg.weight"),
        shared_gate=("ffn_gate_shexp.weight", "mlp.shared_mlp.gate_proj.weight"),
        shared_up=("ffn_up_shexp.weight", "mlp.shared_mlp.up_proj.weight"),
        shared_down=("ffn_down_shexp.weight", "mlp.shared_mlp.down_proj.weight"),
    ),
)  # fmt: skip


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    shared = whole(metadata, f"{arch}.feed_forward_length")
    experts = experts_metadata.from_gguf(metadata, shared=shared)
    config = hunyuan_dense.config_from_gguf(experts_metadata.dense_part(metadata, experts), tensors)
    return experts_metadata.with_experts(config, experts)


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    if metadata.get("use_cla"):
        raise NotImplementedError("use_cla is true (layers that share keys and values); supported: false")
    ffn = whole(metadata, "intermediate_size")
    experts = Experts(
        count=whole(metadata, "num_experts"),
        used=_every_layers(metadata, "moe_topk"),
        ffn=_every_layers(metadata, "moe_intermediate_size", ffn),
        normalized=bool(metadata.get("norm_topk_prob", True)),
        shared=ffn * _every_layers(metadata, "num_shared_expert", 1),
    )
    return experts_metadata.with_experts(hunyuan_dense.config_from_huggingface(metadata, tensors), experts)


def _every_layers(metadata, key: str, default: int | None = None) -> int:
    """A whole number, or a list of it for each layer."""
    value = metadata.get(key)
    if isinstance(value, list) and len(set(map(str, value))) == 1:
        return whole({key: value[0]}, key)
    return whole(metadata, key, default)
