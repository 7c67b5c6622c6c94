"""Products with many rows (prefill), on the tensor cores: matmul's candidates for more than MOST_ROWS rows.

    x [M, K] -> norm -> x = s a, s a power of two per row, a float16 in [-2, 2] -> GEMM with float32 sums
                                                             -> s, SwiGLU or residual

Why float16 and not bfloat16: it holds Q1_0's weights (a float16 d) exactly, and 11 bits of an activation
where bfloat16 holds 8; the scale of each row keeps any activation in range. What is lost: activations are
rounded to 2^-12 of themselves (below 2^-15 of the row's largest: to 2^-25 of it), and weights of formats
that multiply two numbers (Q4_K) to 2^-12 of themselves.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.matmul import rms_norm
from pallas_kernels.qtensor import LayerStack, QTensor, Rows, dequantize, leaves


def run(
    x: jax.Array, weights: tuple[QTensor, ...], part_layer, layer, gamma, eps: float, residual
) -> jax.Array:
    """x W.T + residual, or silu(x G.T) * (x U.T), by the candidate chosen for the weights at load.

    x        floating point [*batch, K]; with gamma, rms_norm(x; gamma[layer], eps) in its place
    weights  one matrix, or two; `part_layer` indexes their stack, if they are one
    Returns float32 [*batch, N].
    """
    if any(w.gemm != "mosaic" for w in weights):
        return library(x, weights, part_layer, layer, gamma, eps, residual)
    from pallas_kernels.mosaic import bit_gemm  # only GPUs need it

    lead, n = x.shape[:-1], weights[0].shape[0]
    a, scale = by_half_rows(x, layer, gamma, eps, lane_order=True)
    stacks = [
        w.fields if part_layer is not None else jax.tree.map(lambda f: f[None], w.fields) for w in weights
    ]
    y = bit_gemm.bit_gemm(
        a,
        scale,
        tuple((stack["words"], stack["scales"]) for stack in stacks),
        jnp.asarray(0 if part_layer is None else part_layer, jnp.int32),
        n,
        None if residual is None else residual.reshape(-1, n),
    )
    return y.reshape(*lead, n)


def library(
    x: jax.Array,
    weights: Sequence[QTensor | Rows | LayerStack],
    part_layer,
    layer,
    gamma,
    eps: float,
    residual,
) -> jax.Array:
    """The candidate "library": decode the matrices to float16, and one GEMM of XLA's choice (cuBLAS).

    weights   one matrix, or two for SwiGLU: QTensors, or stacks of layers that `part_layer` indexes
    The rest as for `run`.

    For the time of the call the matrices exist in float16, rows below rows (2 N K bytes): 200 MB for gate and
    up of an 8B model. mosaic/dense.py decodes what is in its layout, XLA everything else. With such weights
    what SwiGLU is made of leaves the GEMM as float16, the rows' scales still apart: half the bytes, and
    rounded as x was. Sums of |a w| stay below float16's 65504 where a row's sum of |w| is below 32752.
    """
    by_kernel = any(w.impl == "mosaic" for w in leaves(weights))
    if by_kernel and gamma is not None:
        a, scale = by_half_rows(x, layer, gamma, eps)
        a, scale = a.reshape(x.shape), scale.reshape(*x.shape[:-1], 1)
    else:  # what has no norm is left to XLA, which rounds it while it makes it
        x = x.astype(jnp.float32)
        gamma = gamma[layer] if gamma is not None and gamma.ndim == 2 else gamma
        a, scale = scaled_to_half(x if gamma is None else rms_norm(x, gamma, eps))
    out = jnp.float16 if by_kernel and len(weights) == 2 else jnp.float32
    y = jnp.einsum("...k,nk->...n", a, decoded(weights, part_layer), preferred_element_type=out)
    y = y.astype(jnp.float32) * scale
    if len(weights) == 2:
        gate, up = jnp.split(y, 2, axis=-1)
        y = jax.nn.silu(gate) * up
    return y if residual is None else y + residual


def decoded(weights: Sequence[QTensor | Rows | LayerStack], layer) -> jax.Array:
    """float16 [N of all of them, K], the weights of a layer, each rounded to nearest."""
    if any(w.impl == "mosaic" for w in leaves(weights)):
        from pallas_kernels.mosaic import dense  # only GPUs need it

        if dense.serves(weights):
            return dense.run(weights, layer)

    def one(w: QTensor | Rows | LayerStack, i) -> jax.Array:
        if isinstance(w, LayerStack):
            return w.at(i, one)
        if isinstance(w, Rows):
            return jnp.concatenate([one(piece, i) for piece in w.pieces])
        return dequantize(w if i is None else w[i]).astype(jnp.float16)

    return jnp.concatenate([one(w, layer) for w in weights])


def by_half_rows(
    x: jax.Array, layer, gamma, eps: float, lane_order: bool = False
) -> tuple[jax.Array, jax.Array]:
    """scaled_to_half of x, or of rms_norm(x; gamma[layer], eps), by mosaic/half_rows.py: of rows [M, K]."""
    from pallas_kernels.mosaic.half_rows import half_rows  # only GPUs need it

    index = None
    if gamma is not None and gamma.ndim == 1:
        gamma = gamma[None]
    elif gamma is not None and isinstance(layer, int):
        gamma = gamma[slice(layer, layer + 1 or None)]  # to XLA an offset
    elif gamma is not None:
        index = layer
    x = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    return half_rows(x, gamma, index, eps, lane_order=lane_order)


def scaled_to_half(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 [*batch, K] -> (a float16 [*batch, K], s float32 [*batch, 1]): x = s a but for a's rounding,
    with s the power of two that brings the largest |a| of a row into [1, 2)."""
    largest = jnp.abs(x).max(axis=-1, keepdims=True)
    exponent = jax.lax.bitcast_convert_type(largest, jnp.int32) & 0x7F800000
    # From 2^-100 on, so that the inverse is a normal number too; rows of zeros stay zeros.
    exponent = jnp.clip(exponent, 27 << 23, 227 << 23)
    scale = jax.lax.bitcast_convert_type(exponent, jnp.float32)
    inverse = jax.lax.bitcast_convert_type((254 << 23) - exponent, jnp.float32)
    return (x * inverse).astype(jnp.float16), scale
