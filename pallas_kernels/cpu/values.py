"""Numbers, vectors and addresses on their way through a function that LLVM compiles, with Python's operators.

Vectors may have any number of elements: LLVM makes of them what the processor has.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from pallas_kernels.cpu import compiled

Builder = Any  # ir.IRBuilder, whose methods have no annotations
Type = Any  # ir.Type

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
ADDRESS = ir.PointerType()
TYPES = {"f2": F16, "f4": F32, "i1": I8, "u1": I8, "u2": I16, "i4": I32, "u4": I32, "V2": I16}  # V2: bfloat16


def vector(element: Type, count: int) -> Type:
    return ir.VectorType(element, count)


def type_of(dtype: np.dtype) -> Type:
    """Of an array's element; signed and unsigned integers are the same, bfloat16 is its bits."""
    return TYPES[np.dtype(dtype).str.lstrip("<|")]


class Value:
    """An integer, a float, an address, or a vector of integers or floats.

    Operands of an operator have the same type; a Python number takes the other's. Integers have no sign:
    `>>` shifts in zeros, `//` does not exist, and what makes wider ones says how (`unsigned`, `signed`).
    """

    def __init__(self, b: Builder, value: Any):
        self.b, self.ir = b, value

    @property
    def type(self) -> Type:
        return self.ir.type

    @property
    def element(self) -> Type:
        return self.type.element if isinstance(self.type, ir.VectorType) else self.type

    @property
    def count(self) -> int:
        return self.type.count if isinstance(self.type, ir.VectorType) else 1

    def of(self, element: Type) -> Type:
        """A type with as many elements."""
        return vector(element, self.count) if isinstance(self.type, ir.VectorType) else element

    @property
    def is_float(self) -> bool:
        return isinstance(self.element, (ir.HalfType, ir.FloatType))

    def like(self, other) -> Any:
        """A number, an array or a Value as an operand beside this one."""
        return other.ir if isinstance(other, Value) else constant(self.b, self.type, other).ir

    def _made(self, value: Any) -> "Value":
        return Value(self.b, value)

    def __add__(self, other):
        return self._made((self.b.fadd if self.is_float else self.b.add)(self.ir, self.like(other)))

    def __sub__(self, other):
        return self._made((self.b.fsub if self.is_float else self.b.sub)(self.ir, self.like(other)))

    def __mul__(self, other):
        return self._made((self.b.fmul if self.is_float else self.b.mul)(self.ir, self.like(other)))

    def __truediv__(self, other):
        return self._made((self.b.fdiv if self.is_float else self.b.udiv)(self.ir, self.like(other)))

    def __mod__(self, other):
        return self._made(self.b.urem(self.ir, self.like(other)))

    def __neg__(self):
        return self._made(self.b.fneg(self.ir) if self.is_float else self.b.neg(self.ir))

    def __and__(self, other):
        return self._made(self.b.and_(self.ir, self.like(other)))

    def __or__(self, other):
        return self._made(self.b.or_(self.ir, self.like(other)))

    def __xor__(self, other):
        return self._made(self.b.xor(self.ir, self.like(other)))

    def __lshift__(self, other):
        return self._made(self.b.shl(self.ir, self.like(other)))

    def __rshift__(self, other):
        return self._made(self.b.lshr(self.ir, self.like(other)))

    def shifted(self, count: int) -> "Value":
        """To the right, keeping the sign."""
        return self._made(self.b.ashr(self.ir, self.like(count)))

    def compared(self, how: str, other) -> "Value":
        """A condition for each element: "<", "==", ... of integers with a sign, or of floats."""
        compare = self.b.fcmp_ordered if self.is_float else self.b.icmp_signed
        return self._made(compare(how, self.ir, self.like(other)))

    def select(self, yes: "Value", no) -> "Value":
        """yes where this condition holds, else no."""
        return self._made(self.b.select(self.ir, yes.ir, yes.like(no)))

    def halves(self) -> "Value":
        """Integers of 32 bits as twice as many of 16, the lower half first."""
        return self.as_type(vector(I16, 2 * self.count))

    def words(self) -> "Value":
        """Bytes without a sign as integers of 16 bits."""
        return self.unsigned(I16)

    def low_bytes(self) -> "Value":
        return self.narrow(I8)

    def bfloat16(self) -> "Value":
        """float32 of bfloat16's bits."""
        return (self.unsigned(I32) << 16).as_type(self.of(F32))

    def bytes(self, yes: int, no: int) -> "Value":
        """Of conditions: a byte for each."""
        kind = vector(I8, self.count)
        return self.select(constant(self.b, kind, yes), no)

    def unsigned(self, element: Type) -> "Value":
        return self._made(self.b.zext(self.ir, self.of(element)))

    def signed(self, element: Type) -> "Value":
        return self._made(self.b.sext(self.ir, self.of(element)))

    def narrow(self, element: Type) -> "Value":
        return self._made(self.b.trunc(self.ir, self.of(element)))

    def float(self, signed: bool = True) -> "Value":
        """float32, of float16 or of integers."""
        convert = self.b.fpext if self.is_float else self.b.sitofp if signed else self.b.uitofp
        return self._made(convert(self.ir, self.of(F32)))

    def integer(self) -> "Value":
        """float32 without a fraction to int32."""
        return self._made(self.b.fptosi(self.ir, self.of(I32)))

    def as_type(self, kind: Type) -> "Value":
        """The same bits."""
        return self._made(self.b.bitcast(self.ir, kind))

    def bits(self) -> "Value":
        """Bytes -> a condition for each bit, the least significant of the first byte first."""
        return self.as_type(vector(ir.IntType(1), self.count * self.element.width))

    def splat(self, count: int) -> "Value":
        """A number, or a vector of one, `count` times."""
        value = self.ir
        if not isinstance(self.type, ir.VectorType):
            one = ir.Constant(vector(self.type, 1), ir.Undefined)
            value = self.b.insert_element(one, value, I32(0))
        return self._made(value).take([0] * count)

    def take(self, indices: Sequence[int] | np.ndarray) -> "Value":
        """The elements at these places."""
        mask = _vector(I32, tuple(int(i) for i in indices))
        return self._made(self.b.shuffle_vector(self.ir, ir.Constant(self.type, ir.Undefined), mask))

    def looked_up(self, table: Sequence[int]) -> "Value":
        """Of bytes 0 to 15 the bytes of a table of 16."""
        if self.count == 64 and compiled.has("avx512bw"):
            places = constant(self.b, self.type, np.tile(table, 4))
            return intrinsic("llvm.x86.avx512.pshuf.b.512", self.type, places, self)
        found = [constant(self.b, self.type, value) for value in table]
        for bit in (1, 2, 4, 8):
            is_set = (self & bit).compared("!=", 0)
            found = [is_set.select(yes, no) for no, yes in zip(found[::2], found[1::2], strict=True)]
        return found[0]

    def __getitem__(self, part: slice | int) -> "Value":
        if isinstance(part, int):
            return self._made(self.b.extract_element(self.ir, I32(part)))
        return self.take(range(*part.indices(self.count)))

    def then(self, other: "Value") -> "Value":
        """Both vectors as one; the shorter is padded for it."""
        count = max(self.count, other.count)
        first, second = (v if v.count == count else v.take(np.arange(count) % v.count) for v in (self, other))
        places = [*range(self.count), *range(count, count + other.count)]
        mask = _vector(I32, tuple(int(i) for i in places))
        return self._made(self.b.shuffle_vector(first.ir, second.ir, mask))

    def called(self, name: str, *others: "Value", result: Type | None = None) -> "Value":
        """An intrinsic of LLVM on this value; its name ends with this value's type."""
        return intrinsic(f"{name}.{_suffix(self.type)}", result or self.type, self, *others)

    def fma(self, factor: "Value", addend: "Value") -> "Value":
        """self factor + addend, rounded once."""
        return self.called("llvm.fma", factor, addend)

    def sum(self) -> "Value":
        """Of a vector's elements, a power of 2 of them; of floats always in the same order."""
        if not self.is_float:
            return self.called("llvm.vector.reduce.add", result=self.element)
        v = self
        while v.count > 1:
            v = v[: v.count // 2] + v[v.count // 2 :]
        return v[0]

    def largest(self) -> "Value":
        """Of a vector of floats."""
        return self.called("llvm.vector.reduce.fmax", result=self.element)

    # Addresses

    def at(self, offset: "Value | int") -> "Value":
        """The address so many bytes behind this one."""
        count = offset.ir if isinstance(offset, Value) else I64(offset)
        return self._made(self.b.gep(self.ir, [count], source_etype=I8))

    def load(self, kind: Type, count: "Value | None" = None) -> "Value":
        """What lies at this address; with `count` only so many elements of a vector, and zeros after them."""
        if count is None:
            return self._made(self.b.load(self.ir, align=1, typ=kind))
        lanes = constant(self.b, vector(I32, kind.count), np.arange(kind.count))
        mask = lanes.compared("<", count.splat(kind.count))
        name = f"llvm.masked.load.{_suffix(kind)}.p0"
        zeros = constant(self.b, kind, 0)
        return intrinsic(name, kind, self, Value(self.b, I32(1)), mask, zeros)

    def prefetch(self) -> None:
        """Bring the line at this address, which need not be anyone's, into the caches."""
        kind = ir.FunctionType(ir.VoidType(), [ADDRESS, I32, I32, I32])
        name = "llvm.prefetch.p0"
        function = self.b.module.globals.get(name) or ir.Function(self.b.module, kind, name)
        self.b.call(function, [self.ir, I32(0), I32(3), I32(1)])

    def store(self, value: "Value", count: "Value | None" = None) -> None:
        """With `count` only so many elements of a vector."""
        if count is None:
            self.b.store(value.ir, self.ir, align=1)
            return
        lanes = constant(self.b, vector(I32, value.count), np.arange(value.count))
        mask = lanes.compared("<", count.splat(value.count))
        name = f"llvm.masked.store.{_suffix(value.type)}.p0"
        intrinsic(name, ir.VoidType(), value, self, Value(self.b, I32(1)), mask)


def constant(b: Builder, kind: Type, value) -> Value:
    """A number, or an array for a vector (a number: the same in every element)."""
    if not isinstance(kind, ir.VectorType):
        return Value(b, ir.Constant(kind, value))
    elements = np.broadcast_to(value, (kind.count,)).tolist()
    if isinstance(kind.element, (ir.HalfType, ir.FloatType)):
        return Value(b, ir.Constant(kind, [ir.Constant(kind.element, float(v)) for v in elements]))
    return Value(b, _vector(kind.element, tuple(int(v) for v in elements)))


@functools.cache
def _vector(element: Type, values: tuple[int, ...]) -> ir.Constant:
    """Kept with its text: kernels have the same ones many times, and would write them as long as the rest."""
    return ir.Constant(vector(element, len(values)), [ir.Constant(element, v) for v in values])


def intrinsic(name: str, result: Type, *arguments: Value) -> Value:
    """Call a function of LLVM's, or of C's library, by its name."""
    b = arguments[0].b
    kind = ir.FunctionType(result, [a.type for a in arguments])
    function = b.module.globals.get(name) or ir.Function(b.module, kind, name)
    return Value(b, b.call(function, [a.ir for a in arguments]))


def _suffix(kind: Type) -> str:
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{_suffix(kind.element)}"
    return {F16: "f16", F32: "f32"}.get(kind) or f"i{kind.width}"


class Variable:
    """A value that changes in loops."""

    def __init__(self, start: Value):
        self.b = start.b
        with self.b.goto_entry_block():
            self.place = self.b.alloca(start.type)
        self.kind = start.type
        self.value = start

    @property
    def value(self) -> Value:
        return Value(self.b, self.b.load(self.place, typ=self.kind))

    @value.setter
    def value(self, new: Value) -> None:
        self.b.store(new.ir, self.place)


@contextlib.contextmanager
def loop(start: Value, stop: Value, step: int = 1) -> Iterator[Value]:
    """For i in range(start, stop, step)."""
    b = start.b
    i = Variable(start)
    test, body, done = (b.append_basic_block(name) for name in ("test", "body", "done"))
    b.branch(test)
    b.position_at_end(test)
    b.cbranch(i.value.compared("<", stop).ir, body, done)
    b.position_at_end(body)
    now = i.value
    yield now
    i.value = now + step
    b.branch(test)
    b.position_at_end(done)


@contextlib.contextmanager
def when(condition: Value, likely: bool | None = None) -> Iterator[None]:
    with condition.b.if_then(condition.ir, likely=likely):
        yield


def function(
    module: ir.Module,
    name: str,
    result: Type,
    arguments: Sequence[Type],
    body: Callable[..., Value | None],
    internal: bool = True,
) -> ir.Function:
    """A function of these arguments: body(*values) writes it and returns its result."""
    made = ir.Function(module, ir.FunctionType(result, arguments), name)
    made.linkage = "internal" if internal else ""
    b = ir.IRBuilder(made.append_basic_block())
    out = body(*(Value(b, argument) for argument in made.args))
    b.ret_void() if out is None else b.ret(out.ir)
    return made


def exp(x: Value) -> Value:
    """e^x of float32, within 2 units in the last place: 2^n e^r, n = round(x / ln 2), |r| <= ln 2 / 2."""
    like = functools.partial(constant, x.b, x.type)
    high, low = like(88.3762589), like(-87.3365478)
    x = x.called("llvm.minnum", high).called("llvm.maxnum", low)
    n = (x * 1.44269504).called("llvm.rint")
    r = n.fma(like(-0.693359375), x)
    r = n.fma(like(2.12194440e-4), r)
    p = like(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0):
        p = p.fma(r, like(c))
    scale = ((n.integer() + 127) << 23).as_type(x.type)
    return p * scale
