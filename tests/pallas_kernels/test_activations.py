"""Activations against numpy in float64: as arrays, as values of a GPU's lanes in numpy (lockstep), and in
kernels for CPUs and GPUs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    GELU,
    GELU_TANH,
    RELU_SQUARED,
    SILU,
    XIELU,
    Activation,
    Products,
    clamped_swiglu,
    gated,
    swiglu_oai,
)
from pallas_kernels.gpu import memory
from pallas_kernels.gpu.activation_math import FAST, PRECISE
from pallas_kernels.gpu.lanes import thread
from pallas_kernels.matmul.bit_mma import decode_b1, decode_s8
from pallas_kernels.matmul.int_mma import decode as int_decode
from tests.pallas_kernels.lockstep import launched, lockstep
from tests.pallas_kernels.stacks import drawn
from tests.pallas_kernels.test_cpu import error, exact_activations, weights


def silu(x):
    return x / (1 + np.exp(-x))


def swiglu_of_gpt_oss(g, u):
    g, u = np.minimum(g, 7), np.clip(u, -7, 7)
    return g / (1 + np.exp(-1.702 * g)) * (u + 1)


def xielu(x):
    """With alpha_n below beta, so that no x < 0 gives 0: near it few digits would be right."""
    below = 0.3 * (np.expm1(np.minimum(x, -1e-6)) - x)
    return np.where(x > 0, 0.8 * x**2, below) + 0.5 * x


DEFINITIONS = {
    SILU: lambda g, u: silu(g) * u,
    GELU: lambda g, u: g / 2 * np.vectorize(math.erfc)(-g / math.sqrt(2)) * u,
    GELU_TANH: lambda g, u: g / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u,
    RELU_SQUARED: lambda g, u: np.maximum(g, 0) ** 2 * u,
    clamped_swiglu(0.5): lambda g, u: silu(np.minimum(g, 0.5)) * np.clip(u, -0.5, 0.5),
    swiglu_oai(): swiglu_of_gpt_oss,
    Activation(XIELU.formula, (0.8, 0.3, 0.5, -1e-6)): lambda g, u: xielu(g) * u,
}
ACTIVATIONS = pytest.mark.parametrize("activation", DEFINITIONS, ids=str)
OTHERS = pytest.mark.parametrize("activation", [GELU_TANH, clamped_swiglu(0.5)], ids=str)
# Beyond -5 float32's 1 + tanh has few bits, of the oracle's definition too where it is made in float64.
GATES = np.linspace(-5, 11, 128, dtype=np.float32)
UPS = np.linspace(9, -9, 128, dtype=np.float32)


@ACTIVATIONS
def test_formulas_of_arrays(activation):
    got = jax.jit(activation)(GATES, UPS)
    np.testing.assert_allclose(got, DEFINITIONS[activation](np.float64(GATES), UPS), rtol=3e-6)


@pytest.mark.parametrize("functions", [PRECISE, FAST], ids=["precise", "fast"])
@ACTIVATIONS
def test_formulas_of_lanes(activation, functions):
    def body(gates, ups, out):
        g, u = memory.load(gates, thread()), memory.load(ups, thread())
        memory.store(activation(g, u, math=functions), out, thread())

    with lockstep():
        got = launched(body, jax.ShapeDtypeStruct((128,), jnp.float32), [], GATES, UPS)
    np.testing.assert_allclose(got, DEFINITIONS[activation](np.float64(GATES), UPS), rtol=3e-6)


@pytest.mark.parametrize("gate", [-1e30, -200.0, 200.0, 1e18])
@ACTIVATIONS
def test_gates_far_from_zero_are_finite(activation, gate):
    def body(gates, ups, out):
        at = thread()
        memory.store(activation(memory.load(gates, at), memory.load(ups, at), math=FAST), out, at)

    gates, ups = np.full(128, gate, np.float32), np.ones(128, np.float32)
    with np.errstate(all="ignore"):
        want = np.float32(DEFINITIONS[activation](np.float64(gates), np.float64(ups)))
    with lockstep():
        got = launched(body, jax.ShapeDtypeStruct((128,), jnp.float32), [], gates, ups)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(jax.jit(activation)(gates, ups), want, rtol=1e-5, atol=1e-30)


def test_activations_are_static_values():
    """Equal ones are one key of jit; compiled code for CPUs is stored by a text that tells others apart."""
    assert swiglu_oai() == swiglu_oai(7.0) != swiglu_oai(6.0) and hash(SILU) == hash(Activation(SILU.formula))
    assert len({repr(activation) for activation in (*DEFINITIONS, swiglu_oai(7.0000001))}) == 8
    assert str(swiglu_oai()) == "swiglu_oai(7, 1.702)"
    limit = 2.0
    with pytest.raises(ValueError, match="closes over values; pass them as constants"):
        Activation(lambda gate, up, math: math.minimum(gate, limit) * up)


@pytest.mark.parametrize("rows", [2, 9])
@ACTIVATIONS
def test_kernels_of_cpus(activation, rows):
    """Of few rows and of many."""
    rng = np.random.default_rng(rows)
    gate, dense_gate = weights("q4_k", 1, 37, 512)
    up, dense_up = weights("q4_k", 2, 37, 512)
    x = exact_activations(rng, rows, 512) / 16
    got = gated(np.float32(x), gate, up, activation=activation)
    assert error(got, DEFINITIONS[activation](x @ dense_gate.T, x @ dense_up.T)) < 2e-6


@pytest.mark.parametrize(("format", "rows"), [("q4_k", 1), ("q6_k", 3), ("q8_0", 8)])
@OTHERS
def test_decode_of_2_to_8_bits(activation, format, rows):
    gate, up = (drawn(format, (1, 32, 512), seed) for seed in (0, 1))
    x = np.float32(exact_activations(np.random.default_rng(rows), rows, 512))
    with lockstep():
        got = int_decode.int_decode(
            x, ((gate.tiled.fields, up.tiled.fields),), None, formats_of=(format,), activation=activation,
        )  # fmt: skip
    want = DEFINITIONS[activation](*(np.float64(x) @ np.float64(w.dense[0]).T for w in (gate, up)))
    assert error(got, want) < 1e-5


@pytest.mark.parametrize(("kernel", "rows"), [(decode_b1, 1), (decode_s8, 4)])
@OTHERS
def test_decode_of_1_bit(activation, kernel, rows):
    gate, up = (drawn("q1_0", (1, 32, 512), seed) for seed in (0, 1))
    x = np.float32(exact_activations(np.random.default_rng(rows), rows, 512))
    tiled = tuple(w.tiled.replace(products=Products(activation_bits=8)) for w in (gate, up))
    with lockstep():
        got = kernel.run(jnp.asarray(x), tiled, 0, None, None, 0.0, None, activation)
    want = DEFINITIONS[activation](*(np.float64(x) @ np.float64(w.dense[0]).T for w in (gate, up)))
    assert error(got, want) < 1e-5
