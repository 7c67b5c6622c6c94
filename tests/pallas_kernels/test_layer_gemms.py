"""What layer_gemms puts between its GEMMs, in numpy (lockstep), with products by numpy: each GEMM gets what
it wants, of formats with groups of 32 and of 16 columns, and attention q, k and v, whatever their formats."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import GELU_TANH, QTensor
from pallas_kernels.matmul.int_mma import prefill_sm90 as int_prefill_sm90
from pallas_kernels.matmul.prologue import Parts
from pallas_kernels.qtensor import LayerStack, Rows
from pallas_kernels.step import layer_gemms
from pallas_kernels.step.inputs import StepInputs
from tests.pallas_kernels.lockstep import lockstep
from tests.pallas_kernels.test_activations import DEFINITIONS
from tests.pallas_kernels.test_gemm import in_group_order

ROWS, HIDDEN, WIDTH, FFN, EPS = 9, 512, 256, 768, 1e-6


def gemm(a, scale, weights, at, residual, activation, summed):
    """As int_prefill_sm90's: columns in two splits, or the activation."""
    assert residual is None and not summed
    a = np.float64(a) * np.asarray(scale, np.float64)[:, None]
    of_each = [
        in_group_order(w.fields["dense"][at], int_prefill_sm90.formats.get(w.format).LANES.group)
        for w in weights
    ]
    if len(of_each) == 2:
        gate, up = (a @ w.T for w in of_each)
        return np.float32(DEFINITIONS[activation](gate, up))[None]
    halves = np.split(np.arange(a.shape[1]), 2)
    return np.stack([np.float32(a[:, half] @ of_each[0][:, half].T) for half in halves])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "qkv",
    [
        [("q4_k", 320)],
        [("q4_k", 256), ("q6_k", 64)],
        [("q6_k", 128), ("q4_k", 128), ("q3_k", 64)],
        [("q4_k", 256), ("q5_k", 64)],
    ],
    ids=str,
)
def test_a_layer_of_mixed_formats_is_its_definition(qkv, bias):
    rng = np.random.default_rng(len(qkv))
    draw: Any = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731

    def stack(*parts, k):
        pieces = tuple(QTensor({"dense": draw(1, n, k) / k**0.5}, f, (n, k)) for f, n in parts)
        return LayerStack(pieces if len(pieces) == 1 else (Rows(pieces),), ((0, 0),))

    def dense(stack):
        return np.concatenate([w.fields["dense"][0] for w, _ in layer_gemms._pieces(stack, 0)])

    weights = [
        *(stack(*qkv, k=HIDDEN), stack(("q4_k", HIDDEN), k=WIDTH)),
        *(stack(("q4_k", FFN), k=HIDDEN) for _ in range(2)),
        stack(("q6_k", HIDDEN), k=FFN),
    ]
    x, attended, gammas, of_bias = (
        draw(3, 16, HIDDEN),
        draw(ROWS, WIDTH),
        1 + draw(2, 1, HIDDEN) / 9,
        draw(1, 320),
    )
    given = []

    def attention(qkv, *_, **__):
        given.extend(qkv)
        return attended, None, None, None

    with (
        lockstep(),
        jax.disable_jit(),
        mock.patch.object(int_prefill_sm90, "gemm", gemm),
        mock.patch.object(layer_gemms, "decode_attention", attention),
    ):
        unused: Any = None  # by this attention
        parts, *_ = layer_gemms.run(
            Parts(x), weights,
            StepInputs(
                *gammas, of_bias if bias else None, None, (unused, unused), unused, unused, unused,
                jnp.zeros(ROWS),
            ),
            unused, layer=0, eps=EPS, interleaved=False, activation=GELU_TANH,
        )  # fmt: skip
        after: Any = np.array(layer_gemms.summed(parts))

    def norm(x, gamma):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * gamma

    x = np.asarray(x, np.float64).sum(0)[:ROWS]
    want = norm(x, gammas[0]) @ dense(weights[0]).T + (of_bias if bias else 0)
    got = np.concatenate([np.sum(y, axis=0)[:ROWS] if y.ndim == 3 else y for y in given], axis=-1)
    np.testing.assert_allclose(got, want, atol=5e-3)
    x = x + attended @ dense(weights[1]).T
    gate, up = (norm(x, gammas[1]) @ dense(w).T for w in weights[2:4])
    hidden = DEFINITIONS[GELU_TANH](gate, up)
    np.testing.assert_allclose(after[:ROWS, :], x + hidden @ dense(weights[4]).T, atol=5e-3)
