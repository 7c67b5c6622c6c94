"""1-bit weights (Q1_0) of a large matrix, usually the output matrix, times 1 to 8 rows of activations, with
as many bytes in flight as shared memory holds.

In decode_b1.py and decode_s8.py weights are in registers, so a multiprocessor requests the next ones only
when it has multiplied the last. Here each multiprocessor runs one block, which multiplies its tiles in
rounds. All stages but one of a ring in shared memory are in flight at any time:

    per round: its weights have arrived -> products, sums per warp -> shared memory
               -> the stage is refilled for a later round; sum over warps, 1 / rms -> out

While the ring fills, each block quantizes all rows for itself.
"""

import dataclasses

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels.gpu import lanes, memory, shared_memory
from pallas_kernels.gpu.values import index, integer, minimum
from pallas_kernels.matmul import epilogue
from pallas_kernels.matmul.bit_mma.byte_product import ByteProduct
from pallas_kernels.matmul.bit_mma.decode import Decode
from pallas_kernels.matmul.bit_mma.plane_product import MOST_PLANE_ROWS, PlaneProduct
from pallas_kernels.matmul.bit_mma.product import MMA_COLUMNS, PAIR_BYTES, SCALE_BYTES, LaneColumns
from pallas_kernels.tiles import TILE_COLUMNS, TILE_ROWS

MOST_STAGES, LEAST_STAGES = 8, 3
ROUND_BYTES = 40_000  # at most: the last round's are multiplied when nothing is on its way any more
LEAST_TILES = 16  # of a block
AT_ONCE = 8  # rows of groups that a warp quantizes together, to hide one's latency behind another's


