"""1-bit weights (Q1_0) of a large matrix, an output matrix above all, times 1 to 8 rows of activations: as
many bytes on their way as shared memory holds.

decode_b1.py and decode_s8.py have weights in registers, so that a multiprocessor asks for the next ones
when it has multiplied the last. Here each multiprocessor has one block, and the block its tiles of 16 rows in
rounds, of which all stages of a ring of shared memory but one are under way at any time:

    per round: its weights are there -> products, sums per warp -> shared memory
               -> the stage is asked for a later round; sum over warps, 1 / rms -> out

While the ring fills, the block quantizes all rows for itself, as a step's launch does for all blocks
(rows_product.py): on the binary tensor cores up to 4 rows, on the integer ones more.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels.gpu import lanes, memory, shared_memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import index, integer, minimum
from pallas_kernels.matmul.bit_mma import decode as bit_decode
from pallas_kernels.matmul.bit_mma import rows_of_planes
from pallas_kernels.matmul.bit_mma.bit_product import LaneColumns
from pallas_kernels.matmul.bit_mma.decode import PAIR_BYTES, SCALE_BYTES
from pallas_kernels.matmul.bit_mma.rows_of_bytes import RowsOfBytes
from pallas_kernels.matmul.bit_mma.rows_of_planes import RowsOfPlanes
from pallas_kernels.matmul.bit_mma.rows_product import WIDTH, RowsProduct, Section
from pallas_kernels.tiles import COLUMNS, ROWS

MOST_STAGES, LEAST_STAGES = 8, 3
ROUND_BYTES = 40_000  # at most: the last round's are multiplied when nothing is on its way any more
LEAST_TILES = 16  # of a block
AT_ONCE = 8  # rows of groups that a warp quantizes together, to hide one's latency behind another's


def run(*arguments) -> jax.Array:
    """Products of 1 to 8 rows (execute.py)."""
    return bit_decode.run(bit_decode_ring, *arguments)


def refuses(n: int, k: int, matrices: int, bits: int) -> str | None:
    """Why it is not for a matrix of n outputs and k inputs, or two, or None."""
    if matrices > 1 or bits != 8:
        return "is for one matrix, and activations of 8 bits"
    n_tiles, least = -(-n // ROWS), LEAST_TILES * device.multiprocessors()
    if n_tiles < least:
        return f"is for {ROWS * least} outputs or more, of which every block has rounds"
    pairs = -(-k // COLUMNS)
    room = all(plan(rows, k, n_tiles, pairs) for rows in (1, rows_of_planes.MOST_ROWS, WIDTH))
    return None if room else f"{WIDTH} rows of {k} activations leave no room for weights"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a block does: the product of a round, how many rounds, and stages of its ring."""

    product: RowsProduct
    rounds: int
    stages: int

    @property
    def tiles(self) -> int:
        """Of a block."""
        return self.rounds * self.product.tiles

    @property
    def stage_words(self) -> int:
        return self.product.tiles * self.product.pairs * (PAIR_BYTES + SCALE_BYTES) // 4

    @property
    def activation_words(self) -> int:
        """Of all rows, quantized."""
        return self.product.groups * self.product.rows * self.product.words

    @property
    def buffers(self) -> tuple[int, int, int, int]:
        """Words of shared memory: the ring with its mbarriers behind it, activations, sums of two rounds."""
        ring = self.stages * (self.stage_words + 2)
        return ring, self.activation_words, self.product.scratch, self.product.scratch


