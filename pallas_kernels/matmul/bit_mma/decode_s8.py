"""1-bit weights (Q1_0) times up to 8 rows of activations, on the integer tensor cores, weights in registers:
the bits of a word become bytes once, for all rows (product.py, byte_product.py).

decode_b1.py counts the bits of one row's eight planes, and each block of threads quantizes the row itself, so
every further row costs as much as the first. Here no planes are made, and a separate launch quantizes
(`quantize_rows`): otherwise every multiprocessor would read all rows as float32, which is 52 MB for 8 rows of
12,288 and more than the weights. The integers are the same.

A block of threads has `tiles` tiles of 16 rows; its warps share the columns in pairs of groups:

    weights of the first round -> registers, its columns' integers and scales -> shared memory
    per round of tiles: loads of the next round begin; bits -> bytes -> mma -> float32 sums per warp
                        -> shared memory -> sum over warps, 1 / rms, activation or residual -> out
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.gpu import lanes, memory, shared_memory
from pallas_kernels.gpu.values import as_real, as_word, fma, index, integer, minimum, real
from pallas_kernels.matmul import stacks
from pallas_kernels.matmul.bit_mma import decode, quantize_rows
from pallas_kernels.matmul.bit_mma.byte_product import ByteProduct
from pallas_kernels.matmul.bit_mma.decode import Decode, RegisterBlock
from pallas_kernels.matmul.bit_mma.product import GROUP, MMA_COLUMNS, LaneColumns
from pallas_kernels.matmul.bit_mma.quantize_rows import Quantized
from pallas_kernels.matmul.prologue import Parts
from pallas_kernels.qtensor import QTensor
from pallas_kernels.tiles import TILE_COLUMNS, TILE_ROWS

# Warps of a block, and blocks of a multiprocessor at once: as many as there are registers for. The first of
# those with the fewest idle warps is taken.
SIZES_OF_BLOCKS, FEWEST_WARPS = ((12, 1), (8, 1), (4, 2), (4, 1)), 8
MOST_SPLITS = 4  # of the columns
# By bits, tiles times pairs of a warp: as many 16-byte loads a lane has in flight. The sums of 16 bits leave
# fewer registers.
LOADS_OF_ROUND = {8: 9, 16: 8}
DIGIT_BYTES = MMA_COLUMNS * GROUP  # 8 bits of the integers of a group, of 8 rows
STATISTIC_BYTES = 8 * MMA_COLUMNS  # two float32 of each of 8 rows


def refuses(n: int, k: int, matrices: int, bits: int) -> str | None:
    """Why it is not for matrices of n outputs and k inputs, or None."""
    room = Rounds.plan(MMA_COLUMNS, k, -(-n // TILE_ROWS), -(-k // TILE_COLUMNS), matrices, bits)
    return None if room else f"integers of {k} activations a row leave no room for weights"


@dataclasses.dataclass(frozen=True)
class Rounds(Decode):
    product: ByteProduct
    name = "bit_decode_s8"

    @classmethod
    def plan(cls, rows, columns, n_tiles, pairs, matrices=1, bits=8, **rest):
        """With the fewest idle warps, of those that keep FEWEST_WARPS or more on a multiprocessor, in one
        block or in several. Where integers and sums do not fit into shared memory, a block of one matrix has
        a part of the columns. None if they never fit."""

        def planned(warps: int, at_once: int, splits: int) -> Self | None:
            tiles = -(-n_tiles // (at_once * device.multiprocessors() // splits))
            most = max(1, min(tiles, LOADS_OF_ROUND[bits] // (matrices * -(-pairs // splits // warps))))
            product = ByteProduct(
                rows=rows, columns=columns // splits, n_tiles=n_tiles, pairs=pairs // splits, warps=warps,
                tiles=tiles, splits=splits, round_tiles=-(-tiles // -(-tiles // most)), matrices=matrices,
                bits=bits, **rest,
            )  # fmt: skip
            plan = cls(product)
            taken = shared_memory.bytes_taken(*(4 * size for size in plan._words.values()))
            return plan if taken <= shared_memory.bytes_of_block(device.shared_bytes(), at_once) else None

        def idle(splits: int, warps: int, at_once: int) -> tuple[bool, int]:
            return warps * at_once < FEWEST_WARPS, -(-pairs // splits // warps) * warps

        for splits in range(1, 2 if matrices > 1 else MOST_SPLITS + 1):
            if splits > 1 and columns % (splits * TILE_COLUMNS):
                continue
            sizes = sorted(SIZES_OF_BLOCKS, key=lambda size, splits=splits: idle(splits, *size))
            if plan := next(filter(None, (planned(*size, splits) for size in sizes)), None):
                return plan
        return None

    @property
    def _words(self) -> dict[str, int]:
        """Of shared memory."""
        p = self.product
        groups = 2 * p.warps * p.per_warp
        return {
            "integers_smem": groups * p.bits // 8 * DIGIT_BYTES // 4,
            "statistics_smem": groups * STATISTIC_BYTES // 4,
            "sums_smem": p.scratch,
        }

    @property
    def scratch(self):
        dtypes = {"sums_smem": jnp.float32}
        return {name: plgpu.SMEM((size,), dtypes.get(name, jnp.int32)) for name, size in self._words.items()}

    def operands(self, x, gamma, layers):
        if isinstance(x, Quantized):
            return {"quantized_gmem": x}
        padding = ((0, 0), (0, self.product.splits * self.product.pairs * TILE_COLUMNS - x.shape[1]))
        gamma = None if gamma is None else jnp.pad(gamma, padding)
        quantized, *_ = quantize_rows.quantize_rows(jnp.pad(x, padding), layers, gamma, self.product.bits)
        return {"quantized_gmem": quantized}

    def block(
        self, weights_gmem, layers_gmem, residual_gmem, quantized_gmem, out_gmem,
        integers_smem, statistics_smem, sums_smem,
    ):  # fmt: skip
        block = RegisterBlock(self.product, weights_gmem, layers_gmem, residual_gmem, out_gmem)
        p, me = self.product, block.me
        count = minimum(p.n_tiles - block.first_tile, p.tiles)
        loaded = block.load_round(block.round_tiles(index(0)))
        x = SharedRows(p, me, block.split, quantized_gmem, integers_smem, statistics_smem, sums_smem)

        def one_round(first, loaded):
            following = loaded
            if p.tiles > p.together:
                following = block.load_round(block.round_tiles(first + p.together))
            outputs = p.outputs(me, index(0), first, block.first_tile)
            added = block.added(outputs)
            p.store_sums(me, block.multiply([x], loaded), sums_smem)
            lanes.block_barrier()
            block.finish(sums_smem, outputs, added)
            lanes.block_barrier()
            return following

        lanes.loop(0, count, p.together, loaded, one_round)


class SharedRows:
    """Integers and statistics of up to eight rows of this warp's groups, in shared memory (byte_product.Eight
    has those that are in registers)."""

    def __init__(
        self, p: ByteProduct, me: LaneColumns, split, quantized_gmem, integers_smem, statistics_smem,
        sums_smem,
    ):  # fmt: skip
        """Copy the integers of a split, and wait. Sums of squares, for a norm, are those of all splits."""
        q_gmem, statistics_gmem, squares_gmem = quantized_gmem
        first_group, self.digits, squares = me.warp * (2 * p.per_warp), p.bits // 8, real(0)
        self.group_bytes = self.digits * DIGIT_BYTES
        lane_bytes = me.lane * 16
        self.q = memory.shared_address(integers_smem) + integer(first_group * self.group_bytes + lane_bytes)
        self.at = memory.shared_address(statistics_smem) + integer(first_group * STATISTIC_BYTES)
        source = memory.address(q_gmem)
        for k, (p_h, group) in enumerate(me.scale_group.items()):
            own = memory.at_byte(source, integer(group), self.group_bytes, integer(lane_bytes))
            for half in range(self.group_bytes // 512):
                memory.copy_async(self.q + k * self.group_bytes, own, 16, at=half * 512)
            statistic = memory.load(statistics_gmem, group, me.lane % 16 // 2, me.lane % 2) * me.count[p_h]
            memory.store_shared(
                [as_word(statistic)], self.at + integer(me.lane % 16 * 4), k * STATISTIC_BYTES
            )
            for part in range(p.splits if p.normed else 0):
                at = group if p.splits == 1 else group + (index(part) - split) * (2 * p.pairs)
                squares = fma(memory.load(squares_gmem, at, me.g), me.count[p_h], squares)
        memory.commit_copies()
        if p.normed:
            with lanes.when(me.g < p.rows):
                memory.store(squares, sums_smem, me.g * p.busy + me.warp + p.sums)
        memory.wait_copies(0)
        lanes.warp_barrier()

    def integers(self, p: int, h: int) -> list:
        """Per 8 bits eight words."""
        at = (2 * p + h) * self.group_bytes
        halves = range(at, at + self.group_bytes, 512)
        words = [word for half in halves for word in memory.load_shared(4, self.q, half)]
        return [words[8 * digit :][:8] for digit in range(self.digits)]

    def coefficients(self, me: LaneColumns, p: int, h: int) -> list:
        words = memory.load_shared(4, self.at + integer(me.t * 16), (2 * p + h) * STATISTIC_BYTES)
        return [as_real(word) for word in words]


run = Rounds.run


class Rounded(NamedTuple):
    """Activations that several products read (step/layer_gemms.py).

    rows   of x
    normed, eps  whether rms_norm's 1 / rms(x) is still to be multiplied with
    """

    quantized: Quantized
    rows: int
    normed: bool = False
    eps: float = 0.0


def prologue(
    x: jax.Array | Parts, weights: Sequence[QTensor], layer, gamma: jax.Array | None, eps: float, rows: int,
    beside: jax.Array | None = None,
) -> list[Any]:  # fmt: skip
    """x, or rms_norm(x; gamma[layer], eps), to the bits of the weights' products: Rounded. Behind it, of
    Parts their sum, and with `beside` the products of gamma x and the rows of beside[layer], group by group
    (quantize_rows). Columns are whole pairs of groups."""
    gamma, index = stacks.whole(*stacks.gamma_stack(gamma, layer))
    layers = jnp.stack([jnp.int32(0), index, jnp.int32(-1)])
    bits = weights[0].products.bits(rows)
    quantized, x, products = quantize_rows.quantize_rows(x, layers, gamma, bits, beside, rows)
    rounded = Rounded(quantized, rows, gamma is not None, eps)
    return [rounded, *(array for array in (x, products) if array is not None)]


def gemm(x: Rounded, weights: Sequence[QTensor], part_layer, activation: Activation = SILU) -> jax.Array:
    """x W.T for one matrix, activation(x G.T, x U.T) for two: float32 [splits, rows, N], as prefill_sm90's
    parts of sums."""
    matrices = tuple((w.fields["words"], w.fields["scales"]) for w in weights)
    matrices, part = stacks.whole(matrices, part_layer)
    return decode.bit_decode(
        x.quantized, matrices, jnp.stack([part, jnp.int32(0), jnp.int32(-1)]), kernel=Rounds,
        n=weights[0].shape[0], eps=x.eps, bits=8 * x.quantized.q.shape[1],
        activation=activation if len(weights) == 2 else SILU, rows=x.rows, normed=x.normed, summed=False,
    )  # fmt: skip
