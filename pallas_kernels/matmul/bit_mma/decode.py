"""What the decode kernels of 1-bit weights (decode_b1.py, decode_s8.py, decode_ring.py) have in
common: how they are called."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.activations import Activation
from pallas_kernels.matmul import stacks
from pallas_kernels.tiles import ROWS

GROUP = 128  # columns that share a scale, of weights and of activations
PAIR_BYTES, SCALE_BYTES = 2 * GROUP * 16 // 8, 2 * 16 * 2  # words and scales of a tile's pair of groups


def run(
    kernel: Callable, x, weights, part_layer, layer, gamma, eps, residual, activation: Activation
) -> jax.Array:
    """A module's `run` (execute.py), for any leading axes and QTensors with or without a layer axis.

    kernel  (x, stacks, layers, **options) -> y
    Returns float32 [*batch, N].
    """
    lead, n = x.shape[:-1], weights[0].shape[0]
    x = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    bits = weights[0].products.activation_bits
    matrices = tuple((w.fields["words"], w.fields["scales"]) for w in weights)
    matrices, index = stacks.whole(matrices, part_layer)
    gamma, norm_index = stacks.whole(*stacks.of_gamma(gamma, layer))
    if residual is not None:
        residual = jnp.pad(residual.reshape(-1, n), ((0, 0), (0, -n % ROWS)))
    gated: dict[str, Any] = {"activation": activation} if len(matrices) == 2 else {}
    y = kernel(
        x,
        matrices,
        # The third keeps XLA from making equal constants by a kernel of their own, a launch a layer.
        jnp.stack([index, norm_index, jnp.int32(-1)]),
        gamma=gamma,
        eps=eps,
        residual=residual,
        activation_bits=bits,
        **gated,
    )
    return y[:, :n].reshape(*lead, n)
