"""Experts of a decode step on a GPU in two launches: the choice with gate and up, then down. The shared
expert, which every token uses, is one more of those that a token has chosen.

    chosen    3 7 | E     of one token two of E experts, and the shared one, which has stacks of its own
    tiles     3 | 7 | E   of one row each (int_experts.py)

A shared expert must have the experts' shape and formats in the layer. More tokens read it by products of its
own, once for all of them.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import device, selection
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.experts.groups import by_expert, rows_of_tile
from pallas_kernels.experts.routing import Normed, kernel_routes, route_logits
from pallas_kernels.matmul.api import gated, matmul
from pallas_kernels.matmul.execute import differentiated
from pallas_kernels.problems import Experts
from pallas_kernels.qtensor import LayerStack, QTensor

MOST_TOKENS = 16
MOST_WITH_SHARED = 4  # each reads the shared expert's matrices again, out of the L2


class _Matrix(NamedTuple):
    """A layer's: the experts' stack and the layer's place in it, and the same of the shared one, if there is
    one."""

    experts: QTensor
    at: int
    shared: QTensor | None
    shared_at: int


def can_route(stacks: tuple, shared: tuple | None, layer, tokens: int, used: int, groups: int = 1) -> bool:
    """Whether `routed_ffn` is for so many tokens.

    stacks, shared  gate, up and down: LayerStacks of the experts, [layers, experts, N, K], and of the shared
                    expert, [layers, N, K]; None: there is none. Without a gate: never
    layer           known, or traced: never
    used            of a token, without the shared one
    """
    if tokens > (MOST_TOKENS if shared is None else MOST_WITH_SHARED):
        return False
    if (matrices := _of_layer(stacks, shared, layer)) is None:
        return False
    every = [w for m in matrices for w in (m.experts, m.shared) if w is not None]
    kernel, *others = {w.products.kernel(1) for w in every}
    problem = Experts(device.platform(), kernel, folded=any(w.rotation is not None for w in every))
    if others or selection.choose(problem, tokens) != "int_experts":
        return False
    count = _count(matrices[0])
    if not kernel_routes(count, used, kernel, groups):
        return False
    return rows_of_tile(tokens * (used + (shared is not None)), count) == 1


def _of_layer(stacks: tuple, shared: tuple | None, layer) -> list[_Matrix] | None:
    """Gate, up and down of a layer, None where they differ, or experts and the shared one do."""
    every = (*stacks, *(shared or ()))
    if not isinstance(layer, int) or not all(isinstance(w, LayerStack) for w in every):
        return None
    matrices = []
    for w, s in zip(stacks, shared or (None,) * len(stacks), strict=True):
        (part, at), (shared_part, shared_at) = w.where[layer], (0, 0) if s is None else s.where[layer]
        matrices.append(_Matrix(w.parts[part], at, None if s is None else s.parts[shared_part], shared_at))
    gate, up, _ = matrices
    alike = all(m.shared is None or _how(m.experts) == _how(m.shared) for m in matrices)
    if not alike or _how(gate.experts) != _how(up.experts):
        return None
    return matrices if (gate.at, gate.shared_at) == (up.at, up.shared_at) else None


def _count(matrix: _Matrix) -> int:
    """Of a layer's experts, without the shared one."""
    return jax.tree.leaves(matrix.experts.fields)[0].shape[1]


def _how(w: QTensor):
    return w.format, w.shape, w.tiled, w.products.activation_bits, w.rotation is None


