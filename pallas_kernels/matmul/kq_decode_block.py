"""What one block of an integer product does, as one of its lanes sees it (kq_decode.py has the picture)."""

import dataclasses
import math
from typing import Any, NamedTuple

from jax._src.lib.mlir.dialects import arith

from pallas_kernels import formats
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import index, integer, minimum, of, real, select, total
from pallas_kernels.matmul import kq_decode_plan
from pallas_kernels.matmul.activations_shared import WarpActivations
from pallas_kernels.matmul.epilogue import finished, inverse_rms, over_warps
from pallas_kernels.matmul.kq_decode_columns import Columns, WholeColumns
from pallas_kernels.tiles import ROWS


@dataclasses.dataclass(frozen=True)
class IntegerProduct:
    """Static sizes: rows and columns of the activations; tiles of 16 rows and steps of 256 columns of all
    parts; and how the blocks share them."""

    plan: kq_decode_plan.Plan
    rows: int
    columns: int
    n_tiles: int
    steps: int
    matrices: int
    eps: float
    bits: int

    @property
    def width(self) -> int:
        """Rows that a set of columns of the tensor core holds."""
        return kq_decode_plan.columns_of_rows(self.rows)[0]

    @property
    def padded(self) -> int:
        """Rows, and what fills the last set."""
        return kq_decode_plan.columns_of_rows(self.rows)[1]

    @property
    def chunks(self) -> int:
        return self.padded // self.width

    @property
    def slots(self) -> int:
        """Groups that are side by side in the columns of the tensor core."""
        return 8 // self.width

    @property
    def row_bytes(self) -> int:
        return kq_decode_plan.row_bytes(self.steps)

    @property
    def per_warp(self) -> int:
        """Steps of a warp, at most."""
        return -(-self.steps // self.plan.warps)


class Block:
    """A block of threads, and a lane of it.

    part   of the plan: its tiles are the part's, from number block * part.tiles on
    store  (y, row of x, output) puts a result where it belongs
    Refs are named as `kq_decode` names what they are of; weight_gmem has fields by name, of each matrix.
    """

    def __init__(
        self, sizes: IntegerProduct, part: kq_decode_plan.Part, block, store, *,
        weight_gmem, x_gmem, layers_gmem, gamma_gmem, residual_gmem,
        ring_smem, q_smem, stats_smem, sums_smem, squares_smem,
    ):  # fmt: skip
        self.sizes, self.part, self.kq, self.store = sizes, part, formats.get(part.format).LANES, store
        self.weight_gmem, self.residual_gmem, self.normed = weight_gmem, residual_gmem, gamma_gmem is not None
        self.ring_smem, self.q_smem, self.stats_smem = ring_smem, q_smem, stats_smem
        self.sums_smem, self.squares_smem = sums_smem, squares_smem
        self.thread = integer(lanes.thread())
        self.warp, self.lane = self.thread // 32, self.thread % 32
        self.g, self.t = self.lane // 4, self.lane % 4
        self.layer, norm_layer = (
            integer(0) if layers_gmem is None else memory.load(layers_gmem, at) for at in (0, 1)
        )
        self.first_tile = block * part.tiles
        self.count = minimum(part.n_tiles - self.first_tile, part.tiles)
        self.first_step = self.warp * sizes.per_warp
        mine = arith.minsi(integer(sizes.per_warp), sizes.steps - self.first_step)  # signed: below 0 behind
        self.mine = of(arith.maxsi(integer(0), mine))
        self.activations = WarpActivations(
            x_gmem=x_gmem, gamma_gmem=gamma_gmem, norm_layer=norm_layer, lane=self.lane,
            first_step=self.first_step, mine=self.mine, per_warp=sizes.per_warp, steps=sizes.steps,
            kq=self.kq, bits=sizes.bits, rows=sizes.rows, width=sizes.width, padded=sizes.padded,
            row_bytes=sizes.row_bytes,
        )  # fmt: skip

    def run(self):
        first_pass = self.activations.load(integer(0))  # on its way before the layer's number is known
        ring = Ring(self)
        ahead = ring.filled()
        q, stats = map(memory.shared_address, (self.q_smem, self.stats_smem))
        squares = self.activations.store(first_pass, q, stats)
        if self.normed:
            for row, squares_of_row in enumerate(squares):
                memory.store(lanes.warp_sum_real(squares_of_row), self.squares_smem, row, self.warp)
        lanes.warp_barrier()
        columns = (WholeColumns if self.kq.whole_scales else Columns)(self, q, stats)
        together = self.sizes.plan.together

        def one_round(first, carry):
            first = integer(first)
            last = minimum(first + together, self.count)
            # On its way before the product, where each thread has one output at most.
            near = self.residual_gmem is not None and (
                together * self.sizes.rows * ROWS <= self.sizes.plan.warps * 32
            )
            residual = self.residual_at(index(self.thread), first) if near else None
            carry = lanes.loop(
                first, last, 1, carry,
                lambda j, carry: self.one_tile(ring, columns, integer(j) - first, carry),
            )  # fmt: skip
            lanes.block_barrier()
            self.finish(first, last, residual)
            lanes.block_barrier()
            return carry

        lanes.loop(0, self.count, together, [*ahead, integer(0)], one_round)
        memory.wait_copies(0)

    def one_tile(self, ring: "Ring", columns: Columns, place, carry):
        """This warp's sums of a tile to shared memory, as number `place` of the round.

        carry  (tile, step) of the item to copy next, and the slot of the item to multiply
        """
        shape = (self.sizes.matrices, self.sizes.chunks, 2, columns.results)

        def one_item(s, carry):
            (next_tile, next_step, slot), y = carry[:3], _folded(carry[3:], shape)
            s = integer(s)
            at_slot = ring.arrived(slot)
            at_q, at_stats = columns.of_step(s)
            for m in range(self.sizes.matrices):
                columns.multiply(ring.words(m, at_slot), at_q, at_stats, y[m])
            ring.copy(next_tile, next_step, slot)
            next_slot = slot + 1
            next_slot = select(next_slot == self.part.depth, 0, next_slot)
            return [*ring.after(next_tile, next_step), next_slot, *_flat(y)]

        zeros = [real(0)] * math.prod(shape)
        carry = lanes.loop(0, self.mine, 1, [*carry, *zeros], one_item)
        for m, of_matrix in enumerate(_folded(carry[3:], shape)):
            self.store_sums(columns, of_matrix, index(place) * self.sizes.matrices + m)
        return carry[:3]

    def store_sums(self, columns: Columns, y: list, place):
        """y[chunk][rows g, g + 8][results], whose slots are added up."""
        width = self.sizes.width
        for chunk, of_chunk in enumerate(y):
            for r, values in enumerate(of_chunk):
                values = [total(values)] if width == 1 else values
                distance = columns.neighbours
                while distance < 4:
                    values = [v + lanes.swapped(v, distance) for v in values]
                    distance *= 2
                with lanes.when(self.t < columns.neighbours):
                    for c, value in enumerate(values):
                        row = self.t * 2 + (chunk * width + c) if width > 1 else chunk
                        memory.store(value, self.sums_smem, place, row, self.warp, self.g + 8 * r)

    def output(self, at, first):
        """Output number `at` of the tiles from `first` on: (tile from there, row of x, row of it, n)."""
        inside, above = at % ROWS, at // ROWS
        row, j = above % self.sizes.rows, above // self.sizes.rows
        tile = index(self.first_tile + first + self.part.above) + j
        return j, row, inside, tile * ROWS + inside

    def residual_at(self, at, first):
        _, row, _, n = self.output(at, first)
        return memory.load(self.residual_gmem, row, minimum(n, self.sizes.n_tiles * ROWS - 1))

    def finish(self, first, last, residual):
        """Write the outputs of tiles `first` to `last` of this block: one thread an output."""
        sizes, warps = self.sizes, self.sizes.plan.warps

        def one(at, carry):
            j, row, inside, n = self.output(at, first)
            sums = [
                over_warps(
                    lambda w, m=m: memory.load(self.sums_smem, j * sizes.matrices + m, row, w, inside), warps
                )
                for m in range(sizes.matrices)
            ]
            norm = None
            if self.normed:
                squares = over_warps(lambda w: memory.load(self.squares_smem, row, w), warps)
                norm = inverse_rms(squares, sizes.columns, sizes.eps)
            y = finished(sums, norm)
            if self.residual_gmem is not None:
                y = y + (self.residual_at(at, first) if residual is None else residual)
            self.store(y, row, n)
            return carry

        lanes.loop(self.thread, index((last - first) * (sizes.rows * ROWS)), warps * 32, [], one)


class Field(NamedTuple):
    """A field of a matrix in a slot of the ring: from byte `at` on `vectors` times 32 lanes' pieces of `size`
    bytes. shape: what a tile has of it."""

    at: int
    size: int
    vectors: int
    shape: tuple[int, ...]


class Ring:
    """The weights of a warp on their way through shared memory. An item is a tile's 256 columns, of each
    matrix: item k of a warp is tile k / mine, step k % mine of it, and a slot holds one."""

    def __init__(self, block: Block):
        self.block, part, sizes = block, block.part, block.sizes
        self.slot_bytes = part.item_bytes(sizes.matrices)
        self.address = memory.shared_address(block.ring_smem) + block.warp * (part.depth * self.slot_bytes)
        self.fields, at = {}, 0
        for m in range(sizes.matrices):
            for name, shape in zip(part.names, part.shapes, strict=True):
                size = kq_decode_plan.lane_bytes(shape)
                self.fields[m, name] = Field(at, min(size, 16), max(1, size // 16), shape)
                at += 32 * size
        tile = block.layer * part.n_tiles + block.first_tile
        self.first_item = tile * sizes.steps + block.first_step
        self.starts = {
            (m, name): memory.address(ref)
            for m, fields in enumerate(block.weight_gmem)
            for name, ref in fields.items()
        }

    def filled(self) -> tuple:
        """Begin to copy what the ring has room for: the item behind that."""
        ahead: tuple[Any, Any] = integer(0), integer(0)
        for slot in range(self.block.part.depth):
            self.copy(*ahead, integer(slot))
            ahead = self.after(*ahead)
        return ahead

    def copy(self, tile, step, slot):
        """Begin to copy the weights of an item into a slot; a group of its own even if there are none."""
        lane = self.block.lane
        wanted = (tile < self.block.count) & (step < self.block.mine)
        with lanes.when(wanted):
            item = self.first_item + tile * self.block.sizes.steps + step
            for key, field in self.fields.items():
                share = lane // (32 // field.shape[0]) if len(field.shape) < 3 else lane
                words = math.prod(field.shape)
                source = memory.at_byte(self.starts[key], item, 4 * words, share * field.size)
                target = self.address + slot * self.slot_bytes + field.at + lane * field.size
                for v in range(field.vectors):
                    memory.copy_async(target, source, field.size, at=512 * v)
        memory.commit_copies()

    def after(self, tile, step) -> tuple:
        """The item behind this one."""
        last = step + 1 >= self.block.mine
        return select(last, tile + 1, tile), select(last, 0, step + 1)

    def arrived(self, slot):
        """Where a slot begins, when the oldest copy is there."""
        memory.wait_copies(self.block.part.depth - 1)
        return self.address + slot * self.slot_bytes

    def words(self, m: int, at_slot) -> dict:
        """A lane's words of a matrix by name, or vectors of four."""
        words = {}
        for name in self.block.part.names:
            field = self.fields[m, name]
            at = at_slot + self.block.lane * field.size
            loaded = [
                memory.load_shared(field.size // 4, at, field.at + 512 * v) for v in range(field.vectors)
            ]
            words[name] = loaded if len(field.shape) == 3 else loaded[0]
        return words


def _flat(nested) -> list:
    return [v for part in nested for v in (_flat(part) if isinstance(part, list) else [part])]


def _folded(values: list, shape: tuple[int, ...]):
    """A flat list as nested ones of this shape."""
    if len(shape) == 1:
        return list(values)
    size = len(values) // shape[0]
    return [_folded(values[k * size : (k + 1) * size], shape[1:]) for k in range(shape[0])]
