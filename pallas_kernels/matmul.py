"""Matrix product with quantized weights."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.qtensor import LayerStack, QTensor, dequantize


def matmul(
    x: Float[Array, "*batch K"], w: QTensor | LayerStack, layer: int | Int[Array, ""] | None = None
) -> Float[Array, "*batch N"]:
    """Product of activations with the decoded weights of one matrix.

    y[..., n] = sum_k x[..., k] W[layer, n, k]

    x      floating point [..., K]
    w      QTensor of N x K, or a stack of them (a LayerStack, or a QTensor with a leading layer axis) with
    layer  the index into it, which may be traced: kernels index the stack themselves, nothing is sliced out
           for them
    Returns float32 [..., N].
    Raises ValueError when x does not end in K.
    """
    if x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"matmul: x ends in {x.shape[-1]} but the weight is {w.shape[0]} x {w.shape[1]} (N x K)"
        )
    if isinstance(w, LayerStack):
        return w.at(layer, lambda part, index: IMPLEMENTATIONS[part.impl](x, part, index))
    return IMPLEMENTATIONS[w.impl](x, w, layer)


def definition(x: jax.Array, w: QTensor, layer) -> jax.Array:
    """The reference, and the path of every device without a kernel: decode the layer, multiply in float32.

    HIGHEST, because a GPU's default for float32 is TF32 with 10 bits of mantissa.
    """
    dense = dequantize(w if layer is None else w[layer])
    return jnp.einsum("...k,nk->...n", x.astype(jnp.float32), dense, precision=jax.lax.Precision.HIGHEST)


IMPLEMENTATIONS = {"xla": definition}
