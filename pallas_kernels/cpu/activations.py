"""The parts that the two kernels of matmul/cpu.py share: writing activations into the workspace, reading
blocks of weights, and dot products."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from llvmlite import ir

from pallas_kernels import formats
from pallas_kernels.activations import Activation, Math, expm1_near_0, half_erfc
from pallas_kernels.cpu import compiled, ffi, later, rounding
from pallas_kernels.cpu.values import (
    F32,
    I16,
    I32,
    I64,
    Type,
    Value,
    Variable,
    constant,
    exp,
    intrinsic,
    loop,
    type_of,
    vector,
    when,
)
from pallas_kernels.cpu.vectors import PIECE, Load, Vectors

DWORDS = PIECE // 4  # int32 or float32 in the widest vectors
LEAST_SUMS = 8


@dataclasses.dataclass(frozen=True)
class Kernel(abc.ABC):
    """Everything that a kernel's code depends on. From the call it reads sizes, whether a norm comes before
    the product, and whether a residual is added after it: so a layer's products share a kernel, as LLVM needs
    a tenth of a second for each.

    format    the format of the weights
    activation  of two matrices' outputs, activation(x G.T, x U.T); None: there is one matrix
    bits      8: activations become integers; 16: they stay float32
    """

    format: str
    activation: Activation | None
    bits: int

    FACTOR: ClassVar[Type] = I32  # the type of `factors`

    @property
    def matrices(self) -> int:
        return 1 if self.activation is None else 2

    @property
    def vectors(self) -> Vectors:
        return formats.get(self.format).CPU

    @property
    def integers(self) -> bool:
        """Whether activations become integers; if not, they stay float32."""
        return self.bits == 8 and self.vectors.scales is not None

    @property
    def fields(self) -> dict[str, np.dtype]:
        block = formats.get(self.format).BLOCK
        return {name: block[name] for name in block.names}

    @property
    def blocks(self) -> int:
        """Blocks of the format in a chunk."""
        return self.vectors.width // formats.get(self.format).WEIGHTS

    @property
    @abc.abstractmethod
    def places(self) -> np.ndarray:
        """The columns of a chunk in the order in which the kernel reads activations."""

    @property
    @abc.abstractmethod
    def factors(self) -> np.ndarray:
        """The shares of a chunk whose factors the kernel reads, in this order; none where a group is one."""

    @property
    def turns(self) -> int:
        """Chunks in a row whose groups have partial sums of their own: enough for vectors of 8."""
        return max(1, LEAST_SUMS // self.vectors.groups) if self.integers else 1

    @property
    def sums(self) -> int:
        """Partial sums of an output. Both kernels add the same numbers to each, in the same order, and then
        add up the partial sums in the same order, so an output has the same bits from both.

        With integers, products of group g of chunk c go to partial sum c % turns * groups + g; else those
        of columns that are element i of a vector of 16 go to partial sum i.
        """
        return self.turns * self.vectors.groups if self.integers else DWORDS

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes in the workspace for a row of activations and a chunk of columns.

        x      the activations, integers or float32
        factors  an integer for each of `factors`
        zeros  what `zero` adds to the integer sum of each group
        scale  a float32 for each group
        sum    the sum of each group, float32
        """
        v, whole = self.vectors, self.integers
        return {
            "x": v.width if whole else 4 * v.width,
            "factors": self.FACTOR.width // 8 * len(self.factors) if whole else 0,
            "zeros": 4 * v.groups if whole and v.zero else 0,
            "scale": 4 * v.groups if whole else 0,
            "sum": 4 * v.groups if whole and v.minimums else 0,
        }

    @property
    def record(self) -> dict[str, int]:
        """The offset of each of `sizes`, and of the "end"."""
        offsets, end = {}, 0
        for name, size in self.sizes.items():
            offsets[name], end = end, end + size
        return {**offsets, "end": -(-end // PIECE) * PIECE}

    @abc.abstractmethod
    def module(self, name: str) -> ir.Module:
        """A module with the kernel's handler, which has this name."""

    def target(self) -> str:
        """The name by which XLA finds the kernel. It is compiled and registered on first use."""
        return later.target(self, type(self).module)


X, NUMBERS, GAMMA, RESIDUAL, WEIGHTS = range(5)  # arguments of a call; the last are fields, and may be many
# Numbers of a call, int32: two indices, two switches, and the bits of a float32. Without a norm gamma is not
# used, and without a residual that is not; x is in their place.
LAYER, GAMMA_LAYER, NORMS, ADDS, EPS = range(5)


class Writer:
    """Writes a kernel's functions."""

    def __init__(self, kernel: Kernel):
        self.kernel, self.v = kernel, kernel.vectors

    def number(self, frame: Value, i: int, kind: Type = I32) -> Value:
        """One of a call's numbers."""
        return ffi.argument(frame, NUMBERS).at(4 * i).load(kind)

    def activations(self, frame: Value, m: Value, record: Callable[[Value], Any]) -> None:
        """Write row m of x, normed, into the workspace: chunk c to the address record(c)."""
        kernel, v = self.kernel, self.v
        k = ffi.size(frame, X, 1)
        x = ffi.argument(frame, X).at(m * k * 4)
        normed, norm = self.number(frame, NORMS).compared("!=", 0), Variable(constant(k.b, F32, 1.0))
        with when(normed):
            norm.value = self._inverse_rms(x, k, self.number(frame, EPS, F32))

        chunk, zero = self._padded(x, k), constant(k.b, I64, 0)
        layer = self.number(frame, GAMMA_LAYER).signed(I64)
        gamma = self._padded(ffi.argument(frame, GAMMA).at(layer * k * 4), k)
        with loop(zero, (k + (v.width - 1)) / v.width) as c:
            values = chunk(c)
            values = normed.select(values * norm.value.splat(v.width) * gamma(c), values)
            (self.write_integers if kernel.integers else self.write_floats)(values, record(c))

    def _padded(self, row: Value, k: Value) -> Callable[[Value], Value]:
        """A function that loads chunk c of k numbers. A partial chunk is copied, with zeros behind it: so one
        code does for all chunks, without masks."""
        b, width = k.b, self.v.width
        kind, whole = vector(F32, width), k / width
        with b.goto_entry_block():
            last = Value(b, b.alloca(kind))
        last.store(row.at(whole * (4 * width)).load(kind, (k - whole * width).narrow(I32)))
        return lambda c: c.compared("<", whole).select(row.at(c * (4 * width)), last).load(kind)

    def chunks(self, k: Value, write: Callable[[Value, Value | None], None], width: int = 0) -> None:
        """write(c, None) for every whole chunk, the format's or of a width, then write(c, columns left) for a
        partial one."""
        width = width or self.v.width
        whole = k / width
        with loop(constant(k.b, I64, 0), whole) as c:
            write(c, None)
        left = k - whole * width
        with when(left.compared(">", 0)):
            write(whole, left.narrow(I32))

    def _inverse_rms(self, x: Value, k: Value, eps: Value) -> Value:
        b = x.b
        kind = vector(F32, DWORDS)
        total = Variable(constant(b, kind, 0.0))

        def add(c: Value, left: Value | None):
            values = x.at(c * (4 * DWORDS)).load(kind, left)
            total.value = values.fma(values, total.value)

        self.chunks(k, add, DWORDS)
        mean = total.value.sum() / k.float() + eps
        return constant(b, F32, 1.0) / mean.called("llvm.sqrt")

    def write_integers(self, values: Value, record: Any) -> None:
        """Write a chunk of activations as integers (rounding.py), with their scale, and sums if the format
        needs them."""
        v, kernel = self.v, self.kernel
        rounded = rounding.rounded(values.take(rounding.order(v)), v)

        def write(name: str, value: Value) -> None:
            self.write(record, name, value)

        write("x", rounded.q.take(np.argsort(rounding.order(v))[kernel.places]))
        write("scale", rounded.scale)
        if rounded.factors is not None:
            write("factors", rounded.factors.narrow(kernel.FACTOR).take(kernel.factors))
        if v.minimums:
            write("sum", rounded.sums.float() * rounded.scale)
        if v.zero:
            write("zeros", rounded.sums * -v.zero)

    def write_floats(self, values: Value, record: Any) -> None:
        self.write(record, "x", values.take(self.kernel.places))

    def write(self, record: Any, name: str, value: Value) -> None:
        """Write one of Kernel.sizes."""
        record.at(self.kernel.record[name]).store(value)

    def places(self, frame: Value, matrix: int, row: Value, n: Value) -> dict[str, Value]:
        """The address of a row of weights in each field."""
        kernel, k = self.kernel, ffi.size(frame, X, 1)
        layer = self.number(frame, LAYER).signed(I64)
        blocks = (layer * n + row) * (k / formats.get(kernel.format).WEIGHTS)
        first = WEIGHTS + matrix * len(kernel.fields)
        return {
            name: ffi.argument(frame, first + i).at(blocks * dtype.itemsize)
            for i, (name, dtype) in enumerate(kernel.fields.items())
        }

    def loads(self, places: dict[str, Value], c: Value, left: Value | None) -> Load:
        """A function that loads a field of chunk c of a row and prefetches later chunks. `left`: the columns
        of a partial chunk."""
        kernel = self.kernel
        blocks = None if left is None else left / formats.get(kernel.format).WEIGHTS

        def load(name: str) -> Value:
            dtype = kernel.fields[name]
            count = dtype.itemsize // dtype.base.itemsize
            size = kernel.blocks * dtype.itemsize
            place = places[name].at(c * size)
            for line in range(0, size, PIECE):
                place.at(PREFETCHED * size + line).prefetch()
            kind = vector(type_of(dtype.base), kernel.blocks * count)
            return place.load(kind, None if blocks is None else blocks * count)

        return load

    def floats(self, load: Load) -> list[Value]:
        """A chunk of weights as float32, in vectors of 16: of each piece every fourth column, from column 0,
        1, 2 and 3 on."""
        v, out = self.v, []
        scales = v.scales(load) if v.scales else None
        minimums = v.minimums(load) if v.minimums else None
        for p, piece in enumerate(v.codes(load)):
            groups = v.lane_groups(p)
            for i in range(4):
                if piece.is_float:
                    w = piece[DWORDS * i : DWORDS * (i + 1)]
                else:
                    w = (((piece.as_type(vector(I32, DWORDS)) >> 8 * i) & 255) - v.zero).float()
                w = w if scales is None else w * scales.take(groups)
                out.append(w if minimums is None else w - minimums.take(groups))
        return out

    def store(self, frame: Value, y: list[Value], place: Value, count: Value) -> None:
        """Store a vector of outputs, or the activation of two matrices' outputs, with the residual."""
        out = y[0] if self.kernel.activation is None else self.kernel.activation(*y, math=MATH)
        total = Variable(out)
        with when(self.number(frame, ADDS).compared("!=", 0)):
            total.value = out + ffi.argument(frame, RESIDUAL).at(place * 4).load(out.type, count)
        ffi.result(frame, 0).at(place * 4).store(total.value, count)

    def parts(self, frame: Value, threads: Value) -> Value:
        """A few parts per thread, so that a late thread does fewer; one part for a small product."""
        n, m, k = ffi.size(frame, WEIGHTS, 1), ffi.size(frame, X, 0), ffi.size(frame, X, 1)
        few = (n * k * m * self.kernel.matrices).compared("<", SMALL)
        return few.select(constant(frame.b, I64, 1), threads * PARTS)


SMALL = 2**18  # multiplications that one thread finishes sooner than two
PARTS = 4  # per thread
PREFETCHED = 64  # how many chunks before they are read a row's bytes are prefetched


def share(count: Value, i: Value, parts: Value, step: int) -> tuple[Value, Value]:
    """The first of `count` things that part i does, and the first that it does not. Parts are multiples of
    `step`."""
    each = (count + parts * step - 1) / (parts * step) * step
    first = i * each
    last = first + each
    return first, last.compared("<", count).select(last, count)


def _normal(x: Value) -> Value:
    one = constant(x.b, x.type, 1.0)
    z = x.called("llvm.fabs") * 2**-0.5
    half = half_erfc(z, one / (z * 0.5 + 1.0), exp)
    return x.compared("<", 0.0).select(half, one - half)


MATH = Math(
    Value.at_most,
    Value.at_least,
    lambda x, z: x / (exp(-z) + 1.0),
    _normal,
    lambda x: x.compared(">", -0.5).select(expm1_near_0(x), exp(x) - 1.0),
    lambda x, a, b: x.compared(">", 0.0).select(a, b),
)


def scaled(total: Value, ints: Value, factors: Value) -> Value:
    """total + ints * factors, int32 [16]; ints of 16 bits, factors of 15."""
    if compiled.has("avx512vnni"):  # the high halves of factors are 0
        return intrinsic("llvm.x86.avx512.vpdpwssd.512", total.type, total, ints, factors)
    return total + ints.halves().neighbours(factors.halves())


def dot(total: Value, codes: Value, x: Value) -> Value:
    """total + sums of four products each, int32 [16]. Codes are unsigned bytes, x are signed bytes."""
    if compiled.has("avx512vnni"):
        return intrinsic("llvm.x86.avx512.vpdpbusd.512", total.type, total, codes, x)
    if compiled.has("avxvnni"):
        halves = [[a[i * a.count // 2 : (i + 1) * a.count // 2] for a in (total, codes, x)] for i in (0, 1)]
        low, high = (intrinsic("llvm.x86.avx512.vpdpbusd.256", half[0].type, *half) for half in halves)
        return low.then(high)
    halves = vector(I16, PIECE // 2)
    codes, x = codes.as_type(halves), x.as_type(halves)
    for c, s in ((codes & 255, (x << 8).shifted(8)), (codes >> 8, x.shifted(8))):  # even bytes, odd bytes
        total = total + c.neighbours(s)
    return total
