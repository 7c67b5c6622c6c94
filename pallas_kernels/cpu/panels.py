"""The kernel of matmul/cpu.py for many rows of activations: weights are unpacked once, into a panel that
stays in a thread's caches.

    a panel     32 rows of weights (of two matrices 16 of each), all columns: for each four columns of a group
                the codes of 16 rows, a dword for each, so that lanes are rows; scales of 16 rows as a vector
    a tile      4 rows of activations, whose integers are broadcast four columns at a time

for each panel, by one thread:
    unpack
    for each tile, for each group:
        ints[4 rows, 32] = sum of code * integer                            exact
        y[4 rows, 32] += ints * scale of weights * scale of activations

With 16 bits of activations, and for formats of floats, a panel has the weights in float32, one column a lane.
"""

import dataclasses

import numpy as np
from llvmlite import ir

from pallas_kernels import formats
from pallas_kernels.cpu import activations, ffi
from pallas_kernels.cpu.activations import LANES, dot, together
from pallas_kernels.cpu.values import (
    F32,
    I8,
    I32,
    I64,
    Value,
    Variable,
    constant,
    exp,
    loop,
    type_of,
    vector,
    when,
)
from pallas_kernels.cpu.vectors import PIECE

TILE = 4  # rows of activations
BESIDE = 2  # vectors of 16 rows of weights in a panel
UNROLLED = 8


