"""What the kernels of matmul/cpu.py share: activations on their way into the workspace, and dot products."""

import abc
import dataclasses
from collections.abc import Callable

import numpy as np

from pallas_kernels import formats
from pallas_kernels.activations import Activation, Math, half_erfc
from pallas_kernels.cpu import compiled, ffi
from pallas_kernels.cpu.values import (
    F32,
    I8,
    I16,
    I32,
    I64,
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

LANES = PIECE // 4  # sums of four products, and float32 of the widest vectors


@dataclasses.dataclass(frozen=True)
class Kernel(abc.ABC):
    """Everything that a kernel's code depends on but sizes, which it reads from the call.

    format    of the weights
    activation  of two matrices' outputs, activation(x G.T, x U.T); None: there is one matrix
    bits      of activations, 8 or 16
    eps       of the norm before the product; None: no norm
    residual  whether one is added
    """

    format: str
    activation: Activation | None
    bits: int
    eps: float | None
    residual: bool

    @property
    def matrices(self) -> int:
        return 1 if self.activation is None else 2

    @property
    def vectors(self) -> Vectors:
        return formats.get(self.format).CPU

    @property
    def integers(self) -> bool:
        """Whether activations become integers; else they stay float32."""
        return self.bits == 8 and self.vectors.scales is not None

    @property
    def fields(self) -> dict[str, np.dtype]:
        block = formats.get(self.format).BLOCK
        return {name: block[name] for name in block.names}

    @property
    def blocks(self) -> int:
        """Of the format, in a chunk."""
        return self.vectors.width // formats.get(self.format).WEIGHTS

    @property
    @abc.abstractmethod
    def sizes(self) -> dict[str, int]:
        """What is kept of a row of activations for a chunk, in bytes.

        x      integers (or float32)
        zeros  what `zero` adds to integer sums
        scale  of each group
        sum    of each group, in float32
        """

    @property
    def record(self) -> dict[str, int]:
        """The offset of each of them; "end" behind them all."""
        offsets, end = {}, 0
        for name, size in self.sizes.items():
            offsets[name], end = end, end + size
        return {**offsets, "end": -(-end // PIECE) * PIECE}


class Writer(abc.ABC):
    """Writes a kernel's functions. Arguments of its call: x, the indices of the layer and of gamma's, gamma,
    the residual, the fields of the weights."""

    def __init__(self, kernel: Kernel):
        self.kernel, self.v = kernel, kernel.vectors
        self.gamma = 2
        self.residual = self.gamma + (kernel.eps is not None)
        self.weights = self.residual + kernel.residual

    def activations(self, frame: Value, m: Value, record: Callable[[Value], Value]) -> None:
        """Row m of x, normed, into the workspace: chunk c to the address record(c)."""
        kernel, v = self.kernel, self.v
        k = ffi.size(frame, 0, 1)
        x = ffi.argument(frame, 0).at(m * k * 4)
        norm = self._inverse_rms(x, k) if kernel.eps is not None else None

        def write(c: Value, left: Value | None):
            kind = vector(F32, v.width)
            values = x.at(c * (4 * v.width)).load(kind, left)
            if norm is not None:
                layer = ffi.argument(frame, 1).at(4).load(I32).signed(I64)
                gamma = ffi.argument(frame, self.gamma).at((layer * k + c * v.width) * 4)
                values = values * norm.splat(v.width) * gamma.load(kind, left)
            (self.write_integers if kernel.integers else self.write_floats)(values, record(c))

        self.chunks(k, write)

    def chunks(self, k: Value, write: Callable[[Value, Value | None], None]) -> None:
        """write(c, None) for every whole chunk, write(c, columns left) for what is left."""
        whole = k / self.v.width
        with loop(constant(k.b, I64, 0), whole) as c:
            write(c, None)
        left = k - whole * self.v.width
        with when(left.compared(">", 0)):
            write(whole, left.narrow(I32))

    def _inverse_rms(self, x: Value, k: Value) -> Value:
        b = x.b
        kind = vector(F32, LANES)
        total = Variable(constant(b, kind, 0.0))

        def add(c: Value, left: Value | None):
            values = x.at(c * (4 * LANES)).load(kind, left)
            total.value = values.fma(values, total.value)

        whole = k / LANES
        with loop(constant(b, I64, 0), whole) as c:
            add(c, None)
        add(whole, (k - whole * LANES).narrow(I32))
        mean = total.value.sum() / k.float() + self.kernel.eps
        return constant(b, F32, 1.0) / mean.called("llvm.sqrt")

    @abc.abstractmethod
    def write_integers(self, values: Value, record: Value) -> None:
        """A chunk of activations, rounded, as the kernel reads it."""

    def write_floats(self, values: Value, record: Value) -> None:
        v, offset = self.v, self.kernel.record
        for p, columns in enumerate(v.columns):
            for i in range(4):
                record.at(offset["x"] + 4 * (PIECE * p + LANES * i)).store(values.take(columns[i::4]))

    def rounded(self, values: Value, record: Value) -> tuple[Value, list[Value]]:
        """Integers, and of each group their sum where somebody needs it; scales go into the record.

        q = round(127 x / m), m the largest |x| of the group; x = s q but for rounding, s = m / 127
        """
        v, b, offset = self.v, values.b, self.kernel.record
        bits = values.as_type(vector(I32, v.width)) & 0x7FFFFFFF  # ordered as |x| is
        largest = [
            bits[g * v.group : (g + 1) * v.group].called("llvm.vector.reduce.umax", result=I32)
            for g in range(v.groups)
        ]
        m = (
            together(largest)
            .as_type(vector(F32, v.groups))
            .called("llvm.maxnum", constant(b, vector(F32, v.groups), 1e-20))
        )
        scale = m * (1 / 127)
        inverse = constant(b, vector(F32, v.groups), 127.0) / m
        q = (values * inverse.take(np.arange(v.width) // v.group)).called("llvm.rint").integer().narrow(I8)
        record.at(offset["scale"]).store(scale)
        sums = []
        if v.minimums or self.kernel.sizes["zeros"] == 4 * v.groups:
            sums = [q[g * v.group : (g + 1) * v.group].signed(I32).sum() for g in range(v.groups)]
        if v.minimums:
            record.at(offset["sum"]).store(together(sums).float() * scale)
        return q, sums

    def places(self, frame: Value, matrix: int, row: Value, n: Value) -> dict[str, Value]:
        """Where a row of weights begins in each field."""
        kernel, k = self.kernel, ffi.size(frame, 0, 1)
        layer = ffi.argument(frame, 1).load(I32).signed(I64)
        blocks = (layer * n + row) * (k / formats.get(kernel.format).WEIGHTS)
        first = self.weights + matrix * len(kernel.fields)
        return {
            name: ffi.argument(frame, first + i).at(blocks * dtype.itemsize)
            for i, (name, dtype) in enumerate(kernel.fields.items())
        }

    def loads(self, places: dict[str, Value], c: Value, left: Value | None) -> Load:
        """What reads fields of chunk c of a row, and asks for what comes behind; with `left` it has only so
        many columns."""
        kernel = self.kernel
        blocks = None if left is None else left / formats.get(kernel.format).WEIGHTS

        def load(name: str) -> Value:
            dtype = kernel.fields[name]
            count = dtype.itemsize // dtype.base.itemsize
            size = kernel.blocks * dtype.itemsize
            place = places[name].at(c * size)
            for line in range(0, size, PIECE):
                place.at(AHEAD * size + line).prefetch()
            kind = vector(type_of(dtype.base), kernel.blocks * count)
            return place.load(kind, None if blocks is None else blocks * count)

        return load

    def floats(self, piece: Value) -> list[Value]:
        """float32 of every fourth byte of a piece less `zero`, from byte 0, 1, 2 and 3 on."""
        if piece.is_float:
            return [piece[LANES * i : LANES * (i + 1)] for i in range(4)]
        words = piece.as_type(vector(I32, LANES))
        return [(((words >> 8 * i) & 255) - self.v.zero).float() for i in range(4)]

    def parts(self, frame: Value, threads: Value) -> Value:
        """Some for each thread, so that one that comes late has fewer; one where there is little to do."""
        n, m, k = ffi.size(frame, self.weights, 1), ffi.size(frame, 0, 0), ffi.size(frame, 0, 1)
        few = (n * k * m * self.kernel.matrices).compared("<", SMALL)
        return few.select(constant(frame.b, I64, 1), threads * PARTS)


SMALL = 2**18  # products of a weight and an activation that one thread does sooner than two
PARTS = 4  # for each thread
AHEAD = 64  # chunks by which a row's bytes are asked for before they are read


def _normal(x: Value) -> Value:
    one = constant(x.b, x.type, 1.0)
    z = x.called("llvm.fabs") * 2**-0.5
    half = half_erfc(z, one / (z * 0.5 + 1.0), exp)
    return x.compared("<", 0.0).select(half, one - half)


MATH = Math(
    lambda x, limit: x.called("llvm.minnum", constant(x.b, x.type, limit)),
    lambda x, limit: x.called("llvm.maxnum", constant(x.b, x.type, limit)),
    lambda x, z: x / (exp(-z) + 1.0),
    _normal,
)


def together(values: list[Value]) -> Value:
    """Numbers as a vector."""
    b = values[0].b
    out = constant(b, vector(values[0].type, len(values)), 0)
    for i, value in enumerate(values):
        out = Value(b, b.insert_element(out.ir, value.ir, I32(i)))
    return out


def dot(total: Value, codes: Value, x: Value) -> Value:
    """total + sums of four products, int32 [16]: of bytes without a sign and bytes with one."""
    if compiled.has("avx512vnni"):
        return intrinsic("llvm.x86.avx512.vpdpbusd.512", total.type, total, codes, x)
    # The products of even and of odd bytes: LLVM knows a multiplication of words that adds neighbours.
    halves = vector(I16, PIECE // 2)
    codes, x = codes.as_type(halves), x.as_type(halves)
    for c, s in ((codes & 255, (x << 8).shifted(8)), (codes >> 8, x.shifted(8))):
        for i in (0, 1):
            places = range(i, PIECE // 2, 2)
            total = total + c.take(places).signed(I32) * s.take(places).signed(I32)
    return total
