"""Qwen3.5 and Bonsai 27B: of every four layers three mix tokens by a gated delta net, the fourth by
attention, whose heads are gated and partly rotated; all have SwiGLU.

GGUF files hold v heads tiled (v head h uses k head h % k heads) and A as -exp(A_log).
"""

from bonsai_jax import layers
from bonsai_jax.config import Channels, DeltaConfig, Mixer, ModelConfig, RopeConfig
from bonsai_jax.metadata import flags, positive, whole
from bonsai_jax.plan import Spec


def _of_layers(kind: Mixer | Channels, *rows: tuple[str, str, tuple[str, ...]]) -> tuple[Spec, ...]:
    """Tensors of one kind of layer: field, name in GGUF behind "blk.{}.", shape."""
    return tuple(Spec(field, f"blk.{{}}.{gguf}", None, shape, kind=kind) for field, gguf, shape in rows)


TENSORS = (
    Spec("embed", "token_embd.weight", None, ("vocab_size", "hidden")),
    *_of_layers(
        "attention",
        ("attn_norm", "attn_norm.weight", ("hidden",)),
        ("wq", "attn_q.weight", ("q_rows", "hidden")),
        ("wk", "attn_k.weight", ("kv_width", "hidden")),
        ("wv", "attn_v.weight", ("kv_width", "hidden")),
        ("q_norm", "attn_q_norm.weight", ("head_dim",)),
        ("k_norm", "attn_k_norm.weight", ("head_dim",)),
        ("wo", "attn_output.weight", ("hidden", "q_width")),
    ),
    *_of_layers(
        "delta",
        ("delta_norm", "attn_norm.weight", ("hidden",)),
        ("delta_qkv", "attn_qkv.weight", ("delta.qkv_width", "hidden")),
        ("delta_gate", "attn_gate.weight", ("delta.v_width", "hidden")),
        ("delta_alpha", "ssm_alpha.weight", ("delta.v_heads", "hidden")),
        ("delta_beta", "ssm_beta.weight", ("delta.v_heads", "hidden")),
        ("delta_dt", "ssm_dt.bias", ("delta.v_heads",)),
        ("delta_a", "ssm_a", ("delta.v_heads",)),
        ("delta_head_norm", "ssm_norm.weight", ("delta.v_dim",)),
        ("delta_out", "ssm_out.weight", ("hidden", "delta.v_width")),
    ),
    Spec(
        "delta_conv", "blk.{}.ssm_conv1d.weight", None, ("delta.qkv_width", "delta.conv"), kind="delta",
        plain=True,
    ),
    *_of_layers(
        "mlp",
        ("ffn_norm", "post_attention_norm.weight", ("hidden",)),
        ("w_gate", "ffn_gate.weight", ("ffn", "hidden")),
        ("w_up", "ffn_up.weight", ("ffn", "hidden")),
        ("w_down", "ffn_down.weight", ("hidden", "ffn")),
    ),
    Spec("final_norm", "output_norm.weight", None, ("hidden",)),
    Spec("head", "output.weight", None, ("vocab_size", "hidden"), optional=True),
)  # fmt: skip

forward = layers.decoder


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]

    def number(name: str, default: int | None = None) -> int:
        return whole(metadata, f"{arch}.{name}", default)

    # A draft layer (MTP) is counted among the blocks; it is left aside.
    num_layers = number("block_count") - (metadata.get(f"{arch}.nextn_predict_layers") or 0)
    head_dim, k_dim = number("attention.key_length"), number("ssm.state_size")
    if (width := number("attention.value_length", head_dim)) != head_dim:
        raise NotImplementedError(
            f"{arch}.attention.value_length is {width}, but only head_dim ({head_dim}) is supported"
        )
    if (scaling := metadata.get(f"{arch}.rope.scaling.type", "none")) != "none":
        raise NotImplementedError(f"{arch}.rope.scaling.type is {scaling!r}; supported: none")
    v_heads = number("ssm.time_step_rank")
    if (inner := number("ssm.inner_size")) % v_heads:
        raise ValueError(f"{arch}.ssm.inner_size is {inner}; a multiple of its {v_heads} v heads is expected")
    if metadata.get(f"{arch}.attention.recurrent_layers") is None:
        interval = number("full_attention_interval", 4)
        recurrent = [(layer + 1) % interval != 0 for layer in range(num_layers)]
    else:
        recurrent = flags(metadata, f"{arch}.attention.recurrent_layers", num_layers)
    return ModelConfig(
        architecture=arch,
        num_layers=num_layers,
        hidden=number("embedding_length"),
        ffn=number("feed_forward_length"),
        num_heads=number("attention.head_count"),
        num_kv_heads=number("attention.head_count_kv"),
        head_dim=head_dim,
        vocab_size=tensors["token_embd.weight"].shape[0],
        context_length=number("context_length"),
        rms_norm_eps=positive(metadata, f"{arch}.attention.layer_norm_rms_epsilon"),
        rope=RopeConfig(base=positive(metadata, f"{arch}.rope.freq_base", 10000.0)),
        attention_gate=True,
        rotated=number("rope.dimension_count", head_dim),
        mixers=tuple("delta" if of_layer else "attention" for of_layer in recurrent),
        delta=DeltaConfig(
            k_heads=number("ssm.group_count"),
            v_heads=v_heads,
            k_dim=k_dim,
            v_dim=inner // v_heads,
            conv=number("ssm.conv_kernel"),
        ),
    )
