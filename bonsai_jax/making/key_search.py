"""Metadata for an architecture's own reader: of the keys that a converter offers those that the reader asks
for, with the values from which it makes a given model.

    offers      key -> values to try, the usual one first; None: the key is left out
    target      the ModelConfig that the reader shall return

So there is one list of keys for all architectures (gguf_keys.py, folder_keys.py), and no table for each: what
a key means to an architecture, its reader says.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bonsai_jax.config import Layer, ModelConfig
from bonsai_jax.network import kinds
from bonsai_jax.weights import keys
from bonsai_jax.weights.metadata import short

type Offers = Mapping[str, Sequence[Any]]
MOST_TRIES = 4000
CLOSE = 1e-6  # two floats this close are equal: one of them was stored in 32 bits
# Fields that say how a file is written, and nothing about the model.
ASIDE = ("architecture", "skipped", "draft", "divided")


def find(
    offers: Offers, read: Callable[[dict[str, Any]], ModelConfig], target: ModelConfig
) -> tuple[dict[str, Any], set[str]] | str:
    """Values of the keys with which `read` gives the target config, and the keys that it looked up; else a
    sentence about the difference that remains."""
    queue: deque[dict[str, int]] = deque([{}])
    reason = ""
    seen: set[tuple[tuple[str, int], ...]] = {()}
    for _ in range(MOST_TRIES):
        if not queue:
            break
        choice = queue.popleft()
        chosen = {key: values[choice.get(key, 0)] for key, values in offers.items() if values}
        chosen = {key: value for key, value in chosen.items() if value is not None}
        metadata, looked_up = keys.recorded(chosen)
        try:
            differs = difference(target, read(metadata))
        except KeyError as error:
            differs = f"{error.args[0]} is missing"
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            ArithmeticError,
            NotImplementedError,
        ) as e:
            differs = str(e)
        if not differs:
            return chosen, looked_up
        reason = reason or differs
        # Whether a reader looks for a key that is left out cannot be seen.
        left_out = {key for key in offers if key not in chosen}
        for key in sorted((looked_up | left_out) & offers.keys() - choice.keys()):
            for index in range(1, len(offers[key])):
                more = {**choice, key: index}
                if (mark := tuple(sorted(more.items()))) not in seen:
                    seen.add(mark)
                    queue.append(more)
    return reason


def difference(target: Any, got: Any, name: str = "") -> str:
    """Where two configs differ, in words; "" where they are alike."""
    if dataclasses.is_dataclass(target) and type(target) is type(got):
        fields = [field.name for field in dataclasses.fields(target) if field.name not in ASIDE]
        if getattr(target, "original_context", None) == 0:  # of a rope that is not stretched
            fields.remove("original_context")
        pairs = [(_value(target, own), _value(got, own), own) for own in fields]
    elif isinstance(target, tuple) and isinstance(got, tuple) and len(target) == len(got):
        pairs = [(a, b, f"{name} {i}") for i, (a, b) in enumerate(zip(target, got, strict=True))]
    elif isinstance(target, float | int) and isinstance(got, float | int):
        return "" if np.isclose(target, got, rtol=CLOSE, atol=0) else _differs(target, got, name)
    else:
        return "" if target == got else _differs(target, got, name)
    return next((text for a, b, own in pairs if (text := difference(a, b, own))), "")


def _value(settings: Any, name: str) -> Any:
    """Of a field; the usual scale of scores in place of None."""
    value = getattr(settings, name)
    return settings.head_dim**-0.5 if name == "scale" and value is None else value


def _differs(target: Any, got: Any, name: str) -> str:
    return f"{name} is {short(target)}, and would be {short(got)}"


def in_order(config: ModelConfig, like: ModelConfig) -> ModelConfig:
    """The config with rows in the order of another's (kinds, `in_order`)."""

    def half(own: Any, other: Any) -> Any:
        if own is None or other is None or own.kind != other.kind:
            return own
        kind = kinds.get(own.kind)
        return kind.in_order(own, other) if hasattr(kind, "in_order") else own

    def layer(own: Layer, other: Layer) -> Layer:
        mixer, beside = half(own.mixer, other.mixer), half(own.beside, other.beside)
        return dataclasses.replace(own, mixer=mixer, beside=beside)

    if config.num_layers != like.num_layers:
        return config
    layers = zip(config.layers, like.layers, strict=True)
    return dataclasses.replace(config, layers=tuple(layer(*pair) for pair in layers))
