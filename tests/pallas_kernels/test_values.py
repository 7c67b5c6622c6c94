"""Operators on the numbers of a lane (gpu/values.py): in lockstep they give numpy's numbers, and as MLIR the
operations that they name."""

import operator

import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir

from pallas_kernels.gpu import lanes, values
from tests.pallas_kernels.lockstep import lockstep
from tests.pallas_kernels.lockstep.values import Type, Value

WORDS = np.uint32([0, 1, 2, 7, 31, 255, 2**31 - 1, 2**31, 2**32 - 1])
REALS = np.float32([-3.5, -0.0, 0.25, 1.0, 6.75, 1e8, -1e-3, 2.0, 5.0])
OF_WORDS = [
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.and_, operator.or_,
    operator.xor, operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne,
]  # fmt: skip
OF_REALS = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.lt, operator.le, operator.gt,
    operator.ge, operator.eq, operator.ne,
]  # fmt: skip


def value(a: np.ndarray) -> Value:
    return Value(a.view(np.int32), Type("i32")) if a.dtype == np.uint32 else Value(a, Type("f32"))


def numbers(v: Value, like: np.ndarray) -> np.ndarray:
    return v.a if v.a.dtype == bool else v.a.view(like.dtype)


@pytest.mark.parametrize("f", OF_WORDS, ids=lambda f: f.__name__)
def test_words_are_unsigned(f):
    x, y = WORDS, np.roll(WORDS, 3) | 1
    with lockstep():
        np.testing.assert_array_equal(numbers(f(value(x), value(y)), x), f(x, y))
        np.testing.assert_array_equal(numbers(f(value(x), 2**31 + 5), x), f(x, np.uint32(2**31 + 5)))
        np.testing.assert_array_equal(numbers(f(2**31 + 5, value(y)), x), f(np.uint32(2**31 + 5), y))


@pytest.mark.parametrize("f", OF_REALS, ids=lambda f: f.__name__)
def test_reals_are_float32(f):
    x, y = REALS, np.roll(REALS, 2)
    with lockstep(), np.errstate(all="ignore"):
        np.testing.assert_array_equal(numbers(f(value(x), value(y)), x), f(x, y))
        np.testing.assert_array_equal(numbers(f(value(x), 0.1), x), f(x, np.float32(0.1)))
        np.testing.assert_array_equal(numbers(f(3, value(y)), x), f(np.float32(3), y))


def test_shifts_signs_choices_and_casts():
    by = np.uint32([0, 1, 2, 3, 4, 5, 6, 7, 31])
    x, y = value(REALS), value(np.roll(REALS, 2))
    word = value(WORDS)
    with lockstep():
        np.testing.assert_array_equal(numbers(word << value(by), WORDS), WORDS << by)
        np.testing.assert_array_equal(numbers(word >> value(by), WORDS), WORDS >> by)
        np.testing.assert_array_equal(numbers(1 << value(by), WORDS), np.uint32(1) << by)
        np.testing.assert_array_equal(numbers(-word, WORDS), -WORDS)
        np.testing.assert_array_equal(numbers(~word, WORDS), ~WORDS)
        np.testing.assert_array_equal((~(x < y)).a, ~(np.roll(REALS, 2) > REALS))
        np.testing.assert_array_equal((-x).a, -REALS)
        np.testing.assert_array_equal(abs(x).a, abs(REALS))
        np.testing.assert_array_equal(numbers(values.minimum(word, 31), WORDS), np.minimum(WORDS, 31))
        np.testing.assert_array_equal(values.maximum(x, y).a, np.maximum(REALS, np.roll(REALS, 2)))
        np.testing.assert_array_equal(values.select(x < 0, 2.5, x).a, np.where(REALS < 0, 2.5, REALS))
        assert values.select(x < 0, 1, 0).type == Type("i32")
        assert values.select(x < 0, 1, 0.5).type == Type("f32")
        np.testing.assert_array_equal(values.real(word).a, WORDS.view(np.int32).astype(np.float32))
        assert values.index(word).type == Type("index") and values.integer(values.index(3)).type == word.type


def test_what_cannot_be_meant_is_an_error():
    with lockstep():
        x, word = value(REALS), value(WORDS)
        with pytest.raises(TypeError, match="not known while the kernel is traced"):
            _ = 1 if word == 0 else 2
        with pytest.raises(TypeError, match="cast one"):
            _ = x + word
        with pytest.raises(TypeError, match="have no"):
            _ = x % 2
        with pytest.raises(AssertionError):
            _ = word * 0.5


def test_an_expression_is_the_operations_that_it_names():
    """As MLIR, in Python's order, with numbers second."""
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            t = values.integer(5)
            x = values.real(1.5)
            _ = values.select(2 * t + (t >> 3) % 8 == 7, -x, x / 2 - 1)
            _ = values.fma(x, 2.0, values.maximum(abs(x), 1e-20))
            _ = lanes.ratio(127, x)
    names = [op.operation.name for op in module.body if op.operation.name != "arith.constant"]
    ours = ["muli", "shrui", "remui", "addi", "cmpi", "negf", "divf", "subf", "select"]
    ratio = ["llvm.inline_asm", "arith.mulf", "arith.negf", "math.fma", "math.fma"]
    more = ["math.absf", "arith.maximumf", "math.fma"]
    assert names == [f"arith.{name}" for name in ours] + more + ratio
    text = str(module)
    assert "arith.muli %c5_i32, %c2_i32" in text and "arith.remui %1, %c8_i32" in text
