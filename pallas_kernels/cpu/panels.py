"""The kernel of matmul/cpu.py for many rows of activations: weights are unpacked once, into a panel that
stays in the thread's caches.

    panel       all columns of 32 rows of weights (of 16 rows of each of two matrices). For each four columns
                of a group it has a vector with a dword of four codes for each of 16 rows, so that lanes are
                rows; the scales of 16 rows are a vector
    tile        4 rows of activations, whose integers are broadcast four columns at a time

for each panel, by one thread:
    unpack
    for each tile, for each group:
        ints[4 rows, 32] = sum of code * integer                            exact
        y[4 rows, 32] += ints * scale of weights * scale of activations

With 16-bit activations, and for formats of floats, a panel has the weights as float32, in vectors of one
column.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from llvmlite import ir

from pallas_kernels.cpu import activations, ffi
from pallas_kernels.cpu.activations import DWORDS, WEIGHTS, X, dot, scaled, share
from pallas_kernels.cpu.values import (
    F32,
    I8,
    I32,
    I64,
    Type,
    Value,
    Variable,
    constant,
    loop,
    vector,
    when,
)
from pallas_kernels.cpu.vectors import PIECE, Load

TILE = 4  # rows of activations
VECTORS = 2  # of 16 rows of weights, in a panel
UNROLLED = 8


@dataclasses.dataclass(frozen=True)
class Kernel(activations.Kernel):
    """Any number of rows of activations."""

    def workspace(self, rows: int, k: int) -> int:
        """Bytes: records are ordered by tile, then chunk, then row of the tile."""
        return -(-rows // TILE) * -(-k // self.vectors.width) * TILE * self.record["end"]

    @property
    def order(self) -> np.ndarray:
        """int [units]: the units of a chunk, in the panel's order. With integers a unit is four columns, a
        dword of a piece; with floats it is a column. They are sorted by the partial sum that they are added
        to, and within it by share."""
        v = self.vectors
        to = v.column_shares[v.columns[:, ::4].ravel()] if self.integers else np.arange(v.width) % DWORDS
        return np.argsort(to, kind="stable")

    @property
    def factors(self) -> np.ndarray:
        v = self.vectors
        return np.arange(v.groups * v.shares) if v.shares > 1 else np.empty(0, int)

    @property
    def places(self) -> np.ndarray:
        columns = self.vectors.columns
        if self.integers:
            return columns.reshape(-1, 4)[self.order].ravel()
        return columns.reshape(-1, DWORDS, 4).swapaxes(1, 2).ravel()[self.order]

    @property
    def scales(self) -> int:
        """Scales and minimums in a chunk of a row, which a panel stores beside the codes."""
        v = self.vectors
        return v.groups * (2 if v.minimums else 1) if self.integers else 0

    @property
    def sides(self) -> int:
        """Vectors that hold these scales and minimums."""
        return -(-self.scales // DWORDS)

    @property
    def unpacked(self) -> int:
        """Vectors of 16 dwords in an unpacked chunk of a row of weights."""
        return self.vectors.pieces * (1 if self.integers else 4) + self.sides

    @property
    def chunk(self) -> dict[str, int]:
        """Offsets in bytes of a chunk's scales and minimums in a panel, after the codes, and of its "end"."""
        unit = VECTORS * PIECE
        end = len(self.order) * unit
        return {"scale": end, "minimum": end + self.vectors.groups * unit, "end": end + self.scales * unit}

    def module(self, name: str) -> ir.Module:
        writer = _Writer(self)
        return ffi.handler(name, ffi.Phase(writer.parts, writer.round), ffi.Phase(writer.parts, writer.part))


