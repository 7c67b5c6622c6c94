"""The norm and the logits of a router in one launch, in numpy (lockstep), against numpy in float64."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import LayerStack, QTensor, device, formats
from pallas_kernels.experts import normed_logits, router_logits
from pallas_kernels.problems import RouterLogits
from pallas_kernels.selection import choose
from tests.pallas_kernels.lockstep import lockstep

CASES = [  # tokens, hidden, experts, format, multiprocessors, whether there are a bias and a row
    (1, 2048, 20, "f32", 9, (False, True)),  # three rows a block, the last has two
    (3, 1028, 5, "bf16", 132, (True, False)),  # columns that are no multiple of the threads'; a row a block
    (16, 64, 33, "f16", 4, (True, True)),
    (2, 36, 2, "f32", 132, (False, False)),
    (19, 256, 11, "f32", 9, (True, True)),  # three groups of tokens, the last of which has five
    (64, 36, 7, "bf16", 5, (False, False)),
]


def layers_of(hidden, count, format, options):
    """(norms, w, bias, row) of three layers, and the values of w in float64."""
    rng = np.random.default_rng(hidden)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    fields = formats.get(format).quantize(jnp.asarray(draw(3, count, hidden, 1)))
    w = QTensor(fields, format, (count, hidden))
    bias, row = (draw(3, n) if given else None for n, given in zip((count, hidden), options, strict=True))
    return 1 + draw(3, hidden) / 4, w, bias, row, np.asarray(fields["w"]).astype(np.float64)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_are_float64_s(case):
    tokens, hidden, count, format, multiprocessors, options = case
    norms, w, bias, row, dense = layers_of(hidden, count, format, options)
    x = 3 * np.random.default_rng(1).standard_normal((tokens, hidden)).astype(np.float32)
    gpu = dataclasses.replace(device.GPUS["sm_90"], multiprocessors=multiprocessors)
    with mock.patch.object(device, "default", lambda: gpu), lockstep():
        got = router_logits.run(x, (norms, bias, row), w, 1, 2, 1e-3)
    wide = x.astype(np.float64)
    n = norms[2] * wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3)
    logits = n @ dense[1].T + (0 if bias is None else bias[2])
    for y, want in zip(got, (n, logits, None if row is None else n @ row[2]), strict=True):
        assert (y is None) == (want is None)
        if want is not None:
            np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_it_is_for_few_tokens_and_float_routers():
    problem = RouterLogits("sm_90", "f32", 256, 2048, "int_decode")
    assert choose(problem, 64) == choose(dataclasses.replace(problem, format="bf16"), 1) == "router_logits"
    assert choose(problem, 65) == "reference"
    for other in ({"kernel": "reference"}, {"format": "q8_0"}, {"mixed": True}, {"hidden": 2050}):
        assert choose(dataclasses.replace(problem, **other)) == "reference"


@pytest.mark.parametrize("known", [True, False])
def test_derivatives_are_those_of_norm_and_product(known):
    """And what the kernel returns has the axes of x."""
    norms, w, bias, row, _ = layers_of(64, 8, "f32", (True, True))
    x = jnp.asarray(np.random.default_rng(2).standard_normal((2, 3, 64)), jnp.float32)
    stack = LayerStack((w,), tuple((0, i) for i in range(3)))

    def loss(x, w, kernel):
        layer = 1 if known else jnp.asarray(1)
        made = normed_logits(x, norms, w, layer, eps=1e-3, kernel=kernel, bias=bias, row=row)
        assert made.logits.shape == (2, 3, 8) and made.row.shape == (2, 3)
        return jnp.sin(made.normed).sum() + jnp.sin(made.logits).sum() + jnp.sin(made.row).sum()

    def by(x, vectors, w, part_layer, layer, eps):
        made = normed_logits(x, vectors[0], LayerStack((w,), stack.where), layer, eps=eps, kernel="reference",
                             bias=vectors[1], row=vectors[2])  # fmt: skip
        return jax.tree.map(jax.lax.stop_gradient, tuple(made))

    of = jax.value_and_grad(loss, argnums=(0, 1))
    gpu = device.GPUS["sm_90"]
    with mock.patch.object(device, "default", lambda: gpu), mock.patch.object(router_logits, "run", by):
        want, want_gradients = of(x, stack, "reference")
        got, gradients = of(x, stack, "int_decode")
    np.testing.assert_allclose(got, want, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), gradients, want_gradients
    )
