"""Matrix product with quantized weights, with what stands before and after it in a transformer layer."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import formats
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.low_rank import Adapted
from pallas_kernels.matmul.execute import kernel_of, product, rotated_input
from pallas_kernels.norm import centered, rms_norm
from pallas_kernels.qtensor import LayerStack, QTensor, Rows, dequantize, noted
from pallas_kernels.tiles import TILE_ROWS


def matmul(
    x: Float[Array, "*batch K"],
    w: QTensor | LayerStack | Adapted,
    layer: int | Int[Array, ""] | None = None,
    *,
    gamma: Float[Array, "L K"] | Float[Array, "K"] | None = None,
    eps: float = 0.0,
    layer_norm: bool = False,
    residual: Float[Array, "*batch N"] | None = None,
) -> Float[Array, "*batch N"]:
    """Product of activations with the dequantized weights of one matrix.

    y[..., n] = sum_k norm(x)[..., k] W[layer, n, k] + residual[..., n]

    x         floating point [..., K]
    w         QTensor of N x K, or a stack of them (a LayerStack, or a QTensor with a leading layer axis) with
    layer     the index into it, which may be traced: kernels index the stack themselves, nothing is sliced.
              Or a LayerStack with low-rank changes beside it (Adapted), which add scale B (A norm(x)) to y
    gamma     with it, norm is rms_norm with gamma[layer] and eps; without, x itself
    layer_norm  norm is layer_norm, which subtracts the mean first
    residual  without it, 0
    Returns float32 [..., N].
    Raises ValueError where sizes do not fit each other or the format's block, and TypeError for numbers that
    are not floating point.

    Derivatives, forward and reverse, of any order: those of the reference, also where a kernel has computed
    y, and so of exact activations.

    dx = dnorm(x)^T (dy W[layer]),  dresidual = dy,  dW[layer] = dy^T norm(x)

    The last for W in float32, float16 or bfloat16; quantized weights are integers, and to differentiate with
    respect to them raises TypeError. W is dequantized again, one layer at a time; kept from the forward pass
    is x alone. Under vmap over x and residual a kernel gets more rows, in one launch; over weights, layers or
    gamma, one launch each.
    """
    if isinstance(w, Adapted):
        how = {"gamma": gamma, "eps": eps, "layer_norm": layer_norm}
        y = matmul(x, w.base, layer, residual=residual, **how)
        assert layer is not None  # or the product had raised
        x = centered(x.astype(jnp.float32)) if layer_norm else x
        return y + w.change(_normed(x, layer, gamma, eps), layer)
    _check("matmul", x, {"w": w}, layer, gamma, residual)
    x = centered(x.astype(jnp.float32)) if layer_norm else x
    weights = noted((w,), lambda: _normed(x, layer, gamma, eps))
    return product(x, weights, layer, gamma, eps, residual)


def gated(
    x: Float[Array, "*batch K"],
    gate: QTensor | LayerStack | Adapted,
    up: QTensor | LayerStack | Adapted,
    layer: int | Int[Array, ""] | None = None,
    *,
    activation: Activation = SILU,
    gamma: Float[Array, "L K"] | Float[Array, "K"] | None = None,
    eps: float = 0.0,
    layer_norm: bool = False,
) -> Float[Array, "*batch N"]:
    """The first half of a gated feed-forward (Shazeer 2020).

    y = activation(W_gate norm(x), W_up norm(x))

    activation  a value of pallas_kernels.activations; SILU makes it SwiGLU: silu(W_gate n) * (W_up n)
    The other arguments, result, errors and derivatives as for `matmul`; gate and up have the same shape.
    """
    if isinstance(gate, Adapted) or isinstance(up, Adapted):
        how = {"gamma": gamma, "eps": eps, "layer_norm": layer_norm}
        return activation(matmul(x, gate, layer, **how), matmul(x, up, layer, **how))
    _check("gated", x, {"gate": gate, "up": up}, layer, gamma, None)
    x = centered(x.astype(jnp.float32)) if layer_norm else x
    weights = noted((gate, up), lambda: _normed(x, layer, gamma, eps))
    return product(x, weights, layer, gamma, eps, None, activation)


def sent_product(
    x: Float[Array, "*batch K"],
    w: LayerStack,
    layer: int | Int[Array, ""],
    peers: Int[Array, "devices+2 2"],
) -> list[Int[Array, "1"]]:
    """The product with a matrix of which other devices have other columns, on its way to all their mailboxes
    (all_reduce.py): what `all_reduce.receive` wants. By the kernel that makes it, where it can."""
    from pallas_kernels import all_reduce  # only GPUs need it

    if isinstance(layer, int):
        part, i = w.where[layer]
        piece = w.parts[part]
        if isinstance(piece, QTensor) and piece.shape[0] % TILE_ROWS == 0:
            kernel = kernel_of(piece, x)
            if "run_and_send" in kernel.offers:
                x, _ = rotated_input(x, piece, layer, None, 0.0, kernel)
                return kernel.module.run_and_send(x, piece, i, peers)
    return [all_reduce.send(matmul(x, w, layer), peers)]


def _normed(x, layer, gamma, eps) -> jax.Array:
    if gamma is None:
        return x
    return rms_norm(x.astype(jnp.float32), gamma if gamma.ndim == 1 else gamma[layer], eps)


def _check(op: str, x, weights: dict[str, QTensor | LayerStack], layer, gamma, residual) -> None:
    """Raise, in one sentence with the sizes and the remedy, where an argument does not fit."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{op}: x is {x.dtype}; activations are floating point: x.astype(jnp.float32)")
    for name, w in weights.items():
        _check_matrix(op, name, w, layer)
    *_, last = weights.values()
    if len({w.shape for w in weights.values()}) > 1:
        sizes = " and ".join(f"{name} {w.shape[0]} x {w.shape[1]}" for name, w in weights.items())
        raise ValueError(f"{op}: {sizes} (N x K) must have the same shape: they are multiplied one by one")
    rows, columns = last.shape
    if x.ndim == 0 or x.shape[-1] != columns:
        ends = f"ends in {x.shape[-1]}" if x.ndim else "is a scalar"
        raise ValueError(
            f"{op}: x {ends} but the weight is {rows} x {columns} (N x K); give x as [..., {columns}]"
        )
    if gamma is not None:
        if gamma.shape[-1:] != (columns,) or gamma.ndim > 2:
            raise ValueError(
                f"{op}: gamma is {list(gamma.shape)}; the norm of x needs [{columns}] or [layers, {columns}]"
            )
        if gamma.ndim == 2 and layer is None:
            raise ValueError(
                f"{op}: gamma has {gamma.shape[0]} layers; say which by layer, or give one of [{columns}]"
            )
    _check_residual(op, x, last, residual)


