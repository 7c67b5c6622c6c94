"""Qwen3.5 and Bonsai 27B: of every four layers three mix tokens by a gated delta net, the fourth by
attention, whose heads are gated and partly rotated; all have SwiGLU.

GGUF files hold v heads tiled (v head h uses k head h % k heads), A as -exp(A_log) and norms as they are
multiplied; Hugging Face files v heads grouped, A_log, and norms less 1. A draft layer (MTP) is loaded where
RunConfig.draft asks for it; it and what sees images are left aside else.
"""

import dataclasses

import jax
import jax.numpy as jnp

from bonsai_jax.config import Channels, DeltaConfig, Mixer, ModelConfig, RopeConfig
from bonsai_jax.network import transformer
from bonsai_jax.weights.metadata import flags, nested, positive, whole
from bonsai_jax.weights.specs import Spec


def _more(norm: jax.Array) -> jax.Array:
    return 1 + norm


def _decay(log: jax.Array) -> jax.Array:
    return -jnp.exp(log)


def _of_layers(kind: Mixer | Channels, *rows: tuple[str, str, str, tuple[str, ...]]) -> tuple[Spec, ...]:
    """Tensors of one kind of layer: field, names behind that of the layer in GGUF and Hugging Face, shape."""
    return tuple(
        Spec(field, f"blk.{{}}.{gguf}", f"model.layers.{{}}.{huggingface}", shape, kind=kind)
        for field, gguf, huggingface, shape in rows
    )