def refuses(n: int, k: int, matrices: int, bits: int) -> str | None:
    """Why it is not for a matrix of n outputs and k inputs, or two, or None."""
    if matrices > 1 or bits != 8:
        return "is for one matrix, and activations of 8 bits"
    n_tiles, least = -(-n // TILE_ROWS), LEAST_TILES * device.multiprocessors()
    if n_tiles < least:
        return f"is for {TILE_ROWS * least} outputs or more, of which every block has rounds"
    pairs = -(-k // TILE_COLUMNS)
    room = all(Ring.plan(rows, k, n_tiles, pairs) for rows in (1, MOST_PLANE_ROWS, MMA_COLUMNS))
    return None if room else f"{MMA_COLUMNS} rows of {k} activations leave no room for weights"


@dataclasses.dataclass(frozen=True)
class Ring(Decode):
    """`product` is one round; `rounds` of a block, `stages` of its ring."""

    rounds: int
    stages: int
    name = "bit_decode_ring"

    @classmethod
    def plan(cls, rows, columns, n_tiles, pairs, matrices=1, bits=8, **rest):
        """None where shared memory has no room for three stages."""
        if matrices > 1 or bits != 8:
            return None
        kind = ByteProduct if rows > MOST_PLANE_ROWS else PlaneProduct
        warps = min((8, 12), key=lambda w: -(-pairs // w) * w)
        each, plans = -(-n_tiles // device.multiprocessors()), []
        for tiles in range(1, min(each, max(1, ROUND_BYTES // (pairs * (PAIR_BYTES + SCALE_BYTES)))) + 1):
            product = kind(
                rows=rows, columns=columns, n_tiles=n_tiles, pairs=pairs, warps=warps, tiles=tiles, **rest
            )
            if product.section_rows < rows or product.together < tiles:
                continue
            for stages in range(MOST_STAGES, LEAST_STAGES - 1, -1):
                plan = cls(product, -(-each // tiles), stages)
                taken = shared_memory.bytes_taken(*(4 * ref.shape[0] for ref in plan.scratch.values()))
                if taken <= device.shared_bytes():
                    plans.append(plan)
                    break
        return min(plans, key=lambda plan: (plan.tiles, plan.rounds), default=None)

    @property
    def tiles(self) -> int:
        return self.rounds * self.product.tiles

    @property
    def stage_words(self) -> int:
        return self.product.shared_bytes // 4

    @property
    def scratch(self):
        """The ring with its mbarriers behind it, all rows' activations, sums of two rounds."""
        p = self.product
        words = {
            "ring_smem": self.stages * (self.stage_words + 2),
            "activations_smem": p.passed_words,
        }
        sums = dict.fromkeys(("sums0_smem", "sums1_smem"), plgpu.SMEM((p.scratch,), jnp.float32))
        return {name: plgpu.SMEM((size,), jnp.int32) for name, size in words.items()} | sums

    def block(self, **refs):
        _Block(self, **refs).run()


class _Block:
    """What a block of threads does, as one of its lanes sees it."""

    def __init__(
        self, plan: Ring, weights_gmem, x_gmem, layers_gmem, gamma_gmem, residual_gmem, out_gmem,
        ring_smem, activations_smem, sums0_smem, sums1_smem,
    ):  # fmt: skip
        self.plan, self.product = plan, plan.product
        (self.weights,), self.x, self.residual = weights_gmem, x_gmem, residual_gmem
        self.gamma = gamma_gmem
        self.out, self.ring, self.activations = out_gmem, ring_smem, activations_smem
        self.sums = sums0_smem, sums1_smem
        self.layer, self.norm_layer = (index(memory.load(layers_gmem, i)) for i in (0, 1))
        self.first_tile = lanes.block() * plan.tiles
        self.count = minimum(self.product.n_tiles - self.first_tile, plan.tiles)
        self.address = memory.shared_address(ring_smem)
        self.mbarriers = self.address + 4 * plan.stages * plan.stage_words

    def run(self):
        p, plan = self.product, self.plan
        with lanes.when(lanes.thread() == 0):
            for stage in range(plan.stages):
                memory.mbarrier_init(self.mbarriers + 8 * stage)
        lanes.block_barrier()
        for stage in range(plan.stages):  # by a warp each: a copy takes a thread a while
            with lanes.when(lanes.thread() == stage % p.warps * 32):
                self.request(index(stage))
        self.quantize()
        lanes.block_barrier()
        me = p.lane_columns()
        x = p.receive(me, index(0), self.load_activations)
        with p.busy_warps(me):
            p.store_squares(me, index(0), x, self.sums[0])
        lanes.block_barrier()
        outputs = lambda tile: p.outputs(me, index(0), index(0), tile)  # noqa: E731
        norms = [p.norm(self.sums[0], row) for *_, row in outputs(self.first_tile)]

        def one_round(first, sums_smem):
            number = first // p.tiles
            stage = number % plan.stages
            memory.mbarrier_wait(self.mbarriers + integer(stage) * 8, integer(number // plan.stages % 2))
            with p.busy_warps(me):
                p.store_sums(me, self.multiply(me, x, stage, self.count - first), sums_smem)
            lanes.block_barrier()
            # By the last warp, which has the fewest outputs: a copy takes a thread as long as one of those.
            with lanes.when(lanes.thread() == 32 * (p.warps - 1)):
                self.request(number + plan.stages)
            p.finish(sums_smem, outputs(self.first_tile + first), self.store, norms)

        def two_rounds(first, carry):
            # Sums of the next round lie elsewhere, so that whoever has its outputs goes on.
            one_round(first, self.sums[0])
            with lanes.when(first + p.tiles < self.count):
                one_round(first + p.tiles, self.sums[1])
            return carry

        lanes.loop(0, self.count, 2 * p.tiles, [], two_rounds)

    def multiply(self, me: LaneColumns, x, stage, count) -> dict:
        """This warp's sums of a round of so many tiles; in place of those beyond, another tile's."""
        p, begin = self.product, stage * self.plan.stage_words
        tile = [minimum(index(u), count - 1) for u in range(p.tiles)]
        return p.multiply(
            me, x,
            lambda m, u, pair: p.shared_words(self.ring, begin, tile[u], me.pair[pair], me.lane),
            lambda m, u, pair, h: p.shared_scales(self.ring, begin, tile[u], me.scale_group[pair, h], me.g),
        )  # fmt: skip

    def request(self, number):
        """By one thread: request the weights of a round, if the block has so many rounds."""
        p, plan = self.product, self.plan
        first = number * p.tiles
        with lanes.when(first < self.count):
            stage, tiles = integer(number % plan.stages), minimum(self.count - first, p.tiles)
            mbarrier = self.mbarriers + stage * 8
            memory.mbarrier_expect(mbarrier, integer(tiles * (p.pairs * (PAIR_BYTES + SCALE_BYTES))))
            source = self.layer * p.n_tiles + self.first_tile + first
            to = self.address + stage * (4 * plan.stage_words)
            p.copy_to_shared(self.weights, source, tiles, to, 0, mbarrier)

    def quantize(self):
        """Quantize all rows of all groups, one per warp at a time."""
        p, warp = self.product, lanes.thread() // 32
        items = p.groups * p.rows
        each = -(-items // p.warps)
        at_once = -(-each // -(-each // AT_ONCE))

        def some(first, carry):
            own = [first + i * p.warps + warp for i in range(at_once)]
            loaded = [self.load(minimum(item, items - 1)) for item in own]
            for item, (group, row, x, gamma) in zip(own, loaded, strict=True):
                for place, word, condition in p.quantize(row, x, gamma, integer(0)):
                    valid = item < items if condition is None else (item < items) & condition
                    with lanes.when(valid):
                        at = group * p.group_words + index(place)
                        memory.store(word, self.activations, at)
            return carry

        lanes.loop(0, items, at_once * p.warps, [], some)

    def load(self, item) -> tuple:
        """Group, row, this lane's columns of x and gamma."""
        p = self.product
        group, row = item % p.groups, item // p.groups
        columns = [at + more for at, more in p.columns_of_lane(group)]
        x = [memory.load(self.x, row, at) for at in columns]
        gamma = None
        if self.gamma is not None:
            gamma = [memory.load(self.gamma, self.norm_layer, at) for at in columns]
        return group, row, x, gamma

    def load_activations(self, places) -> list:
        out = []
        for at, constant, count in places:
            out += memory.load_words(count, self.activations, [index(at) + constant])
        return out

    def store(self, k, row, n, y):
        if self.residual is not None:
            y = y + memory.load(self.residual, row, n)
        epilogue.store(y, self.out, 0, row, n)


run = Ring.run
