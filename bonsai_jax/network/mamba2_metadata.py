"""The settings of Mamba 2 layers, out of a file's metadata."""

from collections.abc import Mapping
from typing import Any

from bonsai_jax.network.kinds.mamba2 import Mamba2
from bonsai_jax.weights.metadata import whole


def mamba2_from_gguf(metadata: Mapping[str, Any]) -> Mamba2:
    """Raises KeyError for a key that is missing and ValueError for sizes that do not fit each other."""
    key = f"{metadata['general.architecture']}.ssm"
    heads, inner = whole(metadata, f"{key}.time_step_rank"), whole(metadata, f"{key}.inner_size")
    if inner % heads:
        raise ValueError(f"{key}.inner_size is {inner}; a multiple of its {heads} heads is expected")
    return Mamba2(
        heads=heads,
        head_dim=inner // heads,
        groups=whole(metadata, f"{key}.group_count"),
        state=whole(metadata, f"{key}.state_size"),
        conv=whole(metadata, f"{key}.conv_kernel"),
    )


def mamba2_from_huggingface(metadata: Mapping[str, Any]) -> Mamba2:
    """From the keys of config.json that begin with "mamba_", as Falcon-H1 and Granite 4.0-H have them. Raises
    as `mamba2_from_gguf`."""
    mamba2 = Mamba2(
        heads=whole(metadata, "mamba_n_heads"),
        head_dim=whole(metadata, "mamba_d_head"),
        groups=whole(metadata, "mamba_n_groups", 1),
        state=whole(metadata, "mamba_d_state"),
        conv=whole(metadata, "mamba_d_conv"),
    )
    if (width := whole(metadata, "mamba_d_ssm", mamba2.inner)) != mamba2.inner:
        raise ValueError(f"mamba_d_ssm is {width}; mamba_n_heads times mamba_d_head is {mamba2.inner}")
    return mamba2
