"""The kernel of matmul/cpu.py for many rows of activations: weights are unpacked once, into a panel that
stays in the thread's caches.

    panel       all columns of 32 rows of weights (of 16 rows of each of two matrices). For each four columns
                of a group it has a vector with a dword of four codes for each of 16 rows, so that lanes are
                rows; the scales of 16 rows are a vector
    tile        4 rows of activations, whose integers are broadcast four columns at a time; where there is a
                matrix unit (matrix_unit.py), 16, which is as fast as 8 by vectors

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
from typing import NamedTuple

import numpy as np
from llvmlite import ir

from pallas_kernels.cpu import activations, compiled, ffi, matrix_unit
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

TILE = 4  # rows of activations, by vectors
# Where there is a matrix unit: units of a group, or of a share of one, from which on it multiplies; and the
# most rows of activations behind its last tile that vectors multiply.
LEAST_UNITS, ROWS_BY_VECTORS = 8, 8
MOST_PANELS = 4  # that a thread makes at a time, and as many as half of its second cache has room for
VECTORS = 2  # of 16 rows of weights, in a panel
UNROLLED = 8
UNROLLED_ROWS = 4


@dataclasses.dataclass(frozen=True)
class Kernel(activations.Kernel):
    """Any number of rows of activations."""

    @property
    def by_matrices(self) -> bool:
        """Whether the matrix unit multiplies. With a scale for 16 columns most of the time goes into
        scaling, which it does not do."""
        return self.integers and self.units >= LEAST_UNITS and matrix_unit.usable()

    @property
    def tile(self) -> int:
        """Rows of activations of the largest tile."""
        return matrix_unit.ROWS if self.by_matrices else TILE

    @property
    def units(self) -> int:
        """Of a group, or of a share of one."""
        return len(self.order) // (self.vectors.groups * self.vectors.shares)

    def workspace(self, rows: int, k: int) -> int:
        """Bytes: records are ordered by tile, then chunk (`_Record`)."""
        return -(-rows // self.tile) * -(-k // self.vectors.width) * self.tile * self.record["end"]

    def together(self, name: str) -> int:
        """Numbers of one of `sizes`, 4 bytes each, that lie side by side for a row of a tile, before those of
        the next row: all, or as many as the matrix unit reads of a row at a time."""
        if not self.by_matrices:
            return self.sizes[name] // 4
        return min(self.units, matrix_unit.MOST_DWORDS) if name == "x" else 1

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


class _Record(NamedTuple):
    """What a chunk of columns of a row of activations is in the workspace: row m of a tile, whose records
    begin at a place. One after the other lie the tile's "x", "factors" and so on (Kernel.sizes), of each
    `together` numbers of the first row, of the second row, .., then the next numbers of the first row."""

    kernel: Kernel
    place: Value
    m: Value

    def at(self, name: str, i: Value) -> Value:
        """The address of number i, of 4 bytes."""
        kernel, together = self.kernel, self.kernel.together(name)
        number = self.m * together + i
        if 4 * together < kernel.sizes[name]:
            number = (i / together * kernel.tile + self.m) * together + i % together
        return self.place.at(number * 4 + kernel.tile * kernel.record[name])


class _Writer(activations.Writer):
    kernel: Kernel  # pyrefly: ignore[bad-override-mutable-attribute]

    # Activations

    def round(self, frame: Value, i: Value, parts: Value) -> None:
        """Write part i of x, normed, into the workspace."""
        rows = ffi.size(frame, X, 0)
        first, last = share(rows, i, parts, 1)
        with loop(first, last) as m:
            self.activations(frame, m, lambda c: self._record(frame, m, c))

    def _record(self, frame: Value, m: Value, c: Value) -> "_Record":
        """Chunk c of row m."""
        kernel, chunks = self.kernel, self._chunks_of(frame)
        size = kernel.tile * kernel.record["end"]
        place = ffi.result(frame, 1).at((m / kernel.tile * chunks + c) * size)
        return _Record(kernel, place, m % kernel.tile)

    def write(self, record: "_Record", name: str, value: Value) -> None:
        together = self.kernel.together(name)
        size = together * (4 if value.element == I8 else 1)  # elements of a store
        for i in range(value.count // size):
            place = record.at(name, constant(value.b, I64, i * together))
            place.store(value[i * size : (i + 1) * size])

    def _chunks_of(self, frame: Value) -> Value:
        return (ffi.size(frame, X, 1) + (self.v.width - 1)) / self.v.width

    # Weights

    def part(self, frame: Value, i: Value, parts: Value) -> None:
        n, rows = ffi.size(frame, WEIGHTS, 1), ffi.size(frame, X, 0)
        height = DWORDS * VECTORS // self.kernel.matrices
        first, last = share(n, i, parts, height)
        with when(first.compared("<", last)):
            chunks = self._chunks_of(frame)
            size = chunks * self.kernel.chunk["end"]
            room = constant(frame.b, I64, compiled.second_cache() // 2)
            count = (room / size).at_most(MOST_PANELS).at_least(1)
            panels, memory = ffi.allocated(count * size + chunks * (self.kernel.unpacked * DWORDS * PIECE))
            unpacked, step = panels.at(count * size), count * height
            with loop(first, last, step) as begin:
                end = (begin + step).compared("<", last).select(begin + step, last)

                def panels_of(use: Callable[[Value, Value], None], begin=begin, end=end) -> None:
                    """use(panel, its first row of weights)"""
                    with loop(begin, end, height) as row:
                        use(panels.at((row - begin) / height * size), row)

                panels_of(lambda panel, row: self._fill(frame, panel, unpacked, row, n))
                self._multiply(frame, rows, n, panels_of)
            ffi.freed(memory)

    def _multiply(
        self, frame: Value, rows: Value, n: Value, panels_of: Callable[[Callable[[Value, Value], None]], None]
    ) -> None:
        """Compute and store y for all activations and some panels. A tile is read from memory once for all of
        these."""
        b, whole = frame.b, constant(frame.b, I64, 0)
        if self.kernel.by_matrices:
            unit = matrix_unit.ROWS
            matrix_unit.configure(b, self.kernel.together("x"))
            left = (rows + (unit - 1 - ROWS_BY_VECTORS)) / unit * unit
            with loop(whole, left, unit) as m:
                panels_of(lambda panel, row: self._tile_of_matrices(frame, panel, m, row, n))
            matrix_unit.release(b)
            whole = left
        with loop(whole, rows, TILE) as m:
            panels_of(lambda panel, row: self._tile(frame, panel, m, row, n))

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

    def _tile(self, frame: Value, panel: Value, first: Value, row: Value, n: Value) -> None:
        """Compute and store y for a tile of activations, from row `first` on, and a panel."""
        kernel, b = self.kernel, frame.b
        zero, nothing = constant(b, I64, 0), constant(b, vector(F32, DWORDS), 0.0)
        each = [(m, beside) for m in range(TILE) for beside in range(VECTORS)]
        with b.goto_entry_block():
            partial = Value(b, b.alloca(nothing.type, kernel.sums * len(each)))
        classes = kernel.sums // kernel.turns
        with loop(zero, constant(b, I64, kernel.sums)) as number:
            g, sums = number % classes, {at: Variable(nothing) for at in each}
            with loop(number / classes, self._chunks_of(frame), kernel.turns) as c:
                x = [self._record(frame, first + m, c) for m in range(TILE)]
                (self._integer_group if kernel.integers else self._float_group)(
                    panel.at(c * kernel.chunk["end"]), x, g, sums
                )
            for i, at in enumerate(each):
                partial.at((number * len(each) + i) * PIECE).store(sums[at].value)
        for m in range(TILE):
            self._store_row(frame, partial.at(m * VECTORS * PIECE), len(each), first + m, row, n)

    def _store_row(self, frame: Value, partial: Value, every: int, m: Value, row: Value, n: Value) -> None:
        """Store y for row m of activations, if there is one. Its partial sums are `every` vectors apart."""
        kernel, kind = self.kernel, vector(F32, DWORDS)
        with when(m.compared("<", ffi.size(frame, X, 0))):
            y = []
            for beside in range(VECTORS):
                at = [partial.at((g * every + beside) * PIECE) for g in range(kernel.sums)]
                y.append(_in_halves([place.load(kind) for place in at]))
            for i, outputs in enumerate([[v] for v in y] if kernel.activation is None else [y]):
                count = (n - row - DWORDS * i).narrow(I32)
                self.store(frame, outputs, m * n + row + DWORDS * i, count)

    def _tile_of_matrices(self, frame: Value, panel: Value, first: Value, row: Value, n: Value) -> None:
        """The same of a tile for the matrix unit."""
        kernel, v, b = self.kernel, self.v, frame.b
        zero, nothing = constant(b, I64, 0), constant(b, vector(F32, DWORDS), 0.0)
        rows, every = matrix_unit.ROWS, matrix_unit.ROWS * VECTORS
        classes = kernel.sums // kernel.turns
        with b.goto_entry_block():
            partial = Value(b, b.alloca(nothing.type, kernel.sums * every))
            ints = Value(b, b.alloca(vector(I32, DWORDS), v.shares * every))
        with loop(zero, constant(b, I64, kernel.sums * every)) as i:
            partial.at(i * PIECE).store(nothing)
        with loop(zero, self._chunks_of(frame)) as c:
            chunk, x = panel.at(c * kernel.chunk["end"]), self._record(frame, first, c)
            with loop(zero, constant(b, I64, classes)) as g:
                for share in range(v.shares):
                    self._multiply_share(chunk, x, g * v.shares + share, ints.at(share * every * PIECE))
                sums = partial.at((c % kernel.turns * classes + g) * (every * PIECE))
                self._scale_rows(chunk, x, g, ints, sums)
        with loop(zero, constant(b, I64, rows)) as m:
            self._store_row(frame, partial.at(m * (VECTORS * PIECE)), every, first + m, row, n)

    def _scale_rows(self, chunk: Value, x: "_Record", g: Value, ints: Value, sums: Value) -> None:
        """Add a group's products, of `_multiply_share`, to the partial sums of all rows of a tile."""
        b, kinds = chunk.b, (vector(I32, DWORDS), vector(F32, DWORDS))
        rows, sides = matrix_unit.ROWS, self._sides(chunk, g)
        with loop(constant(b, I64, 0), constant(b, I64, rows), UNROLLED_ROWS) as begin:
            for m in (begin + i for i in range(UNROLLED_ROWS)):
                own = x._replace(m=m)
                for j, side in enumerate(sides):
                    at = [
                        ints.at((m + (share * VECTORS + j) * rows) * PIECE) for share in range(self.v.shares)
                    ]
                    total = sums.at((m * VECTORS + j) * PIECE)
                    whole = self._whole(own, g, [place.load(kinds[0]) for place in at])
                    total.store(self._scaled(whole, own, g, side, total.load(kinds[1])))

    def _multiply_share(self, chunk: Value, x: "_Record", share: Value, ints: Value) -> None:
        """Store sums of code * integer of a share: int32 [2 vectors of the panel, 16 rows of activations,
        16]."""
        units, together = self.kernel.units, self.kernel.together("x")
        matrix_unit.clear(chunk.b)
        for unit in range(0, units, together):
            at = share * units + unit
            place = chunk.at(at * (VECTORS * PIECE))
            weights = place, place.at(PIECE)
            matrix_unit.multiply(x.at("x", at), 4 * together, weights, VECTORS * PIECE)
        matrix_unit.store(ints)

    def _whole(self, x: "_Record", g: Value, shares: list[Value]) -> Value:
        """A group's sum of (code - zero) integer, of a row of activations, from those of its shares."""
        v = self.v
        zeros = x.at("zeros", g).load(I32).splat(DWORDS) if v.zero else None
        if v.shares == 1:
            return shares[0] if zeros is None else shares[0] + zeros
        total = constant(g.b, vector(I32, DWORDS), 0) if zeros is None else zeros
        for i, ints in enumerate(shares):
            factor = x.at("factors", g * v.shares + i).load(I32).splat(DWORDS)
            total = scaled(total, ints, factor)
        return total

    def _integer_group(self, chunk: Value, x: "list[_Record]", g: Value, sums: dict) -> None:
        kernel, v, b = self.kernel, self.v, chunk.b
        start = constant(b, vector(I32, DWORDS), 0)
        ints = {}
        for m, beside in sums:
            zeros = x[m].at("zeros", g).load(I32).splat(DWORDS) if v.zero else start
            ints[m, beside] = Variable(zeros)
        bytes_of = lambda dwords: dwords.as_type(vector(I8, PIECE))  # noqa: E731
        add = lambda s, w, q: dot(s, bytes_of(w), bytes_of(q))  # noqa: E731
        if v.shares == 1:
            self._add_units(chunk, x, g, kernel.units, ints, I32, add)
        else:
            with loop(g * v.shares, (g + 1) * v.shares) as share:
                own = {at: Variable(start) for at in ints}
                self._add_units(chunk, x, share, kernel.units, own, I32, add)
                for m in range(TILE):
                    factor = x[m].at("factors", share).load(I32).splat(DWORDS)
                    for j in range(VECTORS):
                        ints[m, j].value = scaled(ints[m, j].value, own[m, j].value, factor)
        for j, side in enumerate(self._sides(chunk, g)):
            for m in range(TILE):
                total = sums[m, j]
                total.value = self._scaled(ints[m, j].value, x[m], g, side, total.value)

    def _sides(self, chunk: Value, g: Value) -> list[tuple[Value, Value | None]]:
        """Of each vector of the panel a group's scale and minimum, or None."""
        kernel, kind, sides = self.kernel, vector(F32, DWORDS), []
        for j in range(VECTORS):
            place = chunk.at(g * (VECTORS * PIECE) + PIECE * j)
            minimum = place.at(kernel.chunk["minimum"]).load(kind) if self.v.minimums else None
            sides.append((place.at(kernel.chunk["scale"]).load(kind), minimum))
        return sides

    def _scaled(
        self, ints: Value, x: "_Record", g: Value, side: tuple[Value, Value | None], total: Value
    ) -> Value:
        """total + a group's product, of a row of activations and 16 of weights."""
        scale, minimum = side
        x_scale = x.at("scale", g).load(F32).splat(DWORDS)
        total = ints.float().fma(scale * x_scale, total)
        if minimum is None:
            return total
        x_sum = x.at("sum", g).load(F32).splat(DWORDS)
        return (-minimum).fma(x_sum, total)

    def _float_group(self, chunk: Value, x: "list[_Record]", g: Value, sums: dict) -> None:
        units = len(self.kernel.order) // self.kernel.sums
        self._add_units(chunk, x, g, units, sums, F32, lambda s, w, q: w.fma(q, s))

    def _add_units(
        self, chunk: Value, x: "list[_Record]", g: Value, units: int, sums: dict, element: Type,
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
                    q = x[m].at("x", at).load(element).splat(DWORDS)
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
