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

from pallas_kernels.cpu import activations, ffi, later
from pallas_kernels.cpu.activations import LANES, MATH, dot, together
from pallas_kernels.cpu.values import (
    F32,
    I8,
    I32,
    I64,
    Value,
    Variable,
    constant,
    loop,
    vector,
    when,
)
from pallas_kernels.cpu.vectors import PIECE, Load

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
    def scales(self) -> int:
        """Numbers beside the codes of a chunk: scales, and minimums where there are."""
        v = self.vectors
        return v.groups * (2 if v.minimums else 1) if self.integers else 0

    @property
    def sides(self) -> int:
        """Vectors of them."""
        return -(-self.scales // LANES)

    @property
    def unpacked(self) -> int:
        """Vectors of 16 dwords that a chunk of a row of weights becomes."""
        return self.vectors.pieces * (1 if self.integers else 4) + self.sides

    @property
    def chunk(self) -> dict[str, int]:
        """What a panel has of a chunk, and its offset in bytes; "end" behind it all."""
        unit = BESIDE * PIECE
        end = len(self.order) * unit
        return {"scale": end, "minimum": end + self.groups * unit, "end": end + self.scales * unit}

    def target(self) -> str:
        """The name by which XLA knows it: made, compiled and registered on first use."""
        return later.target(self, _module)


def _module(kernel: Kernel, name: str) -> ir.Module:
    writer = _Writer(kernel)
    return ffi.handler(name, ffi.Phase(writer.parts, writer.round), ffi.Phase(writer.parts, writer.part))


class _Writer(activations.Writer):
    kernel: Kernel  # pyrefly: ignore[bad-override-mutable-attribute]

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
            chunks, size = self._chunks_of(frame), self.kernel.chunk["end"]
            panel, memory = ffi.allocated(chunks * (size + self.kernel.unpacked * LANES * PIECE))
            unpacked = panel.at(chunks * size)
            with loop(first, last, height) as row:
                self._fill(frame, panel, unpacked, row, n)
                with loop(constant(frame.b, I64, 0), (rows + (TILE - 1)) / TILE) as tile:
                    self._tile(frame, panel, tile, row, n)
            ffi.freed(memory)

    def _fill(self, frame: Value, panel: Value, rows: Value, first: Value, n: Value) -> None:
        """Unpack rows of weights from `first` on, one after the other as memory likes it, and arrange them in
        the panel; behind the last row, the last again."""
        kernel, b = self.kernel, frame.b
        zero = constant(b, I64, 0)
        with loop(zero, constant(b, I64, BESIDE)) as beside:
            with loop(zero, constant(b, I64, LANES)) as r:
                row = first + r if kernel.matrices == 2 else first + beside * LANES + r
                row = row.compared("<", n).select(row, n - 1)
                places = self.places(frame, 0, row, n)
                if kernel.matrices == 2:
                    other = self.places(frame, 1, row, n)
                    gate = beside.compared("==", 0)
                    places = {name: gate.select(place, other[name]) for name, place in places.items()}
                self.chunks(
                    ffi.size(frame, 0, 1),
                    lambda c, left: self._unpack(
                        self.loads(places, c, left), rows.at((c * LANES + r) * (kernel.unpacked * PIECE))
                    ),
                )
            with loop(zero, self._chunks_of(frame)) as c:
                self._arrange(
                    rows.at(c * (kernel.unpacked * LANES * PIECE)),
                    panel.at(c * kernel.chunk["end"] + beside * PIECE),
                )

    def _arrange(self, rows: Value, panel: Value) -> None:
        """A chunk of 16 rows of weights: lanes that were columns become rows."""
        kernel = self.kernel
        places, codes = np.argsort(kernel.order), kernel.unpacked - kernel.sides
        for s in range(kernel.unpacked):
            at = [rows.at((r * kernel.unpacked + s) * PIECE) for r in range(LANES)]
            for j, column in enumerate(_transposed([place.load(vector(I32, LANES)) for place in at])):
                i = (s - codes) * LANES + j  # of the scales, and the minimums behind them
                if s < codes:
                    panel.at(int(places[s * LANES + j]) * BESIDE * PIECE).store(column)
                elif i < kernel.scales:
                    panel.at(kernel.chunk["scale"] + i * BESIDE * PIECE).store(column)

    def _unpack(self, load: Load, row: Value) -> None:
        """A chunk of a row of weights: what will be dwords of columns, and its scales."""
        kernel, v = self.kernel, self.v
        codes, scales = v.codes(load), v.scales(load) if v.scales else None
        minimums = v.minimums(load) if v.minimums else None
        if kernel.integers:
            assert scales is not None
            scales = scales if minimums is None else scales.then(minimums)
            sides = [scales.take((np.arange(LANES) + LANES * i) % scales.count) for i in range(kernel.sides)]
            for i, values in enumerate(codes + sides):
                row.at(i * PIECE).store(values.as_type(vector(I32, LANES)))
            return
        for p, piece in enumerate(codes):
            groups = v.group_of_lanes(p)
            for i, w in enumerate(self.floats(piece)):
                if scales is not None:
                    w = w * scales.take(groups)
                if minimums is not None:
                    w = w - minimums.take(groups)
                row.at((4 * p + i) * PIECE).store(w.as_type(vector(I32, LANES)))

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
                if kernel.activation is not None:
                    y = [kernel.activation(*y, math=MATH)]
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
