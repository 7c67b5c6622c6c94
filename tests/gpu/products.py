"""Products on a GPU against float64: sizes and checks that tests of 1-bit weights and of 2 to 8 bits share.

Kinds: "plain" x W.T, "normed" norm(x) W.T, "added" x W.T + residual,
"gated" silu(norm(x) G.T) * (norm(x) U.T).
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import LayerStack, QTensor, gated, matmul

# (N, K, rows, kind) for every format's kernels of few rows, and of many.
FEW = [
    (64, 256, 1, "plain"),
    (1000, 768, 3, "normed"),  # no whole tiles
    (4096, 2048, 1, "added"),
    (2048, 2560, 8, "gated"),
    (2560, 9728, 2, "added"),
]
MANY = [
    (64, 256, 17, "plain"),
    (1013, 512, 70, "added"),  # as many outputs as no instruction likes
    (4096, 4096, 512, "added"),
    (2560, 2560, 300, "gated"),
    (4096, 4096, 17, "added"),  # columns in splits
    (1013, 12288, 33, "plain"),
    (2560, 2560, 64, "gated"),
]


def expected_product(x, dense: Sequence, kind: str, *, gamma=1.0, eps: float, residual) -> np.ndarray:
    """The definition, in float64: x [rows, K], matrices [N, K], gamma [K], residual [rows, N]."""
    x, dense = np.asarray(x, np.float64), [np.asarray(w, np.float64) for w in dense]
    if kind in ("normed", "gated"):
        x = x * gamma / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    y = [x @ w.T for w in dense]
    if kind == "gated":
        return y[0] / (1 + np.exp(-y[0])) * y[1]
    return y[0] + (residual if kind == "added" else 0)


def by_kernels(
    weights: Sequence[QTensor], layer: int, kind: str, *, gamma, eps: float, residual, known: bool
) -> Callable:
    """x -> the product by what was chosen for these stacks; known: the layer's number is when it is traced,
    else the kernel reads it. gamma: [L, K]."""
    norms = {"gamma": jnp.asarray(gamma), "eps": eps} if kind in ("normed", "gated") else {}
    added = {"residual": jnp.asarray(residual)} if kind == "added" else {}

    def product(x, traced):
        at = layer if known else traced
        if kind != "gated":
            return matmul(x, weights[0], at, **norms, **added)
        where = tuple((0, i) for i in range(len(gamma)))
        return gated(x, *(LayerStack((w,), where) for w in weights), at, **norms)

    run = jax.jit(product)
    return lambda x: run(jnp.asarray(x, jnp.float32), layer)


def check(run: Callable, x, want: np.ndarray, limit: float):
    """Rows may differ by many orders of magnitude; the same bits every time."""
    got, *again = (np.asarray(run(x)) for _ in range(3))
    assert (np.linalg.norm(got - want, axis=1) < limit * np.linalg.norm(want, axis=1)).all()
    for other in again:
        np.testing.assert_array_equal(got, other)
