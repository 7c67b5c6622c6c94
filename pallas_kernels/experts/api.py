"""What a layer of experts is made of. Its matrices are stacked [layers, experts, N, K]."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.activations import SILU, Activation
from pallas_kernels.experts.groups import by_expert, feed_forward
from pallas_kernels.qtensor import LayerStack, QTensor, leaves


def route(
    probabilities: Float[Array, "*batch E"], used: int, *, normalized: bool
) -> tuple[Float[Array, "*batch used"], Int[Array, "*batch used"]]:
    """The experts of each token, and what the output of each is multiplied with.

    weights, chosen = the `used` largest of p;  weights / sum(weights) where `normalized`

    probabilities  floating point, of every expert
    Returns float32 weights, the largest first, and int32 indices of experts. Of equal ones the lower index
    comes first. A sum below 2^-14 is taken for that, as in llama.cpp.
    """
    weights, chosen = jax.lax.top_k(probabilities.astype(jnp.float32), used)
    if normalized:
        weights = weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), 2.0**-14)
    return weights, chosen.astype(jnp.int32)


def experts_gated(
    x: Float[Array, "*batch K"],
    gate: QTensor | LayerStack,
    up: QTensor | LayerStack,
    chosen: Int[Array, "*batch used"],
    layer: int | Int[Array, ""] | None = None,
    *,
    activation: Activation = SILU,
) -> Float[Array, "*batch used N"]:
    """The first half of each chosen expert's gated feed-forward (Shazeer 2020).

    y[..., j, :] = activation(W_gate[layer, e] x, W_up[layer, e] x),  e = chosen[..., j]

    x         floating point [..., K]
    gate, up  stacks of N x K with two leading axes, layers and experts; without layer with that of experts
    chosen    int32 [..., used]; what is no expert's index (-1, or as many as there are) stands for none
    activation  as for `gated`
    Returns float32, zeros where there is no expert. Matrices that nobody has chosen are not read.
    Derivatives and vmap as for `matmul`, which multiplies (groups.py).
    Raises ValueError where sizes do not fit each other.
    """
    _check("experts_gated", x, (gate, up), chosen)
    return by_expert(x, (gate, up), chosen, layer, activation)


def experts_matmul(
    x: Float[Array, "*batch used K"],
    w: QTensor | LayerStack,
    chosen: Int[Array, "*batch used"],
    weights: Float[Array, "*batch used"],
    layer: int | Int[Array, ""] | None = None,
) -> Float[Array, "*batch N"]:
    """The second half: a product with each chosen expert's matrix, weighted and summed.

    y = sum_j weights[..., j] W[layer, chosen[..., j]] x[..., j, :]

    Arguments, derivatives and errors as for `experts_gated`. Returns float32 [..., N].
    """
    _check("experts_matmul", x[..., 0, :], (w,), chosen)
    each = by_expert(x, (w,), chosen, layer)
    return jnp.einsum("...j,...jn->...n", weights, each, precision=jax.lax.Precision.HIGHEST)


def experts_ffn(
    x: Float[Array, "*batch K"],
    gate: QTensor | LayerStack,
    up: QTensor | LayerStack,
    down: QTensor | LayerStack,
    chosen: Int[Array, "*batch used"],
    weights: Float[Array, "*batch used"],
    layer: int | Int[Array, ""] | None = None,
    *,
    activation: Activation = SILU,
) -> Float[Array, "*batch N"]:
    """Both halves, in one pass for the many rows of a prefill on Hopper.

    y = experts_matmul(experts_gated(x, gate, up, chosen, layer, activation), down, chosen, weights, layer)

    Arguments, derivatives and errors as for the two.
    """
    _check("experts_ffn", x, (gate, up), chosen)

    def halves(x, weights, stacks, indices):
        gate, up, down = stacks
        chosen, index = indices
        index = layer if index is None else index
        hidden = experts_gated(x, gate, up, chosen, index, activation=activation)
        return experts_matmul(hidden, down, chosen, weights, index)

    stacks = gate, up, down
    y = feed_forward(x, stacks, chosen, weights, layer, activation, halves)
    return halves(x, weights, stacks, (chosen, layer)) if y is None else y


def _check(op: str, x, weights: tuple[QTensor | LayerStack, ...], chosen) -> None:
    n, k = weights[0].shape
    if len({w.shape for w in leaves(weights)}) > 1:
        sizes = " and ".join(f"{w.shape[0]} x {w.shape[1]}" for w in leaves(weights))
        raise ValueError(f"{op}: {sizes} (N x K) must have the same shape: they are multiplied one by one")
    if x.shape[-1:] != (k,):
        raise ValueError(f"{op}: x is {list(x.shape)} but experts are {n} x {k} (N x K); its last axis is K")
    if chosen.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"{op}: chosen is {list(chosen.shape)}, x {list(x.shape)}; both need the same axes ahead of "
            "their last"
        )