class _Writer(activations.Writer):
    kernel: Kernel  # pyrefly: ignore[bad-override-mutable-attribute]

    # Activations

    def round(self, frame: Value, i: Value, parts: Value) -> None:
        """Write part i of x, normed, into the workspace."""
        rows = ffi.size(frame, X, 0)
        first, last = share(rows, i, parts, 1)
        with loop(first, last) as m:
            self.activations(frame, m, lambda c: self._record(frame, m / TILE, c, m % TILE))

    def _record(self, frame: Value, tile: Value, c: Value, m: Value | int) -> Value:
        chunks = self._chunks_of(frame)
        return ffi.result(frame, 1).at(((tile * chunks + c) * TILE + m) * self.kernel.record["end"])

    def _chunks_of(self, frame: Value) -> Value:
        return (ffi.size(frame, X, 1) + (self.v.width - 1)) / self.v.width

    # Weights

    def part(self, frame: Value, i: Value, parts: Value) -> None:
        n, rows = ffi.size(frame, WEIGHTS, 1), ffi.size(frame, X, 0)
        height = DWORDS * VECTORS // self.kernel.matrices
        first, last = share(n, i, parts, height)
        with when(first.compared("<", last)):
            chunks, size = self._chunks_of(frame), self.kernel.chunk["end"]
            panel, memory = ffi.allocated(chunks * (size + self.kernel.unpacked * DWORDS * PIECE))
            unpacked = panel.at(chunks * size)
            with loop(first, last, height) as row:
                self._fill(frame, panel, unpacked, row, n)
                with loop(constant(frame.b, I64, 0), (rows + (TILE - 1)) / TILE) as tile:
                    self._tile(frame, panel, tile, row, n)
            ffi.freed(memory)

    def _fill(self, frame: Value, panel: Value, rows: Value, first: Value, n: Value) -> None:
        """Unpack the rows of weights from `first` on, in the order of memory, and arrange them in the panel.
        The last row is repeated if there are too few."""
        kernel, b = self.kernel, frame.b
        zero = constant(b, I64, 0)
        with loop(zero, constant(b, I64, VECTORS)) as beside:
            with loop(zero, constant(b, I64, DWORDS)) as r:
                row = first + r if kernel.matrices == 2 else first + beside * DWORDS + r
                row = row.compared("<", n).select(row, n - 1)
                places = self.places(frame, 0, row, n)
                if kernel.matrices == 2:
                    other = self.places(frame, 1, row, n)
                    gate = beside.compared("==", 0)
                    places = {name: gate.select(place, other[name]) for name, place in places.items()}
                self.chunks(
                    ffi.size(frame, X, 1),
                    lambda c, left: self._unpack(
                        self.loads(places, c, left), rows.at((c * DWORDS + r) * (kernel.unpacked * PIECE))
                    ),
                )
            with loop(zero, self._chunks_of(frame)) as c:
                self._arrange(
                    rows.at(c * (kernel.unpacked * DWORDS * PIECE)),
                    panel.at(c * kernel.chunk["end"] + beside * PIECE),
                )

    def _arrange(self, rows: Value, panel: Value) -> None:
        """Transpose a chunk of 16 rows of weights: lanes were columns and become rows."""
        kernel = self.kernel
        places, codes = np.argsort(kernel.order), kernel.unpacked - kernel.sides
        for s in range(kernel.unpacked):
            at = [rows.at((r * kernel.unpacked + s) * PIECE) for r in range(DWORDS)]
            for j, column in enumerate(_transposed([place.load(vector(I32, DWORDS)) for place in at])):
                i = (s - codes) * DWORDS + j  # among the scales, then the minimums
                if s < codes:
                    panel.at(int(places[s * DWORDS + j]) * VECTORS * PIECE).store(column)
                elif i < kernel.scales:
                    panel.at(kernel.chunk["scale"] + i * VECTORS * PIECE).store(column)

    def _unpack(self, load: Load, row: Value) -> None:
        """Unpack a chunk of a row of weights: codes (or float32 weights), then scales and minimums."""
        kernel, v = self.kernel, self.v
        if not kernel.integers:
            values = self.floats(load)
        else:
            scales = v.scales(load)  # pyrefly: ignore[not-callable]
            scales = scales if v.minimums is None else scales.then(v.minimums(load))
            lanes = (np.arange(DWORDS * kernel.sides) % scales.count).reshape(-1, DWORDS)
            values = [*v.codes(load), *map(scales.take, lanes)]
        for i, value in enumerate(values):
            row.at(i * PIECE).store(value.as_type(vector(I32, DWORDS)))

    def _tile(self, frame: Value, panel: Value, tile: Value, row: Value, n: Value) -> None:
        """Compute and store y for a tile of activations and a panel."""
        kernel, b = self.kernel, frame.b
        zero, nothing = constant(b, I64, 0), constant(b, vector(F32, DWORDS), 0.0)
        each = [(m, beside) for m in range(TILE) for beside in range(VECTORS)]
        with b.goto_entry_block():
            partial = Value(b, b.alloca(nothing.type, kernel.sums * len(each)))
        classes = kernel.sums // kernel.turns
        with loop(zero, constant(b, I64, kernel.sums)) as number:
            g, sums = number % classes, {at: Variable(nothing) for at in each}
            with loop(number / classes, self._chunks_of(frame), kernel.turns) as c:
                x = [self._record(frame, tile, c, m) for m in range(TILE)]
                (self._integer_group if kernel.integers else self._float_group)(
                    panel.at(c * kernel.chunk["end"]), x, g, sums
                )
            for i, at in enumerate(each):
                partial.at((number * len(each) + i) * PIECE).store(sums[at].value)
        first, rows = tile * TILE, ffi.size(frame, X, 0)
        for m in range(TILE):
            with when((first + m).compared("<", rows)):
                y = []
                for beside in range(VECTORS):
                    at = [
                        partial.at((g * len(each) + m * VECTORS + beside) * PIECE) for g in range(kernel.sums)
                    ]
                    y.append(_in_halves([place.load(nothing.type) for place in at]))
                for i, outputs in enumerate([[v] for v in y] if kernel.activation is None else [y]):
                    count = (n - row - DWORDS * i).narrow(I32)
                    self.store(frame, outputs, (first + m) * n + row + DWORDS * i, count)

    def _integer_group(self, chunk: Value, x: list[Value], g: Value, sums: dict) -> None:
        kernel, v, b, offset = self.kernel, self.v, chunk.b, self.kernel.record
        number = g * 4
        start = constant(b, vector(I32, DWORDS), 0)
        ints = {}
        for m, beside in sums:
            zeros = x[m].at(number + offset["zeros"]).load(I32).splat(DWORDS) if v.zero else start
            ints[m, beside] = Variable(zeros)
        bytes_of = lambda dwords: dwords.as_type(vector(I8, PIECE))  # noqa: E731
        add = lambda s, w, q: dot(s, bytes_of(w), bytes_of(q))  # noqa: E731
        units = len(kernel.order) // (v.groups * v.shares)
        if v.shares == 1:
            self._add_units(chunk, x, g, units, ints, I32, add)
        else:
            with loop(g * v.shares, (g + 1) * v.shares) as share:
                own = {at: Variable(start) for at in ints}
                self._add_units(chunk, x, share, units, own, I32, add)
                for m in range(TILE):
                    factor = x[m].at(share * 4 + offset["factors"]).load(I32).splat(DWORDS)
                    for j in range(VECTORS):
                        ints[m, j].value = scaled(ints[m, j].value, own[m, j].value, factor)
        for j in range(VECTORS):
            place = chunk.at(g * (VECTORS * PIECE) + PIECE * j)
            scale = place.at(kernel.chunk["scale"]).load(vector(F32, DWORDS))
            minimum = place.at(kernel.chunk["minimum"]).load(vector(F32, DWORDS)) if v.minimums else None
            for m in range(TILE):
                total = sums[m, j]
                x_scale = x[m].at(number + offset["scale"]).load(F32).splat(DWORDS)
                total.value = ints[m, j].value.float().fma(scale * x_scale, total.value)
                if minimum is not None:
                    x_sum = x[m].at(number + offset["sum"]).load(F32).splat(DWORDS)
                    total.value = (-minimum).fma(x_sum, total.value)

    def _float_group(self, chunk: Value, x: list[Value], g: Value, sums: dict) -> None:
        units = len(self.kernel.order) // self.kernel.sums
        self._add_units(chunk, x, g, units, sums, F32, lambda s, w, q: w.fma(q, s))

    def _add_units(
        self, chunk: Value, x: list[Value], g: Value, units: int, sums: dict, element: Type,
        added: Callable[[Value, Value, Value], Value],
    ) -> None:  # fmt: skip
        """sum = added(sum, weights, activations) for each sum and each unit of share g, vectors of 16."""
        step = min(units, UNROLLED)
        with loop(constant(chunk.b, I64, 0), constant(chunk.b, I64, units), step) as u:
            for i in range(step):
                at = g * units + u + i
                place = chunk.at(at * (VECTORS * PIECE))
                weights = [place.at(PIECE * j).load(vector(element, DWORDS)) for j in range(VECTORS)]
                for m in range(TILE):
                    q = x[m].at(at * 4).load(element).splat(DWORDS)
                    for j in range(VECTORS):
                        sums[m, j].value = added(sums[m, j].value, weights[j], q)


def _in_halves(values: list[Value]) -> Value:
    """Their sum, in the order in which cpu/rows.py adds the elements of a vector."""
    while len(values) > 1:
        half = len(values) // 2
        values = [a + b for a, b in zip(values[:half], values[half:], strict=True)]
    return values[0]


def _transposed(vectors: list[Value]) -> list[Value]:
    """Transpose 16 vectors of 16, in four steps that exchange halves of pairs."""
    places = np.arange(2 * DWORDS).reshape(2, DWORDS)
    for width in (8, 4, 2, 1):
        out = list(vectors)
        for r in range(DWORDS):
            if r & width:
                continue
            both = vectors[r].then(vectors[r + width])
            lanes = places.reshape(2, -1, 2, width)
            for half in (0, 1):
                out[r + half * width] = both.take(lanes[:, :, half].swapaxes(0, 1).ravel())
        vectors = out
    return vectors
