"""A model's rope, from the metadata of its file."""

from collections.abc import Mapping
from typing import Any

from bonsai_jax.network.rope import Rope, longrope_mscale, yarn_mscale
from bonsai_jax.weights.metadata import nested, numbers, positive, whole


def rope_from_gguf(metadata: Mapping[str, Any], head_dim: int, interleaved: bool) -> Rope:
    """From the keys of a GGUF file that begin with "<architecture>.rope."."""
    arch = metadata["general.architecture"]
    # Old files have a factor without a type; it is linear, as in llama.cpp.
    scaling = metadata.get(f"{arch}.rope.scaling.type", "linear")
    # Some files say 0 where nothing is scaled; scale_linear is the key of old ones.
    keys = [f"{arch}.rope.scaling.factor", f"{arch}.rope.scale_linear"]
    factor, *_ = [*(positive(metadata, key) for key in keys if metadata.get(key)), 1.0]
    if scaling not in ("none", "linear", "yarn") and (scaling, factor) != ("longrope", 1.0):
        raise NotImplementedError(
            f"{arch}.rope.scaling.type is {scaling!r}; supported: none, linear, yarn (llama3 as rope_freqs, "
            "longrope as rope_factors_short and rope_factors_long)"
        )
    mscale = yarn_mscale(factor) if scaling == "yarn" else 1.0
    return Rope(
        base=positive(metadata, f"{arch}.rope.freq_base", 10000.0),
        dim=whole(metadata, f"{arch}.rope.dimension_count", head_dim),
        interleaved=interleaved,
        scaling=scaling if factor != 1.0 else "none",
        factor=factor,
        original_context=whole(
            metadata,
            f"{arch}.rope.scaling.original_context_length",
            whole(metadata, f"{arch}.context_length"),
        ),
        beta_fast=positive(metadata, f"{arch}.rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=positive(metadata, f"{arch}.rope.scaling.yarn_beta_slow", 1.0),
        mscale=mscale * positive(metadata, f"{arch}.rope.scaling.attn_factor", 1.0),
    )


def rope_from_huggingface(metadata: Mapping[str, Any], head_dim: int) -> Rope:
    """From config.json: rope_theta, rope_scaling or rope_parameters, partial_rotary_factor."""
    # The first is transformers 5's name, and holds rope_theta too.
    name = "rope_parameters" if metadata.get("rope_parameters") else "rope_scaling"
    rope = nested(metadata, name)

    def number(key: str, default: float | None = None) -> float:
        """Of the rope's own object, or beside it."""
        return positive(rope, f"{name}.{key}", positive(metadata, key, default))

    base = number("rope_theta", 10000.0)
    if (part := number("partial_rotary_factor", 1.0)) > 1:
        raise ValueError(f"partial_rotary_factor is {part}; at most 1 is expected")
    dim = int(head_dim * part)
    scaling = rope.get(f"{name}.rope_type", rope.get(f"{name}.type", "default"))
    scaling = {"su": "longrope"}.get(scaling, scaling)
    if scaling == "default":
        return Rope(base, dim)
    if scaling == "proportional":  # pairs are those of the whole head
        return Rope(base, head_dim, scaling=scaling, turned=int(head_dim * part / 2))
    if scaling not in ("linear", "yarn", "llama3", "longrope"):
        raise NotImplementedError(
            f"{name}.rope_type is {scaling!r}; supported: default, linear, yarn, llama3, longrope, "
            "proportional"
        )
    own = whole(metadata, "max_position_embeddings")
    key = "original_max_position_embeddings"
    original = whole(rope, f"{name}.{key}", whole(metadata, key, own))
    factor = own / original if scaling == "longrope" else positive(rope, f"{name}.factor")
    mscale = {"yarn": yarn_mscale(factor), "longrope": longrope_mscale(factor, original)}.get(scaling, 1.0)
    if scaling == "yarn" and rope.get(f"{name}.mscale") and rope.get(f"{name}.mscale_all_dim"):
        wide, narrow = (positive(rope, f"{name}.{key}") for key in ("mscale", "mscale_all_dim"))
        mscale = yarn_mscale(factor, wide) / yarn_mscale(factor, narrow)
    is_long = scaling == "longrope"
    return Rope(
        base=base,
        dim=dim,
        scaling=scaling,
        factor=factor,
        original_context=original,
        beta_fast=positive(rope, f"{name}.beta_fast", 32.0),
        beta_slow=positive(rope, f"{name}.beta_slow", 1.0),
        mscale=positive(rope, f"{name}.attention_factor", mscale) if scaling in ("yarn", "longrope") else 1.0,
        truncate=bool(rope.get(f"{name}.truncate", True)),
        low_freq_factor=positive(rope, f"{name}.low_freq_factor", 1.0),
        high_freq_factor=positive(rope, f"{name}.high_freq_factor", 4.0),
        short_factors=tuple(numbers(rope, f"{name}.short_factor", dim // 2)) if is_long else (),
        long_factors=tuple(numbers(rope, f"{name}.long_factor", dim // 2)) if is_long else (),
    )
