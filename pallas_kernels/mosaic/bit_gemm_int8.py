"""bit_gemm's inner step for activations of whole numbers: int8 wgmma, twice the rate of float16.

An activation is s q, with q of 8 bits and one s per group of 128 (as in decode's matrix-vector kernel), and
a weight is d (+-1). A group of a row with a token is then d s sum(+-q): an exact int32 sum of one wgmma chain
of 128 columns, that lanes scale and add up in float32.

    -64 or 64 as int8 in each byte  <-  ((word << 7 - j) & 0x80808080) ^ 0xC0C0C0C0,   j = 0 .. 7
    position 16 j + 4 t + b of a group  <-  column 32 t + 8 b + j

+-64 because those differ in one bit; s holds the 1 / 64. The chain begins with scale-d = 0, which Mosaic's
own wgmma does not offer and which saves clearing the accumulators. On an H200 it is right but no faster than
float16 (benchmarks/LOG.md), so nothing chooses it yet.
"""
# pyright: reportCallIssue=false, reportAbstractUsage=false

import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, llvm, vector
from jax._src.lib.mlir.dialects import math as mlir_math
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.mosaic.gpu import mma_utils
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import lanes

GROUP = 128


def add_group(packed, sums, a_smem, scale_smem, h: int):
    """sums + the products of a group of activations with the weights of each block.

    packed      for each block uint32 [64, 16], bit_gemm's words and scales of a pair of groups; h picks one
    sums        for each block float32 [64, tokens]
    a_smem      int8 [tokens, 128], swizzled
    scale_smem  float32 [tokens], s / 64
    """
    blocks, tokens = len(sums), sums[0].shape[1]
    transforms = (plgpu.TilingTransform((8, GROUP)), plgpu.SwizzleTransform(GROUP))
    layout = plgpu.Layout.WGMMA
    types = ((layout,) * blocks, (layout,) * blocks, plgpu.RefType(transforms), plgpu.RefType())
    out = (plgpu.ShapeDtypeStruct((64, tokens), jnp.float32, layout=layout),) * blocks

    @plgpu.inline_mgpu(arg_types=types, return_type=out)
    def add(ctx, packed, sums, a_smem, scale_smem):
        _, _, _, t = lane_of_warpgroup()
        pair = ir.VectorType.get((2,), lanes.f32())
        words = [list(p.registers.flat) for p in packed]
        products = [_multiply(_weights(w[h]), a_smem, tokens) for w in words]
        d = [lanes.halves(lanes.element(w[2], h)) for w in words]
        two_t = arith.muli(t, lanes.index(2))
        s = [
            vector.load(pair, scale_smem, [arith.addi(two_t, lanes.index(8 * j))]) for j in range(tokens // 8)
        ]
        totals = []
        for block in range(blocks):
            product = _arrived(products[block], blocks - 1 - block)
            held = []
            for i, total in enumerate(sums[block].registers.flat):
                j, r = divmod(i, 2)
                new = [
                    mlir_math.fma(
                        arith.mulf(d[block][r], lanes.element(s[j], e)),
                        arith.sitofp(lanes.f32(), product[4 * j + 2 * r + e]),
                        lanes.element(total, e),
                    )
                    for e in (0, 1)
                ]
                held.append(vector.from_elements(pair, new))
            totals.append(fragment(held, (64, tokens), fragments.WGMMA_LAYOUT))
        return tuple(totals)

    return add(*(tuple(packed), tuple(sums), a_smem, scale_smem))


def _weights(words):
    """This lane's words of rows g and g + 8 -> 16 registers of 4 weights, for 4 wgmma of 32 columns."""
    registers = []
    for j in range(8):
        for r in (0, 1):
            signs = arith.shli(lanes.element(words, r), lanes.integer(7 - j))
            signs = arith.andi(signs, lanes.integer(0x80808080))
            registers.append(arith.xori(signs, lanes.integer(0xC0C0C0C0)))
    return registers


def _multiply(weights, a_smem, tokens: int):
    """Begin int32 [64, tokens] = weights * activations over 128 columns, and commit it: tokens / 2 registers
    that `_arrived` must see before anything reads them."""
    (base, (_, (k_stride, *_))), _, _ = mma_utils.create_descriptor(
        mosaic.memref_transpose(a_smem, (1, 0, 3, 2)),
        swizzle=GROUP,
        large_tile=(GROUP, GROUP),
        group_size=(GROUP, tokens),
        logical_k_major=True,
    )
    count = tokens // 2
    # Operands: outputs, the 16 weights, the descriptor. Each wgmma has 4 of the weights.
    accumulators = "{" + ",".join(f"${i}" for i in range(count)) + "}"
    text = "{ .reg .pred p; .reg .b64 b; wgmma.fence.sync.aligned; "
    for k in range(4):
        a = "{" + ",".join(f"${count + 4 * k + i}" for i in range(4)) + "}"
        text += f"setp.ne.b32 p, {min(k, 1)}, 0; add.s64 b, ${count + 16}, {k * k_stride >> 4}; "
        text += f"wgmma.mma_async.sync.aligned.m64n{tokens}k32.s32.s8.s8 {accumulators}, {a}, b, p; "
    text += "wgmma.commit_group.sync.aligned; }"
    result = llvm.inline_asm(
        llvm.StructType.get_literal([lanes.i32()] * count),
        [*weights, base],
        text,
        ",".join(["=r"] * count + ["r"] * 16 + ["l"]),
        has_side_effects=True,
    )
    return [llvm.extractvalue(lanes.i32(), result, [i]) for i in range(count)]


def _arrived(registers, pending: int):
    """The registers of a wgmma, once at most `pending` later ones are under way."""
    count = len(registers)
    result = llvm.inline_asm(
        llvm.StructType.get_literal([lanes.i32()] * count),
        registers,
        f"wgmma.wait_group.sync.aligned {pending};",
        ",".join(["=r"] * count + [str(i) for i in range(count)]),
        has_side_effects=True,
    )
    return [llvm.extractvalue(lanes.i32(), result, [i]) for i in range(count)]


def lane_of_warpgroup():
    """(warp of its warpgroup, lane, g, t) of this thread."""
    thread = lanes.thread()
    warp = arith.remui(arith.divui(thread, lanes.index(32)), lanes.index(4))
    lane = arith.remui(thread, lanes.index(32))
    return warp, lane, arith.divui(lane, lanes.index(4)), arith.remui(lane, lanes.index(4))


def fragment(registers, shape, layout, signed=None):
    """Lanes' registers as an array of Mosaic's."""
    held = np.empty(layout.registers_shape(shape), dtype=object)
    held.flat[:] = registers
    return fragments.FragmentedArray(_registers=held, _layout=layout, _is_signed=signed)
