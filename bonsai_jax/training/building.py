"""Params made of arrays by tensor name, as a load plan says: `weights/read.py` for weights that are on the
device already, and perhaps traced."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from bonsai_jax.weights.read import Fields, no_fields, put
from bonsai_jax.weights.records import LoadPlan, Matrix, Piece, Stack, Vector
from bonsai_jax.weights.specs import Source
from pallas_kernels import LayerStack, QTensor, Rows, formats, packed, qtensor, straight_through

SCALE = ".scale"
Arrays = Mapping[str, jax.Array | np.ndarray]
# Dense weights [*lead, N, K] and their scales [*lead, N, groups], or None -> the matrix of Params.
MakeMatrix = Callable[[jax.Array, jax.Array | None, Matrix], QTensor]


def sources(plan: LoadPlan) -> dict[str, Source]:
    """Every tensor of a plan by its name."""
    return {t.name: t for _, t in plan.description.sources}


def rounded(clip: float | None) -> MakeMatrix:
    """Float matrices with the values of their formats."""

    def matrix(w: jax.Array, scale: jax.Array | None, record: Matrix) -> QTensor:
        format = record.problem.format
        some_values = hasattr(formats.get(format), "LEVELS")
        y = straight_through(w, format, scale, clip=clip if some_values else None)
        return QTensor({"w": y}, "f32", record.shape)

    return matrix


def packed_for_kernels(w: jax.Array, scale: jax.Array | None, record: Matrix) -> QTensor:
    """Blocks, in the layout and with the kernels that the plan has chosen."""
    blocks, products = packed(w, record.problem.format, scale), record.products
    return (qtensor.tile(blocks) if products.tiled else blocks).replace(products=products)


def fields(plan: LoadPlan, weights: Arrays, matrix: MakeMatrix) -> Fields:
    """What `read` returns for the model of a plan."""
    out = no_fields(plan.config)
    for stack in plan.stacks:
        put(out, stack, _stack(stack, weights, matrix))
    for vector in plan.vectors:
        put(out, vector, _vector(vector, weights))
    return out


def _stack(stack: Stack, weights: Arrays, matrix: MakeMatrix) -> LayerStack | QTensor:
    parts: list[QTensor | Rows] = []
    for part in stack.parts:
        pieces = []
        for piece in part:
            scale = _dense(piece, weights, SCALE) if _scaled(piece, weights) else None
            dense = _dense(piece, weights)
            if stack.kind is None:
                return matrix(dense[0], None if scale is None else scale[0], piece.matrix)
            pieces.append(matrix(dense, scale, piece.matrix))
        parts.append(pieces[0] if len(pieces) == 1 else Rows(tuple(pieces)))
    return LayerStack(tuple(parts), stack.where)


def _scaled(piece: Piece, weights: Arrays) -> bool:
    """Whether the scales of its matrices are learnt. Raises ValueError where only some are."""
    given = [t.name + SCALE in weights for t in piece.tensors]
    if any(given) and not all(given):
        names = ", ".join(t.name for t, has in zip(piece.tensors, given, strict=True) if not has)
        raise ValueError(
            f"weights: scales of {names} are missing, which lie in one stack with others that have some; "
            "start from plan.weights(scales=True)"
        )
    return all(given)


def _dense(piece: Piece, weights: Arrays, ending: str = "") -> jax.Array:
    """float32 [layers, *experts, N, K], of each layer its matrices rows below rows."""
    layers = [[weights[t.name + ending] for _, t in layer] for layer in piece.layers]
    return jnp.stack([rows[0] if len(rows) == 1 else jnp.concatenate(rows, -2) for rows in layers])


def _vector(vector: Vector, weights: Arrays) -> jax.Array:
    """float32 [layers, *shape], those of several specs side by side; [*shape] of no layer."""
    values = [
        jnp.stack([weights[t.name].reshape(spec.matched_shape(t.shape)) for t in tensors])
        for spec, tensors in vector.tensors
    ]
    if vector.kind is None:
        return values[0][0]
    return values[0] if len(values) == 1 else jnp.concatenate(values, axis=1)
