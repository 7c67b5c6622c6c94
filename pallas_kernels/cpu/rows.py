"""The kernel of matmul/cpu.py for a few rows of activations: weights are multiplied in the registers into
which they are unpacked."""

import dataclasses
import functools

import numpy as np
from llvmlite import ir

from pallas_kernels.cpu import activations, ffi
from pallas_kernels.cpu.activations import DWORDS, WEIGHTS, X, dot, share
from pallas_kernels.cpu.values import (
    F32,
    I8,
    I16,
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

PACKED = np.arange(2 * DWORDS).reshape(2, -1, 4).swapaxes(0, 1).ravel()  # the order of Value.packed


@dataclasses.dataclass(frozen=True)
class Kernel(activations.Kernel):
    """rows  the number of rows of activations"""

    rows: int

    FACTOR = I16

    @property
    def places(self) -> np.ndarray:
        """In the order of the pieces, of which `floats` takes every fourth column."""
        columns = self.vectors.columns
        return (columns if self.integers else columns.reshape(-1, DWORDS, 4).swapaxes(1, 2)).ravel()

    @property
    def classes(self) -> list[tuple[int, ...]]:
        """The shares of lanes, of each kind of pieces."""
        v = self.vectors
        return list(dict.fromkeys(tuple(v.lane_shares(p).tolist()) for p in range(v.pieces)))

    @property
    def factors(self) -> np.ndarray:
        """Of each class's lanes; of two classes together in the order in which `_scaled` reads them."""
        if self.vectors.shares == 1:
            return np.empty(0, int)
        lanes = np.array(self.classes).reshape(-1, self.pairs * DWORDS)
        return (lanes if self.pairs == 1 else lanes[:, PACKED]).ravel()

    @property
    def pairs(self) -> int:
        """How many classes of a chunk are stored together: 2 if they come out even."""
        return 1 + (len(self.classes) % 2 == 0)

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

    def part(self, frame: Value, i: Value, parts: Value) -> None:
        n = ffi.size(frame, WEIGHTS, 1)
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
        kernel, b = self.kernel, frame.b
        workspace = ffi.result(frame, 1)
        places = self.places(frame, matrix, row, n)
        sums = [Variable(constant(b, vector(F32, kernel.sums), 0.0)) for _ in range(kernel.rows)]

        def add(first: Value, count: int, left: Value | None):
            """The products of `count` chunks, 1 or `turns`."""
            chunks = [first + i for i in range(count)]
            loads = [self.loads(places, c, left) for c in chunks]
            at = lambda c, m: workspace.at((c * kernel.rows + m) * kernel.record["end"])  # noqa: E731
            records = [[at(c, m) for c in chunks] for m in range(kernel.rows)]
            if kernel.integers:
                self._add_integers(loads, records, sums, None if count == kernel.turns else first)
            else:
                self._add_floats(loads[0], [record for (record,) in records], sums)

        whole = ffi.size(frame, X, 1) / self.v.width
        together = whole / kernel.turns * kernel.turns
        with loop(constant(b, I64, 0), together, kernel.turns) as c:
            add(c, kernel.turns, None)
        if kernel.turns > 1:
            with loop(together, whole) as c:
                add(c, 1, None)
        left = ffi.size(frame, X, 1) - whole * self.v.width
        with when(left.compared(">", 0)):
            add(whole, 1, left.narrow(I32))
        zeros, lanes = constant(b, vector(F32, kernel.sums), 0.0), np.arange(DWORDS)
        return [total.value.then(zeros).take(np.minimum(lanes, kernel.sums)) for total in sums]

    def _add_integers(
        self, loads: list[Load], records: list[list[Value]], sums: list[Variable], alone: Value | None
    ) -> None:
        """Add the products of chunks' groups with each row of activations, which has a record for each chunk.
        alone: the number of the only chunk, where it is not all that have partial sums of their own."""
        v, offset = self.v, self.kernel.record
        codes = [v.codes(load) for load in loads]
        scales = _joined([v.scales(load) for load in loads])  # pyrefly: ignore[not-callable]
        minimums = _joined([v.minimums(load) for load in loads]) if v.minimums else None
        kinds = self.kernel.classes
        same: dict[tuple[int, int], list[int]] = {}  # a chunk's pieces whose lanes have the same shares
        for c in range(len(loads)):
            for p in range(v.pieces):
                same.setdefault((c, kinds.index(tuple(v.lane_shares(p).tolist()))), []).append(p)
        labels = [np.array(kinds[kind]) // v.shares + c * v.groups for c, kind in same]
        turns, groups = self.kernel.turns, np.arange(self.kernel.sums) % v.groups
        own = None
        if alone is not None:
            turn = (alone % turns).narrow(I32).splat(self.kernel.sums)
            own = constant(scales.b, turn.type, np.arange(self.kernel.sums) // v.groups).compared("==", turn)
        for row, total in zip(records, sums, strict=True):

            def side(name: str, kind: Type, row=row):
                return _joined([record.at(offset[name]).load(vector(kind, v.groups)) for record in row])

            lanes = []
            zero = constant(scales.b, vector(I32, DWORDS), 0)
            for (c, _), pieces in same.items():
                ints = zero
                for p in pieces:
                    x = row[c].at(offset["x"] + PIECE * p).load(vector(I8, PIECE))
                    ints = dot(ints, codes[c][p], x)
                lanes.append(ints)
            places = labels
            if v.shares > 1:
                lanes, places = self._scaled(lanes, list(same), row, labels)
            ints = _group_sums(lanes, places)
            ints = ints + side("zeros", I32) if v.zero else ints
            factors = [(ints.float(), scales * side("scale", F32))]
            if minimums is not None:
                factors.append((-minimums, side("sum", F32)))
            for one, other in factors:
                if own is not None:
                    one, other = one.take(groups), own.select(other.take(groups), 0.0)
                total.value = one.fma(other, total.value)

    def _scaled(
        self, lanes: list[Value], at: list[tuple[int, int]], row: list[Value], groups: list[np.ndarray]
    ) -> tuple[list[Value], list[np.ndarray]]:
        """Sums of 16 bits times their lanes' factors, and the group of each element. Two vectors at a time
        become one, in which neighbours, which belong to a group, have been added.

        at: the chunk and the class of each vector; row: the chunks' records; groups: those of the lanes
        """
        kernel, out = self.kernel, []
        kind = vector(kernel.FACTOR, kernel.pairs * DWORDS)
        size = kernel.FACTOR.width // 8 * DWORDS
        stored = [row[c].at(kernel.record["factors"] + size * number).load(kind) for c, number in at]
        if len(lanes) % 2:
            lanes = [*lanes, constant(lanes[0].b, lanes[0].type, 0)]
            stored, groups = [*stored, stored[-1]], [*groups, groups[-1]]
        for i in range(0, len(lanes), 2):
            factors = stored[i] if kernel.pairs == 2 else stored[i].then(stored[i + 1]).take(PACKED)
            out.append(lanes[i].packed(lanes[i + 1]).neighbours(factors))
        pairs = zip(groups[::2], groups[1::2], strict=True)
        return out, [np.concatenate(pair)[PACKED][::2] for pair in pairs]

    def _add_floats(self, load: Load, records: list[Value], sums: list[Variable]) -> None:
        """Add the products of a chunk's columns with each row of activations."""
        for i, weights in enumerate(self.floats(load)):
            for record, total in zip(records, sums, strict=True):
                x = record.at(self.kernel.record["x"] + 4 * DWORDS * i).load(weights.type)
                total.value = weights.fma(x, total.value)


def _joined(vectors: list[Value]) -> Value:
    return functools.reduce(Value.then, vectors)


def _group_sums(vectors: list[Value], groups: list[np.ndarray]) -> Value:
    """The sum of the elements of each group, in the groups' order. groups[i]: the group of each element of
    vectors[i]; all have as many elements.

    Two vectors at a time become one, in which neighbours of a group have been added.
    """
    while len(vectors) > 1 or len(set(groups[0].tolist())) < len(groups[0]):
        if len(vectors) > 1:
            vectors = [a.then(b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
            groups = [np.concatenate(pair) for pair in zip(groups[::2], groups[1::2], strict=True)]
        order = [np.argsort(names, kind="stable").reshape(-1, 2) for names in groups]
        vectors = [v.take(at[:, 0]) + v.take(at[:, 1]) for v, at in zip(vectors, order, strict=True)]
        groups = [names[at[:, 0]] for names, at in zip(groups, order, strict=True)]
    return vectors[0]


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
