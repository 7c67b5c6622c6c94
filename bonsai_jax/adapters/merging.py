"""An adapter merged into the weights."""

from typing import Any

import jax
import jax.numpy as jnp

from bonsai_jax import arguments
from bonsai_jax.network import kinds
from bonsai_jax.network.adapter import Adapter
from bonsai_jax.network.params import Params
from bonsai_jax.network.schedules import StepPlan
from pallas_kernels import LayerStack, LowRank, QTensor, Rows, dequantize, for_device, formats, quantize
from pallas_kernels.qtensor import tile


def merge(params: Params, adapter: Adapter, format: str | None = None) -> Params:
    """The weights with an adapter merged into them: the same functions then run at the speed without it.

    W' = quantize(dequantize(W) + scale B A)

    format  of the matrices that change: "f32", "bf16" or a packed one that has an encoder, such as "q8_0".
            None: each keeps its own, with its kernels and its schedule; rows without a change stay as they
            are. In another format a decode step is launched product by product
    In "f32" logits are those of the adapter beside the weights but for the order of sums; in other formats
    each weight is rounded to the format. A packed format of few bits loses most of a small change: in Q1_0,
    a sign changes where B A is larger than the weight.
    The adapter in params, if there is one, stays there, and is not merged.
    Raises NotImplementedError for a format without an encoder, and for weights over a mesh.
    """
    arguments.kind("params", params, Params, "model.params")
    arguments.kind("adapter", adapter, Adapter, "what bj.lora or bj.load_adapter returns")
    if params.axis is not None or params.mesh is not None:
        raise NotImplementedError("merge: weights over a mesh; merge on one device, and save a model file")
    layers = dict(params.layers)
    for kind, groups in adapter.layers.items():
        merged = zip(layers[kind], groups, strict=True)
        layers[kind] = tuple(_merged_group(weights, kind, own, format) for weights, own in merged)
    step = params.step if format is None else StepPlan(unrolled=params.step.unrolled)
    return params.replace(layers=layers, step=step)


def _merged_group(weights: Any, kind: str, changes: dict[str, LowRank], format: str | None) -> Any:
    by_array: dict[str, list[LowRank]] = {}
    for name, change in changes.items():
        by_array.setdefault(kinds.get(kind).TENSORS[name].array, []).append(change)
    new = {}
    for array, own in by_array.items():
        value = getattr(weights, array)
        stacks, merged, first = value if isinstance(value, tuple) else (value,), [], 0
        for stack in stacks:
            merged.append(_merged_stack(stack, _rows(own, first, stack.shape), format))
            first += stack.shape[0]
        new[array] = tuple(merged) if isinstance(value, tuple) else merged[0]
    return weights.replace(**new)


def _rows(changes: list[LowRank], first: int, shape: tuple[int, int]) -> list[LowRank]:
    """The changes of a stack whose first row is the array's `first`, with rows counted from it."""
    own = [change for change in changes if first <= change.start < first + shape[0]]
    return [change.replace(start=change.start - first) for change in own]


def _merged_stack(stack: LayerStack, changes: list[LowRank], format: str | None) -> LayerStack:
    if not changes:
        return stack
    parts: list[QTensor | Rows] = []
    for number, part in enumerate(stack.parts):
        layers = [layer for layer, (own, _) in enumerate(stack.where) if own == number]
        layers.sort(key=lambda layer: stack.where[layer][1])
        if isinstance(part, QTensor):
            parts.append(_merged(part, changes, layers, format))
            continue
        pieces, first = [], 0
        for piece in part.pieces:
            pieces.append(_merged(piece, _rows(changes, first, piece.shape), layers, format))
            first += piece.shape[0]
        parts.append(Rows(tuple(pieces)))
    return LayerStack(tuple(parts), stack.where)


def _merged(w: QTensor, changes: list[LowRank], layers: list[int], format: str | None) -> QTensor:
    """The matrices of these layers with their changes, one after another: dense is one at a time.

    Folded rows are stored rotated as their input is, which leaves products as they are.
    """
    plain = w.replace(rotation=None)

    def one(place: tuple[jax.Array, jax.Array]) -> QTensor:
        index, layer = place
        dense = dequantize(plain[index])
        for change in changes:
            rows = change.dense(layer)
            rows = rows if w.rotation is None else w.rotation(rows)
            dense = dense.at[change.start : change.start + len(rows)].add(rows)
        new = quantize(dense, format or w.format)
        if format is not None:
            return for_device(new)
        new = new.replace(fields=jax.tree.map(in_changed_rows, new.fields, _blocks(plain[index])))
        return (tile(new) if w.tiled else new).replace(products=w.products)

    def in_changed_rows(new: jax.Array, old: jax.Array) -> jax.Array:
        changed = jnp.zeros(w.shape[0], bool)
        for change in changes:
            changed = changed.at[change.start : change.start + change.shape[0]].set(True)
        return jnp.where(changed.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    places = jnp.arange(len(layers)), jnp.array(layers)
    merged = jax.jit(lambda places: jax.lax.map(one, places))(places)
    return merged.replace(rotation=w.rotation)


def _blocks(w: QTensor) -> dict[str, jax.Array]:
    """The fields of a matrix's blocks, rows first, also of tiles."""
    return formats.get(w.format).untile(w.fields, w.shape) if w.tiled else w.fields
