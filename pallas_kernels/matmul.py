"""Matrix product with quantized weights, with what stands before and behind it in a transformer layer."""

import importlib
from collections.abc import Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.qtensor import LayerStack, QTensor, Rows, dequantize


def rms_norm(x: Float[Array, "*batch H"], gamma: Float[Array, "H"], eps: float) -> Float[Array, "*batch H"]:
    """Root-mean-square norm (Zhang and Sennrich 2019).

    y = gamma * x / sqrt(mean(x^2) + eps)
    """
    return gamma * (x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps))


def matmul(
    x: Float[Array, "*batch K"],
    w: QTensor | LayerStack,
    layer: int | Int[Array, ""] | None = None,
    *,
    gamma: Float[Array, "L K"] | Float[Array, "K"] | None = None,
    eps: float = 0.0,
    residual: Float[Array, "*batch N"] | None = None,
) -> Float[Array, "*batch N"]:
    """Product of activations with the decoded weights of one matrix.

    y[..., n] = sum_k norm(x)[..., k] W[layer, n, k] + residual[..., n]

    x         floating point [..., K]
    w         QTensor of N x K, or a stack of them (a LayerStack, or a QTensor with a leading layer axis) with
    layer     the index into it, which may be traced: kernels index the stack themselves, nothing is sliced
    gamma     with it, norm is rms_norm with gamma[layer] and eps; without, x itself
    residual  without it, 0
    Returns float32 [..., N].
    Raises ValueError when x does not end in K.
    """
    _check(x, w)
    if isinstance(w, LayerStack):
        return w.at(layer, lambda part, i: _part(x, part, i, layer, gamma, eps, residual))
    return _run(x, (w,), layer, layer, gamma, eps, residual)


def gated(
    x: Float[Array, "*batch K"],
    gate: LayerStack,
    up: LayerStack,
    layer: int | Int[Array, ""],
    *,
    gamma: Float[Array, "L K"],
    eps: float,
) -> Float[Array, "*batch N"]:
    """The first half of a SwiGLU feed-forward (Shazeer 2020).

    y = silu(W_gate n) * (W_up n),  n = rms_norm(x; gamma[layer], eps)

    Arguments, result and errors as for `matmul`.
    """
    _check(x, gate)
    _check(x, up)
    if gate.where == up.where and (isinstance(layer, int) or len(gate.parts) == 1):
        part, i = gate.where[layer] if isinstance(layer, int) else (0, layer)
        g, u = gate.parts[part], up.parts[part]
        if isinstance(g, QTensor) and isinstance(u, QTensor) and g.format == u.format:
            return _run(x, (g, u), i, layer, gamma, eps, None)
    g, u = (matmul(x, w, layer, gamma=gamma, eps=eps) for w in (gate, up))
    return jax.nn.silu(g) * u


def definition(x: jax.Array, weights: tuple[QTensor, ...], layer, gamma, eps, residual) -> jax.Array:
    """The reference, and the path of every device without a kernel: norm, decode, multiply in float32.

    One matrix, or two for silu(x G.T) * (x U.T). HIGHEST, because a GPU's default for float32 is TF32 with 10
    bits of mantissa.
    """
    x = x.astype(jnp.float32)
    if gamma is not None:
        x = rms_norm(x, gamma, eps)
    dense = [dequantize(w if layer is None else w[layer]) for w in weights]
    y = [jnp.einsum("...k,nk->...n", x, w, precision=jax.lax.Precision.HIGHEST) for w in dense]
    out = y[0] if len(y) == 1 else jax.nn.silu(y[0]) * y[1]
    return out if residual is None else out + residual


def _part(x, w: QTensor | Rows, part_layer, layer, gamma, eps, residual) -> jax.Array:
    """Product with one part of a stack."""
    if isinstance(w, QTensor):
        return _run(x, (w,), part_layer, layer, gamma, eps, residual)
    if residual is None and all(_kernel((piece,), x) == "int_gemv" for piece in w.pieces):
        return _module("int_gemv").run_below(x, w.pieces, part_layer, layer, gamma, eps)
    y = [_run(x, (piece,), part_layer, layer, gamma, eps, None) for piece in w.pieces]
    y = jnp.concatenate(y, axis=-1)
    return y if residual is None else y + residual


def _run(x, weights, part_layer, layer, gamma, eps, residual) -> jax.Array:
    """`part_layer` indexes the weights, `layer` the norm: they differ where a file mixes formats."""
    if kernel := _kernel(weights, x):
        return _module(kernel).run(x, weights, part_layer, layer, gamma, eps, residual)
    gamma = gamma[layer] if gamma is not None and gamma.ndim == 2 else gamma
    if all(w.gemm != "xla" for w in weights) and x.size // x.shape[-1] > min(dispatch.MOST_ROWS.values()):
        from pallas_kernels import gemm  # only GPUs need it

        x = x.astype(jnp.float32)
        return gemm.run(x if gamma is None else rms_norm(x, gamma, eps), weights, part_layer, residual)
    return definition(x, weights, part_layer, gamma, eps, residual)


def _kernel(weights: Sequence[QTensor], x: jax.Array) -> str | None:
    """The kernel that takes these weights and so many rows; None for the definition."""
    if any(w.impl != "mosaic" for w in weights):
        return None
    kernel = dispatch.KERNELS[weights[0].format]
    return kernel if x.size // x.shape[-1] <= dispatch.MOST_ROWS[kernel] else None


def _module(kernel: str) -> ModuleType:
    return importlib.import_module(f"pallas_kernels.mosaic.{kernel}")  # here: only GPUs need it


def _check(x: jax.Array, w: QTensor | LayerStack) -> None:
    if x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"matmul: x ends in {x.shape[-1]} but the weight is {w.shape[0]} x {w.shape[1]} (N x K)"
        )
