"""Matrix products with quantized weights in jnp: the reference, and the path of every device without a
kernel."""

import jax
import jax.numpy as jnp

from pallas_kernels.norm import rms_norm
from pallas_kernels.precision import multiply_precision
from pallas_kernels.qtensor import QTensor, dequantize


def run(
    x: jax.Array, weights: tuple[QTensor, ...], part_layer, layer, gamma, eps, residual, activation
) -> jax.Array:
    """Norm, dequantize, multiply in float32. One matrix, or two for activation(x G.T, x U.T).

    In full precision, unless JAX's own setting says otherwise (precision.py).
    """
    precision = multiply_precision()
    x = x.astype(jnp.float32)
    if gamma is not None:
        x = rms_norm(x, gamma[layer] if gamma.ndim == 2 else gamma, eps)
    dense = [dequantize(w if part_layer is None else w[part_layer]) for w in weights]
    y = [jnp.einsum("...k,nk->...n", x, w, precision=precision) for w in dense]
    out = y[0] if len(y) == 1 else activation(*y)
    return out if residual is None else out + residual
