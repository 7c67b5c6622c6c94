"""Gemma 4 (E2B, E4B, 26B-A4B, 31B; text only): a Gemma 3 in which layers without a window have wider heads,
fewer KV heads, and a rope that turns some of the pairs.

Values are normed, without weights, and scores are not scaled. Layers without a window may lack W_v. A layer's
output is multiplied by a number. 26B-A4B has experts beside the feed-forward. In E2B and E4B the last layers
read keys and values of earlier ones, and each token has a vector for each layer.

Both kinds of file hold norms as they are multiplied. They may hold W_k and W_v of layers that read another
layer's keys, which are ignored.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from bonsai_jax.config import Layer, ModelConfig
from bonsai_jax.network import experts_metadata, layer_vectors
from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds import tensors
from bonsai_jax.network.kinds.attention import Attention
from bonsai_jax.network.kinds.experts import Experts
from bonsai_jax.network.kinds.layer_output import LayerOutput
from bonsai_jax.network.kinds.mlp import Mlp
from bonsai_jax.network.params import EMBED, FINAL_NORM, HEAD
from bonsai_jax.network.rope import Rope
from bonsai_jax.network.rope_metadata import rope_from_gguf, rope_from_huggingface
from bonsai_jax.weights import specs
from bonsai_jax.weights.metadata import counts, flags, nested, positive, short, whole, windowed_types
from bonsai_jax.weights.specs import Fused, Spec
from pallas_kernels.activations import GELU_TANH

MODELS = "Gemma 4 E2B, E4B, 26B-A4B and 31B"
_NORM = ("ffn_norm.weight", "pre_feedforward_layernorm.weight")


def _experts() -> tuple[Spec, ...]:
    """In Hugging Face folders experts lie beside the feed-forward, gate and up in one tensor."""

    def renamed(spec: Spec) -> Spec:
        if spec.field not in ("gate", "up") or spec.fused is None:
            return dataclasses.replace(spec, fused=None)
        both = Fused(spec.fused.gguf, "model.layers.{}.experts.gate_up_proj", spec.fused.rows)
        return dataclasses.replace(spec, fused=both)

    own = tensors(
        "experts",
        "router_norm", "shared_norm", "shared_post_norm", "chosen_post_norm", "post_norm",
        norm=("pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight"),
        router=("ffn_gate_inp.weight", "router.proj.weight"),
        gate=("ffn_gate_exps.weight", "experts.gate_proj"),
        up=("ffn_up_exps.weight", "experts.up_proj"),
        down=("ffn_down_exps.weight", "experts.down_proj"),
        shared_gate=("ffn_gate.weight", "mlp.gate_proj.weight"),
        shared_up=("ffn_up.weight", "mlp.up_proj.weight"),
        shared_down=("ffn_down.weight", "mlp.down_proj.weight"),
    )  # fmt: skip
    return (*map(renamed, own), *tensors("experts", "down_scale", optional=True))


TENSORS = (
    EMBED,
    *tensors("attention", "norm", "o", "post_norm", "q_norm", "k_norm"),
    *tensors("attention", "q", "k", "v", rows_of=("attn_qkv.weight", None)),
    *tensors("mlp", "gate", "up", "down", "post_norm", norm=_NORM),
    *_experts(),
    *tensors("layer_output", "gate", "proj", "post_norm"),
    *tensors("layer_output", "scale", optional=True),
    *layer_vectors.SPECS,
    FINAL_NORM,
    HEAD,
    dataclasses.replace(llama.ROPE_DIVISORS, optional=False),
)


def config_from_gguf(metadata, tensors) -> ModelConfig:
    arch = metadata["general.architecture"]
    count, key = whole(metadata, f"{arch}.block_count"), f"{arch}.attention"
    heads, head_dim = whole(metadata, f"{key}.head_count"), whole(metadata, f"{key}.key_length")
    local_dim = whole(metadata, f"{key}.key_length_swa", head_dim)
    for name, width in (("value_length", head_dim), ("value_length_swa", local_dim)):
        if (given := whole(metadata, f"{key}.{name}", width)) != width:
            raise NotImplementedError(f"{key}.{name} is {given}; supported: that of keys, {width}")
    base = positive(metadata, f"{arch}.rope.freq_base_swa", 10000.0)
    turned = whole(metadata, f"{arch}.rope.dimension_count_swa", local_dim)
    experts = None
    if experts_metadata.count(metadata, f"{arch}.expert_count"):
        shared = whole(metadata, f"{arch}.feed_forward_length")
        experts = dataclasses.replace(experts_metadata.from_gguf(metadata), shared=shared)

    def has_values(layer: int) -> bool:
        return any(f"blk.{layer}.attn_{name}.weight" in tensors for name in ("v", "qkv"))

    windows = flags(metadata, f"{key}.sliding_window_pattern", count)
    layers = _layers(
        Attention(heads, 1, head_dim, rope_from_gguf(metadata, head_dim, False)),
        Attention(
            heads, 1, local_dim, Rope(base, turned, divided=False),
            window=whole(metadata, f"{key}.sliding_window"),
        ),
        windows,
        counts(metadata, f"{key}.head_count_kv", count),
        [not window and not has_values(layer) for layer, window in enumerate(windows)],
        experts_metadata.count(metadata, f"{key}.shared_kv_layers"),
        [experts or Mlp(ffn) for ffn in counts(metadata, f"{arch}.feed_forward_length", count)],
    )  # fmt: skip
    softcap = f"{arch}.final_logit_softcapping"
    plain = ModelConfig(
        architecture=arch,
        hidden=whole(metadata, f"{arch}.embedding_length"),
        vocab_size=tensors["token_embd.weight"].shape[0],
        context_length=whole(metadata, f"{arch}.context_length"),
        rms_norm_eps=positive(metadata, f"{key}.layer_norm_rms_epsilon"),
        layers=layers,
        logit_softcap=positive(metadata, softcap) if metadata.get(softcap) else None,
        skipped=_unused(layers, ("blk.{}.attn_k.", "blk.{}.attn_v.", "blk.{}.attn_k_norm.")),
    )
    return _scaled(plain, experts_metadata.count(metadata, f"{arch}.embedding_length_per_layer_input"))


def config_from_huggingface(metadata, tensors) -> ModelConfig:
    metadata = {"model_type": metadata["model_type"], **(metadata.get("text_config") or metadata)}
    for key, supported in (
        ("hidden_activation", "gelu_pytorch_tanh"), ("attention_bias", False),
    ):  # fmt: skip
        if (value := metadata.get(key, supported)) != supported:
            raise NotImplementedError(f"{key} is {value!r}; supported: {supported}")
    # "vision": tokens of one image see each other; a text has none.
    if (value := metadata.get("use_bidirectional_attention")) not in (None, False, "vision"):
        raise NotImplementedError(f"use_bidirectional_attention is {value!r}; supported: None and 'vision'")
    count, heads = whole(metadata, "num_hidden_layers"), whole(metadata, "num_attention_heads")
    kv_heads, ffn = whole(metadata, "num_key_value_heads", heads), whole(metadata, "intermediate_size")
    windows = windowed_types(metadata, count, 6)
    metadata = metadata | _layers_without_windows(metadata, windows)
    full_kv_heads = whole(metadata, "num_global_key_value_heads", kv_heads)
    local_dim = whole(metadata, "head_dim", 256)
    head_dim = whole(metadata, "global_head_dim", local_dim)
    ropes = nested(metadata, "rope_parameters")
    full, local = (
        rope_from_huggingface(dict(metadata) | {"rope_parameters": ropes[f"rope_parameters.{kind}"]}, width)
        for kind, width in (("full_attention", head_dim), ("sliding_attention", local_dim))
    )
    without_values = bool(metadata.get("attention_k_eq_v"))
    shared = experts_metadata.count(metadata, "num_kv_shared_layers")
    experts = _experts_from_huggingface(metadata, ffn) if metadata.get("enable_moe_block") else None
    wide = bool(metadata.get("use_double_wide_mlp"))
    layers = _layers(
        Attention(heads, 1, head_dim, full),
        Attention(heads, 1, local_dim, local, window=whole(metadata, "sliding_window")),
        windows,
        [kv_heads if window else full_kv_heads for window in windows],
        [without_values and not window for window in windows],
        shared,
        [experts or Mlp(ffn * (1 + (wide and layer >= count - shared))) for layer in range(count)],
    )
    softcap = "final_logit_softcapping"
    parts = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder.")
    plain = ModelConfig(
        architecture="gemma4",
        hidden=whole(metadata, "hidden_size"),
        vocab_size=specs.text_tensor(tensors, "model.embed_tokens.weight").shape[0],
        context_length=whole(metadata, "max_position_embeddings"),
        rms_norm_eps=positive(metadata, "rms_norm_eps"),
        layers=layers,
        logit_softcap=positive(metadata, softcap) if metadata.get(softcap) else None,
        skipped=(
            *(f"{start}{part}" for start in ("", "model.") for part in parts),
            *_unused(
                layers,
                [
                    f"{start}layers.{{}}.self_attn.{part}."
                    for start in ("model.", *(name for name in specs.MULTIMODAL if name.endswith("model.")))
                    for part in ("k_proj", "v_proj", "k_norm")
                ],
            ),
        ),
    )
    return _scaled(plain, experts_metadata.count(metadata, "hidden_size_per_layer_input"))


def _layers_without_windows(metadata: Mapping[str, Any], windows: Sequence[bool]) -> dict[str, Any]:
    """What transformers 5 writes as per_layer_config, an object for each layer without a window, under the
    keys that it has in other folders."""
    by_layer = nested(metadata, "per_layer_config")
    numbers = [number for number, window in enumerate(windows) if not window]
    if not by_layer:
        return {}
    settings = by_layer.get(f"per_layer_config.{numbers[0]}") if numbers else None
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    alike = dict.fromkeys((f"per_layer_config.{number}" for number in numbers), settings)
    if by_layer != alike or not isinstance(settings, dict) or not {*settings} <= {*names}:
        raise NotImplementedError(
            f"per_layer_config is {short(metadata['per_layer_config'])}; supported: the same "
            f"{', '.join(names)} for all layers without a window, and none for others"
        )
    return {names[str(name)]: value for name, value in settings.items()}


def _experts_from_huggingface(metadata: Mapping[str, Any], ffn: int) -> Experts:
    name = "expert_intermediate_size" if metadata.get("expert_intermediate_size") else "moe_intermediate_size"
    return Experts(
        whole(metadata, "num_experts"), whole(metadata, "top_k_experts"), whole(metadata, name), shared=ffn
    )


def _layers(
    full: Attention,
    windowed: Attention,
    windows: Sequence[bool],
    kv_heads: Sequence[int],
    keys_as_values: Sequence[bool],
    shared: int,
    channels: Sequence[Any],
) -> tuple[Layer, ...]:
    """The layers; kv_heads, keys_as_values, channels: of each. The last `shared` ones read keys and values of
    the last layer before them that has a window, or has none, as they do."""
    own = len(windows) - shared
    if shared and {*windows[own:]} - {*windows[: max(own, 0)]}:
        raise ValueError(f"the last {shared} of {len(windows)} layers share keys of none of the others")
    sources = {window: number for number, window in enumerate(windows[:own])}
    layers = []
    for number, window in enumerate(windows):
        mixer = dataclasses.replace(
            windowed if window else full,
            num_kv_heads=kv_heads[number],
            scale=1.0,
            v_norm=True,
            keys_as_values=keys_as_values[number],
        )
        if number >= own:
            mixer = dataclasses.replace(
                layers[sources[window]].mixer, v_norm=False, keys_as_values=False, reads=sources[window]
            )
        half = dataclasses.replace(channels[number], activation=GELU_TANH)
        layers.append(Layer(mixer, half, output=LayerOutput()))
    return tuple(layers)


def _unused(layers: Sequence[Layer], prefixes: Sequence[str]) -> tuple[str, ...]:
    """Prefixes of tensors that layers which read another's keys do not need, and files may have."""
    readers = [number for number, layer in enumerate(layers) if layer.mixer.reads is not None]
    return tuple(prefix.format(number) for number in readers for prefix in prefixes)


def _scaled(plain: ModelConfig, vector: int) -> ModelConfig:
    """With the scale of the embedding, and so wide a vector of each token for each layer."""
    layers = tuple(dataclasses.replace(layer, output=LayerOutput(vector)) for layer in plain.layers)
    return dataclasses.replace(
        plain, layers=layers, embedding_scale=math.sqrt(plain.hidden), layer_vector=vector
    )
