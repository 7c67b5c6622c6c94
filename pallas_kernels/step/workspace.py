"""Activations on their way from block to block of one launch (gpu/exchange.py), in global memory.

[vector][split][row][width of the vector], i32
[phase]    of more than one row, what is passed on (product.py)
what is behind them is attention's (decode_splits.py)
"""

import contextlib
import itertools

import jax.numpy as jnp

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.exchange import Exchange, first_contents, tag
from pallas_kernels.gpu.values import index, integer
from pallas_kernels.matmul.bit_mma.product import Product
from pallas_kernels.step.shapes import Phase, Shapes, Vector

# x is written twice a layer: its writes so far, when a phase reads it or after it has written it.
WRITES_OF_X = {Phase.QKV: 0, Phase.O: 1, Phase.GATE_UP: 1, Phase.DOWN: 2}


def workspace_words(shapes: Shapes) -> int:
    """Of a step's vectors, and of what is passed on of them; a multiple of 4."""
    words = sum(_words(shapes).values()) + sum(_passed_on(shapes).values())
    return -(-words // 4) * 4


def begun(shapes: Shapes, x, more: int):
    """The workspace before the first layer, and so many words more: x as its phases read it, or nothing to be
    added to it."""
    first, before = first_contents(x, 0).reshape(-1), 0
    if shapes.passes_on:
        words = _words(shapes)
        first = jnp.full(words[Vector.DOWN_SUMS], tag(0), jnp.int32)
        before = sum(words.values()) - first.size  # the last vector
    return jnp.pad(first, (before, workspace_words(shapes) + more - before - first.size))


def _words(shapes: Shapes) -> dict[Vector, int]:
    return {v: shapes.copies(v) * shapes.rows * shapes.width(v) for v in Vector}


def _passed_on(shapes: Shapes) -> dict[Phase, int]:
    """Words of what each product reads, where it is passed on as integers, of all copies."""
    if not shapes.passes_on:
        return {}
    return {phase: p.copies * p.passed_words for phase, p in shapes.products().items()}


class Workspace:
    """As a lane sees it."""

    def __init__(self, shapes: Shapes, ref):
        self.ref, self.shapes = ref, shapes
        self.width = {vector: shapes.width(vector) for vector in Vector}
        # One row's o and down write the residual stream. Of more rows it is with whoever quantizes it, who
        # adds to it what o and down have made.
        o, down = (Vector.O_SUMS, Vector.DOWN_SUMS) if shapes.passes_on else (Vector.X, Vector.X)
        made = Vector.QKV, Vector.ATTENDED, o, Vector.HIDDEN, down
        self.writes = dict(zip(Phase, made, strict=True))
        self.reads = dict(zip(Phase, (down, *made), strict=False))
        sizes = [*_words(shapes).values(), *_passed_on(shapes).values()]
        begins = list(itertools.accumulate(sizes, initial=0))
        self.begin = dict(zip(Vector, begins, strict=False))
        self.passed_on = dict(zip(_passed_on(shapes), begins[len(Vector) :], strict=False))

    def receive(self, phase: Phase, layer, row, columns, count: int) -> list:
        """Wait for `count` float32 from each column on (an index and a constant) of what a phase reads; of
        each split, one behind the other."""
        vector = self.reads[phase]
        places = [
            ((self._at(vector, row, column), more + copy * self.shapes.rows * self.width[vector]), count)
            for copy in range(self.shapes.copies(vector))
            for column, more in columns
        ]
        return memory.load_tagged(self.ref, places, self.tag_read(phase, layer), at_once=True)

    def send(self, phase: Phase, layer, y, row, column, split=0):
        """A float32 of what a phase writes."""
        at = self._at(self.writes[phase], row, column, split)
        Exchange(self.ref, 0, self.tag_written(phase, layer)).send(at, [y])

    def receive_passed_on(self, phase: Phase, layer, places, p: Product, split) -> list:
        """Wait for words from each place on (an index, a constant and how many) of what is passed on to a
        phase, of a split of the columns."""
        begin = self.passed_on[phase]
        if p.copies > 1:
            begin = lanes.block() // p.splits % p.copies * p.passed_words + begin
        if p.splits > 1:
            begin = split * (p.passed_words // p.splits) + begin
        shifted = [((index(place) + begin, constant), count) for place, constant, count in places]
        load = lambda: memory.load_tagged_words(self.ref, shifted, self.tag_read(phase, layer))  # noqa: E731
        if p.busy == p.warps:
            return load()
        words = sum(count for *_, count in places)
        return lanes.choose(lanes.thread() // 32 < p.busy, load, [integer(0)] * words)

    def pass_on(self, phase: Phase, words, p: Product):
        """(place, word, condition or None) of what is passed on to a phase."""
        begins = [self.passed_on[phase] + copy * p.passed_words for copy in range(p.copies)]
        for place, word, condition in words:
            with contextlib.nullcontext() if condition is None else lanes.when(condition):
                for begin in begins:
                    memory.store_for_others([word], self.ref, place + begin)

    def tag_read(self, phase: Phase, layer):
        """Of what a phase of a layer reads, and of what is passed on of it."""
        return self._tag(phase, layer, self.reads[phase], 0)

    def tag_written(self, phase: Phase, layer):
        return self._tag(phase, layer, self.writes[phase], 1)

    def _tag(self, phase: Phase, layer, vector: Vector, written: int):
        write = layer
        if vector == Vector.X:
            write = layer * 2 + WRITES_OF_X[phase]
        if vector == Vector.DOWN_SUMS:  # before the first layer nothing is to be added
            write = layer + written
        return integer(tag(write))

    def _at(self, vector: Vector, row, column, split=0):
        if not isinstance(split, int) or split:
            row = index(row) + split * self.shapes.rows
        return index(row) * self.width[vector] + self.begin[vector] + index(column)
