"""MLIR's values, types and dialects, as far as the kernels uses them, for arrays of all threads.

A value is computed when it is made: `arith.addi(a, b)` of a traced kernel adds numpy arrays here.
"""

import functools
import types
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from pallas_kernels.gpu import values

NUMPY = {
    "i1": np.dtype(bool), "i8": np.dtype(np.int8), "i32": np.dtype(np.int32), "i64": np.dtype(np.int64),
    "index": np.dtype(np.int64),
    "f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip


class Type(NamedTuple):
    """Of a scalar of each thread, of a vector of each thread, or of a ref."""

    element: str
    shape: tuple = ()

    @property
    def element_type(self) -> "Type":
        return Type(self.element)


class Value:
    """An array [threads] (or [threads, n] for vectors), or [] where all threads have the same."""

    __slots__ = ("a", "type")

    def __init__(self, a: Any, type: Type):
        self.a, self.type = np.asarray(a, NUMPY[type.element]), type

    def of_threads(self, threads: int) -> np.ndarray:
        shape = (threads, *self.type.shape)
        return self.a if self.a.shape == shape else np.broadcast_to(self.a, shape)


for name, operator in vars(values.Value).items():
    if callable(operator) and name not in ("__new__", "__init__"):
        setattr(Value, name, operator)


def column(a: np.ndarray, type: Type) -> np.ndarray:
    """A scalar of each thread, to be combined with vectors."""
    return a[:, None] if type.shape and a.ndim else a


def unsigned(v: Value) -> np.ndarray:
    return v.a.view({4: np.uint32, 8: np.uint64}[v.a.itemsize])


def i32(a) -> Value:
    """Of the low 32 bits of integers."""
    return Value(np.asarray(a).astype(np.int64).astype(np.uint32).view(np.int32), Type("i32"))


def f32(a) -> Value:
    return Value(np.asarray(a, np.float32), Type("f32"))


def reinterpreted(type: Type, v: Value) -> Value:
    """The same bits as another type, whose elements may be of another size."""
    a = np.ascontiguousarray(v.a)
    a = a.reshape(a.shape or (1,)) if not v.type.shape else a
    a = a.view(np.uint8).reshape(-1, v.a.itemsize * (v.type.shape or (1,))[0])
    a = np.ascontiguousarray(a).view(NUMPY[type.element])
    return Value(a if type.shape else a[:, 0] if v.a.ndim else a[0, 0], type)


def _binary(f, of=lambda v: v.a):
    def op(x: Value, y: Value) -> Value:
        assert x.type == y.type, (x.type, y.type)
        out = np.asarray(f(of(x), of(y)))
        return Value(out.view(x.a.dtype) if out.dtype.kind == "u" else out, x.type)

    return op


def _unary(f):
    return lambda v: Value(f(v.a), v.type)


def _shift(f, of=lambda v: v.a):
    def op(x: Value, by: Value) -> Value:
        assert (unsigned(by) < 8 * x.a.itemsize).all()
        out = np.asarray(f(of(x), of(by)))
        return Value(out.view(x.a.dtype), x.type)

    return op


_COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "ult": np.less, "ule": np.less_equal, "uge": np.greater_equal,
    "ugt": np.greater, "sge": np.greater_equal, "sgt": np.greater, "slt": np.less, "sle": np.less_equal,
    "OEQ": np.equal, "UNE": np.not_equal, "OLT": np.less, "OLE": np.less_equal, "OGT": np.greater,
    "OGE": np.greater_equal,
}  # fmt: skip


def _compare(predicate: str, x: Value, y: Value) -> Value:
    assert x.type == y.type, (x.type, y.type)
    of = unsigned if predicate.startswith("u") else lambda v: v.a
    return Value(_COMPARE[predicate](of(x), of(y)), Type("i1"))


def _select(condition: Value, x: Value, y: Value) -> Value:
    assert x.type == y.type, (x.type, y.type)
    return Value(np.where(column(condition.a, x.type), x.a, y.a), x.type)


