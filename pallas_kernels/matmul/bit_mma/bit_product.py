"""One row after another of activations times 1-bit weights (Q1_0), on the binary tensor cores: a phase, of
which decode_b1.py makes a kernel and step/decode_layers.py a part of one launch. Packed weights are never
unpacked.

An activation x is an integer q of 8 (or 16) bits times the scale s of its group of 128: x = s q, q = sum_p
2^p b_p with the highest plane negative. A weight is d (2 b - 1) with one d per group and row. So over a group

    sum_k w_k x_k = d s (2 sum_p 2^p popcount(b & b_p) - sum_k q_k)

and `mma.m16n8k128 and.popc` counts 16 rows against 8 planes at once. Weights are as formats/q1_0.py tiles
them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from pallas_kernels.activations import SILU, Activation
from pallas_kernels.gpu import lanes, memory, tensor_cores
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
from pallas_kernels.matmul import epilogue
from pallas_kernels.matmul.bit_mma.decode import GROUP
from pallas_kernels.matmul.quantize_activations import largest_of_group

SUM, SUM_WORD = 1.5 * 2**23 + 2, 0x4B400002  # a float and its bits, of which a third is a whole number


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
    activation: Activation = SILU
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
                store(i, row, n, epilogue.output(y, norm, self.activation))


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
