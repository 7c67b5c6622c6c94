"""How a product is carried out: by the kernels that were chosen for its weights at load, with a derivative
and a rule for vmap, which kernels lack."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import formats, selection
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.norm import rms_norm
from pallas_kernels.problems import Matmul
from pallas_kernels.qtensor import LayerStack, QTensor, Rows, leaves
from pallas_kernels.selection import Candidate

# A kernel in Products is the name of a candidate (selection.py), called as problems.Matmul describes. Beside
# `run` it may offer
#
#     rotates(format) -> bool                 whether it rotates inputs itself: weights keep their rotation
#     run_stacks                              `run` for LayerStacks and Rows: it finds a layer's format itself
#     run_below(x, pieces, part_layer, layer, gamma, eps)  matrices rows below rows, in one launch
#     run_and_send(x, w, part_layer, peers)                the product, into mailboxes (all_reduce.py)


def product(
    x, weights: tuple[QTensor | LayerStack, ...], layer, gamma, eps, residual, activation: Activation = SILU
) -> jax.Array:
    """norm(x) W.T + residual for one matrix, activation(norm(x) G.T, norm(x) U.T) for two: float32
    [*batch, N].

    x, layer, gamma, eps, residual   as for api.matmul
    """
    index = None if isinstance(layer, int) else layer  # a known layer stays one: XLA then need not read it

    def by(exact: bool):
        return lambda x, gamma, residual, weights, index: _of_layer(
            exact, x, weights, layer if index is None else index, gamma, eps, residual, activation
        )

    by_kernels = any(kernel != "reference" for w in leaves(weights) for _, kernel in w.products.kernels)
    op = differentiated(_with_rows_of_vmap(by(False)) if by_kernels else by(True), by(True))
    return op(x, gamma, residual, weights, index)


def differentiated(op: Callable[..., Any], exactly: Callable[..., Any]) -> Callable[..., Any]:
    """op(*arrays, weights, indices) with the derivatives of `exactly`, which is called with the same."""
    op = jax.custom_jvp(op)

    @functools.partial(op.defjvp, symbolic_zeros=True)
    def derivative(primals, tangents):
        *primal, indices = primals
        _refuse_integers(primal[-1], tangents[-2])
        varied, tree = jax.tree.flatten(primal)
        flat = jax.tree.leaves(tangents[:-1], is_leaf=_is_zero)
        moving = [i for i, tangent in enumerate(flat) if not _is_zero(tangent)]

        @jax.checkpoint  # dequantized weights are not kept for the backward pass: they would be a dense model
        def exact(values):
            leaves = list(varied)
            for i, value in zip(moving, values, strict=True):
                leaves[i] = value
            return exactly(*jax.tree.unflatten(tree, leaves), indices)

        y = op(*primals)
        if not moving:
            return y, jax.tree.map(jnp.zeros_like, y)
        return y, jax.jvp(exact, ([varied[i] for i in moving],), ([flat[i] for i in moving],))[1]

    return op


def kernel_of(w: QTensor, x: jax.Array) -> Candidate:
    """The kernel that multiplies x, [*batch, K], with a matrix."""
    return selection.get(Matmul, w.products.kernel(x.size // x.shape[-1]))


def _is_zero(tangent) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)


def _refuse_integers(weights, tangents) -> None:
    """Raise TypeError where a derivative is asked for with respect to quantized weights."""
    tangents = iter(jax.tree.leaves(tangents, is_leaf=_is_zero))
    for w in leaves(weights):
        moving = [not _is_zero(next(tangents)) for _ in jax.tree.leaves(w)]
        if any(moving) and formats.get(w.format).WEIGHTS > 1:
            raise TypeError(
                f"matmul: there is no gradient with respect to {w.format} weights, which are integers. "
                "Differentiate with respect to activations (jax.grad of what Taps.edit closes over), to a "
                "dense adapter beside them, or load the model with weights='decoded' (float32)"
            )


def _with_rows_of_vmap(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """f(x, gamma, residual, weights, index) whose vmap over x and residual is f of more rows."""
    f = jax.custom_batching.custom_vmap(f)

    @f.def_vmap
    def rule(size, batched, *arguments):
        x, gamma, residual, weights, index = arguments
        x_batched, residual_batched = batched[0], bool(jax.tree.leaves(batched[2])[:1] == [True])
        if any(jax.tree.leaves((batched[1], *batched[3:]))):
            axes = jax.tree.map(lambda moves: 0 if moves else None, tuple(batched))
            return jax.vmap(jax.custom_batching.sequential_vmap(f), in_axes=axes)(*arguments), True
        if not x_batched:  # residual alone: one product for all of them
            return f(x, gamma, None, weights, index) + residual, True
        if residual is not None and not residual_batched:
            residual = jnp.broadcast_to(residual, (size, *residual.shape))
        return f(x, gamma, residual, weights, index), True

    return f


def _of_layer(
    exact: bool, x, weights: Sequence[QTensor | LayerStack], layer, gamma, eps, residual,
    activation: Activation,
):  # fmt: skip
    """The product with what of the stacks is the layer's; two matrices in one where their formats agree.

    exact  by the reference, whatever was chosen
    """
    rows = x.size // x.shape[-1]
    folded = {w.rotation is not None for w in leaves(weights)}
    kernels = {w.products.kernel(rows) for w in leaves(weights)}
    if not exact and len(folded) == len(kernels) == 1:
        kernel = selection.get(Matmul, kernels.pop())
        if "run_stacks" in kernel.offers:  # a branch of XLA's on the format makes a GPU wait for the host
            x, gamma = rotated_input(x, leaves(weights)[0], layer, gamma, eps, kernel)
            return kernel.module.run_stacks(x, weights, layer, layer, gamma, eps, residual, activation)
    if len(weights) == 1:
        (w,) = weights
        if isinstance(w, QTensor):
            return _run(exact, x, (w,), layer, layer, gamma, eps, residual)
        return w.at(layer, lambda part, i: _part(exact, x, part, i, layer, gamma, eps, residual))
    if (together := same_part(weights[0], weights[1], layer)) is not None:
        pair, i = together
        return _run(exact, x, pair, i, layer, gamma, eps, residual, activation)
    return activation(*(_of_layer(exact, x, (w,), layer, gamma, eps, None, activation) for w in weights))


def rotated_input(
    x: jax.Array, w: QTensor, layer, gamma: jax.Array | None, eps: float, kernel: Candidate
) -> tuple[jax.Array, jax.Array | None]:
    """x [*batch, K] and gamma for the kernel that multiplies; for folded weights norm(x), rotated, float32,
    and no gamma."""
    if w.rotation is None:
        return x, gamma
    x = x.astype(jnp.float32)
    if kernel.pallas:
        from pallas_kernels.matmul import activations_rotated, rotated_columns, stacks  # only GPUs need them

        if rotated_columns.refuses(w.rotation, x.shape[-1]) is None:
            gamma, index = stacks.narrowed(*stacks.gamma_stack(gamma, layer))
            rows = x.reshape(-1, x.shape[-1])
            n = activations_rotated.activations_rotated(rows, w.rotation, gamma, index, eps)
            return n.reshape(x.shape), None
    if gamma is not None:
        x = rms_norm(x, gamma[layer] if gamma.ndim == 2 else gamma, eps)
    return w.rotation(x), None


def _rotates(kernel: Candidate, w: QTensor) -> bool:
    """Whether a kernel rotates its inputs itself."""
    if w.rotation is None or "rotates" not in kernel.offers:
        return False
    if not kernel.module.rotates(w.format):
        return False
    from pallas_kernels.matmul import rotated_columns  # only GPUs need it

    return rotated_columns.refuses(w.rotation, w.shape[1]) is None


def same_part(gate, up, layer) -> tuple[tuple[QTensor, QTensor], int | jax.Array | None] | None:
    """Both matrices and the index into them, if one launch can take them: the same format, at the same
    index."""
    i = layer
    if isinstance(gate, LayerStack) and isinstance(up, LayerStack):
        if gate.where != up.where or not (isinstance(layer, int) or len(gate.parts) == 1):
            return None
        part, i = gate.where[layer] if isinstance(layer, int) else (0, layer)
        gate, up = gate.parts[part], up.parts[part]
    if not (isinstance(gate, QTensor) and isinstance(up, QTensor)):
        return None
    alike = _how(gate) == _how(up)
    return ((gate, up), i) if alike else None


def _how(w: QTensor):
    return w.format, w.tiled, w.products, w.rotation is None


def _part(exact: bool, x, w: QTensor | Rows, part_layer, layer, gamma, eps, residual) -> jax.Array:
    """Product with one part of a stack."""
    if isinstance(w, QTensor):
        return _run(exact, x, (w,), part_layer, layer, gamma, eps, residual)
    # Folded are all pieces or none (plan.py).
    kernel = _reference() if exact else kernel_of(w.pieces[0], x)
    x, gamma = rotated_input(x, w.pieces[0], layer, gamma, eps, kernel)
    w = Rows(tuple(piece.replace(rotation=None) for piece in w.pieces))
    alike = residual is None and all(kernel_of(piece, x) == kernel for piece in w.pieces)
    if alike and "run_below" in kernel.offers:
        return kernel.module.run_below(x, w.pieces, part_layer, layer, gamma, eps)
    y = [_run(exact, x, (piece,), part_layer, layer, gamma, eps, None) for piece in w.pieces]
    y = jnp.concatenate(y, axis=-1)
    return y if residual is None else y + residual


def _run(
    exact: bool, x, weights: tuple[QTensor, ...], part_layer, layer, gamma, eps, residual,
    activation: Activation = SILU,
) -> jax.Array:  # fmt: skip
    kernel = _reference() if exact else kernel_of(weights[0], x)
    if not _rotates(kernel, weights[0]):
        x, gamma = rotated_input(x, weights[0], layer, gamma, eps, kernel)
        weights = tuple(w.replace(rotation=None) for w in weights)
    return kernel(x, weights, part_layer, layer, gamma, eps, residual, activation)


def _reference() -> Candidate:
    return selection.get(Matmul, "reference")