def plan(rows: int, columns: int, n_tiles: int, pairs: int, **rest) -> Plan | None:
    """For so many rows and columns of activations; None where shared memory has no room for three stages."""
    kind = RowsOfBytes if rows > rows_of_planes.MOST_ROWS else RowsOfPlanes
    warps = min((8, 12), key=lambda w: -(-pairs // w) * w)
    each, found = -(-n_tiles // device.multiprocessors()), []
    for tiles in range(1, min(each, max(1, ROUND_BYTES // (pairs * (PAIR_BYTES + SCALE_BYTES)))) + 1):
        product = kind(
            rows=rows, columns=columns, n_tiles=n_tiles, pairs=pairs, warps=warps, tiles=tiles, **rest
        )
        if product.section_rows < rows or product.together < tiles:
            continue
        for stages in range(MOST_STAGES, LEAST_STAGES - 1, -1):
            p = Plan(product, -(-each // tiles), stages)
            if shared_memory.bytes_taken(*(4 * words for words in p.buffers)) <= device.shared_bytes():
                found.append(p)
                break
    return min(found, key=lambda p: (p.tiles, p.rounds), default=None)  # pyrefly: ignore[missing-attribute]


@functools.partial(jax.jit, static_argnames=("eps", "activation_bits"))
def bit_decode_ring(
    x: jax.Array,
    weights: tuple[tuple[jax.Array, jax.Array], ...],
    layers: jax.Array,
    *,
    gamma: jax.Array | None = None,
    eps: float = 0.0,
    residual: jax.Array | None = None,
    activation_bits: int = 8,
) -> jax.Array:
    """y = x W.T

    x         float32 [rows, K], 1 to 8 rows; with gamma, float32 [L, K], x is rms_norm(x; gamma[i], eps)
    weights   ((words, scales),) of W: a tiled stack (formats/q1_0.py)
    layers    int32 [2 or more], the index into the weights' stack and the one into gamma's
    residual  float32 [rows, N], added to y
    Returns float32 [rows, N padded to 16]. Activations are quantized here, symmetric per group of 128.
    """
    (words, scales), rows = weights[0], len(x)
    n_tiles, pairs = words.shape[1:3]
    found = plan(rows, x.shape[1], n_tiles, pairs, normed=gamma is not None, eps=eps)
    if found is None or len(weights) > 1 or activation_bits != 8:
        raise NotImplementedError(
            f"{len(weights)} matrices, {rows} rows of {x.shape[1]} activations, {activation_bits} bits: this "
            "is for one matrix, 8 bits, and what leaves room for weights; leave the choice to selection.py"
        )
    ring, activations, *sums = found.buffers
    return launch(
        lambda **refs: _Block(found, **refs).run(),
        {
            "words_gmem": words, "scales_gmem": scales, "x_gmem": x, "layers_gmem": layers,
            "gamma_gmem": gamma, "residual_gmem": residual,
        },
        {"out_gmem": jax.ShapeDtypeStruct((rows, n_tiles * 16), jnp.float32)},
        name="bit_decode_ring",
        blocks=-(-n_tiles // found.tiles),
        threads=32 * found.product.warps,
        scratch={
            "ring_smem": plgpu.SMEM((ring,), jnp.int32),
            "activations_smem": plgpu.SMEM((activations,), jnp.int32),
            **{f"sums{i}_smem": plgpu.SMEM((size,), jnp.float32) for i, size in enumerate(sums)},
        },
    )  # fmt: skip


class _Block:
    """What a block of threads does, as one of its lanes sees it."""

    def __init__(
        self, plan: Plan, words_gmem, scales_gmem, x_gmem, layers_gmem, gamma_gmem, residual_gmem, out_gmem,
        ring_smem, activations_smem, sums0_smem, sums1_smem,
    ):  # fmt: skip
        self.plan, self.product = plan, plan.product
        self.gmem, self.x, self.residual = (words_gmem, scales_gmem), x_gmem, residual_gmem
        self.gamma = gamma_gmem
        self.out, self.ring, self.activations = out_gmem, ring_smem, activations_smem
        self.sums = sums0_smem, sums1_smem
        self.layer, self.norm_layer = (index(memory.load(layers_gmem, i)) for i in (0, 1))
        self.first_tile = lanes.block() * plan.tiles
        self.count = minimum(self.product.n_tiles - self.first_tile, plan.tiles)
        self.address = memory.shared_address(ring_smem)
        self.mbarriers = self.address + 4 * plan.stages * plan.stage_words
        self.words_of_stage = self.product.tiles * self.product.pairs * (PAIR_BYTES // 4)

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
        me, section = LaneColumns.of(p), Section(index(0), p.rows)
        x = p.receive(me, section, self.load_activations)
        with p.busy_warps(me):
            p.store_squares(me, section, x, self.sums[0])
        lanes.block_barrier()
        outputs = lambda tile: p.my_outputs(me, section, index(0), tile)  # noqa: E731
        norms = [p.norm(self.sums[0], row) for *_, row in outputs(self.first_tile)]

        def one_round(first, sums_smem):
            number = first // p.tiles
            stage = number % plan.stages
            memory.mbarrier_wait(self.mbarriers + integer(stage) * 8, integer(number // plan.stages % 2))
            with p.busy_warps(me):
                p.store_sums(me, section, self.multiply(me, x, stage, self.count - first), sums_smem)
            lanes.block_barrier()
            # By the last warp, which has the fewest outputs: a copy takes a thread as long as one of those.
            with lanes.when(lanes.thread() == 32 * (p.warps - 1)):
                self.request(number + plan.stages)
            p.outputs(section, sums_smem, outputs(self.first_tile + first), self.store, norms)

        def two_rounds(first, carry):
            # Sums of the next round lie elsewhere, so that whoever has its outputs goes on.
            one_round(first, self.sums[0])
            with lanes.when(first + p.tiles < self.count):
                one_round(first + p.tiles, self.sums[1])
            return carry

        lanes.loop(0, self.count, 2 * p.tiles, [], two_rounds)

    def multiply(self, me: LaneColumns, x, stage, there) -> dict:
        """A round's sums of this warp; of tiles that are not there another's."""
        p, begin = self.product, stage * self.plan.stage_words
        tile = [minimum(index(u), there - 1) * p.pairs for u in range(p.tiles)]

        def words(m, u, pair):
            at = begin + (tile[u] + me.pair[pair]) * (PAIR_BYTES // 4) + me.lane * 4
            return memory.load_vector(4, self.ring, [at])

        def scales(m, u, pair, h):
            at = (tile[u] * 2 + me.scale_group[pair, h]) * (SCALE_BYTES // 8) + me.g
            return memory.load(self.ring, begin + self.words_of_stage + at)

        return p.multiply(me, x, words, scales)

    def request(self, number):
        """A round's weights, by one thread, if there is such a round."""
        p, plan = self.product, self.plan
        first = number * p.tiles
        with lanes.when(first < self.count):
            stage, tiles = integer(number % plan.stages), minimum(self.count - first, p.tiles)
            mbarrier = self.mbarriers + stage * 8
            memory.mbarrier_expect(mbarrier, integer(tiles * (p.pairs * (PAIR_BYTES + SCALE_BYTES))))
            to = self.address + stage * (4 * plan.stage_words)
            tile = self.layer * p.n_tiles + self.first_tile + first
            for ref, each, at in zip(
                self.gmem, (PAIR_BYTES, SCALE_BYTES), (0, 4 * self.words_of_stage), strict=True
            ):
                size = integer(tiles * (p.pairs * each))
                memory.copy_to_shared(to + at, ref, tile * (p.pairs * each // 4), size, mbarrier)

    def quantize(self):
        """All rows of all groups, a warp each."""
        p, warp = self.product, lanes.thread() // 32
        items = p.groups * p.rows
        each = -(-items // p.warps)
        at_once = -(-each // -(-each // AT_ONCE))

        def some(first, carry):
            wanted = [first + i * p.warps + warp for i in range(at_once)]
            loaded = [self.load(minimum(item, items - 1)) for item in wanted]
            for item, (group, row, x, gamma) in zip(wanted, loaded, strict=True):
                of_columns = None if gamma is None else lambda _, gamma=gamma: gamma
                words = p.quantize(group, row, lambda _, x=x: x, of_columns, integer(0))
                for place, word, condition in words:
                    there = item < items if condition is None else (item < items) & condition
                    with lanes.when(there):
                        at = group * (p.words * p.rows) + index(place)
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
        memory.store(y, self.out, row, n)
