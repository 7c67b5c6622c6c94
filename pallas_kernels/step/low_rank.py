"""Low-rank changes (pallas_kernels/low_rank.py) beside the products of a step of one row in one launch.

    y = W x + scale B t,   t = A x

Each block that makes a slice of x multiplies it with its columns of A and passes on its part of t behind the
slice itself. Each reader adds the parts while it makes W x:

    block i of x:   slice_i -> barrier -> A[:, slice_i] slice_i -> part i of t
    reader:         x -> quantized -> W x .................... -> barrier -> norm (W x + scale B t)
                         parts asked for -> added, in order ->

So t takes no trip of its own through the L2 cache. Where the reader norms, slices are multiplied by gamma
before, and 1 / rms comes with that of W x.

Parts lie in the workspace as [rank][slice]: the ranks of all changes beside a product, one change after the
other. Each warp of a reader adds ranks of its own, neighbouring lanes neighbouring slices. It asks only for
those that the block's rows of W need: of q, k and v mostly one's.

A lane asks for its numbers of A and B before the block waits for activations. Parts are written when the
slice is, and read before their reader makes anything, so nobody overwrites what is still read
(gpu/exchange.py).
"""

import contextlib
import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from pallas_kernels.attention.decode_cache import Share
from pallas_kernels.attention.decode_plan import THREADS, WARPS, Plan
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.exchange import Exchange
from pallas_kernels.gpu.values import as_real, fma, index, integer, minimum, real, select, total
from pallas_kernels.step.inputs import StepChanges
from pallas_kernels.step.low_rank_plan import Piece
from pallas_kernels.step.shapes import Phase, Shapes

# Who makes what a phase reads.
MAKERS = {Phase.QKV: Phase.DOWN, Phase.O: Phase.ATTENTION, Phase.GATE_UP: Phase.O, Phase.DOWN: Phase.GATE_UP}
READERS = {maker: reader for reader, maker in MAKERS.items()}


class Part(NamedTuple):
    """What a block makes of a vector.

    first    its first column
    columns  of a slice, a multiple of 4
    begin    the first of the block's slices that it multiplies with A, and
    slices   how many
    number   of the block's slice 0 among those of all blocks
    end      columns of the block that exist; None: all
    """

    first: Any
    columns: int
    begin: Any
    slices: int
    number: Any
    end: Any = None


class Item(NamedTuple):
    """A rank and a slice, by its position in the block. So many neighbouring `lanes` multiply four columns
    each, again and again; `fours` are their places in what the block makes, and whether they exist (None:
    they do).

    exists   whether there is such an item; `in_warp`: whether this warp has any (None: it has)
    """

    rank: Any
    position: Any
    fours: list[tuple[Any, Any]]
    lanes: int
    exists: Any
    in_warp: Any


def flattened(changes: StepChanges) -> StepChanges:
    """A [layers, adapters, rank, K] as [layers adapters, rank, K], B alike: what kernels are given."""
    flat = lambda x: x.reshape(-1, *x.shape[-2:])  # noqa: E731
    return jax.tree.map(flat, changes._replace(chosen=None))._replace(chosen=changes.chosen)


def workspace_words(shapes: Shapes, attention: Plan) -> int:
    """For parts of t."""
    return sum(_words(shapes, attention).values())


def _words(shapes: Shapes, attention: Plan) -> dict[Phase, int]:
    """By who reads them; multiples of 4, as ranks are."""
    return {phase: shapes.beside(phase).ranks * _slices(shapes, attention, phase) for phase in MAKERS}


