"""What the kernels of many rows share: how lanes hold wgmma's operands and sums, and where the sums go."""

import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.activations import Activation
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.activation_math import FAST
from pallas_kernels.gpu.values import as_real, as_word, index, integer

# By the warpgroups that multiply: registers of a thread of theirs, and of the one that brings operands. Their
# sum is what the launch has: more would wait forever.
REGISTERS = {2: (232, 40), 3: (160, 32), 4: (112, 32)}
STEP_BYTES = 128  # of a token's activations in a step: the widest swizzle, 64 columns of float16
STEP = STEP_BYTES // 2


def swizzled(item_bytes: int):
    """How TMA and wgmma want rows of 128 bytes in shared memory."""
    return plgpu.TilingTransform((8, STEP_BYTES // item_bytes)), plgpu.SwizzleTransform(STEP_BYTES)


def lane(reuse: bool = False):
    """(warp of its warpgroup, lane, g, t) of this thread, lane = 4 g + t. `reuse`: what is computed from them
    may be kept in registers."""
    thread = lanes.thread(reuse)
    warp, number = thread // 32 % 4, thread % 32
    return warp, number, number // 4, number % 4


def fragment(registers, shape, layout, signed=None):
    """Lanes' registers as an array of Mosaic's."""
    array = np.empty(layout.registers_shape(shape), dtype=object)
    array.flat[:] = registers
    return fragments.FragmentedArray(_registers=array, _layout=layout, _is_signed=signed)


def half_fragment(pairs, shape):
    """Lanes' pairs of float16, each a word, as an array of Mosaic's in wgmma's layout."""
    return fragment([lanes.as_half_vector(pair) for pair in pairs], shape, fragments.WGMMA_LAYOUT)


def stage_results(sums, scale, stage, first: int, activation: Activation | None, added: bool):
    """sums * scale (+ what is there), or the activation of its rows, transposed to shared memory for TMA.

    sums   float32 [64 rows, all tokens] in wgmma's layout: 64 outputs; or, with an activation of two
           matrices, of 8 outputs of each warp the gate, and then up
    scale  ref of the scales of some tokens, `first` the first of them
    stage  ref of float32 [those tokens, 64 or 32], with the transforms `swizzled`
    """
    stored = scale.shape[0]
    types = (plgpu.RefType(), plgpu.RefType(swizzled(4)), plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=types)
    def store(ctx, scale, stage, sums):
        stored_by_lane(sums, scale, stage, stored, first, activation, added)

    store(scale, stage, sums)


def stored_by_lane(sums, scale, stage, stored: int, first: int, activation: Activation | None, added: bool):
    """`stage_results` for one lane. It has the tokens 8 j + 2 t + e of the outputs 16 warp + 8 r + g: of tile
    (j, warp / 2), of 8 x 32, in row 2 t + e. With two matrices: of the outputs 8 warp + g, in tile j. Of a
    row's pieces of 16 bytes the swizzle puts number i in place i xor row, so that the lanes of a warp write
    to different banks."""
    warp, _, g, t = map(integer, lane())
    matrices = 1 if activation is None else 2
    base = memory.shared_address(stage) + g % 4 * 4
    per_warp = 4 // matrices  # pieces
    if matrices == 1:
        base = base + warp // 2 * (8 * STEP_BYTES)
        warp = warp % 2
    piece = warp * per_warp + g // 4
    places = {}
    for e in (0, 1):
        row = t * 2 + e
        for r in range(2 // matrices):
            swizzled = piece + 2 * r ^ row
            row_begin, piece_begin = row * STEP_BYTES, swizzled * 16
            places[e, r] = base + row_begin + piece_begin
    values = list(sums.registers.flat)
    two_t = index(t * 2)
    for j in range(stored // 8):
        at = 2 // matrices * 8 * STEP_BYTES * j  # a row of tiles behind the one before
        rows = values[2 * (first // 8 + j) :][:2]
        for e, s in enumerate(memory.load_reals(2, scale, [two_t + 8 * j])):
            y = [lanes.element(v, e) * s for v in rows]
            if activation is not None:
                y = [activation(*y, math=FAST)]
            for r, out in enumerate(y):
                if added:
                    (residual,) = memory.load_shared(1, places[e, r], at)
                    out = out + as_real(residual)
                memory.store_shared([as_word(out)], places[e, r], at)
