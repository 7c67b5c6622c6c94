"""Activations of a gated feed-forward, as values that kernels close over.

    hidden = activation(gate, up, math=math)

Each is one formula, written once. `math` supplies the functions that numbers have no operator for: ARRAYS for
arrays (the reference), gpu/activation_math.py for the values of a GPU kernel, cpu/activations.py for the
vectors of a CPU kernel. A value is static under jit: kernels with another activation are other kernels.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Math(NamedTuple):
    """What formulas ask of a kind of numbers besides + - and *. Constants are Python numbers.

    minimum, maximum  (x, constant) -> the smaller, the larger
    times_sigmoid     (x, z) -> x / (1 + exp(-z))
    normal            x -> Phi(x), the standard normal distribution
    expm1             x -> exp(x) - 1, for x below 0
    if_positive       (x, a, b) -> a where x > 0, else b
    """

    minimum: Callable[[Any, float], Any]
    maximum: Callable[[Any, float], Any]
    times_sigmoid: Callable[[Any, Any], Any]
    normal: Callable[[Any], Any]
    expm1: Callable[[Any], Any]
    if_positive: Callable[[Any, Any, Any], Any]


ARRAYS = Math(
    jnp.minimum,
    jnp.maximum,
    lambda x, z: x * jax.nn.sigmoid(z),
    lambda x: 0.5 * jax.lax.erfc(x * -(2**-0.5)),
    jnp.expm1,
    lambda x, a, b: jnp.where(x > 0, a, b),
)


@dataclasses.dataclass(frozen=True, repr=False)
class Activation:
    """An activation of a gated feed-forward: hidden = formula(gate, up, math, *constants), elementwise.

    formula    (gate, up, math, *constants) -> hidden, a function that closes over nothing
    constants  of the formula, Python numbers
    Two of the same formula and constants are equal. Raises ValueError for a formula that closes over values.
    """

    formula: Callable[..., Any]
    constants: tuple[float, ...] = ()

    def __post_init__(self):
        if self.formula.__closure__ is not None:
            raise ValueError(f"{self}: its formula closes over values; pass them as constants")

    def __call__(self, gate, up, *, math: Math = ARRAYS, constants=None):
        """Hidden values from outputs of the gate and of the up projection, elementwise.

        constants  in place of its own; they may be traced"""
        return self.formula(gate, up, math, *(self.constants if constants is None else constants))

    def __str__(self):
        constants = ", ".join(f"{constant:g}" for constant in self.constants)
        return self.formula.__name__.strip("_") + (f"({constants})" if constants else "")

    def __repr__(self):
        """Compiled code is stored under it (cpu/later.py), so formulas of the same name differ in it."""
        code = self.formula.__code__
        content = repr((code.co_code, code.co_consts, code.co_names, self.constants))
        return f"{self}:{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def silu(gate, up, math: Math):
    return math.times_sigmoid(gate, gate) * up


def gelu(gate, up, math: Math):
    return gate * math.normal(gate) * up


def gelu_tanh(gate, up, math: Math):
    """0.5 g (1 + tanh(z)) is g / (1 + exp(-2 z))."""
    z = gate * gate * gate * 0.044715 + gate
    return math.times_sigmoid(gate, z * (2 * 0.7978845608028654)) * up  # sqrt(2 / pi)


def relu_squared(gate, up, math: Math):
    positive = math.maximum(gate, 0.0)
    return positive * positive * up


def xielu(gate, up, math: Math, alpha_p: float, alpha_n: float, beta: float, eps: float):
    below = math.expm1(math.minimum(gate, eps)) - gate
    return (math.if_positive(gate, gate * gate * alpha_p, below * alpha_n) + gate * beta) * up


def _clamped_swiglu(gate, up, math: Math, limit: float):
    return silu(math.minimum(gate, limit), _clamped(up, limit, math), math)


def _swiglu_oai(gate, up, math: Math, limit: float, alpha: float):
    gate = math.minimum(gate, limit)
    return math.times_sigmoid(gate, gate * alpha) * (_clamped(up, limit, math) + 1.0)


def _clamped(x, limit: float, math: Math):
    return math.minimum(math.maximum(x, -limit), limit)


SILU = Activation(silu)
"""g sigmoid(g) u: SwiGLU (Shazeer 2020)."""
GELU = Activation(gelu)
"""g Phi(g) u, by the error function (Hendrycks and Gimpel 2016)."""
GELU_TANH = Activation(gelu_tanh)
"""0.5 g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))) u, as in Gemma."""
RELU_SQUARED = Activation(relu_squared)
"""max(g, 0)^2 u (So et al. 2021)."""

XIELU = Activation(xielu)
"""(alpha_p g^2 + beta g) u for g > 0, else (alpha_n (exp(min(g, eps)) - 1 - g) + beta g) u (Huang and Schlag
2025), as in Apertus. Its constants, alpha_p, alpha_n, beta and eps, differ from layer to layer."""


def clamped_swiglu(limit: float) -> Activation:
    """hidden = silu(min(g, limit)) clamp(u, -limit, limit)"""
    return Activation(_clamped_swiglu, (limit,))


def swiglu_oai(limit: float = 7.0, alpha: float = 1.702) -> Activation:
    """hidden = g' sigmoid(alpha g') (u' + 1), g' = min(g, limit), u' = clamp(u, -limit, limit)

    As in gpt-oss.
    """
    return Activation(_swiglu_oai, (limit, alpha))


# erfc(z) = t exp(p(t) - z^2), t = 1 / (1 + z / 2); from the highest power of t on (Press et al. 1992, 6.2).
_ERFC = (
    0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196,
    1.00002368, -1.26551223,
)  # fmt: skip


def half_erfc(z, t, exp: Callable):
    """erfc(z) / 2 for z >= 0 and t = 1 / (1 + z / 2), within 1.2e-7 of itself: for kinds of numbers that have
    no error function. Phi(-sqrt(2) z) is this, Phi(sqrt(2) z) is 1 less it."""
    highest, second, *others = _ERFC
    p = functools.reduce(lambda so_far, c: so_far * t + c, others, t * highest + second)
    return t * exp(p - z * z) * 0.5


def expm1_near_0(x):
    """exp(x) - 1 for |x| <= 0.5, by nine terms of its series: for kinds of numbers that have no expm1."""
    return x * functools.reduce(
        lambda so_far, n: so_far * x * (1 / n) + 1.0, range(8, 1, -1), x * (1 / 9) + 1.0
    )
