"""Ropes whose frequencies a GGUF file has as a tensor: Llama 3's scaling and Gemma 4's proportional rope as
divisors (rope_freqs), longrope as two lists of factors. Its keys say nothing of them; a config.json does.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.rope import Rope, frequencies
from bonsai_jax.weights.specs import Description, Spec
from pallas_kernels import formats

NEVER = 1e30  # divisor of pairs that do not turn, as llama.cpp's converter writes it
FIELDS = ("rope_divisors", "rope_short", "rope_long")  # Spec.field of the tensors
# (low, high) frequency factors and first contexts of models with Llama 3's scaling.
LLAMA3 = [(1.0, 4.0, 2**exponent) for exponent in range(13, 18)] + [(1.0, 4.0, 2**n) for n in range(7, 13)]


def as_gguf(rope: Rope) -> tuple[Rope, dict[str, np.ndarray]]:
    """The rope that a GGUF file's keys describe, and its tensors by field."""
    plain = dataclasses.replace(
        rope, scaling="none", factor=1.0, turned=0, short_factors=(), long_factors=(), original_context=0,
        low_freq_factor=1.0, high_freq_factor=4.0,
    )  # fmt: skip
    if rope.scaling in ("none", "linear"):
        return dataclasses.replace(rope, original_context=0), {}
    if rope.scaling == "llama3":
        base = frequencies(plain).astype(np.float64)
        return plain, {"rope_divisors": (base / frequencies(rope)).astype(np.float32)}
    if rope.scaling == "proportional":
        turns = np.arange(rope.pairs) < rope.turned
        return plain, {"rope_divisors": np.where(turns, 1.0, NEVER).astype(np.float32)}
    if rope.scaling == "longrope":
        factors = {"rope_short": rope.short_factors, "rope_long": rope.long_factors}
        longrope = dataclasses.replace(plain, original_context=rope.original_context)
        return longrope, {name: np.array(values, np.float32) for name, values in factors.items()}
    return rope, {}


def as_folder(rope: Rope, tensors: Mapping[str, np.ndarray], context: int) -> Rope:
    """The rope that config.json describes, of the rope that a GGUF file's keys describe and of its tensors.
    Raises NotImplementedError for divisors that no rule gives."""
    if "rope_long" in tensors and "rope_short" in tensors:
        short, long = (tuple(map(float, tensors[f"rope_{name}"])) for name in ("short", "long"))
        factor = context / rope.original_context
        return dataclasses.replace(
            rope, scaling="longrope", factor=factor, short_factors=short, long_factors=long
        )
    divisors = tensors.get("rope_divisors")
    rope = dataclasses.replace(rope, original_context=0) if rope.scaling in ("none", "linear") else rope
    if divisors is None or not rope.divided or np.all(divisors == 1):
        return rope
    turned = int(np.count_nonzero(divisors == 1))
    if np.all(divisors[turned:] >= NEVER / 2):
        return dataclasses.replace(rope, scaling="proportional", turned=turned)
    for low, high, original in LLAMA3:
        made = dataclasses.replace(
            rope, scaling="llama3", factor=float(round(float(divisors.max()), 4)), low_freq_factor=low,
            high_freq_factor=high, original_context=original,
        )  # fmt: skip
        if np.allclose(as_gguf(made)[1]["rope_divisors"], divisors, rtol=1e-5):
            return made
    raise NotImplementedError(
        f"its rope_freqs ({len(divisors)} divisors, {divisors.min():g} to {divisors.max():g}) are those of "
        "no scaling that a config.json can name; supported: Llama 3's, and Gemma 4's"
    )


def with_ropes(config: ModelConfig, change: Callable[[Rope], Rope]) -> ModelConfig:
    """The config with change(rope) for each rope."""

    def half(settings):
        rope = getattr(settings, "rope", None)
        return settings if rope is None else dataclasses.replace(settings, rope=change(rope))

    return dataclasses.replace(config, layers=tuple(layer.changed(half) for layer in config.layers))


def ropes_as_gguf(
    description: Description, module: ModuleType
) -> tuple[ModelConfig, dict[str, np.ndarray], tuple[str, ...]]:
    """The model with the ropes that a GGUF file's keys describe, the tensors that say the rest by name, and
    what neither can say."""
    config, notes = description.config, set()
    by_field: dict[str, list[np.ndarray]] = {}

    def change(rope: Any) -> Any:
        plain, arrays = as_gguf(rope)
        for field, values in arrays.items():
            by_field.setdefault(field, []).append(values)
        if not rope.truncate:
            notes.add(
                "YaRN's truncate is false in config.json, which a GGUF file cannot say: frequencies differ"
            )
        return dataclasses.replace(plain, truncate=True)

    target = with_ropes(config, change)
    names: dict[str, Spec] = {spec.field: spec for spec in module.TENSORS if spec.field in FIELDS}
    if "rope_divisors" in names and not names["rope_divisors"].optional:
        by_field.setdefault("rope_divisors", [np.ones(config.rope_pairs, np.float32)])
    for field, each in by_field.items():
        if field not in names or any(not np.array_equal(each[0], other) for other in each):
            raise NotImplementedError(
                f"{description.source}: its layers' ropes are stretched in a way that a GGUF file of "
                f"{module.__name__.rpartition('.')[-1]} cannot say"
            )
    return target, {names[field].gguf: each[0] for field, each in by_field.items()}, tuple(sorted(notes))


def check_divided(source: str, config: ModelConfig, after: ModelConfig) -> None:
    """Raise NotImplementedError where a GGUF file's divisors would be meant for other ropes than those of the
    folder that are stretched. config, after: as the folder and as the new file describe the model."""
    mixers = [
        pair
        for one, other in zip(config.layers, after.layers, strict=True)
        for pair in zip(one.mixers, other.mixers, strict=True)
    ]
    ropes = [(a.rope, b.rope) for a, b in mixers if getattr(a, "rope", None) is not None]
    stretched = [bool(as_gguf(rope)[1]) for rope, _ in ropes]
    if any(stretched) and stretched != [rope.divided for _, rope in ropes]:
        raise NotImplementedError(
            f"{source}: some of its layers' ropes are stretched and others not, which a GGUF file of this "
            "architecture cannot say"
        )


def ropes_as_folder(description: Description) -> ModelConfig:
    """The model with the ropes that config.json describes. Raises as `as_folder`."""
    arrays = {
        spec.field: formats.values(t.format, t.data).reshape(-1)
        for spec, t in description.sources
        if spec.field in FIELDS
    }
    context = description.config.context_length
    try:
        return with_ropes(description.config, lambda rope: as_folder(rope, arrays, context))
    except NotImplementedError as error:
        raise NotImplementedError(f"{description.source}: {error}") from error
