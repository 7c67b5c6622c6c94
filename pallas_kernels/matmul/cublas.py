"""Products of many rows by XLA's own GEMM (cuBLAS) on weights that are dequantized to float16 before it, a
layer at a time: any format, stacks of several formats, any GPU.

For the time of a call the matrices exist in float16, rows below rows (2 N K bytes): 200 MB for gate and up of
an 8B model. dequantize.py makes them of tiles, XLA of everything else. With tiles the inputs of an activation
leave the GEMM as float16, the rows' scales still apart: half the bytes, and rounded as x was. Sums of |a w|
stay below float16's 65504 where a row's sum of |w| is below 32752.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import device, formats
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.matmul import stacks
from pallas_kernels.matmul.prefill import in_two_phases, scaled_to_half
from pallas_kernels.norm import rms_norm
from pallas_kernels.qtensor import LayerStack, QTensor, Rows, dequantize, leaves
from pallas_kernels.tiles import TILE_ROWS

Weights = Sequence[QTensor | Rows | LayerStack]


def prologue(x: jax.Array, weights: Weights, layer, gamma, eps: float) -> tuple[jax.Array, jax.Array]:
    """(a, s), float16 [M, K] and float32 [M, 1] of `scaled_to_half`."""
    # Without a norm XLA can round x while it makes it, but not what a kernel has made, as SwiGLU's on Hopper.
    made = gamma is not None or device.platform() == "sm_90"
    if made and any(w.tiled for w in leaves(weights)):
        from pallas_kernels.matmul.int_mma.activations_float16 import activations_float16  # only GPUs need it

        gamma, index = stacks.narrowed(*stacks.gamma_stack(gamma, layer))
        a, scale = activations_float16(x, gamma, index, eps)
        return a, scale[:, None]
    gamma = gamma[layer] if gamma is not None and gamma.ndim == 2 else gamma
    return scaled_to_half(x if gamma is None else rms_norm(x, gamma, eps))


def gemm(
    a: jax.Array, scale: jax.Array, weights: Weights, part_layer, residual, activation: Activation = SILU
) -> jax.Array:
    """x W.T + residual, or activation(x G.T, x U.T), of x = s a."""
    out = jnp.float16 if len(weights) == 2 and _by_kernel(weights) else jnp.float32
    y = jnp.einsum("mk,nk->mn", a, to_float16(weights, part_layer), preferred_element_type=out)
    y = y.astype(jnp.float32) * scale
    if len(weights) == 2:
        y = activation(*jnp.split(y, 2, axis=-1))
    return y if residual is None else y + residual


run = run_stacks = in_two_phases(prologue, gemm)


def run_each(x: jax.Array, w: QTensor | LayerStack, layer) -> jax.Array:
    """float32 [M, matrices, N]: of each matrix the product with inputs of its own, x [M, matrices, K]."""
    a, scale = scaled_to_half(x)
    y = jnp.einsum("mek,enk->men", a, each_to_float16(w, layer), preferred_element_type=jnp.float32)
    return y * scale


def each_to_float16(w: QTensor | LayerStack, layer) -> jax.Array:
    """float16 [matrices, N, K], the weights of a layer, each rounded to nearest, of a stack with two leading
    axes, layers and matrices; without layer with that of matrices."""
    n, k = w.shape
    axis = 0 if layer is None else 1

    def below(part: QTensor) -> QTensor:
        """One matrix a layer, rows below rows, in whole tiles."""
        rows = -(-n // TILE_ROWS) * TILE_ROWS if part.tiled else n
        join = lambda field: field.reshape(*field.shape[:axis], -1, *field.shape[axis + 2 :])  # noqa: E731
        count = jax.tree.leaves(part.fields)[0].shape[axis]
        return part.replace(fields=jax.tree.map(join, part.fields), shape=(count * rows, k))

    joined = jax.tree.map(below, w, is_leaf=lambda leaf: isinstance(leaf, QTensor))
    rows = joined.shape[0]
    matrices = jax.tree.leaves(leaves(w)[0].fields)[0].shape[axis]
    return to_float16((joined,), layer).reshape(matrices, rows // matrices, k)[:, :n]


def to_float16(weights: Weights, layer) -> jax.Array:
    """float16 [N of all of them, K], the weights of a layer, each rounded to nearest."""
    if _by_kernel(weights):
        from pallas_kernels.matmul.int_mma import dequantize as int_dequantize  # only GPUs need it

        return int_dequantize.run(weights, layer)

    def one(w: QTensor | Rows | LayerStack, i) -> jax.Array:
        if isinstance(w, LayerStack):
            return w.at(i, one)
        if isinstance(w, Rows):
            return jnp.concatenate([one(piece, i) for piece in w.pieces])
        return dequantize(w if i is None else w[i]).astype(jnp.float16)

    return jnp.concatenate([one(w, layer) for w in weights])


def _by_kernel(weights: Weights) -> bool:
    """Whether dequantize.py makes them; else XLA does, and may make one kernel of that and the GEMM."""
    return all(w.tiled and formats.family(w.format) == "int" for w in leaves(weights))
