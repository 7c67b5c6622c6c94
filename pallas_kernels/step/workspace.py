"""Activations on their way from block to block of one launch, in global memory.

There is no barrier: each word has a tag of 2 bits, which says of which layer it is (memory.store_tagged). A
reader asks for its words again until all have the tag that it wants, so that an activation is on its way to
its reader as soon as it is written, where a barrier would wait for the slowest write, count, and then read.

No word is written while somebody may still read it: a block writes a vector only when it has read all of a
later one, of which each part was made by somebody who had read all of that vector before.

    [vector][row][width of the vector], i32;  of more than one row: [vector] passed on (rows_product.py);
    what is behind them is attention's (decode_splits.py)
"""

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import integer, of
from pallas_kernels.step.rows_product import RowsProduct
from pallas_kernels.step.shapes import Phase, Shapes, Vector

READS = {
    Phase.QKV: Vector.X, Phase.ATTENTION: Vector.QKV, Phase.O: Vector.ATTENDED, Phase.GATE_UP: Vector.X,
    Phase.DOWN: Vector.HIDDEN,
}  # fmt: skip
WRITES = {
    Phase.QKV: Vector.QKV, Phase.ATTENTION: Vector.ATTENDED, Phase.O: Vector.X, Phase.GATE_UP: Vector.HIDDEN,
    Phase.DOWN: Vector.X,
}  # fmt: skip
# x is written twice a layer: its writes so far, when a phase reads it or behind what it writes.
WRITES_OF_X = {Phase.QKV: 0, Phase.O: 1, Phase.GATE_UP: 1, Phase.DOWN: 2}


def tag(write):
    """Of the write-th contents of a place, which begins as zeros."""
    return write % 3 + 1


def workspace_words(shapes: Shapes) -> int:
    """Of a step's vectors, and of what is passed on of them."""
    return shapes.rows * sum(map(shapes.width, Vector)) + sum(_passed_on(shapes).values())


def _passed_on(shapes: Shapes) -> dict[Vector, int]:
    """Words of each vector that a product reads, where it is passed on as integers."""
    products = {READS[phase]: p for phase, p in shapes.products().items()}
    return {v: p.groups * p.rows * p.words for v, p in products.items() if isinstance(p, RowsProduct)}


class Workspace:
    """As a lane sees it."""

    def __init__(self, shapes: Shapes, ref):
        self.ref, self.width = ref, {vector: shapes.width(vector) for vector in Vector}
        sizes = [shapes.rows * width for width in self.width.values()]
        self.begin = {vector: sum(sizes[:vector]) for vector in Vector}
        self.passed_on, at = {}, sum(sizes)
        for vector, size in _passed_on(shapes).items():
            self.passed_on[vector] = at
            at += size

    def receive(self, phase: Phase, layer, row, columns, count: int, at_once: bool = False) -> list:
        """Wait for `count` float32 from each column on (an index and a constant) of what a phase reads."""
        vector = READS[phase]
        wanted = [((self._at(vector, row, column), more), count) for column, more in columns]
        return memory.load_tagged(self.ref, wanted, self.tag(phase, layer, READS), at_once)

    def send(self, phase: Phase, layer, y, row, column):
        """A float32 of what a phase writes."""
        at = self._at(WRITES[phase], row, column)
        memory.store_tagged(y, self.ref, at, self.tag(phase, layer, WRITES))

    def receive_passed_on(self, phase: Phase, layer, places, p: RowsProduct) -> list:
        """Wait for words from each place on (an index, a constant and how many) of what is passed on to a
        phase."""
        begin = self.passed_on[READS[phase]]
        wanted = [((of(place) + begin, constant), count) for place, constant, count in places]
        return memory.load_tagged_words(self.ref, wanted, self.tag(phase, layer, READS), p.at_once)

    def pass_on(self, phase: Phase, words):
        """(place, word, condition or None) of what is passed on to a phase."""
        begin = self.passed_on[READS[phase]]
        for place, word, condition in words:
            if condition is None:
                memory.store_for_others(word, self.ref, place + begin)
                continue
            with lanes.when(condition):
                memory.store_for_others(word, self.ref, place + begin)

    def tag(self, phase: Phase, layer, vectors: dict[Phase, Vector]):
        """Of what a phase of a layer reads, or writes."""
        write = layer
        if vectors[phase] == Vector.X:
            write = layer * 2 + WRITES_OF_X[phase]
        return integer(tag(write))

    def _at(self, vector: Vector, row, column):
        return of(row) * self.width[vector] + self.begin[vector] + of(column)
