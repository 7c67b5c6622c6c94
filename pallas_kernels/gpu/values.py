"""Numbers of a lane while a kernel is traced: MLIR values with Python's operators.

    row = minimum(block() * 16 + thread() // 32, rows - 1)
    y = x * scale + select(thread() % 4 == 0, bias, 0.0)

Operands have the same type, or one of them is a Python number, which takes the other's: index (of memory and
of loops), i32 (a word; u32 and s32 are both i32), i64, f32, or i1 (a condition). Integers are unsigned: so
are // % >> < <= > >=, minimum and maximum.

A value is not known while the kernel is traced, so `if`, `and` and `or` of one are errors: there are `select`
for values, `lanes.when` and `lanes.choose` for code, & | and ~ for conditions.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith
from jax._src.lib.mlir.dialects import math as mlir_math

Number = int | float


def _binary(integer_op: str | None, real_op: str | None):
    def op(self, other):
        return _apply(integer_op, real_op, self, _like(self, other))

    def reflected(self, other):
        return _apply(integer_op, real_op, _like(self, other), self)

    return op, reflected


def _compare(integer_op: str | None, real_op: str | None):
    def op(self, other):
        other, name = _like(self, other), real_op if _is_real(self) else integer_op
        if name is None:
            raise TypeError(f"values of {self.type} have no such comparison")
        if _is_real(self):
            return as_value(arith.cmpf(getattr(arith.CmpFPredicate, name), self, other))
        return as_value(arith.cmpi(getattr(arith.CmpIPredicate, name), self, other))

    return op


class Value(ir.Value):
    """An MLIR value with operators."""

    __add__, _ = _binary("addi", "addf")
    __sub__, __rsub__ = _binary("subi", "subf")
    __mul__, _ = _binary("muli", "mulf")
    __truediv__, __rtruediv__ = _binary(None, "divf")
    __floordiv__, __rfloordiv__ = _binary("divui", None)
    __mod__, __rmod__ = _binary("remui", None)
    __and__, _ = _binary("andi", None)
    __or__, _ = _binary("ori", None)
    __xor__, _ = _binary("xori", None)
    __lshift__, __rlshift__ = _binary("shli", None)
    __rshift__, __rrshift__ = _binary("shrui", None)
    # A number comes second, as compilers have it.
    __radd__, __rmul__, __rand__, __ror__, __rxor__ = __add__, __mul__, __and__, __or__, __xor__

    __lt__, __le__ = _compare("ult", "OLT"), _compare("ule", "OLE")
    __gt__, __ge__ = _compare("ugt", "OGT"), _compare("uge", "OGE")
    __eq__, __ne__ = _compare("eq", "OEQ"), _compare("ne", "UNE")
    __hash__ = ir.Value.__hash__

    def __neg__(self):
        return as_value(arith.negf(self)) if _is_real(self) else 0 - self

    def __abs__(self):
        return as_value(mlir_math.absf(self))

    def __invert__(self):
        return self ^ (1 if self.type == i1() else -1)

    def __bool__(self):
        raise TypeError("a value is not known while the kernel is traced: use select, when or choose")


def as_value(value) -> Any:
    """An MLIR value, as this module's."""
    return value if isinstance(value, Value) else Value(value)


def i1() -> ir.Type:
    return ir.IntegerType.get_signless(1)


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def f32() -> ir.Type:
    return ir.F32Type.get()


def constant(type: ir.Type, number: Number):
    if type == f32():
        return as_value(arith.constant(type, float(number)))
    assert isinstance(number, int), f"{number} as a value of {type}"
    if type == i32() and number >= 2**31:
        number -= 2**32
    return as_value(arith.constant(type, number))


def index(x: Any):
    """A number or an integer as an index."""
    return _cast(ir.IndexType.get(), x)


def integer(x: Any):
    """A number or an index as i32."""
    return _cast(i32(), x)


def real(x: Any):
    """A number or a signed i32 as float32."""
    if isinstance(x, Number):
        return constant(f32(), x)
    return as_value(arith.sitofp(f32(), x))


def as_real(word):
    """The bits of a word as float32."""
    return as_value(arith.bitcast(f32(), word))