def _slices(shapes: Shapes, attention: Plan, phase: Phase) -> int:
    """Of the vector that a phase reads."""
    if phase == Phase.O:
        return attention.owners * attention.splits
    p = shapes.products()[MAKERS[phase]]
    return -(-p.n_tiles // p.tiles)


class LowRankChanges:
    """As a lane sees them."""

    def __init__(
        self, shapes: Shapes, attention: Plan, layers: int, changes: Any, workspace, begin: int, smem
    ):
        """
        changes    `flattened`, of refs
        workspace  with `workspace_words` from `begin` on
        smem       scratch memory, as `shapes` has it
        """
        self.shapes, self.attention, self.workspace, self.smem = shapes, attention, workspace, smem
        (self.dtype,) = {change.dtype for changes in shapes.changes.matrices for change in changes}
        self.products, self.beside = shapes.products(), {phase: shapes.beside(phase) for phase in MAKERS}
        self.slices = {phase: _slices(shapes, attention, phase) for phase in MAKERS}
        self.begins, self.layers = {}, layers
        for phase, size in _words(shapes, attention).items():
            self.begins[phase], begin = begin, begin + size
        qkv, o, *gate_up, down = changes.matrices
        refs = {Phase.QKV: [qkv], Phase.O: [o], Phase.GATE_UP: gate_up, Phase.DOWN: [down]}
        self.changes = {phase: self._with_refs(phase, refs[phase]) for phase in MAKERS}
        a = next(ref.a for matrices in refs.values() for changes in matrices for ref in changes)
        self.stacked, self.chosen = a.type.shape[0] // layers, index(0)
        if changes.chosen is not None:
            self.chosen = minimum(index(memory.load(changes.chosen, 0)), self.stacked - 1)

    def _with_refs(self, phase: Phase, refs: Sequence[Sequence]) -> list[list[tuple[Piece, Any]]]:
        """The changes of each matrix."""
        pieces = [[p for p in pieces if p.change.rank] for pieces in self.beside[phase].matrices]
        return [list(zip(*both, strict=True)) for both in zip(pieces, refs, strict=True)]

    def layer_after(self, maker: Phase, layer):
        """The layer that reads what a phase makes; after the last, which nobody reads, the last."""
        return minimum(layer + 1, self.layers - 1) if maker == Phase.DOWN else layer

    # By the maker of a vector

    def keep(self, y, place):
        """A number that this block has made, for the A of its reader; its place among them."""
        memory.store(y, self.smem, place + self.shapes.made_at)

    def made(self, maker: Phase, layer, tag) -> contextlib.AbstractContextManager:
        """Around this block's share of a product: what it `keep`s, until a barrier that ends it, is
        multiplied with its reader's A, and passed on with a tag."""
        return self._multiplied(READERS[maker], self.layer_after(maker, layer), self._part(maker), tag)

    @contextlib.contextmanager
    def attended(self, layer, tag, share: Share, alone: bool):
        """The same around a block's outputs of attention: of its heads' columns one split's, or, alone, those
        of all splits."""
        a = self.attention
        size = a.heads * a.head_dim
        columns = 4 * -(-size // (4 * a.splits))
        part = Part(
            share.heads * size, columns, index(0) if alone else share.split, a.splits if alone else 1,
            share.owner * a.splits, None if size == columns * a.splits else index(size),
        )  # fmt: skip
        with self._multiplied(Phase.O, layer, part, tag):
            yield
            lanes.block_barrier()

    def begin(self, x, gamma, tag):
        """By who makes the input of later layers, that of the first: refs of x and gamma."""
        size, width = 16 * self.products[Phase.DOWN].tiles, self.products[Phase.QKV].columns
        first = lanes.block() * size
        with self._multiplied(Phase.QKV, index(0), self._part(Phase.DOWN), tag):
            for begin in range(0, size, THREADS):
                place = lanes.thread() + begin
                with lanes.when((place < size) & (first + place < width)):
                    n = first + place
                    self.keep(memory.load(x, 0, n) * memory.load(gamma, 0, n), place)
            lanes.block_barrier()

    def _part(self, maker: Phase) -> Part:
        """This block's of a product."""
        p = self.products[maker]
        first = lanes.block() * p.tiles
        end = (index(p.n_tiles) - first) * 16 if p.n_tiles % p.tiles else None
        return Part(first * 16, 16 * p.tiles, index(0), 1, lanes.block(), end)

    @contextlib.contextmanager
    def _multiplied(self, reader: Phase, layer, part: Part, tag):
        loaded = [self._load_a(reader, layer, part, item) for item in self._items(reader, part)]
        yield
        for item, numbers in zip(self._items(reader, part), loaded, strict=True):
            sums = []
            for (place, exists), a in zip(item.fours, numbers, strict=True):
                x = memory.load_reals(4, self.smem, [place + self.shapes.made_at])
                products = _dot(x, self._reals(a))
                sums.append(products if exists is None else select(exists, products, 0.0))
            y = lanes.warp_sum_real(total(sums), item.lanes)
            with lanes.when(item.exists & (lanes.thread() % item.lanes == 0)):
                at = item.rank * self.slices[reader] + part.number + item.position
                Exchange(self.workspace, self.begins[reader], tag).send(at, [y])

    def _items(self, reader: Phase, part: Part) -> Iterator[Item]:
        """This lane's."""
        ranks, fours = self.beside[reader].ranks, part.columns // 4
        count, together = ranks * part.slices, 1
        while together < min(fours, 32) and 2 * together * count <= THREADS:
            together *= 2
        at_once = THREADS // together
        for first in range(0, count, at_once):
            thread = lanes.thread()
            number, lane = thread // together + first, thread % together
            rank, position = minimum(number, count - 1), part.begin
            if part.slices > 1:
                rank, position = rank % ranks, rank // ranks + position
            places = []
            for four in range(0, fours, together):
                own, inside = lane + four, []
                if four + together > fours:
                    own, inside = minimum(own, fours - 1), [own < fours]
                place = position * part.columns + own * 4
                inside += [] if part.end is None else [place < part.end]
                places.append((place, functools.reduce(operator.and_, inside) if inside else None))
            whole = first + at_once <= count
            in_warp = None if whole else thread // 32 * (32 // together) + first < count
            yield Item(rank, position, places, together, number < count, in_warp)

    def _load_a(self, reader: Phase, layer, part: Part, item: Item) -> list[list]:
        """An item's numbers of A, by its fours."""
        last, changes = self.products[reader].columns - 4, list(itertools.chain(*self.changes[reader]))

        def address(place, exists):
            column = part.first + place
            column = column if exists is None else minimum(column, last)
            each = [
                memory.address_of(
                    ref.a, [self._layer(layer), minimum(item.rank - p.begin, p.change.rank - 1), column]
                )
                for p, ref in changes
            ]
            return _chosen(item.rank, [p.begin for p, _ in changes], each)

        return self._load_fours(
            lambda: [address(*four) for four in item.fours], len(item.fours), item.in_warp
        )

    # By its reader

    def ask(self, phase: Phase) -> list[list]:
        """Ask for this warp's parts of t, for `add`."""
        out = []
        for ranks, exists in self._own_ranks(phase):
            parts = self._parts(phase, ranks)
            load = functools.partial(memory.load_early, self.workspace, parts)
            words = [integer(0)] * sum(count for _, count in parts)
            out.append(load() if exists is None else lanes.choose(exists, load, words))
        return out

    def add(self, phase: Phase, asked: list[list], tag):
        """Wait for what was asked for, and store scale t in shared memory for `change`, after a barrier."""
        lane, p = lanes.thread() % 32, self.slices[phase]
        width = self._width(phase)
        begins, scales = zip(
            *((p.begin, p.change.scale) for p, _ in itertools.chain(*self.changes[phase])), strict=True
        )
        for (ranks, exists), early in zip(self._own_ranks(phase), asked, strict=True):
            with contextlib.nullcontext() if exists is None else lanes.when(exists):
                words = memory.settled(self.workspace, self._parts(phase, ranks), early, tag)
                each = len(words) // len(ranks)
                for k, rank in enumerate(ranks):
                    parts = [memory.untagged(word) for word in words[k * each : (k + 1) * each]]
                    for i in range(each):
                        if (first := i // width * 32 * width) + 32 * width > p:
                            parts[i] = select(lane * width + first < p, parts[i], 0.0)
                    t = lanes.warp_sum_real(total(parts))
                    if set(scales) != {1.0}:
                        t = t * (_chosen(rank, begins, [real(s) for s in scales]))
                    memory.store(t, self.smem, rank + self.shapes.inner_at)  # all lanes have the same

    def _own_ranks(self, phase: Phase) -> list[tuple[list, Any]]:
        """This warp's ranks, and whether there are such (None: there are)."""
        p, b = self.products[phase], self.beside[phase]
        size, rows = 16 * p.tiles, 16 * p.n_tiles
        needed = [b.needed(first, min(first + size, rows) - 1) for first in range(0, rows, size)]
        begin, end = index(0), index(b.ranks)
        if b.varies:
            first, (pieces,) = lanes.block() * size, b.matrices
            starts = [piece.start for piece in pieces]
            begin = _chosen(first, starts, [index(piece.begin) for piece in pieces])
            end = _chosen(minimum(first + size, rows) - 1, starts, [index(piece.end) for piece in pieces])
        own = [lanes.thread() // 32 + begin + turn for turn in range(0, max(needed), WARPS)]
        always = min(needed) // WARPS
        return [(own[:always], None)] * bool(always) + [([rank], rank < end) for rank in own[always:]]

    def _width(self, phase: Phase) -> int:
        """Neighbouring slices that a lane loads at once."""
        return next(width for width in (4, 2, 1) if self.slices[phase] % width == 0)

    def _parts(self, phase: Phase, ranks: list) -> list:
        """This lane's words of ranks, as `memory.load_tagged_words` has them."""
        lane, width, count = lanes.thread() % 32, self._width(phase), self.slices[phase]
        places = [
            rank * count + minimum(lane * width + first, count - width)
            for rank in ranks
            for first in range(0, count, 32 * width)
        ]
        return [((place, self.begins[phase]), width) for place in places]

    def load_b(self, phase: Phase, layer, rows: list) -> list[list]:
        """Ask for B of this thread's outputs: of each by matrix and by four ranks."""
        p, out, matrices = self.products[phase], [], self.changes[phase]
        fours = [
            (changes, 4 * f)
            for changes, count in zip(matrices, self.beside[phase].fours, strict=True)
            for f in range(count)
        ]

        def address(n, changes, rank):
            each = [
                memory.address_of(
                    ref.b,
                    [
                        self._layer(layer), minimum(n - p.start, p.change.rows - 1),
                        min(rank, p.change.rank - 4),
                    ],
                )
                for p, ref in changes
            ]  # fmt: skip
            return _chosen(n, [p.start for p, _ in changes], each)

        for k, n in enumerate(rows):
            begin, count = k * THREADS, 16 * p.together
            in_warp = None
            if begin + THREADS > count:
                in_warp = lanes.thread() // 32 * 32 + begin < count
            out.append(
                self._load_fours(lambda n=n: [address(n, *four) for four in fours], len(fours), in_warp)
            )
        return out

    def change(self, phase: Phase, y: list, n, b: list) -> list:
        """The sums of an output n by matrix, and what `load_b` has of it -> those of W x + scale B t."""
        numbers, out = iter(b), []
        for v, count, pieces in zip(y, self.beside[phase].fours, self.beside[phase].matrices, strict=True):
            starts = [piece.start for piece in pieces]
            begin = _chosen(n, starts, [index(piece.begin) for piece in pieces])
            sums = [v]
            for four in range(count):
                at = minimum(begin + 4 * four, self.beside[phase].ranks - 4)
                t = memory.load_reals(4, self.smem, [at + self.shapes.inner_at])
                if {piece.change.rank // 4 for piece in pieces} != {count}:  # beyond the smaller ones
                    ranks = _chosen(n, starts, [index(piece.change.rank) for piece in pieces])
                    t = [select(ranks > 4 * four, w, 0.0) for w in t]
                sums.append(_dot(t, self._reals(next(numbers))))
            out.append(total(sums))
        return out

    # Memory

    def _layer(self, layer):
        return layer * self.stacked + self.chosen

    def _load_fours(self, addresses, count: int, in_warp) -> list[list]:
        """Words of four numbers at each of addresses(), where the condition holds (None: it does)."""
        words = 4 if self.dtype == "float32" else 2
        load = lambda: [w for address in addresses() for w in memory.load_unchanging(words, address)]  # noqa: E731
        loaded = load() if in_warp is None else lanes.choose(in_warp, load, [integer(0)] * (words * count))
        return [loaded[k : k + words] for k in range(0, len(loaded), words)]

    def _reals(self, words: list) -> list:
        """Four numbers."""
        if self.dtype == "float32":
            return [as_real(word) for word in words]
        if self.dtype == "float16":
            return [half for word in words for half in lanes.halves(word)]
        return [as_real(half) for word in words for half in (word << 16, word & 0xFFFF0000)]


def _chosen(at, starts: Sequence[int], each: Sequence):
    """That of the last start that is not above `at`, or the first."""
    out = each[0]
    for start, value in zip(starts[1:], each[1:], strict=True):
        out = select(at >= start, value, out)
    return out


def _dot(x: Sequence, y: Sequence):
    return functools.reduce(lambda so_far, both: fma(*both, so_far), zip(x, y, strict=True), real(0))
