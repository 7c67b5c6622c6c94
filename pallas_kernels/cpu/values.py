"""Python operators on the values of an LLVM function: numbers, vectors and addresses.

Vectors may have any number of elements: LLVM splits them into the processor's.
"""

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from pallas_kernels.cpu import compiled
from pallas_kernels.cpu.vectors import PIECE

Builder = Any  # an ir.IRBuilder, which is not annotated
Type = Any  # an ir.Type

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
ADDRESS = ir.PointerType()
TYPES = {"f2": F16, "f4": F32, "i1": I8, "u1": I8, "u2": I16, "i4": I32, "u4": I32, "V2": I16}  # V2: bfloat16


def vector(element: Type, count: int) -> Type:
    return ir.VectorType(element, count)


def type_of(dtype: np.dtype) -> Type:
    """The type of an array's elements. Integers have no sign; bfloat16 is an integer of 16 bits."""
    return TYPES[np.dtype(dtype).str.lstrip("<|")]


def _binary(integers: str, floats: str = ""):
    """An operator, by the builder's instructions for integers and for floats."""

    def op(self: "Value", other) -> "Value":
        instruction = getattr(self.b, floats if self.is_float else integers)
        return self._made(instruction(self.ir, self.like(other)))

    return op


class Value:
    """An integer, a float, an address, or a vector of integers or floats.

    Both operands of an operator have the same type; a Python number is converted to it. Integers have no
    sign: `>>` shifts in zeros, `/` divides unsigned integers, and conversions to wider integers name the sign
    (`unsigned`, `signed`).
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

    def shaped(self, element: Type) -> Type:
        """The type with this element and as many elements as this value."""
        return vector(element, self.count) if isinstance(self.type, ir.VectorType) else element

    @property
    def is_float(self) -> bool:
        return isinstance(self.element, (ir.HalfType, ir.FloatType))

    def like(self, other) -> Any:
        """A number, an array or a Value, as the other operand."""
        return other.ir if isinstance(other, Value) else constant(self.b, self.type, other).ir

    def _made(self, value: Any) -> "Value":
        return Value(self.b, value)

    __add__, __sub__ = _binary("add", "fadd"), _binary("sub", "fsub")
    __mul__, __truediv__ = _binary("mul", "fmul"), _binary("udiv", "fdiv")
    __mod__, __lshift__, __rshift__ = _binary("urem"), _binary("shl"), _binary("lshr")
    __and__, __or__, __xor__ = _binary("and_"), _binary("or_"), _binary("xor")

    def __neg__(self):
        return self._made(self.b.fneg(self.ir) if self.is_float else self.b.neg(self.ir))

    def shifted(self, count: int) -> "Value":
        """Shifted to the right, keeping the sign."""
        return self._made(self.b.ashr(self.ir, self.like(count)))

    def compared(self, how: str, other) -> "Value":
        """A condition for each element: "<", "==" and so on, of signed integers or floats."""
        compare = self.b.fcmp_ordered if self.is_float else self.b.icmp_signed
        return self._made(compare(how, self.ir, self.like(other)))

    def select(self, yes: "Value", no) -> "Value":
        """`yes` where this condition is true, else `no`."""
        return self._made(self.b.select(self.ir, yes.ir, yes.like(no)))

    def at_least(self, limit) -> "Value":
        """The larger of float32 and limits. NaN stays NaN, where llvm.maxnum returns the limit; on x86
        both are one instruction."""
        return self.compared("<", limit).select(self._made(self.like(limit)), self)

    def at_most(self, limit) -> "Value":
        """The smaller of float32 and limits; NaN stays NaN."""
        return self.compared(">", limit).select(self._made(self.like(limit)), self)

    def halves(self) -> "Value":
        """32-bit integers as twice as many 16-bit integers, low halves first."""
        return self.as_type(vector(I16, 2 * self.count))

    def words(self) -> "Value":
        """Unsigned bytes as 16-bit integers."""
        return self.unsigned(I16)

    def low_bytes(self) -> "Value":
        return self.narrow(I8)

    def packed(self, other: "Value") -> "Value":
        """Vectors of int32 as 16-bit integers, which they must fit: four of the one, four of the other, and
        so on, as x86 packs them."""
        if packed := _x86("packssdw", I16, 2 * self.count, self, other):
            return packed
        places = np.arange(2 * self.count).reshape(2, -1, 4).swapaxes(0, 1).ravel()
        return self.narrow(I16).then(other.narrow(I16)).take(places)

    def neighbours(self, other: "Value") -> "Value":
        """a[0] b[0] + a[1] b[1], a[2] b[2] + a[3] b[3], ..., int32, of vectors of 16-bit integers."""
        if added := _x86("pmaddw.d", I32, self.count // 2, self, other):
            return added
        places = [range(i, self.count, 2) for i in (0, 1)]
        even, odd = (self.take(at).signed(I32) * other.take(at).signed(I32) for at in places)
        return even + odd

    def bfloat16(self) -> "Value":
        """The bits of bfloat16 as float32."""
        return (self.unsigned(I32) << 16).as_type(self.shaped(F32))

    def bytes(self, yes: int, no: int) -> "Value":
        """A byte for each condition."""
        return self.select(constant(self.b, vector(I8, self.count), yes), no)

    def unsigned(self, element: Type) -> "Value":
        return self._made(self.b.zext(self.ir, self.shaped(element)))

    def signed(self, element: Type) -> "Value":
        return self._made(self.b.sext(self.ir, self.shaped(element)))

    def narrow(self, element: Type) -> "Value":
        """As integers of fewer bits, or of as many."""
        if element == self.element:
            return self
        return self._made(self.b.trunc(self.ir, self.shaped(element)))

    def float(self, signed: bool = True) -> "Value":
        """float16 or integers as float32."""
        convert = self.b.fpext if self.is_float else self.b.sitofp if signed else self.b.uitofp
        return self._made(convert(self.ir, self.shaped(F32)))

    def integer(self) -> "Value":
        """float32 without a fraction as int32."""
        return self._made(self.b.fptosi(self.ir, self.shaped(I32)))

    def as_type(self, kind: Type) -> "Value":
        """The same bits as another type."""
        return self._made(self.b.bitcast(self.ir, kind))

    def bits(self) -> "Value":
        """A condition for each bit of bytes, the lowest bit of the first byte first."""
        count = self.count * self.element.width
        if compiled.has("avx512bw"):  # it has registers for them
            return self.as_type(vector(ir.IntType(1), count))
        each = self.as_type(vector(I8, count // 8)).take(np.arange(count) // 8)
        return (each & (1 << np.arange(count) % 8)).compared("!=", 0)

    def splat(self, count: int) -> "Value":
        """A vector that repeats a number, or a vector of one element, `count` times."""
        value = self.ir
        if not isinstance(self.type, ir.VectorType):
            one = ir.Constant(vector(self.type, 1), ir.Undefined)
            value = self.b.insert_element(one, value, I32(0))
        return self._made(value).take([0] * count)

    def take(self, indices: Sequence[int] | np.ndarray) -> "Value":
        """The elements at these indices."""
        mask = _vector(I32, tuple(int(i) for i in indices))
        return self._made(self.b.shuffle_vector(self.ir, ir.Constant(self.type, ir.Undefined), mask))

    def looked_up(self, table: Sequence[int]) -> "Value":
        """Bytes from a table of 16; the indices are bytes from 0 to 15."""
        places = constant(self.b, self.type, np.resize(table, self.count))
        if self.count == PIECE and (bytes_ := _x86("pshuf.b", I8, PIECE, places, self)):
            return bytes_
        values = [constant(self.b, self.type, value) for value in table]
        for bit in (1, 2, 4, 8):
            is_set = (self & bit).compared("!=", 0)
            values = [is_set.select(yes, no) for no, yes in zip(values[::2], values[1::2], strict=True)]
        return values[0]

    def rows_of(self, table: np.ndarray) -> "Value":
        """Of a table of bytes [n, 4] or [n, 8] the rows with these numbers, one after the other."""
        row, place = ir.IntType(8 * table.shape[1]), address_of(self.b, table)
        rows = self._made(ir.Constant(vector(row, self.count), ir.Undefined))
        for i in range(self.count):
            at = place.at(self[i].unsigned(I64) * table.shape[1])
            rows = self._made(self.b.insert_element(rows.ir, at.load(row).ir, I32(i)))
        return rows.as_type(vector(I8, table.size // len(table) * self.count))

    def __getitem__(self, part: slice | int) -> "Value":
        if isinstance(part, int):
            return self._made(self.b.extract_element(self.ir, I32(part)))
        return self.take(range(*part.indices(self.count)))

    def then(self, other: "Value") -> "Value":
        """Both vectors as one."""
        count = max(self.count, other.count)
        first, second = (v if v.count == count else v.take(np.arange(count) % v.count) for v in (self, other))
        mask = _vector(I32, (*range(self.count), *range(count, count + other.count)))
        return self._made(self.b.shuffle_vector(first.ir, second.ir, mask))

    def called(self, name: str, *others: "Value", result: Type | None = None) -> "Value":
        """An LLVM intrinsic on this value; the value's type completes its name."""
        return intrinsic(f"{name}.{_suffix(self.type)}", result or self.type, self, *others)

    def fma(self, factor: "Value", addend: "Value") -> "Value":
        """self * factor + addend, rounded once."""
        return self.called("llvm.fma", factor, addend)

    def sum(self) -> "Value":
        """The sum of a vector's elements. Floats are always added in the same order."""
        if not self.is_float:
            return self.called("llvm.vector.reduce.add", result=self.element)
        width = self.count & -self.count  # the largest power of 2 that divides it
        v = self[:width]
        for start in range(width, self.count, width):
            v = v + self[start : start + width]
        while v.count > 1:
            v = v[: v.count // 2] + v[v.count // 2 :]
        return v[0]

    # Addresses

    def at(self, offset: "Value | int") -> "Value":
        """The address this many bytes further on."""
        count = offset.ir if isinstance(offset, Value) else I64(offset)
        return self._made(self.b.gep(self.ir, [count], source_etype=I8))

    def load(self, kind: Type, count: "Value | None" = None) -> "Value":
        """Load a value. With `count`, load this many elements of a vector, followed by zeros."""
        if count is None:
            return self._made(self.b.load(self.ir, align=1, typ=kind))
        if not _has_masks(kind.element):
            part = Variable(constant(self.b, kind, 0))
            _copy(self._made(part.place), self, kind, count)
            return part.value
        mask = _first(count, kind.count)
        name = f"llvm.masked.load.{_suffix(kind)}.p0"
        zeros = constant(self.b, kind, 0)
        return intrinsic(name, kind, self, Value(self.b, I32(1)), mask, zeros)

    def prefetch(self) -> None:
        """Bring the cache line at this address into the caches. The address need not be valid."""
        hints = (Value(self.b, I32(i)) for i in (0, 3, 1))
        intrinsic("llvm.prefetch.p0", ir.VoidType(), self, *hints)

    def store(self, value: "Value", count: "Value | None" = None) -> None:
        """Store a value. With `count`, store only this many elements of a vector."""
        if count is None:
            self.b.store(value.ir, self.ir, align=1)
            return
        if not _has_masks(value.element):
            _copy(self, self._made(Variable(value).place), value.type, count)
            return
        name = f"llvm.masked.store.{_suffix(value.type)}.p0"
        intrinsic(name, ir.VoidType(), value, self, Value(self.b, I32(1)), _first(count, value.count))


def _has_masks(element: Type) -> bool:
    """Whether the processor loads and stores some of a vector's elements. Where it does not, LLVM makes a
    branch for each, which takes it minutes."""
    return compiled.has("avx512bw") or (compiled.has("avx2") and element in (I32, F32))


def _copy(to: Value, source: Value, kind: Type, count: Value) -> None:
    """Copy the first `count` elements of a vector, at most all of them."""
    count = count if count.type == I64 else count.signed(I64)
    count = count.at_most(kind.count).at_least(0)
    size = {F16: 2, F32: 4}.get(kind.element) or kind.element.width // 8
    b, name = to.b, "memcpy"
    memcpy = b.module.globals.get(name) or ir.Function(
        b.module, ir.FunctionType(ADDRESS, [ADDRESS, ADDRESS, I64]), name
    )
    b.call(memcpy, [to.ir, source.ir, (count * size).ir])


def _first(count: Value, lanes: int) -> Value:
    """A condition for each lane: true for the first `count`."""
    return constant(count.b, vector(I32, lanes), np.arange(lanes)).compared("<", count.splat(lanes))


def constant(b: Builder, kind: Type, value) -> Value:
    """A number as a constant. For a vector type: an array, or a number that every element has."""
    if not isinstance(kind, ir.VectorType):
        return Value(b, ir.Constant(kind, value))
    elements = np.broadcast_to(value, (kind.count,)).tolist()
    if isinstance(kind.element, (ir.HalfType, ir.FloatType)):
        return Value(b, ir.Constant(kind, [ir.Constant(kind.element, float(v)) for v in elements]))
    return Value(b, _vector(kind.element, tuple(int(v) for v in elements)))


@functools.cache
def _vector(element: Type, values: tuple[int, ...]) -> ir.Constant:
    """Cached, because kernels contain the same constants many times and formatting each would take as long as
    all the rest."""
    return ir.Constant(vector(element, len(values)), [ir.Constant(element, v) for v in values])


def address_of(b: Builder, table: np.ndarray) -> Value:
    """The address of constant bytes, which a module has once."""
    contents = bytearray(np.ascontiguousarray(table, np.uint8).tobytes())
    name = f"table_{zlib.crc32(contents):08x}"
    place = b.module.globals.get(name)
    if place is None:
        kind = ir.ArrayType(I8, len(contents))
        place = ir.GlobalVariable(b.module, kind, name)
        place.initializer, place.global_constant, place.linkage = ir.Constant(kind, contents), True, "private"
    return Value(b, place)


def intrinsic(name: str, result: Type, *arguments: Value) -> Value:
    """Call a function of LLVM or of the C library by name."""
    b = arguments[0].b
    kind = ir.FunctionType(result, [a.type for a in arguments])
    function = b.module.globals.get(name) or ir.Function(b.module, kind, name)
    return Value(b, b.call(function, [a.ir for a in arguments]))


def _suffix(kind: Type) -> str:
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{_suffix(kind.element)}"
    return {F16: "f16", F32: "f32"}.get(kind) or f"i{kind.width}"


def _x86(name: str, element: Type, count: int, *arguments: Value) -> Value | None:
    """An instruction of x86 that leaves parts of 128 bits apart, on vectors of 512 bits as it is; None on
    other processors. LLVM finds few of them by itself."""
    if compiled.has("avx512bw"):
        return intrinsic(f"llvm.x86.avx512.{name}.512", vector(element, count), *arguments)
    if not compiled.has("avx2"):
        return None
    name = {"pmaddw.d": "pmadd.wd"}.get(name, name)
    halves = [[a[i * a.count // 2 : (i + 1) * a.count // 2] for a in arguments] for i in (0, 1)]
    low, high = (intrinsic(f"llvm.x86.avx2.{name}", vector(element, count // 2), *half) for half in halves)
    return low.then(high)


class Variable:
    """A variable that loops assign to."""

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
def loop(start: Value, stop: Value, step: Value | int = 1) -> Iterator[Value]:
    """for i in range(start, stop, step)"""
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
    """A function: body(*arguments) writes its code and returns its result."""
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
    x = x.at_most(high).at_least(low)
    n = (x * 1.44269504).called("llvm.rint")
    r = n.fma(like(-0.693359375), x)
    r = n.fma(like(2.12194440e-4), r)
    p = like(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0):
        p = p.fma(r, like(c))
    scale = ((n.integer() + 127) << 23).as_type(x.type)
    return p * scale


def log(x: Value) -> Value:
    """The natural logarithm of positive, normal float32, within 2 units in the last place: x = 2^n m,
    sqrt(1/2) <= m < sqrt(2), n ln 2 + log m. (Cephes' polynomial.)"""
    like = functools.partial(constant, x.b, x.type)
    bits = x.as_type(x.shaped(I32))
    n = ((bits >> 23) - 126).float()
    m = ((bits & 0x007FFFFF) | 0x3F000000).as_type(x.type)  # in [1/2, 1)
    small = m.compared("<", 0.707106781186547524)
    n = small.select(n - 1.0, n)
    m = small.select(m + m, m) - 1.0
    square = m * m
    p = like(7.0376836292e-2)
    for c in (
        -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
        2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
    ):  # fmt: skip
        p = p.fma(m, like(c))
    p = p * m * square
    p = n.fma(like(-2.12194440e-4), p)
    p = square.fma(like(-0.5), p)
    return n.fma(like(0.693359375), m + p)
