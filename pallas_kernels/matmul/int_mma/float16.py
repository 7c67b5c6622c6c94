"""Weights of 2 to 8 bits in int_decode's layout to float16, as one lane does it: for whoever multiplies them
with many rows (dequantize.py writes them to memory, prefill_sm90.py multiplies them out of registers).

    w = q d - m in float32, rounded to float16

The integers become float32 by their place in 2^23 + q, without a conversion. Products are exact (at most 23
bits) wherever something is subtracted from them, so the values are those of the format's `dequantize`, bit
for bit.

As wgmma's first operand (`operand`) they are 64 rows x 64 columns at a time, of which each warp has 16; the
order of columns is int_prefill_sm90's. There every instruction counts, and two weights are made at a time:

    w = q s - m in float16, rounded once, with s and m rounded to float16 before

The integers become float16 by their place in 2^10 + q. Where d, or d and m, are float16 in the file, the
values are still the definition's; of others (Q4_K, Q5_K, Q6_K) they are within about 2^-11 of it.
"""

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import as_real, as_word, fma, index, integer, select
from pallas_kernels.gpu.wgmma import STEP, half_fragment, lane
from pallas_kernels.matmul.int_mma import bytes as int_bytes
from pallas_kernels.tiles import TILE_COLUMNS, Lanes


def pairs(words: list, signed: bool, scale: list, minimum: list | None = None) -> list[list]:
    """A lane's part of one group -> pairs of float16, [rows g, g + 8][pairs of neighbouring columns].

    words           int_bytes.Unit's `a` of the group
    scale, minimum  float32 of rows g and g + 8 (`group_values`)
    """
    out = []
    for r in (0, 1):
        packed = []
        for word in words[r::2]:
            q = lanes.bytes_as_reals(word, signed)
            w = [v * scale[r] if minimum is None else fma(v, scale[r], -minimum[r]) for v in q]
            packed += [lanes.half_pair(*w[i : i + 2]) for i in (0, 2)]
        out.append(packed)
    return out


