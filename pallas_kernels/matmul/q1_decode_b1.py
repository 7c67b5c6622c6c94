"""Matrix-vector products with 1-bit weights (Q1_0), on the binary tensor cores: packed weights are never
unpacked.

An activation x is an integer q of 8 (or 16) bits times the scale s of its group of 128: x = s q, q = sum_p
2^p b_p with the highest plane negative. A weight is d (2 b - 1) with one d per group and row. So over a group

    sum_k w_k x_k = d s (2 sum_p 2^p popcount(b & b_p) - sum_k q_k)

and `mma.m16n8k128 and.popc` counts 16 rows against 8 planes at once. One block of threads has `tiles` tiles
of 16 rows; its warps share the columns in pairs of groups:

    weights of all its tiles and pairs -> registers      (on their way while the activations are quantized)
    its pairs' activations -> norm, absmax, q, planes    (each warp those that it multiplies)
    popcounts -> float32 sums per warp -> shared memory -> sum over warps, 1 / rms, SwiGLU or residual -> out

`q1_decode_b1` is one such phase as a kernel of its own; decode_layers.py has the same pieces in one launch.
More rows go through q1_decode_s8.py where its codes have room in shared memory.

Layout (`tile`): words [L, N / 16, K / 256, 32 lanes, 4], for lane 4 g + t and a pair of groups (h = 0, 1)
word t of rows g and g + 8: one 16-byte load; scales [L, N / 16, K / 128, 8], the float16 scales of rows g and
g + 8. Rows are padded to 16 and columns to 256, by weights whose scale is 0.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import lanes, memory, tensor_cores
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import (
    as_real,
    as_word,
    fma,
    index,
    integer,
    minimum,
    real,
    select,
    sum_of_squares,
    total,
)
from pallas_kernels.matmul import epilogue, q1_decode
from pallas_kernels.matmul.quantize_activations import largest_of_group

GROUP = 128
PAIR_BYTES, SCALE_BYTES = 2 * GROUP * 16 // 8, 2 * 16 * 2  # of a tile and a pair of groups
SUM, SUM_WORD = 1.5 * 2**23 + 2, 0x4B400002  # a float and its bits, of which a third is a whole number
LOADS_PER_LANE = 16  # 16-byte loads that a lane has in flight before anything else: 256 bytes


def run(*arguments) -> jax.Array:
    """Products of 1 to 8 rows (execute.py)."""
    return q1_decode.run(q1_decode_b1, "q1_decode_b1", _plan_for, *arguments)


def plan(
    n_tiles: int, pairs: int, matrices: int = 1, warps: int | None = None, tiles: int | None = None
) -> tuple[int, int] | None:
    """(warps of a block, tiles of a block), for the least idle warps and, if there are enough tiles, 132
    blocks; with measured ones None where a lane has no registers for so many weights. Of so many columns that
    eight warps would have more than two tiles' loads, 16 quantize them."""
    each = lambda w: -(-pairs // w)  # noqa: E731
    few = [w for w in (8, 4) if 2 * each(w) <= LOADS_PER_LANE]
    warps = warps or (min(few, key=lambda w: (each(w) * w, -w)) if few else 16)
    per_warp = each(warps)
    if tiles is None:
        # Blocks of 16 warps are alone on a multiprocessor, and must all run at once.
        most = -(-n_tiles // 132) if warps == 16 else n_tiles // 128
        return warps, max(1, min(LOADS_PER_LANE // per_warp, most))
    fits = tiles <= n_tiles and matrices * tiles * per_warp <= 2 * LOADS_PER_LANE
    return (warps, tiles) if fits else None


def _plan_for(n_tiles: int, pairs: int, matrices: int, bits: int, **sizes) -> tuple[int, int] | None:
    return plan(n_tiles, pairs, matrices, **sizes)


@functools.partial(jax.jit, static_argnames=("eps", "activation_bits", "warps", "tiles"))
def q1_decode_b1(
    x: jax.Array,
    weights: tuple[tuple[jax.Array, jax.Array], ...],
    layers: jax.Array,
    *,
    gamma: jax.Array | None = None,
    eps: float = 0.0,
    residual: jax.Array | None = None,
    activation_bits: int = 8,
    warps: int | None = None,
    tiles: int | None = None,
) -> jax.Array:
    """y = x W.T for one matrix, or silu(x G.T) * (x U.T) for two.

    x         float32 [rows, K], 1 to 8 rows; with gamma, float32 [L, K], x is rms_norm(x; gamma[i], eps)
    weights   ((words, scales),) of W, or of G and U, tiled stacks as above
    layers    int32 [2 or more], the index into the weights' stacks and the one into gamma's
    residual  float32 [rows, N], added to y
    activation_bits  8 or 16
    warps, tiles     of a block (tuned.py)
    Returns float32 [rows, N padded to 16]. Activations are quantized here, symmetric per group of 128.
    """
    rows, columns = x.shape
    n_tiles, pairs = weights[0][0].shape[1:3]
    planned = plan(n_tiles, pairs, len(weights), warps, tiles)
    if planned is None:
        raise NotImplementedError(f"{tiles} tiles of {pairs} pairs of groups are too many for {warps} warps")
    warps, tiles = planned
    phase = BitProduct(
        rows=rows, columns=columns, n_tiles=n_tiles, pairs=pairs, warps=warps, tiles=tiles,
        matrices=len(weights), normed=gamma is not None, eps=eps, bits=activation_bits,
    )  # fmt: skip
    return launch(
        functools.partial(_multiply_rows, phase),
        {
            "weight_gmem": weights, "x_gmem": x, "layers_gmem": layers, "gamma_gmem": gamma,
            "residual_gmem": residual,
        },
        {"out_gmem": jax.ShapeDtypeStruct((rows, n_tiles * 16), jnp.float32)},
        name="q1_decode_b1",
        blocks=-(-n_tiles // tiles),
        threads=32 * warps,
        scratch={"scratch_smem": plgpu.SMEM((phase.scratch,), jnp.float32)},
    )  # fmt: skip


def _multiply_rows(
    phase: "BitProduct", weight_gmem, x_gmem, layers_gmem, gamma_gmem, residual_gmem, out_gmem, scratch_smem
):
    me = LaneColumns.of(phase)
    layer, norm_layer = (index(memory.load(layers_gmem, i)) for i in (0, 1))
    first_tile = lanes.block() * phase.tiles
    tile = [minimum(first_tile + j, phase.n_tiles - 1) for j in range(phase.tiles)]

    def row_of(ref, i):
        return phase.gather(me, lambda columns: [memory.load(ref, i, at + more) for at, more in columns])

    gamma = row_of(gamma_gmem, norm_layer) if phase.normed else {}
    outputs = phase.my_outputs(me, first_tile, phase.n_tiles)
    residual = []
    if residual_gmem is not None:
        last = 16 * phase.n_tiles - 1
        residual = [memory.load(residual_gmem, row, minimum(n, last)) for *_, row, _, n in outputs]
    first_row = row_of(x_gmem, 0)  # before the weights: these are near and wanted first
    # All weights of this block, on their way at once.
    words, scales = {}, {}
    for m, (words_gmem, scales_gmem) in enumerate(weight_gmem):
        for j in range(phase.tiles):
            for p in range(phase.per_warp):
                at = [layer, tile[j], me.pair[p], me.lane, 0]
                words[m, j, p] = memory.load_vector(4, words_gmem, at)
                for h in (0, 1):
                    at = [layer, tile[j], me.scale_group[p, h], me.g]
                    scales[m, j, p, h] = memory.load(scales_gmem, *at)

    for row in range(phase.rows):
        x = phase.quantize(me, first_row if row == 0 else row_of(x_gmem, row), gamma)
        phase.store_squares(me, x, scratch_smem, row)
        sums = [
            (m, j, phase.tile_product(
                me, x, lambda p, at=(m, j): words[*at, p], lambda p, h, at=(m, j): scales[*at, p, h]
            ))
            for m in range(phase.matrices)
            for j in range(phase.tiles)
        ]  # fmt: skip
        phase.store_sums(me, sums, scratch_smem, row)
    lanes.block_barrier()

    def store(i, row, n, y):
        memory.store(y + residual[i] if residual else y, out_gmem, row, n)

    phase.outputs(me, scratch_smem, outputs, store)


@dataclasses.dataclass(frozen=True)
class LaneColumns:
    """Where a lane stands in its block, and which columns its warp has.

    pair         of this warp; another's where there are no more
    scale_group  {(p, h): group of pair p}, as the weights' scales count them, with padding
    x_group      the same, clipped to the last that activations have: (index, constant to be added)
    count        {(p, h): 1.0, or 0.0 for a group that is another's or padding}
    """

    thread: Any
    warp: Any
    lane: Any
    g: Any
    t: Any
    pair: list
    scale_group: dict
    x_group: dict
    count: dict

    @staticmethod
    def of(phase: Any) -> "LaneColumns":
        """phase: a BitProduct, or what has its columns, pairs, warps and per_warp."""
        thread = lanes.thread()
        warp, lane = thread // 32, thread % 32
        g, t = lane // 4, lane % 4
        first = phase.per_warp * warp
        groups = phase.columns // GROUP
        # Where every warp has as many whole pairs, addresses differ by constants alone.
        even = phase.per_warp * phase.warps * 2 == groups
        pair, scale_group, x_group, count = [], {}, {}, {}
        for p in range(phase.per_warp):
            wanted = first + p
            # Of a pair that is not there another's words are read, not all the last one's: 132 blocks do.
            pair.append(wanted if even else index(integer(wanted) % phase.pairs))
            for h in (0, 1):
                scale_group[p, h] = pair[p] * 2 + h
                if even:
                    x_group[p, h], count[p, h] = (first * 2, 2 * p + h), real(1)
                else:
                    x_group[p, h] = (minimum(scale_group[p, h], groups - 1), 0)
                    count[p, h] = select(wanted * 2 + h < groups, 1.0, 0.0)
        return LaneColumns(thread, warp, lane, g, t, pair, scale_group, x_group, count)


@dataclasses.dataclass(frozen=True)
class RowPlanes:
    """A warp's activations of one row, quantized.

    planes      {(p, h): a word per 8 bits of q}
    scale       {(p, h): of what this lane counts}
    correction  {(p, h): -s sum_k q_k}, in one of the four lanes that share a row of weights
    squares     sum over this lane's columns, where the phase norms
    """

    planes: dict
    scale: dict
    correction: dict
    squares: Any


@dataclasses.dataclass(frozen=True)
class BitProduct:
    """One phase: rows of activations times the tiles of one matrix, or of two for SwiGLU, that a block has.

    rows, columns      of the activations
    n_tiles, pairs     of the matrix: tiles of 16 rows, pairs of groups of 128 columns
    warps, tiles       of a block
    Its methods are called while a kernel is traced.
    """

    rows: int
    columns: int
    n_tiles: int
    pairs: int
    warps: int
    tiles: int
    matrices: int = 1
    normed: bool = False
    eps: float = 0.0
    bits: int = 8
    splits: ClassVar[int] = 1  # of the columns: each block has all of them

    @property
    def per_warp(self) -> int:
        return -(-self.pairs // self.warps)

    @property
    def scratch(self) -> int:
        """float32 of shared memory: sums [matrices, tiles, rows, warps, 16], then squares [rows, warps]."""
        return self.matrices * self.tiles * self.rows * self.warps * 16 + self.rows * self.warps

    def gather(self, me: LaneColumns, load: Callable) -> dict:
        """{(p, h, i): value} of this lane's columns, bit `lane` of word i of each of its groups.

        load(columns) loads them all; a column is an index and a constant to be added.
        """
        columns = {
            (p, h, i): (base * GROUP + me.lane, GROUP * more + 32 * i)
            for (p, h), (base, more) in me.x_group.items()
            for i in range(4)
        }
        return dict(zip(columns, load(list(columns.values())), strict=True))

    def quantize(self, me: LaneColumns, x: dict, gamma: dict) -> RowPlanes:
        # Of planes 2 t and 2 t + 1 this lane sums the counts: 2 * 4^t times what `tile_product` counts.
        weight = real(integer(2) << integer(me.t) * 2)
        first = me.t == 0
        planes, scale, correction, squares = {}, {}, {}, real(0)
        for p, h in me.x_group:
            mine = [x[p, h, i] for i in range(4)]
            if self.normed:
                squares = fma(sum_of_squares(mine), me.count[p, h], squares)
                mine = [v * gamma[p, h, i] for i, v in enumerate(mine)]
            planes[p, h], step, sum_of_q = bit_planes(mine, me.lane, self.bits)
            step = step * me.count[p, h]
            scale[p, h] = step * weight
            correction[p, h] = select(first, -(step * sum_of_q), 0.0)
        return RowPlanes(planes, scale, correction, squares)

    def tile_product(self, me: LaneColumns, x: RowPlanes, words: Callable, scales: Callable) -> list:
        """This lane's share of rows g and g + 8 of a tile: words(p) is the vector of a pair, scales(p, h) the
        scales of a group."""
        y = [real(0)] * 2
        for p in range(self.per_warp):
            word = words(p)
            for h in (0, 1):
                a0, a1 = (lanes.element(word, 2 * h + r) for r in (0, 1))
                counted = weighted_counts(me.t, a0, a1, x.planes[p, h])
                d = lanes.halves(scales(p, h))
                for r in (0, 1):
                    y[r] = fma(d[r], fma(counted[r], x.scale[p, h], x.correction[p, h]), y[r])
        return y

    def _slot(self, m, j, row, warp):
        """Where the 16 sums of matrix m, tile j, a row and a warp begin."""
        return (((j + m * self.tiles) * self.rows + row) * self.warps + warp) * 16

    def store_sums(self, me: LaneColumns, sums: list, scratch_smem, row: int):
        """Shares of tiles: (matrix, tile, share) each."""
        for (m, j, _), v in zip(sums, over_lanes(me.t, [y for *_, y in sums], 4), strict=True):
            memory.store(v, scratch_smem, self._slot(m, index(j), row, me.warp) + me.t % 2 * 8 + me.g)

    def store_squares(self, me: LaneColumns, x: RowPlanes, scratch_smem, row: int):
        if self.normed:
            first = self.scratch - self.rows * self.warps + row * self.warps
            memory.store(lanes.warp_sum_real(x.squares), scratch_smem, me.warp + first)

    def my_outputs(self, me: LaneColumns, first_tile, end_tile) -> list:
        """This thread's outputs: per output (whether it is there, j, row, index within the tile, n)."""
        out = []
        outputs, threads = self.tiles * self.rows * 16, self.warps * 32
        for first in range(0, outputs, threads):
            at = me.thread + first
            inside, row, j = at % 16, at // 16 % self.rows, at // (16 * self.rows)
            n_tile = first_tile + j
            out.append(((at < outputs) & (n_tile < end_tile), j, row, inside, n_tile * 16 + inside))
        return out

    def outputs(self, me: LaneColumns, scratch_smem, mine: list, store: Callable):
        """Behind a block barrier: store(i, row, n, y) for each of my_outputs."""

        def over_warps(at, stride):
            return epilogue.over_warps(lambda w: memory.load(scratch_smem, at + w * stride), self.warps)

        for i, (valid, j, row, inside, n) in enumerate(mine):
            with lanes.when(valid):
                y = [over_warps(self._slot(m, j, row, 0) + inside, 16) for m in range(self.matrices)]
                norm = None
                if self.normed:
                    squares = over_warps(row * self.warps + (self.scratch - self.rows * self.warps), 1)
                    norm = epilogue.inverse_rms(squares, self.columns, self.eps)
                store(i, row, n, epilogue.finished(y, norm))


def over_lanes(t, shares: list, count: int) -> list:
    """Sums over 2 or 4 neighbouring lanes of their shares of rows g and g + 8: of rows g in lanes of even t,
    of rows g + 8 in the others, so that half as many numbers are exchanged.

    All shares come before the first exchange, past which no compiler moves a product: so the latency of one
    is hidden behind the others.
    """
    odd = t % 2 == 1
    mine, others = ([select(odd, y[r], y[1 - r]) for y in shares] for r in (1, 0))
    sums = [v + lanes.swapped(other, 1) for v, other in zip(mine, others, strict=True)]
    return sums if count == 2 else [v + lanes.swapped(v, 2) for v in sums]


def weighted_counts(t, a0, a1, planes: list) -> list:
    """A lane's share of sum_p 2^p popcount(a & b_p) of rows g and g + 8, as float32: that of planes 2 t and
    2 t + 1, over 4^t. Of the highest byte's planes the last is negative."""
    highest = t == 3
    if len(planes) == 1:
        # Counts start so that their sum is the last bits of a float: no conversion, which would run at a
        # quarter of the speed.
        second = select(highest, -2, 2)
        c = tensor_cores.count_common_bits(
            a0, a1, planes[0], select(highest, -SUM_WORD % 2**32, SUM_WORD // 3)
        )
        return [as_real(c[2 * r] + c[2 * r + 1] * second) - SUM for r in (0, 1)]
    counted = [integer(0)] * 2
    for byte, plane in enumerate(planes):
        c = tensor_cores.count_common_bits(a0, a1, plane)
        second = select(highest, -2, 2) if byte == len(planes) - 1 else 2
        counted = [n + (c[2 * r] + c[2 * r + 1] * second << 8 * byte) for r, n in enumerate(counted)]
    return [real(n) for n in counted]


def bit_planes(x: list, lane, bits: int):
    """A warp's 128 activations (4 a lane) -> (planes, scale, sum of q as float32).

    planes   per 8 bits of q one word: lane 4 p + t holds word t of plane p, as the tensor core wants it
    """
    top = 2 ** (bits - 1) - 1
    largest = largest_of_group(x, lambda v: as_real(lanes.warp_max(as_word(v))))
    inverse = lanes.ratio(top, largest)
    q = [lanes.round_to_integer(v * inverse) for v in x]
    sum_of_q = total(q)
    # Word t of plane p is bit p of the lanes' q[t]. Transposed, lane 8 t + p holds it; lane 4 p + t wants it.
    source = integer(lane % 4 * 8 + lane // 4)
    planes = []
    for byte in range(bits // 8):
        packed = lanes.packed_bytes(q, byte)
        planes.append(lanes.from_lane(lanes.transposed_bits(packed, lane), source))
    return planes, largest * (1 / top), real(lanes.warp_sum(sum_of_q))
