"""What the matrices of layers are multiplied with: sums of squares by column, for importance matrices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels import LayerStack
from pallas_kernels.qtensor import Watched

COUNTS = ".counts"


def site(kind: str, group: int, array: str) -> str:
    """The name under which the inputs of an array of a group's weights are read."""
    return f"inputs.{kind}.{group}.{array}"


def watched(
    weights: Any, half: Any, group: int, positions: Int[Array, "B T"], read: dict[str, jax.Array]
) -> Any:
    """The weights of a group, whose products put into `read`, under `site`,

        sums    float32 [matrices, K]: sums of squares of the inputs over tokens; one matrix, or each expert
        counts  float32 [matrices]: their number, under the same name with COUNTS

    Padding, at positions below 0, is left out.
    """
    valid = positions >= 0

    def note(array: str):
        def put(x: jax.Array, chosen: jax.Array | None) -> None:
            name = site(half.kind, group, array)
            squares = jnp.square(x.astype(jnp.float32))
            if chosen is None:
                used = jnp.broadcast_to(valid.reshape(valid.shape + (1,) * (x.ndim - 3)), x.shape[:-1])
                sums = jnp.where(used[..., None], squares, 0).reshape(-1, x.shape[-1]).sum(axis=0)
                read[name], read[name + COUNTS] = sums[None], used.sum(dtype=jnp.float32)[None]
                return
            squares = squares if x.ndim == chosen.ndim + 1 else squares[..., None, :]
            squares = jnp.broadcast_to(squares, (*chosen.shape, x.shape[-1]))
            one = (valid[..., None] & (chosen >= 0)).astype(jnp.float32)
            expert = jnp.where(one > 0, chosen, 0)
            sums = jnp.zeros((half.count, x.shape[-1])).at[expert].add(one[..., None] * squares)
            read[name], read[name + COUNTS] = sums, jnp.zeros(half.count).at[expert].add(one)

        return put

    changes: dict[str, Any] = {}
    for field in dataclasses.fields(weights):
        value = getattr(weights, field.name)
        if isinstance(value, LayerStack):
            changes[field.name] = _watch(value, note(field.name))
        elif isinstance(value, tuple) and value and isinstance(value[0], LayerStack):
            # Matrices of one input: the first says what it is.
            changes[field.name] = (_watch(value[0], note(field.name)), *value[1:])
    return weights.replace(**changes)


def _watch(stack: LayerStack, note: Any) -> Watched:
    return Watched(stack.parts, stack.where, note)
