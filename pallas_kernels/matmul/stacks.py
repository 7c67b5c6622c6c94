"""Arrays stacked by layer, and the index into them: what kernels take, because a layer's slice is a copy."""

from typing import Any

import jax
import jax.numpy as jnp


def whole(stack: Any, layer) -> tuple[Any, jax.Array]:
    """(a tree of stacks, the index into them, int32 []). layer: None for arrays without a layer axis."""
    if layer is None:
        return jax.tree.map(lambda a: a[None], stack), jnp.int32(0)
    return stack, jnp.asarray(layer, jnp.int32)


def narrowed(stack: Any, layer) -> tuple[Any, jax.Array | None]:
    """The same, but of a known layer a stack of one, and no index: that slice is an offset to XLA, no copy,
    and no kernel waits to read where its weights are."""
    if layer is None:
        return jax.tree.map(lambda a: a[None], stack), None
    if isinstance(layer, int):
        return jax.tree.map(lambda a: a[slice(layer, layer + 1 or None)], stack), None
    return stack, jnp.asarray(layer, jnp.int32)


def gamma_stack(gamma: jax.Array | None, layer) -> tuple[jax.Array | None, Any]:
    """gamma, [L, K] or [K] or None, as one of the stacks above, and its layer."""
    if gamma is None or gamma.ndim == 1:
        return gamma, None
    return gamma, layer if len(gamma) > 1 else 0
