"""What one block of an integer product does, as one of its lanes sees it (decode.py has the picture)."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import formats
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import index, integer, minimum, real, total
from pallas_kernels.matmul.epilogue import inverse_rms, output, over_warps
from pallas_kernels.matmul.int_mma import decode_plan as int_decode_plan
from pallas_kernels.matmul.int_mma.activations_shared import RotatedActivations, WarpActivations
from pallas_kernels.matmul.int_mma.activations_summed import PostNorm, SummedActivations
from pallas_kernels.matmul.int_mma.decode_columns import Columns, WholeColumns
from pallas_kernels.matmul.int_mma.decode_planes import PlaneActivations, PlaneColumns
from pallas_kernels.matmul.int_mma.decode_ring import Ring, Share, Stream
from pallas_kernels.matmul.rotated_columns import RotatedColumns
from pallas_kernels.tiles import TILE_ROWS


def scratch(products: Sequence[int_decode_plan.IntegerProduct]) -> dict[str, Any]:
    """Shared memory of a block besides its ring, for products in turn (plan.scratch_bytes)."""
    sizes = [
        int_decode_plan.scratch_bytes(p.plan, p.matrices, p.steps, p.padded, p.bits, p.tiles_of_item)
        for p in products
    ]
    q, *rest = (max(each) // 4 for each in zip(*sizes, strict=True))
    names = ("stats_smem", "sums_smem", "squares_smem")
    reals = {name: plgpu.SMEM((n,), jnp.float32) for name, n in zip(names, rest, strict=True)}
    return {"q_smem": plgpu.SMEM((q,), jnp.int32), **reals}


class Block:
    """A block of threads at a product, and a lane of it.

    share      what its warp has of its part
    store      (y, row of x, output, prefetched) puts a result where it belongs. All lanes of a warp call it
    residual   (row of x, output) -> what is added to it; None: nothing
    prefetch   the same arguments -> what `store` needs, loaded before the product; None: nothing
    load_x     as in WarpActivations; with a rotation as in RotatedColumns
    rounded    as in WarpActivations; not with a rotation
    rotation   of the activations: RotatedColumns' flips_gmem, block, heads and rotated_smem; None: none
    post_norm  of what load_x loads, which is then added to x (activations_summed.py); None: it is x itself
    in_groups  whether a warp's results are 32 neighbours of one row, for a `store` that rounds them: of parts
               whose blocks have even numbers of tiles
    Refs are named as `int_decode` names what they are of.
    """

    def __init__(
        self, sizes: int_decode_plan.IntegerProduct, share: Share, store, residual, load_x, *,
        gamma_gmem, norm_layer, q_smem, stats_smem, sums_smem, squares_smem, prefetch=None,
        rounded=False, rotation=None, post_norm: PostNorm | None = None, in_groups=False,
    ):  # fmt: skip
        self.sizes, self.share, self.part = sizes, share, share.part
        self.in_groups = in_groups
        self.format_lanes, warp_activations, self.lane_columns = _arithmetic(self.part.format)
        self.normed = gamma_gmem is not None
        self.store, self.residual, self.prefetch = store, residual, prefetch
        self.q_smem, self.stats_smem = q_smem, stats_smem
        self.sums_smem, self.squares_smem = sums_smem, squares_smem
        self.thread = integer(lanes.thread())
        self.warp, self.lane = self.thread // 32, self.thread % 32
        self.g, self.t = self.lane // 4, self.lane % 4
        self.first_step = share.first_step
        if rotation is not None:
            columns = RotatedColumns(
                load_x, sizes.columns, gamma_gmem=gamma_gmem, norm_layer=norm_layer, slot=index(self.warp),
                lane=index(self.lane), **rotation,
            )  # fmt: skip
            self.activations = RotatedActivations(columns, sizes, self.format_lanes, self.warp, self.lane)
            return
        own = warp_activations(
            load_x, rounded, None if rounded else gamma_gmem, norm_layer, share, sizes, self.format_lanes,
            self.lane,
        )  # fmt: skip
        self.activations = own if post_norm is None else SummedActivations(own, post_norm, self.warp)

    def load(self):
        """Begin to load activations."""
        return self.activations.load(integer(0))

    def run(self, first_pass, ring: Ring, state: list, number: int = 0) -> list:
        """All of its tiles: the state of the ring behind them.

        first_pass  of `load`
        number      of this product in the ring
        """
        q, stats = map(memory.shared_address, (self.q_smem, self.stats_smem))
        squares = self.activations.store(first_pass, q, stats)
        if self.normed:
            for row, squares_of_row in enumerate(squares):
                place = self.warp + row * self.sizes.plan.warps
                memory.store(lanes.warp_sum_real(squares_of_row), self.squares_smem, place)
        self.activations.barrier()
        columns = self.lane_columns(self, q, stats)
        together, tiles_of_item = self.sizes.plan.together, self.sizes.tiles_of_item
        together = -(-together // tiles_of_item) * tiles_of_item

        def one_round(first, state):
            first = integer(first)
            last = minimum(first + together, self.share.count)
            # Loaded before the product, where each thread has one output at most.
            one_each = together * self.sizes.rows * TILE_ROWS <= self.sizes.plan.warps * 32
            prefetched = self.prefetched(index(self.thread), first) if one_each else None
            state = lanes.loop(
                first, last, tiles_of_item, state,
                lambda j, state: self.one_item(ring, number, columns, integer(j) - first, state),
            )  # fmt: skip
            lanes.block_barrier()
            self.store_outputs(first, last, prefetched)
            lanes.block_barrier()
            return state

        return lanes.loop(0, self.share.count, together, state, one_round)

    def run_alone(self, weight_gmem, layer, ring_smem):
        """The only product of a launch: fields of each matrix, refs of stacks, and the index into them."""
        ring = Ring(
            [[Stream(self.share, weight_gmem, layer)]], ring_smem, self.part.depth,
            self.part.item_bytes(self.sizes.units),
        )  # fmt: skip
        first_pass = self.load()  # on its way before the layer's number is known
        self.run(first_pass, ring, ring.filled())
        memory.wait_copies(0)

    def one_item(self, ring: Ring, number: int, columns: Columns | PlaneColumns, place, state: list) -> list:
        """This warp's sums of the tiles of an item to shared memory, from number `place` of the round on."""
        shape = (self.sizes.units, self.sizes.chunks, 2, columns.results)
        count = math.prod(shape)

        def one_item(s, carry):
            state, y = carry[:-count], _folded(carry[-count:], shape)
            at_slot = ring.arrived(state)
            q, stats = columns.at_step(integer(s))
            for unit in range(self.sizes.units):
                columns.multiply(ring.words(self.part, unit, at_slot), q, stats, y[unit])
            return [*ring.refilled(state, number), *_flat(y)]

        carry = lanes.loop(0, self.share.own_steps, 1, [*state, *[real(0)] * count], one_item)
        for unit, y in enumerate(_folded(carry[-count:], shape)):
            self.store_sums(columns, y, index(place) * self.sizes.matrices + unit)
        return carry[:-count]

    def store_sums(self, columns: Columns | PlaneColumns, y: list, place):
        """y[chunk][rows g, g + 8][results], whose slots are added up."""
        width = self.sizes.width
        for chunk, rows in enumerate(y):
            for r, values in enumerate(rows):
                values = [total(values)] if width == 1 else values
                distance = columns.neighbours
                while distance < 4:
                    values = [v + lanes.swapped(v, distance) for v in values]
                    distance *= 2
                with lanes.when(self.t < columns.neighbours):
                    for c, value in enumerate(values):
                        row = self.t * 2 + (chunk * width + c) if width > 1 else chunk
                        at = self.sums_at(place, row, index(self.warp)) + index(self.g + 8 * r)
                        memory.store(value, self.sums_smem, at)

    def sums_at(self, place, row, warp):
        """Where the 16 sums of a unit, a row and a warp begin: all indices."""
        return ((place * self.sizes.padded + index(row)) * self.sizes.plan.warps + warp) * TILE_ROWS

    def output(self, at, first):
        """Output number `at` of the tiles from `first` on: (tile from there, row of x, row of it, n)."""
        inside, above = at % TILE_ROWS, at // TILE_ROWS
        if self.in_groups and self.sizes.rows > 1:  # two tiles of a row beside each other
            second, above = above % 2, above // 2
            row, j = above % self.sizes.rows, above // self.sizes.rows * 2 + second
        else:
            row, j = above % self.sizes.rows, above // self.sizes.rows
        tile = index(self.share.first_tile + first + self.part.above) + j
        return j, row, inside, tile * TILE_ROWS + inside

    def prefetched(self, at, first) -> list:
        """For output number `at`: the residual, and what `store` needs."""
        _, row, _, n = self.output(at, first)
        n = minimum(n, self.sizes.n_tiles * TILE_ROWS - 1)
        return [None if load is None else load(row, n) for load in (self.residual, self.prefetch)]

    def store_outputs(self, first, last, prefetched: list | None):
        """Write the outputs of tiles `first` to `last` of this block: one thread an output.

        prefetched  for the thread's only output; None: it may have several
        """
        sizes, warps = self.sizes, self.sizes.plan.warps

        def one(at, carry):
            j, row, inside, n = self.output(at, first)
            sums = [
                over_warps(
                    lambda w, m=m: memory.load(
                        self.sums_smem, self.sums_at(j * sizes.matrices + m, row, index(w)) + inside
                    ),
                    warps,
                )
                for m in range(sizes.matrices)
            ]
            norm = None
            if self.normed:
                squares = over_warps(lambda w: memory.load(self.squares_smem, row * warps + w), warps)
                norm = inverse_rms(squares, sizes.columns, sizes.eps)
            y = output(sums, norm, sizes.activation)
            residual, rest = self.prefetched(at, first) if prefetched is None else prefetched
            self.store(y if residual is None else y + residual, row, n, rest)
            return carry

        outputs = index((last - first) * (sizes.rows * TILE_ROWS))
        if prefetched is None:
            lanes.loop(self.thread, outputs, warps * 32, [], one)
        else:
            with lanes.when(index(self.thread) < outputs):
                one(index(self.thread), [])


def _arithmetic(format: str) -> tuple[Any, type[WarpActivations], type[Columns] | type[PlaneColumns]]:
    """The format's LANES (None for 1 bit), how a warp makes activations for it, and how a lane multiplies."""
    if formats.family(format) == "bit":
        return None, PlaneActivations, PlaneColumns
    format_lanes = formats.get(format).LANES
    return format_lanes, WarpActivations, WholeColumns if format_lanes.whole_scales else Columns


def _flat(nested) -> list:
    return [v for part in nested for v in (_flat(part) if isinstance(part, list) else [part])]


def _folded(values: list, shape: tuple[int, ...]):
    """A flat list as nested ones of this shape."""
    if len(shape) == 1:
        return list(values)
    size = len(values) // shape[0]
    return [_folded(values[k * size : (k + 1) * size], shape[1:]) for k in range(shape[0])]