def as_word(x):
    """The bits of a float32 as i32."""
    return as_value(arith.bitcast(i32(), x))


def ordered(x):
    """A float32 as a word, larger for larger ones; what is no number has a place too."""
    word = as_word(x)
    return word ^ (shifted_signed(word, 31) | 0x80000000)


def from_ordered(word):
    """The float32 of `ordered`."""
    return as_real(word ^ (~shifted_signed(word, 31) | 0x80000000))


def long(x: Any):
    """A number, an index, or an unsigned i32, as i64."""
    if isinstance(x, int):
        return constant(i64(), x)
    return as_value(arith.extui(i64(), x) if x.type == i32() else arith.index_cast(i64(), x))


def low_word(x):
    """The low half of an i64 as i32."""
    return as_value(arith.trunci(i32(), x))


def not_negative(x):
    """Whether an i32 with a sign is 0 or more."""
    return as_value(arith.cmpi(arith.CmpIPredicate.sge, x, integer(0)))


def true():
    return constant(i1(), 1)


def select(condition, x: Any, otherwise: Any):
    """x where the condition holds."""
    if isinstance(x, Number) and isinstance(otherwise, Number):
        x = integer(x) if isinstance(x, int) and isinstance(otherwise, int) else real(x)
    elif isinstance(x, Number):
        x = _like(otherwise, x)
    return as_value(arith.select(condition, x, _like(x, otherwise)))


def minimum(x, y: Any):
    return _apply("minui", "minimumf", x, _like(x, y))


def maximum(x, y: Any):
    return _apply("maxui", "maximumf", x, _like(x, y))


def smaller_signed(x, y: Any):
    """The smaller of two i32 with signs."""
    return as_value(arith.minsi(x, _like(x, y)))


def larger_signed(x, y: Any):
    """The larger of two i32 with signs."""
    return as_value(arith.maxsi(x, _like(x, y)))


def shifted_signed(word, count: int):
    """An i32 with a sign, shifted to the right: copies of the sign come in."""
    return as_value(arith.shrsi(word, integer(count)))


def fma(a, b: Any, c: Any):
    """a b + c, rounded once."""
    return as_value(mlir_math.fma(a, _like(a, b), _like(a, c)))


def exp(x):
    return as_value(mlir_math.exp(x))


def log(x):
    return as_value(mlir_math.log(x))


def ceil_divided(x, y: Any):
    """x / y, rounded up."""
    return as_value(arith.ceildivui(x, _like(x, y)))


def rsqrt(x):
    return as_value(mlir_math.rsqrt(x))


def total(xs: Sequence[Any]):
    """Sum, from left to right."""
    return functools.reduce(operator.add, xs)


def greatest(xs: Sequence[Any]):
    return in_pairs(maximum, xs)


def in_pairs(op: Callable[[Any, Any], Any], xs: Sequence[Any]):
    """op of all, of neighbours first: the fewest that wait for each other."""
    while len(xs) > 1:
        xs = [functools.reduce(op, xs[i : i + 2]) for i in range(0, len(xs), 2)]
    return xs[0]


def sum_of_squares(xs: Sequence[Any], start: Any = 0.0):
    """start + the squares of float32, from left to right, each rounded once."""
    return functools.reduce(lambda so_far, x: fma(x, x, so_far), xs, start)


def _cast(type: ir.Type, x: Any):
    if isinstance(x, int):
        return constant(type, x)
    return as_value(x) if x.type == type else as_value(arith.index_cast(type, x))


def _is_real(x) -> bool:
    return x.type == f32()


def _like(x, other: Any):
    """`other` as a value of x's type."""
    if isinstance(other, Number):
        return constant(x.type, other)
    if other.type != x.type:
        raise TypeError(f"a value of {x.type} with one of {other.type}: cast one, with index() or integer()")
    return other


def _apply(integer_op: str | None, real_op: str | None, x, y):
    name = real_op if _is_real(x) else integer_op
    if name is None:
        raise TypeError(f"values of {x.type} have no {integer_op or real_op}")
    return as_value(getattr(arith, name)(x, y))