def group_values(values: list, j: int, lane) -> list:
    """Of a unit's values, [rows g, g + 8][groups 2 t, 2 t + 1], those of group j, from the lane of the quad
    that has them."""
    return [as_real(lanes.from_quad(as_word(row[j % 2]), lane, j // 2)) for row in values]


def put_scales(format_lanes: Lanes, shapes, matrices, target):
    """All scales and minimums of 64 rows x 256 columns to shared memory, for `operand`.

    shapes    of the weights, by name in sorted order: a tile's as the format has them
    matrices  fields by name: refs of tiles as they stand (lanes and their words in one axis), 4 of one
              matrix, or 2 of each of two
    target    float32 [4 warps, bytes_of_scales / 4]: of each group, for each g, those of a warp's rows g and
              g + 8: a pair of the same float16 each, minimums negative

    With one matrix only the warp that writes them reads them; with two `seen` comes between.
    """
    shapes = dict(zip(sorted(matrices[0]), shapes, strict=True))
    names = [name for name in shapes if name != "words"]
    kinds = 1 + format_lanes.minimums

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (1 + len(matrices) * len(names)))
    def scales(ctx, target, *refs):
        warp, number, g, t = lane(reuse=True)
        fields = [dict(zip(names, refs[i:], strict=False)) for i in range(0, len(refs), len(names))]
        warp = integer(warp)
        # With two matrices warps 2 i and 2 i + 1 dequantize tile i, of one matrix each.
        tile = index(warp // len(fields))
        matrix_words = [
            {name: words_of(refs[name], shapes[name], tile, number) for name in names} for refs in fields
        ]
        words = matrix_words[0]
        if len(fields) == 2:
            second = warp % 2 == 1
            words = {
                name: _either(second, *(matrix[name] for matrix in reversed(matrix_words))) for name in names
            }
        at, g_begin, t_begin = (
            memory.shared_address(target),
            integer(g) * (8 * kinds),
            integer(t) * (2 * 64 * kinds),
        )
        at = at + g_begin + t_begin
        region = bytes_of_scales(format_lanes)
        if len(fields) == 1:
            at = at + warp * region
        else:
            tile_begin, matrix_begin = warp // 2 * (2 * region), warp % 2 * (4 * kinds)
            at = at + tile_begin + matrix_begin
        for j, (low, high) in enumerate(_half_scales(format_lanes, words, number)):
            u, h = divmod(j, 2)
            offset = (8 * u + h) * 64 * kinds
            if len(fields) == 1:
                memory.store_shared(low + high, at, offset)
            else:
                memory.store_shared(low, at, offset)
                memory.store_shared(high, at, offset + region)
        if len(fields) == 1:
            lanes.warp_barrier()

    scales(target, *(fields[name] for fields in matrices for name in names))


def seen():
    """What other warps of the warpgroup have put is there."""

    @plgpu.inline_mgpu(arg_types=())
    def barrier(ctx):
        lanes.warpgroup_barrier()

    barrier()


def _either(condition, a, b):
    """Of words, or vectors of words."""
    if isinstance(a, list):
        return [_either(condition, x, y) for x, y in zip(a, b, strict=True)]
    return select(condition, a, b)


def _half_scales(format_lanes: Lanes, fields, number) -> list:
    """As tiles.Lanes.half_scales."""
    if format_lanes.half_scales is not None:
        return format_lanes.half_scales(fields)
    out = []
    for eight in int_bytes.scales(format_lanes, fields, integer(number)):
        for h in (0, 1):
            rows = []
            for r in (0, 1):
                scale = eight.scale[r][h]
                if format_lanes.words.units[h] > 1:
                    scale = scale * format_lanes.words.units[h]
                row = [scale] + ([-eight.minimum[r][h]] if eight.minimum is not None else [])
                assert len(row) == 1 + format_lanes.minimums
                rows.append([lanes.half_pair(v, v) for v in row])
            out.append(rows)
    return out


def bytes_of_scales(format_lanes: Lanes) -> int:
    """Of 16 rows x 256 columns, as `put_scales` puts them."""
    return TILE_COLUMNS // format_lanes.group * 16 * 4 * (1 + format_lanes.minimums)


def scales_of_warp(scales, warp, format_lanes: Lanes, g):
    """Where a warp's begin, as i32, for rows g and g + 8."""
    at = memory.shared_address(scales) + integer(warp) * bytes_of_scales(format_lanes)
    return at + integer(g) * (2 * 4 * (1 + format_lanes.minimums))


def operand(format_lanes: Lanes, step: int, matrices, scales):
    """float16 [64, 64]: the weights of a step of 64 columns, as wgmma wants them.

    matrices  refs of the words of 256 columns: of 4 tiles of one matrix; or of 2 tiles of each of two, and
              then warp w has of tile w / 2 rows 8 (w % 2) + g, as its row g of the first matrix, as its row
              g + 8 of the second
    scales    what `put_scales` made of them
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),) * (1 + len(matrices)),
        return_type=plgpu.ShapeDtypeStruct((64, STEP), jnp.float16, layout=plgpu.Layout.WGMMA),
    )
    def dequantize(ctx, scales, *matrices):
        warp, number, g, _ = lane(reuse=True)
        vectors = vectors_of(matrices, warp, number)
        at = scales_of_warp(scales, warp, format_lanes, g)
        return half_fragment(step_pairs(format_lanes, step, vectors, at), (64, STEP))

    return dequantize(scales, *matrices)


def vectors_of(matrices, warp, number) -> tuple:
    """(a lane's words of 256 columns, by four, of each matrix; which of rows g and g + 8 of both
    is its own, for two matrices)."""
    shape = (matrices[0].type.shape[1], 32, 4)
    if len(matrices) == 1:
        return [words_of(matrices[0], shape, warp, number)], None
    warp = integer(warp)
    tile = index(warp // 2)
    second = warp % 2 == 1
    return [words_of(ref, shape, tile, number) for ref in matrices], second


def _own_rows(matrices: list, second) -> list:
    """Vectors, in which rows g and g + 8 take turns: a matrix's own, or of two its row of each."""
    if len(matrices) == 1:
        return matrices[0]
    return [
        [select(second, words[i + 1], words[i]) for i in (0, 2) for words in pair]
        for pair in zip(*matrices, strict=True)
    ]


def step_pairs(format_lanes: Lanes, step: int, vectors: tuple, scales) -> list:
    """A lane's pairs of float16 for the 64 columns of a step, in wgmma's order: for 8 positions at a time row
    g, and row g + 8.

    vectors  `vectors_of` of 256 columns; of those of other steps nothing remains
    scales   address of those of its rows
    """
    kinds, sign = 1 + format_lanes.minimums, 0x80 * format_lanes.signed
    groups, out = format_lanes.words.integers(_own_rows(*vectors)), []
    for group in range(step * STEP // format_lanes.group, (step + 1) * STEP // format_lanes.group):
        (words, mask), unit = groups[group], format_lanes.words.units[group % 2]
        bytes_ = [_half_bytes(word, mask, sign) for word in words]
        values = memory.load_shared(2 * kinds, scales, group * 16 * 4 * kinds)
        base = -(1024 + sign) / unit
        for i in range(0, len(bytes_), 2):
            for pair in zip(*bytes_[i : i + 2], strict=True):
                for r, q in enumerate(pair):
                    if unit == 1:
                        q = lanes.half_less(q, lanes.half_twice(-base))
                    else:
                        q = lanes.half_fma(q, lanes.half_twice(1 / unit), lanes.half_twice(base))
                    if kinds == 1:
                        out.append(lanes.half_times(q, values[r]))
                    else:
                        out.append(lanes.half_fma(q, values[2 * r], values[2 * r + 1]))
    return out


def _half_bytes(word, mask: int, sign: int) -> list:
    """1024 + bytes 0 and 2 of a word under the mask, and 1024 + bytes 1 and 3; signed ones have 128 added."""
    bits = [word >> right for right in (0, 8)]
    return [lanes.halves_of_code(v, mask * 0x10001, sign * 0x10001) for v in bits]


def words_of(ref, shape: tuple[int, ...], warp, number) -> list:
    """What a lane has of a field of one tile: words, or vectors of four."""
    if len(shape) == 1:  # a word for 32 / n neighbouring lanes
        return [memory.load(ref, warp, number // (32 // shape[0]))]
    if len(shape) == 2:  # words for them
        return memory.load_words(shape[1], ref, [warp, number // (32 // shape[0]) * shape[1]])
    return [memory.load_words(4, ref, [warp, v, number * 4]) for v in range(shape[0])]