@dataclasses.dataclass(frozen=True)
class Kernel(activations.Kernel):
    """Rows of activations are read from the call."""

    @property
    def sizes(self) -> dict[str, int]:
        """x in the order of the panel's units, zeros for each group."""
        v, whole = self.vectors, self.integers
        return {
            "x": v.width if whole else 4 * v.width,
            "zeros": 4 * v.groups if whole and v.zero else 0,
            "scale": 4 * v.groups if whole else 0,
            "sum": 4 * v.groups if whole and v.minimums else 0,
        }

    def workspace(self, rows: int, k: int) -> int:
        """Tile by tile, in it chunk by chunk."""
        return -(-rows // TILE) * -(-k // self.vectors.width) * TILE * self.record["end"]

    @property
    def order(self) -> np.ndarray:
        """int [units]: the units in the order in which a panel has them. A unit is a dword of a piece (four
        columns), sorted by group; or a column, as the pieces have them."""
        v = self.vectors
        groups = v.columns[:, ::4].ravel() // v.group
        return np.argsort(groups, kind="stable") if self.integers else np.arange(v.width)

    @property
    def groups(self) -> int:
        """Of units in a chunk, with scales of their own where these are not in the weights."""
        return self.vectors.groups if self.integers else self.vectors.width // 32

    @property
    def chunk(self) -> dict[str, int]:
        """What a panel has of a chunk, and its offset in bytes; "end" behind it all."""
        v, unit = self.vectors, BESIDE * PIECE
        scales = v.groups * unit if self.integers else 0
        end = len(self.order) * unit
        return {
            "scale": end,
            "minimum": end + scales,
            "end": end + scales + (scales if v.minimums else 0),
        }

    def target(self) -> str:
        """The name by which XLA knows it: made, compiled and registered on first use."""
        return ffi.target(self, _module)


def _module(kernel: Kernel, name: str) -> ir.Module:
    writer = _Writer(kernel)
    return ffi.handler(name, ffi.Phase(writer.parts, writer.round), ffi.Phase(writer.parts, writer.part))


class _Writer(activations.Writer):
    kernel: Kernel

    # Activations

    def round(self, frame: Value, i: Value, parts: Value) -> None:
        """Part i of x, normed, into the workspace."""
        rows = ffi.size(frame, 0, 0)
        first, last = _share(rows, i, parts, 1)
        with loop(first, last) as m:
            self.activations(frame, m, lambda c: self._record(frame, m / TILE, c, m % TILE))

    def _record(self, frame: Value, tile: Value, c: Value, m: Value | int) -> Value:
        chunks = self._chunks_of(frame)
        return ffi.result(frame, 1).at(((tile * chunks + c) * TILE + m) * self.kernel.record["end"])

    def _chunks_of(self, frame: Value) -> Value:
        return (ffi.size(frame, 0, 1) + (self.v.width - 1)) / self.v.width

    def write_integers(self, values: Value, record: Value) -> None:
        v, offset = self.v, self.kernel.record
        q, sums = self.rounded(values, record)
        record.at(offset["x"]).store(q.take(v.columns.reshape(-1, 4)[self.kernel.order].ravel()))
        if v.zero:
            record.at(offset["zeros"]).store(together(sums) * -v.zero)

    # Weights

    def part(self, frame: Value, i: Value, parts: Value) -> None:
        n, rows = ffi.size(frame, self.weights, 1), ffi.size(frame, 0, 0)
        height = LANES * BESIDE // self.kernel.matrices
        first, last = _share(n, i, parts, height)
        with when(first.compared("<", last)):
            panel, memory = ffi.allocated(self._chunks_of(frame) * self.kernel.chunk["end"])
            with loop(first, last, height) as row:
                self._fill(frame, panel, row, n)
                with loop(constant(frame.b, I64, 0), (rows + (TILE - 1)) / TILE) as tile:
                    self._tile(frame, panel, tile, row, n)
            ffi.freed(memory)

    def _fill(self, frame: Value, panel: Value, first: Value, n: Value) -> None:
        """Unpack rows of weights from `first` on into the panel; behind the last row, the last again."""
        kernel, v, b = self.kernel, self.v, frame.b
        zero, lanes = constant(b, I64, 0), constant(b, I64, LANES)
        unit = 1 if kernel.integers else 4  # vectors of units in a piece
        weights = formats.get(kernel.format).WEIGHTS
        with b.goto_entry_block():
            rows = Value(b, b.alloca(vector(I32, LANES), LANES * v.pieces * unit))
        with (
            loop(zero, self._chunks_of(frame)) as c,
            loop(zero, constant(b, I64, BESIDE)) as beside,
        ):
            mine = panel.at(c * kernel.chunk["end"] + beside * PIECE)
            with loop(zero, lanes) as r:
                place = (frame, first, n, c, beside, r, rows, mine)
                left = ffi.size(frame, 0, 1) / weights - c * kernel.blocks
                if not kernel.ragged:
                    self._unpack(*place, None)
                else:
                    with b.if_else(left.compared("<", kernel.blocks).ir) as (last, whole):
                        with last:
                            self._unpack(*place, left.narrow(I32))
                        with whole:
                            self._unpack(*place, None)
            places = np.argsort(kernel.order)
            for s in range(v.pieces * unit):
                vectors = [
                    rows.at((r * v.pieces * unit + s) * PIECE).load(vector(I32, LANES)) for r in range(LANES)
                ]
                for j, column in enumerate(_transposed(vectors)):
                    mine.at(int(places[s * LANES + j]) * BESIDE * PIECE).store(column)

    def _unpack(self, frame, first, n, c, beside, r, rows, mine, left: Value | None) -> None:
        """A chunk of a row of weights, with `left` only so many blocks: what will be dwords of columns to
        `rows`, scales to the panel."""
        kernel, v = self.kernel, self.v
        k, weights = ffi.size(frame, 0, 1), formats.get(kernel.format).WEIGHTS
        layer = ffi.argument(frame, 1).load(I32).signed(I64)
        row = first + r if kernel.matrices == 2 else first + beside * LANES + r
        row = row.compared("<", n).select(row, n - 1)

        def load(name: str):
            dtype = kernel.fields[name]
            count = dtype.itemsize // dtype.base.itemsize
            at = self.weights + list(kernel.fields).index(name)
            base = ffi.argument(frame, at)
            if kernel.matrices == 2:
                base = beside.compared("==", 0).select(base, ffi.argument(frame, at + len(kernel.fields)))
            place = base.at(((layer * n + row) * (k / weights) + c * kernel.blocks) * dtype.itemsize)
            kind = vector(type_of(dtype.base), kernel.blocks * count)
            return place.load(kind, None if left is None else left * count)

        codes, scales = v.codes(load), v.scales(load) if v.scales else None
        minimums = v.minimums(load) if v.minimums else None
        if kernel.integers:
            assert scales is not None
            for p, piece in enumerate(codes):
                rows.at((r * v.pieces + p) * PIECE).store(piece.as_type(vector(I32, LANES)))
            for name, values in (("scale", scales), ("minimum", minimums)):
                for g in range(v.groups if values is not None else 0):
                    mine.at(r * 4 + (kernel.chunk[name] + g * BESIDE * PIECE)).store(values[g])
            return
        for p, piece in enumerate(codes):
            groups = v.group_of_lanes(p)
            for i, w in enumerate(self.floats(piece)):
                if scales is not None:
                    w = w * scales.take(groups)
                if minimums is not None:
                    w = w - minimums.take(groups)
                rows.at((r * v.pieces * 4 + 4 * p + i) * PIECE).store(w.as_type(vector(I32, LANES)))

    def _tile(self, frame: Value, panel: Value, tile: Value, row: Value, n: Value) -> None:
        """y of a tile of activations and a panel."""
        kernel, b = self.kernel, frame.b
        zero = constant(b, I64, 0)
        each = [(m, beside) for m in range(TILE) for beside in range(BESIDE)]
        sums = {at: Variable(constant(b, vector(F32, LANES), 0.0)) for at in each}
        with loop(zero, self._chunks_of(frame)) as c, loop(zero, constant(b, I64, kernel.groups)) as g:
            x = [self._record(frame, tile, c, m) for m in range(TILE)]
            (self._integer_group if kernel.integers else self._float_group)(
                panel.at(c * kernel.chunk["end"]), x, g, sums
            )
        first, rows = tile * TILE, ffi.size(frame, 0, 0)
        for m in range(TILE):
            with when((first + m).compared("<", rows)):
                y = [sums[m, beside].value for beside in range(BESIDE)]
                if kernel.matrices == 2:
                    y = [y[0] / (exp(-y[0]) + 1.0) * y[1]]
                for i, out in enumerate(y):
                    count = (n - row - LANES * i).narrow(I32)
                    place = ((first + m) * n + row + LANES * i) * 4
                    if kernel.residual:
                        out = out + ffi.argument(frame, self.residual).at(place).load(out.type, count)
                    ffi.result(frame, 0).at(place).store(out, count)

    def _integer_group(self, chunk: Value, x: list[Value], g: Value, sums: dict) -> None:
        kernel, v, b, offset = self.kernel, self.v, chunk.b, self.kernel.record
        number = g * 4
        start = constant(b, vector(I32, LANES), 0)
        ints = {}
        for m, beside in sums:
            zeros = x[m].at(number + offset["zeros"]).load(I32).splat(LANES) if v.zero else start
            ints[m, beside] = Variable(zeros)
            ints[m, beside].value = zeros
        units = v.group // 4
        step = min(units, UNROLLED)
        with loop(constant(b, I64, 0), constant(b, I64, units), step) as u:
            for i in range(step):
                at = g * units + u + i
                codes = [
                    chunk.at(at * (BESIDE * PIECE) + PIECE * j).load(vector(I8, PIECE)) for j in range(BESIDE)
                ]
                for m in range(TILE):
                    q = x[m].at(at * 4).load(I32).splat(LANES).as_type(vector(I8, PIECE))
                    for j in range(BESIDE):
                        ints[m, j].value = dot(ints[m, j].value, codes[j], q)
        for j in range(BESIDE):
            place = chunk.at(g * (BESIDE * PIECE) + PIECE * j)
            scale = place.at(kernel.chunk["scale"]).load(vector(F32, LANES))
            below = place.at(kernel.chunk["minimum"]).load(vector(F32, LANES)) if v.minimums else None
            for m in range(TILE):
                total = sums[m, j]
                of_x = x[m].at(number + offset["scale"]).load(F32).splat(LANES)
                total.value = ints[m, j].value.float().fma(scale * of_x, total.value)
                if below is not None:
                    of_x = x[m].at(number + offset["sum"]).load(F32).splat(LANES)
                    total.value = (-below).fma(of_x, total.value)

    def _float_group(self, chunk: Value, x: list[Value], g: Value, sums: dict) -> None:
        units = self.v.width // self.kernel.groups
        with loop(constant(chunk.b, I64, 0), constant(chunk.b, I64, units), UNROLLED) as u:
            for i in range(UNROLLED):
                at = g * units + u + i
                weights = [
                    chunk.at(at * (BESIDE * PIECE) + PIECE * j).load(vector(F32, LANES))
                    for j in range(BESIDE)
                ]
                for m in range(TILE):
                    q = x[m].at(at * 4).load(F32).splat(LANES)
                    for j in range(BESIDE):
                        sums[m, j].value = weights[j].fma(q, sums[m, j].value)


def _share(count: Value, i: Value, parts: Value, step: int) -> tuple[Value, Value]:
    """From where to where part i goes of `count` things, of which `step` stay together."""
    each = (count + parts * step - 1) / (parts * step) * step
    first = i * each
    last = first + each
    return first, last.compared("<", count).select(last, count)


def _transposed(vectors: list[Value]) -> list[Value]:
    """16 vectors of 16 -> 16 of the elements in the same place: halves of pairs change places, four times."""
    places = np.arange(2 * LANES).reshape(2, LANES)
    for width in (8, 4, 2, 1):
        out = list(vectors)
        for r in range(LANES):
            if r & width:
                continue
            both = vectors[r].then(vectors[r + width])
            lanes = places.reshape(2, -1, 2, width)
            for half in (0, 1):
                out[r + half * width] = both.take(lanes[:, :, half].swapaxes(0, 1).ravel())
        vectors = out
    return vectors