def routed_ffn(
    made: Normed,
    positions: Int[Array, "*batch"],
    stacks: tuple,
    shared: tuple | None,
    layer: Any,
    used: int,
    *,
    biases: Float[Array, "L E"] | None = None,
    activation: Activation = SILU,
    **rules,
) -> Float[Array, "*batch N"]:
    """What a token's experts make of its normed input.

    sum_j weights[..., j] D_e activation(G_e n, U_e n), e = chosen[..., j],
    weights, chosen = route_logits(made.logits, positions, used, bias=biases[layer], **rules)
    + s D activation(G n, U n) with a shared expert, s = sigmoid(made.row), or 1 without a row

    made       n, logits and row (`normed_logits`)
    stacks, shared, layer, used  for which `can_route` holds
    Returns float32; padding has zeros. Derivatives are those of the products one by one. vmap is a launch for
    each entry.
    """

    def by_kernel(n, vectors, matrices, positions):
        layer_matrices = _of_layer(matrices[0], matrices[1], layer)
        assert layer_matrices is not None  # `can_route`
        gate, up, down = layer_matrices
        choice = _choice(_count(down), used, shared is not None, **rules)
        flat = n.reshape(-1, n.shape[-1])
        hidden, weights, chosen = _choose(flat, (gate, up), vectors, layer, positions, choice, activation)
        y = _down(hidden, down, chosen)
        y = jnp.where((chosen.reshape(-1) >= 0)[:, None], y, 0.0).reshape(*chosen.shape, -1)
        return _weighted(weights, y).reshape(*positions.shape, -1)

    def exactly(n, vectors, matrices, positions):
        logits, row, biases = vectors
        (gate, up, down), shared = matrices
        how = {"kernel": "reference", "bias": None if biases is None else biases[layer]}
        weights, chosen = route_logits(logits, positions, used, **how, **rules)
        hidden = by_expert(n, (gate, up), chosen, layer, activation)
        y = _weighted(weights, by_expert(hidden, (down,), chosen, layer))
        if shared is None:
            return y
        factor = jnp.where(positions >= 0, 1.0 if row is None else jax.nn.sigmoid(row), 0.0)
        beside = gated(n, shared[0], shared[1], layer, activation=activation)
        return y + factor[..., None] * matmul(beside, shared[2], layer)

    op = differentiated(jax.custom_batching.sequential_vmap(by_kernel), exactly)
    row = None if shared is None else made.row
    return op(made.normed, (made.logits, row, biases), (stacks, shared), positions)


def _choice(
    count: int, used: int, with_shared: bool, *, normalized: bool,
    gating: Literal["softmax", "sigmoid"] = "softmax", scale: float = 1.0,
    groups: int = 1, groups_used: int = 1,
):  # fmt: skip
    from pallas_kernels.experts.choice import Choice, Experts, Rules  # only GPUs need it

    rules = Rules(gating, scale, groups, groups_used)
    return Choice(Experts(count, used, normalized), rules, with_shared)


def _choose(
    n, matrices: tuple[_Matrix, ...], vectors: tuple, layer: int, positions, choice, activation: Activation
):
    """(hidden [tokens * columns, F], weights, chosen [tokens, columns]), in one launch; vectors: logits, row
    and biases."""
    from pallas_kernels.experts import int_experts  # only GPUs need it
    from pallas_kernels.experts.choice import Logits

    first, count = matrices[0], choice.experts.count
    logits, row, biases = vectors
    given = Logits(
        logits.reshape(-1, count), positions.reshape(-1), biases,
        None if biases is None else jnp.asarray(layer, jnp.int32).reshape(1),
        None if row is None else row.reshape(-1),
    )  # fmt: skip
    return int_experts.run_and_choose(
        n, _flat(matrices), given, choice, first.at * count, activation, _shared(matrices), first.shared_at
    )


def _down(hidden, matrix: _Matrix, chosen):
    """float32 [pairs, N]."""
    pairs, count = chosen.reshape(-1), _count(matrix)
    rows = jnp.asarray(np.arange(pairs.size, dtype=np.int32)[:, None])
    return selection.get(Experts, "int_experts")(
        hidden, _flat((matrix,)), pairs, rows, matrix.at * count, count,
        shared=_shared((matrix,)), shared_at=matrix.shared_at,
    )  # fmt: skip


def _flat(matrices: tuple[_Matrix, ...]) -> tuple[QTensor, ...]:
    """The experts of all layers as one stack."""
    flat = lambda field: field.reshape(-1, *field.shape[2:])  # noqa: E731
    return tuple(m.experts.replace(fields=jax.tree.map(flat, m.experts.fields)) for m in matrices)


def _shared(matrices: tuple[_Matrix, ...]) -> tuple[QTensor, ...] | None:
    shared = tuple(m.shared for m in matrices if m.shared is not None)
    return shared or None


def _weighted(weights, y):
    return jnp.einsum("...j,...jn->...n", weights, y, precision=jax.lax.Precision.HIGHEST)
