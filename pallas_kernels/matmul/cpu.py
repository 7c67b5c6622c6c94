"""Products with packed weights on a CPU, by vector instructions: of few rows of activations by cpu/rows.py,
of many by cpu/panels.py.

    file bytes -> a QTensor's fields, rows of blocks as they lie, which the reference reads too
    x [M, K] float32 -> norm -> integers of 8 bits, a scale per group of columns (cpu/rounding.py)
    rows of weights, a chunk of columns at a time                                    by all threads
        codes and scales of the chunk (the format's Vectors)
        sums of code * integer, exact, in int32; times both scales, added up in float32
    -> y [M, N], + residual, or activation(gate, up)

    y = sum over groups of  s_w s_x (sum of (code - zero) q_x)  -  minimum s_x (sum of q_x)

An output's sum has one order, in both kernels and whichever thread has it. So its bits depend neither on the
number of threads nor on the rows beside it. With 16 bits of activations they stay float32, and the products
of weights and x are summed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import formats
from pallas_kernels.matmul import stacks
from pallas_kernels.qtensor import QTensor

FEW = 6  # rows of activations up to which weights are multiplied where they are unpacked


def run(
    x: jax.Array, weights: tuple[QTensor, ...], part_layer, layer, gamma, eps, residual, activation
) -> jax.Array:
    from pallas_kernels.cpu import panels, rows  # needs the extra `cpu`

    batch, (n, k) = x.shape[:-1], weights[0].shape
    x = x.reshape(-1, k).astype(jnp.float32)
    if FEW < len(x) <= 2 * FEW and formats.family(weights[0].format) == "bit":
        # To unpack 1 bit a weight twice takes less time than to make a panel of them.
        half = -(-len(x) // 2)
        residuals = [None] * 2 if residual is None else jnp.split(residual.reshape(-1, n), [half])
        halves = zip(jnp.split(x, [half]), residuals, strict=True)
        y = [run(rows, weights, part_layer, layer, gamma, eps, r, activation) for rows, r in halves]
        return jnp.concatenate(y).reshape(*batch, n)
    gamma, gamma_index = stacks.whole(*stacks.gamma_stack(gamma, layer))
    fields, index = stacks.whole(tuple(w.fields for w in weights), part_layer)
    shape = functools.partial(rows.Kernel, rows=len(x)) if len(x) <= FEW else panels.Kernel
    kernel = shape(
        weights[0].format,
        activation=activation if len(weights) == 2 else None,
        bits=weights[0].products.activation_bits,
    )
    switches = np.array([gamma is not None, residual is not None, np.float32(eps).view(np.int32)], np.int32)
    operands = [
        x,
        jnp.stack([index, gamma_index, *switches]),
        x if gamma is None else gamma.astype(jnp.float32),
        x if residual is None else residual.reshape(-1, n).astype(jnp.float32),
        *(field[name] for field in fields for name in kernel.fields),
    ]
    y, _ = jax.ffi.ffi_call(
        kernel.target(),
        (
            jax.ShapeDtypeStruct((len(x), n), jnp.float32),
            jax.ShapeDtypeStruct((kernel.workspace(len(x), k),), jnp.uint8),
        ),
    )(*operands)
    return y.reshape(*batch, n)
