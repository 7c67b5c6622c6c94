"""Matrix-vector products with 1-bit weights (Q1_0), on the binary tensor cores, weights in registers.

One block of threads has `tiles` tiles of 16 rows, all in one round; its warps share the columns in pairs of
groups of 128 (product.py, plane_product.py):

    weights of all its tiles and pairs -> registers      (on their way while the activations are quantized)
    its pairs' activations -> norm, absmax, q, planes    (each warp those that it multiplies)
    popcounts -> float32 sums per warp -> shared memory -> sum over warps, 1 / rms, activation or residual

Several rows are multiplied one after another by the same weights; more go through decode_s8.py where its
integers have room in shared memory.
"""

import dataclasses

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import index
from pallas_kernels.matmul.bit_mma.decode import Decode, RegisterBlock
from pallas_kernels.matmul.bit_mma.plane_product import PlaneProduct

NUMBERS_OF_WARPS = 8, 12, 16, 20, 24
MOST_WARPS_OF_ROWS = 16  # for several rows, whose code wants more registers than larger blocks have
LOADS_PER_LANE = 18  # 16-byte loads that a lane has in flight before anything else: 288 bytes


@dataclasses.dataclass(frozen=True)
class RowByRow(Decode):
    product: PlaneProduct  # of one row
    rows: int
    name = "bit_decode_b1"

    @classmethod
    def plan(cls, rows, columns, n_tiles, pairs, matrices=1, bits=8, **rest):
        """Each multiprocessor gets one block with all its tiles, unless a lane would have too many loads in
        flight: each further wave of blocks reads and quantizes x again. Of the numbers of warps that allow as
        many tiles, it is one that leaves the fewest warps idle."""
        blocks = device.multiprocessors()
        most = -(-n_tiles // blocks)
        allowed = [w for w in NUMBERS_OF_WARPS if rows == 1 or w <= MOST_WARPS_OF_ROWS]
        each = {warps: -(-pairs // warps) for warps in allowed}
        room = {warps: min(most, LOADS_PER_LANE // (matrices * each[warps])) for warps in each}
        warps = max(each, key=lambda w: (room[w], -each[w] * w, -w))
        waves = -(-most // max(1, room[warps]))
        tiles = -(-n_tiles // (waves * blocks))
        product = PlaneProduct(
            rows=1, columns=columns, n_tiles=n_tiles, pairs=pairs, warps=warps, tiles=tiles,
            round_tiles=tiles, matrices=matrices, bits=bits, **rest,
        )  # fmt: skip
        return cls(product, rows)

    @property
    def scratch(self):
        return {f"sums_{row}": plgpu.SMEM((self.product.scratch,), jnp.float32) for row in range(self.rows)}

    def block(self, weights_gmem, layers_gmem, residual_gmem, x_gmem, gamma_gmem, out_gmem, **sums_smem):
        block = RegisterBlock(self.product, weights_gmem, layers_gmem, residual_gmem, out_gmem)
        p, me, sums = self.product, block.me, list(sums_smem.values())
        tiles = block.round_tiles(index(0))  # before x is requested: nothing then delays the weights

        def columns(ref, i):
            return p.own_columns(me, lambda places: [memory.load(ref, i, at + more) for at, more in places])

        gamma = columns(gamma_gmem, index(memory.load(layers_gmem, 1))) if p.normed else {}
        outputs = p.outputs(me, index(0), index(0), block.first_tile)
        added = [block.added(outputs, row) for row in range(self.rows)]
        first_row = columns(x_gmem, 0)  # before the weights: these are near and wanted first
        loaded = block.load_round(tiles)
        for row, smem in enumerate(sums):
            x = p.quantize_own(me, columns(x_gmem, row) if row else first_row, gamma)
            p.store_squares(me, index(0), x, smem)
            p.store_sums(me, block.multiply(x, loaded), smem)
        lanes.block_barrier()
        for row, smem in enumerate(sums):
            block.finish(smem, outputs, added[row], row)


run = RowByRow.run
