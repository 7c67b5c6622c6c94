"""Our pytrees in files: jax.export and flax.serialization can write them and read them."""

import dataclasses
import json
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import serialization


def serializable[T](node: type[T]) -> type[T]:
    """Class decorator of a flax dataclass.

    jax.export    an exported function may take it and return it. Static fields (numbers, texts, None, tuples
                  of them, and frozen dataclasses whose default has their type) are JSON, never pickle
    flax          to_state_dict, to_bytes and their inverses take random keys too, as their words
    """
    static = [f for f in dataclasses.fields(cast(Any, node)) if not f.metadata.get("pytree_node", True)]
    defaults = [field.default for field in static]
    jax.export.register_pytree_node_serialization(
        node,
        serialized_name=f"{node.__module__}.{node.__name__}",
        serialize_auxdata=lambda values: json.dumps(values, default=_plain).encode(),
        deserialize_auxdata=lambda text: tuple(map(_static, json.loads(bytes(text)), defaults)),
    )
    names = [f.name for f in dataclasses.fields(cast(Any, node)) if f not in static]

    def to_state_dict(tree) -> dict[str, Any]:
        values = {name: getattr(tree, name) for name in names}
        values = {name: jax.random.key_data(v) if _is_key(v) else v for name, v in values.items()}
        return serialization.to_state_dict(values)

    def from_state_dict(tree, state: dict[str, Any]):
        values = {name: getattr(tree, name) for name in names}
        keys = {name: jax.random.key_impl(v) for name, v in values.items() if _is_key(v)}
        restored = serialization.from_state_dict(values | dict.fromkeys(keys), state)
        words = {name: jax.random.wrap_key_data(restored[name], impl=impl) for name, impl in keys.items()}
        return tree.replace(**restored | words)

    serialization.register_serialization_state(node, to_state_dict, from_state_dict, override=True)
    return node


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _plain(value: Any) -> dict[str, Any]:
    """What a static field is in JSON, where JSON has no word for it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise NotImplementedError(
        f"jax.export: a {type(value).__name__} cannot be written to a file; export functions of arrays on "
        "one device (a model loaded without a mesh)"
    )


def _static(value: Any, default: Any) -> Any:
    """A static field from its JSON."""
    if isinstance(value, list):
        return tuple(_static(v, None) for v in value)
    if isinstance(value, dict):
        return type(default)(**{name: _static(v, None) for name, v in value.items()})
    return value
