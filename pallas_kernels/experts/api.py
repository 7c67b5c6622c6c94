"""What a layer of experts is made of. Its matrices are stacked [layers, experts, N, K]."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.activations import SILU, Activation
from pallas_kernels.experts.groups import by_expert, each, feed_forward
from pallas_kernels.qtensor import LayerStack, QTensor, leaves


def experts_gated(
    x: Float[Array, "*batch K"],
    gate: QTensor | LayerStack | None,
    up: QTensor | LayerStack,
    chosen: Int[Array, "*batch used"],
    layer: int | Int[Array, ""] | None = None,
    *,
    activation: Activation = SILU,
    biases: tuple[Float[Array, "E N"], Float[Array, "E N"]] | None = None,
) -> Float[Array, "*batch used N"]:
    """The first half of each chosen expert's gated feed-forward (Shazeer 2020).

    y[..., j, :] = activation(W_gate[layer, e] x, W_up[layer, e] x),  e = chosen[..., j]

    x         floating point [..., K]
    gate, up  stacks of N x K with two leading axes, layers and experts; without layer with that of experts.
              A gate of None: y = activation(W_up x, 1)
    chosen    int32 [..., used]; what is no expert's index (-1, or as many as there are) stands for none
    activation  as for `gated`
    biases    of gate and up in this layer, added to the products; None: there are none
    Returns float32, zeros where there is no expert. Matrices that nobody has chosen are not read.
    Derivatives and vmap as for `matmul`, which multiplies (groups.py).
    Raises ValueError where sizes do not fit each other, and for biases without a gate.
    """
    _check("experts_gated", x, (up,) if gate is None else (gate, up), chosen)
    return _hidden(x, gate, up, chosen, layer, activation, biases, zeros=True)


def _hidden(x, gate, up, chosen, layer, activation: Activation, biases, zeros: bool) -> jax.Array:
    """`experts_gated`; zeros: as of `by_expert`."""
    if gate is None:
        if biases is not None:
            raise ValueError("experts: biases are given, and gate is None; biases need a gate")
        return activation(by_expert(x, (up,), chosen, layer, zeros=zeros), 1.0)
    if biases is None:
        return by_expert(x, (gate, up), chosen, layer, activation, zeros)
    products = (by_expert(x, (w,), chosen, layer, zeros=zeros) for w in (gate, up))
    return activation(*(y + _rows(bias, chosen) for y, bias in zip(products, biases, strict=True)))


def experts_matmul(
    x: Float[Array, "*batch used K"],
    w: QTensor | LayerStack,
    chosen: Int[Array, "*batch used"],
    weights: Float[Array, "*batch used"],
    layer: int | Int[Array, ""] | None = None,
    bias: Float[Array, "E N"] | None = None,
) -> Float[Array, "*batch N"]:
    """The second half: a product with each chosen expert's matrix, weighted and summed.

    y = sum_j weights[..., j] (W[layer, e] x[..., j, :] + bias[e]),  e = chosen[..., j]

    bias  of this layer; None: there is none
    Other arguments, derivatives and errors as for `experts_gated`. Returns float32 [..., N].
    """
    _check("experts_matmul", x[..., 0, :], (w,), chosen)
    each = by_expert(x, (w,), chosen, layer)
    if bias is not None:
        each = each + _rows(bias, chosen)
    return jnp.einsum("...j,...jn->...n", weights, each, precision=jax.lax.Precision.HIGHEST)


def experts_ffn(
    x: Float[Array, "*batch K"],
    gate: QTensor | LayerStack | None,
    up: QTensor | LayerStack,
    down: QTensor | LayerStack,
    chosen: Int[Array, "*batch used"],
    weights: Float[Array, "*batch used"],
    layer: int | Int[Array, ""] | None = None,
    *,
    activation: Activation = SILU,
    biases: tuple[Float[Array, "E F"], Float[Array, "E F"], Float[Array, "E N"]] | None = None,
) -> Float[Array, "*batch N"]:
    """Both halves, in one pass for the many rows of a prefill on Hopper.

    hidden = experts_gated(x, gate, up, chosen, layer, activation, biases[:2])
    y = experts_matmul(hidden, down, chosen, weights, layer, biases[2])

    biases  of gate, up and down in this layer; None: there are none
    Other arguments, derivatives and errors as for the two.
    """

    def halves(x, summed, stacks, indices):
        (gate, up, down), (weights, biases), (chosen, index) = stacks, summed, indices
        index = layer if index is None else index
        hidden = _hidden(x, gate, up, chosen, index, activation, biases and biases[:2], zeros=False)
        return experts_matmul(hidden, down, chosen, weights, index, biases and biases[2])

    stacks = gate, up, down
    _check("experts_ffn", x, (up,) if gate is None else (gate, up), chosen)
    if gate is None:
        return halves(x, (weights, biases), stacks, (chosen, layer))
    y = feed_forward(x, stacks, chosen, weights, biases, layer, activation, halves)
    return halves(x, (weights, biases), stacks, (chosen, layer)) if y is None else y


def each_matmul(
    x: Float[Array, "*batch E W"],
    w: QTensor | LayerStack,
    layer: int | Int[Array, ""] | None = None,
) -> Float[Array, "*batch E N"]:
    """A product with each of several matrices, each with an input of its own: those of heads.

    y[..., e, :] = W[layer, e] x[..., e, :K]

    x  floating point [..., E, K or more]: what is more is not read, without a copy where a kernel can
    w  a stack of N x K with two leading axes, layers and matrices; without layer with that of matrices
    Returns float32. Derivatives and vmap as for `matmul`. Raises ValueError where sizes do not fit.
    """
    (part, *_), (n, k) = leaves(w), w.shape
    count = jax.tree.leaves(part.fields)[0].shape[0 if layer is None else 1]
    if x.shape[-2] != count or x.shape[-1] < k:
        raise ValueError(
            f"each_matmul: x is {list(x.shape)} but there are {count} matrices of {n} x {k} (N x K); its "
            f"last axes are {count}, {k} or more"
        )
    return each(x, w, layer)


def _rows(bias: Float[Array, "E N"], chosen: Int[Array, "*batch used"]) -> Float[Array, "*batch used N"]:
    """The bias of each chosen expert, zeros where there is no expert."""
    return bias.at[chosen].get(mode="fill", fill_value=0.0, wrap_negative_indices=False)


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
