"""Values out of a file's metadata, checked: strangers write them.

A key that is absent, or null, has the default; without a default it is a KeyError. What is no such number is
a ValueError with key, value and what is expected.
"""

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

MOST = 2**31 - 1


class Key(str):
    """A key of metadata that adds `name` to `read` when it is looked up.

    A copy of the metadata has the same keys. So a function that copies it, to change a value or to leave one
    out, is noted too, and needs no line for it.
    """

    name: str
    read: set[str]

    def __new__(cls, text: str, name: str, read: set[str]) -> "Key":
        key = super().__new__(cls, text)
        key.name, key.read = name, read
        return key

    def __eq__(self, other: object) -> bool:
        if same := super().__eq__(other) is True:
            self.read.add(self.name)
        return same

    __hash__ = str.__hash__


def whole(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """metadata[key], a whole number from 1 to 2^31 - 1; also written as a float, as some tools do."""
    if (value := _number(metadata, key, default)) != int(value) or not 1 <= value <= MOST:
        raise ValueError(f"{key} is {short(value)}; a whole number from 1 to {MOST} is expected")
    return int(value)


def positive(metadata: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """metadata[key], a number above 0."""
    if (value := _number(metadata, key, default)) <= 0:
        raise ValueError(f"{key} is {value}; a number above 0 is expected")
    return float(value)


def flags(metadata: Mapping[str, Any], key: str, count: int) -> list[bool]:
    """The first `count` values of the list metadata[key], each true or false."""
    values = metadata.get(key)
    if values is None:
        raise KeyError(key)
    values = values.tolist() if isinstance(values, np.ndarray) else values
    if not isinstance(values, list) or len(values) < count or any(v not in (0, 1) for v in values):
        raise ValueError(f"{key} is {short(values)}; a list of {count} values, true or false, is expected")
    return [bool(v) for v in values[:count]]


def counts(metadata: Mapping[str, Any], key: str, count: int) -> list[int]:
    """The first `count` values of the list metadata[key], whole numbers from 0 to 2^31 - 1; a number stands
    for a list of it."""
    values = metadata.get(key)
    if values is None:
        raise KeyError(key)
    values = values.tolist() if isinstance(values, np.ndarray) else values
    values = values if isinstance(values, list) else [values] * count
    whole_numbers = all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= MOST for v in values)
    if len(values) < count or not whole_numbers:
        raise ValueError(f"{key} is {short(values)}; a list of {count} whole numbers from 0 on is expected")
    return values[:count]


def numbers(metadata: Mapping[str, Any], key: str, count: int) -> list[float]:
    """The list metadata[key] of `count` numbers; or one number, `count` times."""
    value = metadata.get(key)
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(value, list) and len(value) != count:
        raise ValueError(f"{key} is {short(value)}; one number or a list of {count} is expected")
    values = value if isinstance(value, list) else [value] * count
    return [float(_number({key: one}, key, None)) for one in values]


def windowed_layers(metadata: Mapping[str, Any], key: str, count: int, every: int) -> list[bool]:
    """Which of `count` layers have a window: the list metadata[key], or all but every n-th; n is
    metadata[key], or `every` where that is absent."""
    value = metadata.get(key)
    if value is not None and not isinstance(value, int | float) and getattr(value, "ndim", 1):
        return flags(metadata, key, count)
    every = whole(metadata, key, every)
    return [number % every < every - 1 for number in range(count)]


def windowed_types(metadata: Mapping[str, Any], count: int, every: int) -> list[bool]:
    """The same from a Hugging Face config: layer_types, or all but every sliding_window_pattern-th."""
    if (types := metadata.get("layer_types")) is None:
        return windowed_layers(metadata, "sliding_window_pattern", count, every)
    known = {"full_attention": False, "sliding_attention": True}
    if not isinstance(types, list) or len(types) != count or not {*types} <= known.keys():
        raise ValueError(f"layer_types: {count} are expected, each one of {', '.join(known)}")
    return [known[kind] for kind in types]


def nested(metadata: Mapping[str, Any], key: str) -> dict[str, Any]:
    """What the object metadata[key] holds, under "key.name"; nothing where there is none."""
    value = metadata.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{key} is {short(value)}; an object is expected")
    return {_inside(key, name): item for name, item in value.items()}


def _inside(key: str, name: str) -> str:
    text = f"{key}.{name}"
    return Key(text, name.name, name.read) if isinstance(name, Key) else text


def _number(metadata: Mapping[str, Any], key: str, default: float | None) -> int | float:
    value = metadata.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise KeyError(key)
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{key} is {short(value)}; a number is expected")
    return value


def short(value: Any) -> str:
    """A value on one line of at most 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."
