"""The kernel of matmul/cpu.py for a few rows of activations: weights are multiplied in the registers into
which they are unpacked."""

import dataclasses

import numpy as np
from llvmlite import ir

from pallas_kernels.cpu import activations, ffi
from pallas_kernels.cpu.activations import DWORDS, dot, share, together
from pallas_kernels.cpu.values import F32, I8, I32, I64, Value, Variable, constant, loop, vector
from pallas_kernels.cpu.vectors import PIECE


@dataclasses.dataclass(frozen=True)
class Kernel(activations.Kernel):
    """rows  the number of rows of activations"""

    rows: int

    @property
    def sizes(self) -> dict[str, int]:
        """x is in the order of the pieces; zeros is an int32 for each four bytes of x."""
        v, whole = self.vectors, self.integers
        return {
            "x": v.width if whole else 4 * v.width,
            "zeros": v.width if whole and v.zero else 0,
            "scale": 4 * v.groups if whole else 0,
            "sum": 4 * v.groups if v.minimums else 0,
        }

    def workspace(self, rows: int, k: int) -> int:
        return -(-k // self.vectors.width) * rows * self.record["end"]

    def module(self, name: str) -> ir.Module:
        writer = _Writer(self)
        one = lambda frame, threads: constant(frame.b, I64, 1)  # noqa: E731
        return ffi.handler(name, ffi.Phase(one, writer.round), ffi.Phase(writer.parts, writer.part))


class _Writer(activations.Writer):
    kernel: Kernel  # pyrefly: ignore[bad-override-mutable-attribute]

    def round(self, frame: Value, i: Value, parts: Value) -> None:
        """Write x, normed, into the workspace."""
        rows, end = self.kernel.rows, self.kernel.record["end"]
        with loop(constant(frame.b, I64, 0), constant(frame.b, I64, rows)) as m:
            self.activations(frame, m, lambda c: ffi.result(frame, 1).at((c * rows + m) * end))

    def write_integers(self, values: Value, record: Value) -> None:
        v, b, offset = self.v, values.b, self.kernel.record
        q, _ = self.rounded(values, record)
        for p, columns in enumerate(v.columns):
            piece = q.take(columns)
            record.at(offset["x"] + PIECE * p).store(piece)
            if v.zero:
                ones = constant(b, vector(I8, PIECE), 1)
                sums = dot(constant(b, vector(I32, DWORDS), 0), ones, piece)
                record.at(offset["zeros"] + PIECE * p).store(sums * -v.zero)

    def write_floats(self, values: Value, record: Value) -> None:
        super().write_floats(values, record)
        v = self.v
        if v.minimums:
            sums = [values[g * v.group : (g + 1) * v.group].sum() for g in range(v.groups)]
            record.at(self.kernel.record["sum"]).store(together(sums))

    def part(self, frame: Value, i: Value, parts: Value) -> None:
        n = ffi.size(frame, self.weights, 1)
        first, last = share(n, i, parts, DWORDS)
        with loop(first, last, DWORDS) as row:
            self._outputs(frame, row, n)

    def _outputs(self, frame: Value, row: Value, n: Value) -> None:
        """Compute and store y for 16 rows of weights. They are read one after the other: memory is twice as
        fast as with several rows at a time. Their vectors of sums are stored, then added up together."""
        kernel, b = self.kernel, frame.b
        left = n - row
        count = left.compared("<", DWORDS).select(left, constant(b, I64, DWORDS))
        each = kernel.matrices * kernel.rows
        with b.goto_entry_block():
            sums = Value(b, b.alloca(vector(F32, DWORDS), each * DWORDS))
        with loop(constant(b, I64, 0), count) as r:
            for matrix in range(kernel.matrices):
                for m, total in enumerate(self._row(frame, matrix, row + r, n)):
                    sums.at((r + (matrix * kernel.rows + m) * DWORDS) * PIECE).store(total)
        for m in range(kernel.rows):
            y = []
            for matrix in range(kernel.matrices):
                row_sums = sums.at((matrix * kernel.rows + m) * DWORDS * PIECE)
                lanes = [row_sums.at(r * PIECE).load(vector(F32, DWORDS)) for r in range(DWORDS)]
                y.append(_sums_of_each(lanes))
            self.store(frame, y, row + n * m, count.narrow(I32))

    def _row(self, frame: Value, matrix: int, row: Value, n: Value) -> list[Value]:
        """For a row of weights and each row of activations: a vector, whose elements add up to the
        product."""
        kernel, v, b = self.kernel, self.v, frame.b
        workspace = ffi.result(frame, 1)
        places = self.places(frame, matrix, row, n)
        sums = [Variable(constant(b, vector(F32, DWORDS), 0.0)) for _ in range(kernel.rows)]
        minimums = [Variable(constant(b, vector(F32, v.groups), 0.0)) for _ in sums] if v.minimums else []

        def chunk(c: Value, left: Value | None):
            record = workspace.at(c * (kernel.rows * kernel.record["end"]))
            load = self.loads(places, c, left)
            codes, scales = v.codes(load), v.scales(load) if v.scales else None
            minimum = v.minimums(load) if v.minimums else None
            for m in range(kernel.rows):
                row_record = record.at(m * kernel.record["end"])
                sums[m].value = sums[m].value + self._multiplied(codes, scales, row_record)
                if minimum is not None:
                    x_sums = row_record.at(kernel.record["sum"]).load(minimum.type)
                    minimums[m].value = (-minimum).fma(x_sums, minimums[m].value)

        self.chunks(ffi.size(frame, 0, 1), chunk)
        if not minimums:
            return [total.value for total in sums]
        zeros = constant(b, vector(F32, v.groups), 0.0)
        lanes = np.arange(DWORDS) % (2 * v.groups)  # the minimums, then zeros
        lanes[v.groups :] = v.groups
        return [
            total.value + minimum.value.then(zeros).take(lanes)
            for total, minimum in zip(sums, minimums, strict=True)
        ]

    def _multiplied(self, codes: list[Value], scales: Value | None, record: Value) -> Value:
        """The product of a chunk and a row of activations, as a vector to be added up."""
        v, b, offset = self.v, codes[0].b, self.kernel.record
        total = None
        if self.kernel.integers:
            assert scales is not None
            scales = scales * record.at(offset["scale"]).load(scales.type)
        same: dict[tuple[int, ...], list[int]] = {}  # pieces whose lanes have the same groups
        for p in range(v.pieces):
            same.setdefault(tuple(v.lane_groups(p).tolist()), []).append(p)
        for groups, pieces in same.items():
            if self.kernel.integers:
                lanes = constant(b, vector(I32, DWORDS), 0)
                for p in pieces:
                    x = record.at(offset["x"] + PIECE * p).load(vector(I8, PIECE))
                    if v.zero:
                        lanes = lanes + record.at(offset["zeros"] + PIECE * p).load(vector(I32, DWORDS))
                    lanes = dot(lanes, codes[p], x)
                lanes = lanes.float()
            else:
                lanes = constant(b, vector(F32, DWORDS), 0.0)
                for p in pieces:
                    for i, weights in enumerate(self.floats(codes[p])):
                        x = record.at(offset["x"] + 4 * (PIECE * p + DWORDS * i)).load(vector(F32, DWORDS))
                        lanes = weights.fma(x, lanes)
            if scales is not None:
                lane_scales = scales.take(groups)
                total = lanes * lane_scales if total is None else lanes.fma(lane_scales, total)
            else:
                total = lanes if total is None else total + lanes
        assert total is not None
        return total


def _sums_of_each(vectors: list[Value]) -> Value:
    """[16]: the sums of the elements of 16 vectors of 16, each in the same order."""
    width = DWORDS  # partial sums left per vector; each remaining vector has those of DWORDS / width vectors
    while len(vectors) > 1:
        first = np.arange(2 * DWORDS).reshape(-1, width)
        halves = [first[:, i * width // 2 : (i + 1) * width // 2].ravel() for i in (0, 1)]
        pairs = [left.then(right) for left, right in zip(vectors[::2], vectors[1::2], strict=True)]
        vectors = [pair.take(halves[0]) + pair.take(halves[1]) for pair in pairs]
        width //= 2
    return vectors[0]
