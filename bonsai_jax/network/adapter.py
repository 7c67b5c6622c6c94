"""An adapter (LoRA) beside the packed weights of a model: low-rank changes of matrices of its layers.

y = W x + scale B (A x),   A [rank, in], B [out, rank], scale = alpha / rank
"""

from collections.abc import Iterator
from typing import Any

import jax
from flax import struct
from jaxtyping import Array, Int

from bonsai_jax.network import kinds
from pallas_kernels import Adapted, LayerStack, LowRank, serializable


@serializable
class Adapter(struct.PyTreeNode):
    """Low-rank changes of a model's matrices, what training takes gradients of: a pytree of A and B.

    layers  by kind, for each group of its layers (as Params.layers), by the matrix's name: the A of queries,
            layers["attention"][0]["q"].a, is [layers, rank, hidden]. A matrix that has none is missing
    chosen  int32 [B]: where several adapters are stacked in this one, which of them each sequence has; None:
            it is one, or all have the first
    """

    layers: dict[str, tuple[dict[str, LowRank], ...]]
    chosen: Int[Array, "B"] | None = None

    def each(self) -> Iterator[tuple[str, int, str, LowRank]]:
        """(kind, group, name, change) of each matrix that has one."""
        for kind, groups in self.layers.items():
            for group, changes in enumerate(groups):
                for name, change in changes.items():
                    yield kind, group, name, change


def adaptable(kind: str) -> tuple[str, ...]:
    """The matrices of a kind that may have changes beside them."""
    return getattr(kinds.get(kind), "ADAPTED", ())


def refuse_split(axis: str | None) -> None:
    """Raise NotImplementedError where matrices are split over a mesh, along this axis."""
    if axis is not None:
        raise NotImplementedError(
            f'adapters over a mesh with an axis "{axis}", along which matrices are split; supported: one '
            "device, and a mesh of data alone"
        )


def beside(weights: Any, kind: str, group: int, adapter: Adapter) -> Any:
    """The weights of a group (a kind's Weights) with their changes beside them."""
    own = adapter.layers[kind][group] if kind in adapter.layers else {}
    by_array: dict[str, list[LowRank]] = {}
    for name, change in own.items():
        by_array.setdefault(kinds.get(kind).TENSORS[name].array, []).append(change)
    changed = {
        array: _adapted(getattr(weights, array), sorted(changes, key=lambda c: c.start), adapter.chosen)
        for array, changes in by_array.items()
    }
    return weights.replace(**changed)


def _adapted(value: Any, changes: list[LowRank], chosen: jax.Array | None) -> Any:
    """A stack with its changes, or stacks whose products lie side by side."""
    if not isinstance(value, tuple):
        for change in changes:
            _check(change, value)
        return Adapted(value, tuple(changes), chosen)
    stacks: list[LayerStack | Adapted] = []
    first = 0
    for stack in value:
        end = first + stack.shape[0]
        inside = [c.replace(start=c.start - first) for c in changes if first <= c.start < end]
        stacks.append(_adapted(stack, inside, chosen) if inside else stack)
        first = end
    return tuple(stacks)


def _check(change: LowRank, stack: LayerStack) -> None:
    """Raise ValueError for a change that is not of this weight."""
    (n, k), layers = stack.shape, len(stack.where)
    rows, columns = change.shape
    if columns != k or change.start + rows > n or change.a.shape[0] != layers:
        raise ValueError(
            f"adapter: a change of {change.a.shape[0]} layers, {rows} x {columns} (N x K), is beside a "
            f"weight of {layers} layers, {n} x {k}; the adapter is of another model"
        )