def _cast(type: Type, v: Value) -> Value:
    return Value(v.a.astype(NUMPY[type.element]), Type(type.element, v.type.shape))


def _zero_extended(type: Type, v: Value) -> Value:
    return Value(unsigned(v).astype(NUMPY[type.element]), type)


def _ceildivui(x: Value, y: Value) -> Value:
    return Value(-(-x.a // y.a), x.type)


def _fma(a: Value, b: Value, c: Value) -> Value:
    return f32(a.a.astype(np.float64) * b.a + c.a)


def _from_elements(type: Type, values: list) -> Value:
    assert type.shape == (len(values),) and all(v.type == type.element_type for v in values)
    return Value(np.stack(np.broadcast_arrays(*(np.atleast_1d(v.a) for v in values)), axis=-1), type)


def _bitcast(type: Type, v: Value) -> Value:
    assert NUMPY[type.element].itemsize == v.a.itemsize
    bits = np.ascontiguousarray(v.a).view(NUMPY[type.element]).reshape(v.a.shape)
    if (v.type.element, type.element) == ("f32", "i32"):
        bits = np.where(np.isnan(v.a), np.int32(0x7FFFFFFF), bits)  # the NaN that a GPU's operations return
    return Value(bits, type)


def _extract(v: Value, dynamic_position, static_position) -> Value:
    return Value(v.a[..., static_position[0]], v.type.element_type)


class VectorType:
    def __new__(cls, type: Type) -> Type:  # a cast, of what is one
        assert type.shape
        return type

    @staticmethod
    def get(shape, element: Type) -> Type:
        return Type(element.element, tuple(shape))


def _kind(name: str):
    made = Type(name)
    return types.SimpleNamespace(get=lambda: made)


ir = types.SimpleNamespace(
    Type=Type, Value=Value, VectorType=VectorType, F32Type=_kind("f32"), F16Type=_kind("f16"),
    BF16Type=_kind("bf16"), IndexType=_kind("index"),
    IntegerType=types.SimpleNamespace(get_signless=functools.cache(lambda n: Type(f"i{n}"))),
    DenseI64ArrayAttr=types.SimpleNamespace(get=list),
)  # fmt: skip
arith = types.SimpleNamespace(
    CmpIPredicate=types.SimpleNamespace(**{name: name for name in _COMPARE}),
    CmpFPredicate=types.SimpleNamespace(**{name: name for name in _COMPARE}),
    constant=lambda type, value: Value(value, type),
    cmpi=_compare, cmpf=_compare, select=_select,
    addi=_binary(np.add), subi=_binary(np.subtract), muli=_binary(np.multiply),
    andi=_binary(np.bitwise_and), ori=_binary(np.bitwise_or), xori=_binary(np.bitwise_xor),
    minui=_binary(np.minimum, unsigned), maxui=_binary(np.maximum, unsigned),
    divui=_binary(np.floor_divide, unsigned), remui=_binary(np.remainder, unsigned),
    minsi=_binary(np.minimum), maxsi=_binary(np.maximum), ceildivui=_ceildivui,
    shli=_shift(np.left_shift, unsigned), shrui=_shift(np.right_shift, unsigned),
    shrsi=_shift(np.right_shift),
    addf=_binary(np.add), subf=_binary(np.subtract), mulf=_binary(np.multiply), divf=_binary(np.divide),
    maximumf=_binary(np.maximum), minimumf=_binary(np.minimum), negf=_unary(np.negative),
    index_cast=_cast, sitofp=_cast, extf=_cast, truncf=_cast,
    index_castui=_zero_extended, extui=_zero_extended, bitcast=_bitcast,
)  # fmt: skip
math = types.SimpleNamespace(
    fma=_fma,
    absf=_unary(np.abs),
    exp=_unary(np.exp),
    log=_unary(np.log),
    rsqrt=_unary(lambda a: np.float32(1) / np.sqrt(a)),
)
vector = types.SimpleNamespace(extract=_extract, from_elements=_from_elements, bitcast=reinterpreted)
