"""Llama: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU. Also SmolLM2, Mistral, and Llama 2 and
3.

GGUF files hold q and k with their rows permuted so that rotated pairs are neighbours (interleaved rope);
Hugging Face files hold them in halves.
"""

from bonsai_jax.config import ModelConfig, RopeConfig, yarn_mscale
from bonsai_jax.network import transformer
from bonsai_jax.weights.metadata import nested, positive, whole
from bonsai_jax.weights.specs import Spec

TENSORS = (
    Spec("embed", "token_embd.weight", "model.embed_tokens.weight", ("vocab_size", "hidden")),
    Spec("attn_norm", "blk.{}.attn_norm.weight", "model.layers.{}.input_layernorm.weight", ("hidden",)),
    Spec("wq", "blk.{}.attn_q.weight", "model.layers.{}.self_attn.q_proj.weight", ("q_width", "hidden")),
    Spec("wk", "blk.{}.attn_k.weight", "model.layers.{}.self_attn.k_proj.weight", ("kv_width", "hidden")),
    Spec("wv", "blk.{}.attn_v.weight", "model.layers.{}.self_attn.v_proj.weight", ("kv_width", "hidden")),
    Spec("wo", "blk.{}.attn_output.weight", "model.layers.{}.self_attn.o_proj.weight", ("hidden", "q_width")),
    Spec(
        "ffn_norm", "blk.{}.ffn_norm.weight", "model.layers.{}.post_attention_layernorm.weight", ("hidden",)
    ),
    Spec("w_gate", "blk.{}.ffn_gate.weight", "model.layers.{}.mlp.gate_proj.weight", ("ffn", "hidden")),
    Spec("w_up", "blk.{}.ffn_up.weight", "model.layers.{}.mlp.up_proj.weight", ("ffn", "hidden")),
    Spec("w_down", "blk.{}.ffn_down.weight", "model.layers.{}.mlp.down_proj.weight", ("hidden", "ffn")),
    Spec("final_norm", "output_norm.weight", "model.norm.weight", ("hidden",)),
    Spec("head", "output.weight", "lm_head.weight", ("vocab_size", "hidden"), optional=True),
    Spec("rope_divisors", "rope_freqs.weight", None, ("rope_pairs",), optional=True),
)

forward = transformer.decoder


def config_from_gguf(metadata, tensors, *, interleaved: bool = True) -> ModelConfig:
    arch = metadata["general.architecture"]
    if experts := metadata.get(f"{arch}.expert_count"):
        raise NotImplementedError(f"{arch}.expert_count is {experts}: mixtures of experts are not supported")
    heads, hidden = (
        whole(metadata, f"{arch}.attention.head_count"),
        whole(metadata, f"{arch}.embedding_length"),
    )
    head_dim = whole(metadata, f"{arch}.attention.key_length", hidden // heads)
    for key in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
        if (width := whole(metadata, key, head_dim)) != head_dim:
            raise NotImplementedError(f"{key} is {width}, but only head_dim ({head_dim}) is supported")
    scaling = metadata.get(f"{arch}.rope.scaling.type", "none")
    if scaling not in ("none", "linear", "yarn"):
        raise NotImplementedError(
            f"{arch}.rope.scaling.type is {scaling!r}; supported: none, linear, yarn (llama3 as rope_freqs)"
        )
    # Some files say 0 where nothing is scaled; scale_linear is the key of old ones.
    keys = [f"{arch}.rope.scaling.factor", f"{arch}.rope.scale_linear"]
    factor = next((positive(metadata, key) for key in keys if metadata.get(key)), 1.0)
    context = whole(metadata, f"{arch}.context_length")
    rope = RopeConfig(
        base=positive(metadata, f"{arch}.rope.freq_base", 10000.0),
        interleaved=interleaved,
        scaling=scaling if factor != 1.0 else "none",
        factor=factor,
        original_context=whole(metadata, f"{arch}.rope.scaling.original_context_length", context),
        beta_fast=positive(metadata, f"{arch}.rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=positive(metadata, f"{arch}.rope.scaling.yarn_beta_slow", 1.0),
        mscale=(yarn_mscale(factor) if scaling == "yarn" else 1.0)
        * positive(metadata, f"{arch}.rope.scaling.attn_factor", 1.0),
    )
    return ModelConfig(
        architecture=arch,
        num_layers=whole(metadata, f"{arch}.block_count"),
        hidden=hidden,
        ffn=whole(metadata, f"{arch}.feed_forward_length"),
        num_heads=heads,
        num_kv_heads=whole(metadata, f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=tensors["token_embd.weight"].shape[0],
        context_length=context,
        rms_norm_eps=positive(metadata, f"{arch}.attention.layer_norm_rms_epsilon"),
        rope=rope,
    )


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    heads, hidden = whole(metadata, "num_attention_heads"), whole(metadata, "hidden_size")
    if metadata.get("hidden_act", "silu") != "silu":
        raise NotImplementedError(f"hidden_act is {metadata['hidden_act']!r}; supported: silu")
    context = whole(metadata, "max_position_embeddings")
    # Attention here sees every earlier token; within the window that is what a sliding window sees too.
    if metadata.get("sliding_window") and metadata.get("use_sliding_window", True):
        context = min(context, whole(metadata, "sliding_window"))
    return ModelConfig(
        architecture=metadata["model_type"],
        num_layers=whole(metadata, "num_hidden_layers"),
        hidden=hidden,
        ffn=whole(metadata, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=whole(metadata, "num_key_value_heads", heads),
        head_dim=whole(metadata, "head_dim", hidden // heads),
        vocab_size=tensors["model.embed_tokens.weight"].shape[0],
        context_length=context,
        rms_norm_eps=positive(metadata, "rms_norm_eps"),
        rope=_rope_from_huggingface(metadata),
    )


def _rope_from_huggingface(metadata) -> RopeConfig:
    # The first is transformers 5's name, and holds rope_theta too.
    name = "rope_parameters" if metadata.get("rope_parameters") else "rope_scaling"
    rope = nested(metadata, name)
    base = positive(rope, f"{name}.rope_theta", positive(metadata, "rope_theta", 10000.0))
    scaling = rope.get(f"{name}.rope_type", rope.get(f"{name}.type", "default"))
    if scaling == "default":
        return RopeConfig(base)
    if scaling not in ("linear", "yarn", "llama3"):
        raise NotImplementedError(
            f"{name}.rope_type is {scaling!r}; supported: default, linear, yarn, llama3"
        )
    factor = positive(rope, f"{name}.factor")
    own = whole(metadata, "max_position_embeddings")
    mscale = yarn_mscale(factor) if scaling == "yarn" else 1.0
    return RopeConfig(
        base=base,
        scaling=scaling,
        factor=factor,
        original_context=whole(rope, f"{name}.original_max_position_embeddings", own),
        beta_fast=positive(rope, f"{name}.beta_fast", 32.0),
        beta_slow=positive(rope, f"{name}.beta_slow", 1.0),
        mscale=positive(rope, f"{name}.attention_factor", mscale) if scaling == "yarn" else 1.0,
        low_freq_factor=positive(rope, f"{name}.low_freq_factor", 1.0),
        high_freq_factor=positive(rope, f"{name}.high_freq_factor", 4.0),
    )
