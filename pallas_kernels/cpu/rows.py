"""The kernel of matmul/cpu.py: rows of weights times a few rows of activations."""

import dataclasses
from collections.abc import Callable

import numpy as np
from llvmlite import ir

from pallas_kernels import formats
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
)
from pallas_kernels.cpu.vectors import PIECE, Vectors

LANES = PIECE // 4  # sums of four products, and float32 of the widest vectors


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel: everything that its code depends on but sizes, which it reads from the call.

    format    of the weights
    rows      of activations
    matrices  2 for silu(x G.T) * (x U.T)
    bits      of activations, 8 or 16
    eps       of the norm before the product; None: no norm
    residual  whether one is added
    ragged    whether a row of weights ends within a chunk
    """

    format: str
    rows: int
    matrices: int
    bits: int
    eps: float | None
    residual: bool
    ragged: bool

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
    def record(self) -> dict[str, int]:
        """What is kept of a row of activations for a chunk, and its offset in bytes; "end" behind it all.

        x         integers (or float32), piece by piece in the order of its bytes
        zeros     what `zero` adds to each sum of four, int32
        scale     of each group
        sum       of each group, in float32
        """
        v, whole = self.vectors, self.integers
        sizes = {
            "x": v.width if whole else 4 * v.width,
            "zeros": v.width if whole and v.zero else 0,
            "scale": 4 * v.groups if whole else 0,
            "sum": 4 * v.groups if v.minimums else 0,
        }
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name], end = end, end + size
        return {**offsets, "end": -(-end // PIECE) * PIECE}

    def workspace(self, k: int) -> int:
        return -(-k // self.vectors.width) * self.rows * self.record["end"]

    def target(self) -> str:
        """The name by which XLA knows it: made, compiled and registered on first use."""
        return ffi.target(self, _module)


def _module(kernel: Kernel, name: str) -> ir.Module:
    writer = _Writer(kernel)
    return ffi.handler(name, before=writer.activations, parts=writer.parts, part=writer.part)


class _Writer:
    """Writes a kernel's functions."""

    def __init__(self, kernel: Kernel):
        self.kernel, self.v = kernel, kernel.vectors
        self.gamma = 2
        self.residual = self.gamma + (kernel.eps is not None)
        self.weights = self.residual + kernel.residual

    # Activations

    def activations(self, frame: Value) -> None:
        """x, normed, into the workspace."""
        kernel, v, b = self.kernel, self.v, frame.b
        k = ffi.size(frame, 0, 1)
        whole = k / v.width
        with loop(constant(b, I64, 0), constant(b, I64, kernel.rows)) as m:
            x = ffi.argument(frame, 0).at(m * k * 4)
            norm = self._inverse_rms(x, k) if kernel.eps is not None else None

            def write(c: Value, left: Value | None):
                kind = vector(F32, v.width)
                values = x.at(c * (4 * v.width)).load(kind, left)
                if norm is not None:
                    layer = ffi.argument(frame, 1).at(4).load(I32).signed(I64)
                    gamma = ffi.argument(frame, self.gamma).at((layer * k + c * v.width) * 4)
                    values = values * norm.splat(v.width) * gamma.load(kind, left)
                record = ffi.result(frame, 1).at((c * kernel.rows + m) * kernel.record["end"])
                (self._integers if kernel.integers else self._floats)(values, record)

            self._chunks(whole, k, write)

    def _chunks(self, whole: Value, k: Value, write: Callable[[Value, Value | None], None]) -> None:
        """write(c, None) for every whole chunk, write(c, columns left) for what is left."""
        with loop(constant(k.b, I64, 0), whole) as c:
            write(c, None)
        if self.kernel.ragged:
            write(whole, (k - whole * self.v.width).narrow(I32))

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

    def _integers(self, values: Value, record: Value) -> None:
        """q = round(127 x / m), m the largest |x| of the group; x = s q but for rounding, s = m / 127."""
        v, b, offset = self.v, values.b, self.kernel.record
        bits = values.as_type(vector(I32, v.width)) & 0x7FFFFFFF  # ordered as |x| is
        largest = [
            bits[g * v.group : (g + 1) * v.group].called("llvm.vector.reduce.umax", result=I32)
            for g in range(v.groups)
        ]
        m = (
            _together(largest)
            .as_type(vector(F32, v.groups))
            .called("llvm.maxnum", constant(b, vector(F32, v.groups), 1e-20))
        )
        scale = m * (1 / 127)
        inverse = constant(b, vector(F32, v.groups), 127.0) / m
        q = (values * inverse.take(np.arange(v.width) // v.group)).called("llvm.rint").integer().narrow(I8)
        record.at(offset["scale"]).store(scale)
        if v.minimums:
            sums = [q[g * v.group : (g + 1) * v.group].signed(I32).sum() for g in range(v.groups)]
            record.at(offset["sum"]).store(_together(sums).float() * scale)
        for p, columns in enumerate(v.columns):
            piece = q.take(columns)
            record.at(offset["x"] + PIECE * p).store(piece)
            if v.zero:
                ones = constant(b, vector(I8, PIECE), 1)
                sums = _dot(constant(b, vector(I32, LANES), 0), ones, piece)
                record.at(offset["zeros"] + PIECE * p).store(sums * -v.zero)

    def _floats(self, values: Value, record: Value) -> None:
        v, offset = self.v, self.kernel.record
        if v.minimums:
            sums = [values[g * v.group : (g + 1) * v.group].sum() for g in range(v.groups)]
            record.at(offset["sum"]).store(_together(sums))
        for p, columns in enumerate(v.columns):
            for i in range(4):
                record.at(offset["x"] + 4 * (PIECE * p + LANES * i)).store(values.take(columns[i::4]))

    # Weights

    def parts(self, frame: Value, threads: Value) -> Value:
        """Some for each thread, so that one that comes late has fewer; one where there is little to do."""
        n, k = ffi.size(frame, self.weights, 1), ffi.size(frame, 0, 1)
        few = (n * k * (self.kernel.rows * self.kernel.matrices)).compared("<", SMALL)
        one = constant(frame.b, I64, 1)
        return few.select(one, threads * PARTS)

    def part(self, frame: Value, i: Value, parts: Value) -> None:
        n = ffi.size(frame, self.weights, 1)
        each = (n + parts * LANES - 1) / (parts * LANES) * LANES
        first = i * each
        last = first + each
        last = last.compared("<", n).select(last, n)
        with loop(first, last, LANES) as row:
            self._outputs(frame, row, n)

    def _outputs(self, frame: Value, row: Value, n: Value) -> None:
        """y of 16 rows of weights. They are read one after the other, as they lie: memory is twice as fast
        as with several at a time. Their sums in lanes are kept, and added up together."""
        kernel, b = self.kernel, frame.b
        left = n - row
        count = left.compared("<", LANES).select(left, constant(b, I64, LANES))
        each = kernel.matrices * kernel.rows
        with b.goto_entry_block():
            kept = Value(b, b.alloca(vector(F32, LANES), each * LANES))
        with loop(constant(b, I64, 0), count) as r:
            for matrix in range(kernel.matrices):
                for m, total in enumerate(self._row(frame, matrix, row + r, n)):
                    kept.at((r + (matrix * kernel.rows + m) * LANES) * PIECE).store(total)
        for m in range(kernel.rows):
            y = []
            for matrix in range(kernel.matrices):
                of_row = kept.at((matrix * kernel.rows + m) * LANES * PIECE)
                lanes = [of_row.at(r * PIECE).load(vector(F32, LANES)) for r in range(LANES)]
                y.append(_sums_of_each(lanes))
            out = y[0] if len(y) == 1 else y[0] / (exp(-y[0]) + 1.0) * y[1]
            place = (row + n * m) * 4
            if kernel.residual:
                residual = ffi.argument(frame, self.residual).at(place)
                out = out + residual.load(out.type, count.narrow(I32))
            ffi.result(frame, 0).at(place).store(out, count.narrow(I32))

    def _row(self, frame: Value, matrix: int, row: Value, n: Value) -> list[Value]:
        """Of a row of weights and each row of activations: sums in lanes, which are to be added up."""
        kernel, v, b = self.kernel, self.v, frame.b
        k = ffi.size(frame, 0, 1)
        weights = formats.get(kernel.format).WEIGHTS
        blocks = v.width // weights  # in a chunk
        layer = ffi.argument(frame, 1).load(I32).signed(I64)
        workspace = ffi.result(frame, 1)
        places = {}
        for i, name in enumerate(kernel.fields):
            base = ffi.argument(frame, self.weights + matrix * len(kernel.fields) + i)
            places[name] = base.at((layer * n + row) * (k / weights * kernel.fields[name].itemsize))
        sums = [Variable(constant(b, vector(F32, LANES), 0.0)) for _ in range(kernel.rows)]
        minimums = [Variable(constant(b, vector(F32, v.groups), 0.0)) for _ in sums] if v.minimums else []

        def chunk(c: Value, left: Value | None):
            record = workspace.at(c * (kernel.rows * kernel.record["end"]))
            left_blocks = None if left is None else left / weights

            def load(name: str):
                dtype = kernel.fields[name]
                count = dtype.itemsize // dtype.base.itemsize
                place = places[name].at(c * (blocks * dtype.itemsize))
                for line in range(0, blocks * dtype.itemsize, PIECE):
                    place.at(AHEAD * blocks * dtype.itemsize + line).prefetch()
                valid = None if left_blocks is None else left_blocks * count
                return place.load(vector(type_of(dtype.base), blocks * count), valid)

            codes, scales = v.codes(load), v.scales(load) if v.scales else None
            below = v.minimums(load) if v.minimums else None
            for m in range(kernel.rows):
                of_row = record.at(m * kernel.record["end"])
                sums[m].value = sums[m].value + self._multiplied(codes, scales, of_row)
                if below is not None:
                    x_sums = of_row.at(kernel.record["sum"]).load(below.type)
                    minimums[m].value = (-below).fma(x_sums, minimums[m].value)

        self._chunks(k / v.width, k, chunk)
        if not minimums:
            return [of_row.value for of_row in sums]
        zeros = constant(b, vector(F32, v.groups), 0.0)
        lanes = np.arange(LANES) % (2 * v.groups)  # the minimums, then zeros
        lanes[v.groups :] = v.groups
        return [
            of_row.value + below.value.then(zeros).take(lanes)
            for of_row, below in zip(sums, minimums, strict=True)
        ]

    def _multiplied(self, codes: list[Value], scales: Value | None, record: Value) -> Value:
        """A chunk's product with a row of activations, in lanes."""
        v, b, offset = self.v, codes[0].b, self.kernel.record
        total = None
        if self.kernel.integers:
            assert scales is not None
            scales = scales * record.at(offset["scale"]).load(scales.type)
        same: dict[tuple[int, ...], list[int]] = {}  # pieces whose lanes have the same groups
        for p in range(v.pieces):
            same.setdefault(tuple(v.group_of_lanes(p).tolist()), []).append(p)
        for groups, pieces in same.items():
            if self.kernel.integers:
                lanes = constant(b, vector(I32, LANES), 0)
                for p in pieces:
                    x = record.at(offset["x"] + PIECE * p).load(vector(I8, PIECE))
                    if v.zero:
                        lanes = lanes + record.at(offset["zeros"] + PIECE * p).load(vector(I32, LANES))
                    lanes = _dot(lanes, codes[p], x)
                lanes = lanes.float()
            else:
                lanes = constant(b, vector(F32, LANES), 0.0)
                for p in pieces:
                    for i, weights in enumerate(self._weights(codes[p])):
                        x = record.at(offset["x"] + 4 * (PIECE * p + LANES * i)).load(vector(F32, LANES))
                        lanes = weights.fma(x, lanes)
            if scales is not None:
                of_lanes = scales.take(groups)
                total = lanes * of_lanes if total is None else lanes.fma(of_lanes, total)
            else:
                total = lanes if total is None else total + lanes
        assert total is not None
        return total

    def _weights(self, piece: Value) -> list[Value]:
        """float32 of every fourth byte of a piece less `zero`, from byte 0, 1, 2 and 3 on."""
        if piece.is_float:
            return [piece[LANES * i : LANES * (i + 1)] for i in range(4)]
        words = piece.as_type(vector(I32, LANES))
        return [(((words >> 8 * i) & 255) - self.v.zero).float() for i in range(4)]


SMALL = 2**18  # products of a weight and an activation that one thread does sooner than two
PARTS = 4  # for each thread
AHEAD = 64  # chunks by which a row's bytes are asked for before they are read


def _together(values: list[Value]) -> Value:
    """Numbers as a vector."""
    b = values[0].b
    out = constant(b, vector(values[0].type, len(values)), 0)
    for i, value in enumerate(values):
        out = Value(b, b.insert_element(out.ir, value.ir, I32(i)))
    return out


def _sums_of_each(vectors: list[Value]) -> Value:
    """[16] of 16 vectors of 16: the sum of each one's elements, always in the same order."""
    width = LANES  # elements that are left of each; a vector has those of LANES / width of them
    while len(vectors) > 1:
        first = np.arange(2 * LANES).reshape(-1, width)
        halves = [first[:, i * width // 2 : (i + 1) * width // 2].ravel() for i in (0, 1)]
        pairs = [left.then(right) for left, right in zip(vectors[::2], vectors[1::2], strict=True)]
        vectors = [pair.take(halves[0]) + pair.take(halves[1]) for pair in pairs]
        width //= 2
    return vectors[0]


def _dot(total: Value, codes: Value, x: Value) -> Value:
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