def _check_matrix(op: str, name: str, w: QTensor | LayerStack, layer) -> None:
    stacks = isinstance(w, LayerStack)
    for part in w.parts if stacks else (w,):
        for piece in part.pieces if isinstance(part, Rows) else (part,):
            if piece.shape[1] % (block := formats.get(piece.format).WEIGHTS):
                raise ValueError(
                    f"{op}: {name} has {piece.shape[1]} columns, no multiple of the {block} in a block of "
                    f"{piece.format}; pad K to {piece.shape[1] + -piece.shape[1] % block}, or take another "
                    "format"
                )
    layers = len(w.where) if stacks else _layers(w)
    if layers is not None and layer is None:
        raise ValueError(f"{op}: {name} is a stack of {layers} layers; say which by layer")
    if layers is None and layer is not None:
        raise ValueError(f"{op}: {name} is one matrix, so there is no layer {layer} of it; leave layer out")
    if layers is not None and isinstance(layer, int) and not -layers <= layer < layers:
        raise ValueError(f"{op}: layer is {layer}, but {name} has {layers} layers")


def _layers(w: QTensor) -> int | None:
    """Length of a QTensor's layer axis; None without one."""
    fields = tuple((name, field.shape, field.dtype) for name, field in w.fields.items())
    return _layers_of(w.format, w.tiled, w.shape, fields)


@functools.cache
def _layers_of(format: str, tiled: bool, shape: tuple[int, int], fields: tuple) -> int | None:
    stored = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape, dtype in fields}
    one = jax.eval_shape(lambda stored: dequantize(QTensor(stored, format, shape, tiled)), stored)
    return one.shape[0] if one.ndim == 3 else None


def _check_residual(op: str, x, w: QTensor | LayerStack, residual) -> None:
    want = (*x.shape[:-1], w.shape[0])
    if residual is not None and residual.shape != want:
        raise ValueError(f"{op}: residual is {list(residual.shape)}, but the product is {list(want)}")
