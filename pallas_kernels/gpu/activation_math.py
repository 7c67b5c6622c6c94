"""Functions of a lane's float32 that the formulas of activations need (pallas_kernels/activations.py)."""

import math

from pallas_kernels.activations import Math, expm1_near_0, half_erfc
from pallas_kernels.gpu import lanes
from pallas_kernels.gpu.values import as_value, exp, maximum, minimum, select


def _fast_exp(x):
    return lanes.exp2(as_value(x) * math.log2(math.e))


def _fast_times_sigmoid(x, z):
    return as_value(x) * lanes.reciprocal(lanes.exp2(as_value(z) * -math.log2(math.e)) + 1)


def _normal(reciprocal, exp):
    def normal(x):
        z = abs(x) * 2**-0.5
        half = half_erfc(z, reciprocal(z * 0.5 + 1.0), exp)
        return select(x < 0.0, half, 1.0 - half)

    return normal


def _expm1(exp):
    return lambda x: select(x > -0.5, expm1_near_0(x), exp(x) - 1.0)


def _if_positive(x, a, b):
    return select(x > 0.0, a, b)


# To nearest: for the few outputs of a decode step.
PRECISE = Math(
    minimum, maximum, lambda x, z: x / (exp(-z) + 1.0), _normal(lambda x: 1.0 / x, lambda x: exp(x)),
    _expm1(exp), _if_positive,
)  # fmt: skip
# Within a few units in the last place, in fewer instructions: for the many outputs of a prefill.
FAST = Math(
    minimum,
    maximum,
    _fast_times_sigmoid,
    _normal(lanes.reciprocal, _fast_exp),
    _expm1(_fast_exp),
    _if_positive,
)


def silu(x):
    """x / (1 + exp(-x)), by FAST."""
    return _fast_times_sigmoid(x, x)