def _made(specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
    """With what Hugging Face files hold otherwise: norms less 1, but that of the delta net, and log A."""
    less_1 = ("attn_norm", "q_norm", "k_norm", "delta_norm", "ffn_norm", "final_norm")
    less_1 += ("embed_norm", "hidden_norm", "norm")
    how = dict.fromkeys(less_1, _more) | {"delta_a": _decay}
    return tuple(dataclasses.replace(spec, from_huggingface=how.get(spec.field)) for spec in specs)


TENSORS = _made((
    Spec("embed", "token_embd.weight", "model.embed_tokens.weight", ("vocab_size", "hidden")),
    *_of_layers(
        "attention",
        ("attn_norm", "attn_norm.weight", "input_layernorm.weight", ("hidden",)),
        ("wq", "attn_q.weight", "self_attn.q_proj.weight", ("q_rows", "hidden")),
        ("wk", "attn_k.weight", "self_attn.k_proj.weight", ("kv_width", "hidden")),
        ("wv", "attn_v.weight", "self_attn.v_proj.weight", ("kv_width", "hidden")),
        ("q_norm", "attn_q_norm.weight", "self_attn.q_norm.weight", ("head_dim",)),
        ("k_norm", "attn_k_norm.weight", "self_attn.k_norm.weight", ("head_dim",)),
        ("wo", "attn_output.weight", "self_attn.o_proj.weight", ("hidden", "q_width")),
    ),
    *_of_layers(
        "delta",
        ("delta_norm", "attn_norm.weight", "input_layernorm.weight", ("hidden",)),
        ("delta_qkv", "attn_qkv.weight", "linear_attn.in_proj_qkv.weight", ("delta.qkv_width", "hidden")),
        ("delta_z", "attn_gate.weight", "linear_attn.in_proj_z.weight", ("delta.v_width", "hidden")),
        ("delta_alpha", "ssm_alpha.weight", "linear_attn.in_proj_a.weight", ("delta.v_heads", "hidden")),
        ("delta_beta", "ssm_beta.weight", "linear_attn.in_proj_b.weight", ("delta.v_heads", "hidden")),
        ("delta_dt", "ssm_dt.bias", "linear_attn.dt_bias", ("delta.v_heads",)),
        ("delta_a", "ssm_a", "linear_attn.A_log", ("delta.v_heads",)),
        ("delta_head_norm", "ssm_norm.weight", "linear_attn.norm.weight", ("delta.v_dim",)),
        ("delta_out", "ssm_out.weight", "linear_attn.out_proj.weight", ("hidden", "delta.v_width")),
    ),
    Spec(
        "delta_conv", "blk.{}.ssm_conv1d.weight", "model.layers.{}.linear_attn.conv1d.weight",
        ("delta.qkv_width", "delta.conv"), kind="delta", plain=True,
    ),
    *_of_layers(
        "mlp",
        ("ffn_norm", "post_attention_norm.weight", "post_attention_layernorm.weight", ("hidden",)),
        ("w_gate", "ffn_gate.weight", "mlp.gate_proj.weight", ("ffn", "hidden")),
        ("w_up", "ffn_up.weight", "mlp.up_proj.weight", ("ffn", "hidden")),
        ("w_down", "ffn_down.weight", "mlp.down_proj.weight", ("hidden", "ffn")),
    ),
    Spec("final_norm", "output_norm.weight", "model.norm.weight", ("hidden",)),
    Spec("head", "output.weight", "lm_head.weight", ("vocab_size", "hidden"), optional=True),
))  # fmt: skip

# The draft layer, as if it were the only one (plan.of_draft).
DRAFT = _made((
    *(
        dataclasses.replace(spec, huggingface=spec.huggingface.replace("model.", "mtp.", 1))
        for spec in TENSORS
        if spec.kind in ("attention", "mlp") and spec.huggingface
    ),
    Spec("join", "blk.{}.nextn.eh_proj.weight", "mtp.fc.weight", ("hidden", "draft_inputs")),
    Spec("embed_norm", "blk.{}.nextn.enorm.weight", "mtp.pre_fc_norm_embedding.weight", ("hidden",)),
    Spec("hidden_norm", "blk.{}.nextn.hnorm.weight", "mtp.pre_fc_norm_hidden.weight", ("hidden",)),
    Spec("norm", "blk.{}.nextn.shared_head_norm.weight", "mtp.norm.weight", ("hidden",), optional=True),
))  # fmt: skip

forward = transformer.decoder


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]

    def number(name: str, default: int | None = None) -> int:
        return whole(metadata, f"{arch}.{name}", default)

    blocks = number("block_count")  # draft layers (MTP) among them, the last ones
    draft = number("nextn_predict_layers") if metadata.get(f"{arch}.nextn_predict_layers") else 0
    num_layers = blocks - draft
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
        aside=tuple(f"blk.{layer}." for layer in range(num_layers, blocks)),
    )


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    # Of a model that sees images too, the text model's own part.
    metadata = {"model_type": metadata["model_type"], **(metadata.get("text_config") or metadata)}
    if metadata.get("hidden_act", "silu") != "silu":
        raise NotImplementedError(f"hidden_act is {metadata['hidden_act']!r}; supported: silu")
    if metadata.get("attention_bias"):
        raise NotImplementedError("attention_bias is true; supported: false")
    num_layers, rope = whole(metadata, "num_hidden_layers"), nested(metadata, "rope_parameters")
    if (kind := rope.get("rope_parameters.rope_type", "default")) != "default":
        raise NotImplementedError(f"rope_parameters.rope_type is {kind!r}; supported: default")
    part = positive(rope, "rope_parameters.partial_rotary_factor", 0.25)
    head_dim = whole(metadata, "head_dim", 256)
    if metadata.get("layer_types") is None:
        interval = whole(metadata, "full_attention_interval", 4)
        kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)]
    else:
        kinds = list(metadata["layer_types"])
    mixer: dict[str, Mixer] = {"linear_attention": "delta", "full_attention": "attention"}
    if len(kinds) != num_layers or (unknown := set(kinds) - mixer.keys()):
        what = f"{len(kinds)} entries" if len(kinds) != num_layers else f"{unknown.pop()!r} in it"
        raise ValueError(f"layer_types has {what}; {num_layers} are expected, each one of {', '.join(mixer)}")
    embedding = (
        tensors.get("model.embed_tokens.weight") or tensors["model.language_model.embed_tokens.weight"]
    )
    return ModelConfig(
        architecture="qwen35",
        num_layers=num_layers,
        hidden=whole(metadata, "hidden_size"),
        ffn=whole(metadata, "intermediate_size"),
        num_heads=whole(metadata, "num_attention_heads"),
        num_kv_heads=whole(metadata, "num_key_value_heads"),
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        context_length=whole(metadata, "max_position_embeddings"),
        rms_norm_eps=positive(metadata, "rms_norm_eps"),
        rope=RopeConfig(base=positive(rope, "rope_parameters.rope_theta")),
        attention_gate=True,
        rotated=int(head_dim * part),
        mixers=tuple(mixer[kind] for kind in kinds),
        delta=DeltaConfig(
            k_heads=whole(metadata, "linear_num_key_heads"),
            v_heads=whole(metadata, "linear_num_value_heads"),
            k_dim=whole(metadata, "linear_key_head_dim"),
            v_dim=whole(metadata, "linear_value_head_dim"),
            conv=whole(metadata, "linear_conv_kernel_dim"),
            grouped=True,
        ),
        aside=("mtp.", "model.mtp.", "model.visual."),
    )
