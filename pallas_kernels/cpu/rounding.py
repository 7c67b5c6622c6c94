"""Activations to integers of 8 bits, as code in a CPU kernel.

    q = round(a x / m),  m the largest |x| of a group of columns;  x = s q but for rounding,  s = m / a

a is the one of LARGEST with the least sum of (x - s q)^2. Where a format has one scale for more than 32
columns, parts of its group, the shares, have factors f, so that integers still add up over the whole group:

    q = round(127 (256 / f) x / m),  f = ceil(256 (127 / a) m' / m),  m' the largest |x| of the share;
    x = s f q but for rounding,  s = m / (127 256)
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pallas_kernels.cpu.values import F32, I8, I32, Value, constant, vector
from pallas_kernels.cpu.vectors import Vectors

# What the largest of a group may become. A choice of three takes a twelfth off the squared error and off the
# divergence of a model; a choice of 16 would take a seventh.
LARGEST = (127.0, 125.0, 123.0)
# f of a group's largest share, or 127 / 123 times it: sums of 128 products with codes up to 3 stay below
# 2^24, and are exact in float32.
FACTORS = 256.0


class Rounded(NamedTuple):
    """A chunk of activations, share by share.

    q        int8 [columns]
    scale    float32 [groups]: s
    factors  int32 [shares]: f; None where a group is one share
    sums     int32 [groups]: sum of f q, or of q
    """

    q: Value
    scale: Value
    factors: Value | None
    sums: Value


def order(v: Vectors) -> np.ndarray:
    """int [columns]: a chunk's columns, share by share."""
    return np.argsort(v.column_shares, kind="stable")


def rounded(x: Value, v: Vectors) -> Rounded:
    """x: float32 [columns], in `order`."""
    size, larger = v.group // v.shares, lambda a, b: a.called("llvm.umax", b)
    bits = x.as_type(vector(I32, v.width)) & 0x7FFFFFFF  # ordered as |x| is, and NaN above all
    largest = _folded(bits, size, larger)
    m = _folded(largest, v.shares, larger)
    largest, m = (bits.as_type(vector(F32, bits.count)).at_least(1e-20) for bits in (largest, m))
    inverse, step = _finest(x, largest, m, v)
    q = (x * inverse.take(np.arange(v.width) // size)).called("llvm.rint").integer().narrow(I8)
    sums = _folded(q.signed(I32), size, Value.__add__)
    if v.shares == 1:
        return Rounded(q, m * (step * (1 / 127)), None, sums)
    factors = step.integer()
    return Rounded(q, m * (1 / 127 / FACTORS), factors, _folded(sums * factors, v.shares, Value.__add__))


def _finest(x: Value, largest: Value, m: Value, v: Vectors) -> tuple[Value, Value]:
    """For each share 1 over the difference of two integers, in x, and this difference: f, or in m / 127.

    largest, m: of each share and of each group
    """
    m = m.take(np.arange(largest.count) // v.shares)
    like = functools.partial(constant, x.b, largest.type)
    size = v.group // v.shares
    share = np.arange(v.width) // size

    def tried(a: float) -> tuple[Value, Value, Value]:
        if v.shares == 1:
            inverse, step = like(a) / m, like(127 / a)
        else:
            step = (largest / m * (FACTORS * 127 / a)).called("llvm.ceil").at_least(1.0)
            inverse = (like(127.0) / m) * (like(FACTORS) / step)
        scaled = x * inverse.take(share)
        error = scaled - scaled.called("llvm.rint")
        first, second = _halves(error, size)
        squares = _folded(first.fma(first, second * second), size // 2, Value.__add__)
        return inverse, step, squares * (step * step)

    inverse, step, least = tried(LARGEST[0])
    for a in LARGEST[1:]:
        other_inverse, other_step, error = tried(a)
        better = error.compared("<", least)  # of NaN it is false
        inverse, step = better.select(other_inverse, inverse), better.select(other_step, step)
        least = better.select(error, least)
    return inverse, step


def _folded(values: Value, count: int, add: Callable[[Value, Value], Value]) -> Value:
    """Each `count` neighbours in a vector as one; a power of two. Halves of them are added, then quarters."""
    while count > 1:
        values, count = add(*_halves(values, count)), count // 2
    return values


def _halves(values: Value, count: int) -> tuple[Value, Value]:
    """The first half of each `count` neighbours, and the second."""
    places = np.arange(values.count).reshape(-1, 2, count // 2)
    return values.take(places[:, 0].ravel()), values.take(places[:, 1].ravel())
