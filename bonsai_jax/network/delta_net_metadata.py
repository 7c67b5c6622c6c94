"""The settings of gated delta nets, and which layers are such, out of a file's metadata."""

from collections.abc import Mapping
from typing import Any

from bonsai_jax.network.kinds.delta_net import DeltaNet
from bonsai_jax.weights.metadata import flags, whole


def delta_net_from_gguf(metadata: Mapping[str, Any]) -> DeltaNet:
    """Raises KeyError for a key that is missing and ValueError for sizes that do not fit each other."""
    key = f"{metadata['general.architecture']}.ssm"
    v_heads, inner = whole(metadata, f"{key}.time_step_rank"), whole(metadata, f"{key}.inner_size")
    if inner % v_heads:
        raise ValueError(f"{key}.inner_size is {inner}; a multiple of its {v_heads} v heads is expected")
    return DeltaNet(
        k_heads=whole(metadata, f"{key}.group_count"),
        v_heads=v_heads,
        k_dim=whole(metadata, f"{key}.state_size"),
        v_dim=inner // v_heads,
        conv=whole(metadata, f"{key}.conv_kernel"),
    )


def delta_net_from_huggingface(metadata: Mapping[str, Any]) -> DeltaNet:
    """From the keys of config.json that begin with "linear_". Raises as `delta_net_from_gguf`."""
    return DeltaNet(
        k_heads=whole(metadata, "linear_num_key_heads"),
        v_heads=whole(metadata, "linear_num_value_heads"),
        k_dim=whole(metadata, "linear_key_head_dim"),
        v_dim=whole(metadata, "linear_value_head_dim"),
        conv=whole(metadata, "linear_conv_kernel_dim"),
        grouped=True,
    )


def delta_layers_from_gguf(metadata: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Of each layer, whether it is a delta net and not attention."""
    arch = metadata["general.architecture"]
    if metadata.get(f"{arch}.attention.recurrent_layers") is not None:
        return list(flags(metadata, f"{arch}.attention.recurrent_layers", num_layers))
    return _all_but_each(whole(metadata, f"{arch}.full_attention_interval", 4), num_layers)


def delta_layers_from_huggingface(metadata: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Of each layer, whether it is a delta net and not attention. Raises ValueError for a list of other
    names, or of another length."""
    if metadata.get("layer_types") is None:
        return _all_but_each(whole(metadata, "full_attention_interval", 4), num_layers)
    kinds, known = list(metadata["layer_types"]), ("linear_attention", "full_attention")
    if len(kinds) != num_layers or (unknown := set(kinds) - set(known)):
        what = f"{len(kinds)} entries" if len(kinds) != num_layers else f"{unknown.pop()!r} in it"
        raise ValueError(f"layer_types has {what}; {num_layers} are expected, each one of {', '.join(known)}")
    return [kind == "linear_attention" for kind in kinds]


def _all_but_each(interval: int, num_layers: int) -> list[bool]:
    return [(layer + 1) % interval != 0 for layer in range(num_layers)]
