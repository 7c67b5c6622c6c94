"""Weights of 4 to 8 bits in int_gemv's layout to float16, as one lane does it: for whoever multiplies them
with many rows (dense.py writes them to memory, int_gemm.py multiplies them out of registers).

    w = q d - m in float32, rounded to float16

The codes become float32 by their place in 2^23 + q, without a conversion. Products are exact (at most 23
bits) wherever something is subtracted from them, so the values are those of the format's `dequantize`, bit
for bit.

As wgmma's first operand they are 64 rows x 64 columns at a time, of which each warp has a tile of 16 rows;
the order of columns is int_gemm's.
"""
# pyright: reportAbstractUsage=false, reportCallIssue=false

import jax.numpy as jnp
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, llvm
from jax._src.lib.mlir.dialects import math as mlir_math
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import formats
from pallas_kernels.mosaic import lanes, memory
from pallas_kernels.mosaic.wgmma import STEP, fragment, lane
from pallas_kernels.tiles import COLUMNS


def pairs(words: list, signed: bool, scale: list, minimum: list | None) -> list[list]:
    """A lane's part of one group -> pairs of float16, [rows g, g + 8][pairs of neighbouring columns].

    words           int_phase.Unit's `a` of the group
    scale, minimum  float32 of rows g and g + 8 (`of_group`)
    """
    out = []
    for r in (0, 1):
        packed = []
        for word in words[r::2]:
            q = lanes.bytes_as_reals(word, signed)
            if minimum is None:
                w = [arith.mulf(v, scale[r]) for v in q]
            else:
                w = [mlir_math.fma(v, scale[r], arith.negf(minimum[r])) for v in q]
            packed += [lanes.half_pair(*w[i : i + 2]) for i in (0, 2)]
        out.append(packed)
    return out


def of_group(values: list, j: int, lane) -> list:
    """Of a unit's values, [rows g, g + 8][groups 2 t, 2 t + 1], those of group j, from the lane of the quad
    that has them."""
    return [lanes.as_real(lanes.from_quad(lanes.as_word(row[j % 2]), lane, j // 2)) for row in values]


def put_scales(format: str, shapes, fields, target):
    """All scales and minimums of 64 rows x 256 columns to shared memory, for `operand`.

    shapes, fields  of the weights, by name in sorted order: a tile's as the format has them; refs of 4 tiles
                    as they stand (lanes and their words in one axis)
    target          float32 [4 warps, bytes_of_scales / 4]: of each group, for each g, those of rows g and
                    g + 8. Only the warp that writes them reads them
    """
    module = formats.get(format)
    names = sorted(fields)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (1 + len(names)))
    def scales(ctx, target, *refs):
        warp, number, g, t = lane()
        words = {
            name: words_of(ref, shape, warp, number)
            for name, ref, shape in zip(names, refs, shapes, strict=True)
        }
        per_row = 4 * _kinds(module)  # bytes
        at = scales_of_warp(target, warp, module, g)
        at = lanes.plus(at, lanes.scaled(lanes.to_integer(t), 2 * 16 * per_row))
        for u, unit in enumerate(module.fragments(words, lanes.to_integer(number))):
            kinds = [unit.scale] if unit.minimum is None else [unit.scale, unit.minimum]
            for h in (0, 1):
                values = [lanes.as_word(kind[r][h]) for r in (0, 1) for kind in kinds]
                memory.store_shared(values, at, (8 * u + h) * 16 * per_row)
        lanes.warp_barrier()

    scales(target, *(fields[name] for name in names))


def bytes_of_scales(module) -> int:
    """Of 16 rows x 256 columns, as `put_scales` puts them."""
    return COLUMNS // module.GROUP * 16 * 4 * _kinds(module)


def _kinds(module) -> int:
    """Numbers of a group: 2 where something is subtracted from every weight, because codes are not signed."""
    return 1 if module.SIGNED else 2


def scales_of_warp(scales, warp, module, g):
    """Where a warp's begin, as i32, for rows g and g + 8."""
    at = lanes.plus(
        memory.shared_address(scales), lanes.scaled(lanes.to_integer(warp), bytes_of_scales(module))
    )
    return lanes.plus(at, lanes.scaled(lanes.to_integer(g), 2 * 4 * _kinds(module)))


def operand(format: str, step: int, words, scales):
    """float16 [64, 64]: the weights of a step of 64 columns, as wgmma wants them.

    words   ref of the codes of 4 tiles of 256 columns
    scales  what `put_scales` made of them
    """
    module = formats.get(format)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((64, STEP), jnp.float16, layout=plgpu.Layout.WGMMA),
    )
    def decode(ctx, words, scales):
        warp, number, g, _ = lane()
        vectors = [
            memory.load_words(4, words, [warp, lanes.index(v), arith.muli(number, lanes.index(4))])
            for v in range(words.type.shape[1])
        ]
        at = scales_of_warp(scales, warp, module, g)
        halves = ir.VectorType.get((2,), ir.F16Type.get())
        held = [llvm.bitcast(halves, pair) for pair in step_pairs(module, step, vectors, at)]
        return fragment(held, (64, STEP), fragments.WGMMA_LAYOUT)

    return decode(words, scales)


def step_pairs(module, step: int, vectors: list, scales) -> list:
    """A lane's pairs of float16 for the 64 columns of a step, in wgmma's order: for 8 positions at a time row
    g, and row g + 8.

    vectors  its words of the codes of 256 columns; of those of other steps nothing remains
    scales   address of those of its rows
    """
    kinds = _kinds(module)
    of_groups, out = module.group_bytes(vectors), []
    for group in range(step * STEP // module.GROUP, (step + 1) * STEP // module.GROUP):
        values = [lanes.as_real(v) for v in memory.load_shared(2 * kinds, scales, group * 16 * 4 * kinds)]
        minimum = values[1::2] if kinds == 2 else None
        decoded = pairs(of_groups[group], module.SIGNED, values[::kinds], minimum)
        out += [pair for rows in zip(*decoded, strict=True) for pair in rows]
    return out


def words_of(ref, shape: tuple[int, ...], warp, number) -> list:
    """What a lane has of a field of one tile: words, or vectors of four."""
    if len(shape) == 1:  # a word for 32 / n neighbouring lanes
        return [memory.load(ref, warp, arith.divui(number, lanes.index(32 // shape[0])))]
    at = arith.muli(number, lanes.index(shape[-1]))
    if len(shape) == 2:
        return memory.load_words(shape[-1], ref, [warp, at])
    return [memory.load_words(4, ref, [warp, lanes.index(v), at]) for v in range(shape[0])]
