"""What the kernels of many rows share: how lanes hold wgmma's operands and sums, and SwiGLU's silu."""

import math

import numpy as np
from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import fragmented_array as fragments

from pallas_kernels.mosaic import lanes

WARPGROUPS = 2  # that multiply
STEP_BYTES = 128  # of a token's activations in a step: the widest swizzle, 64 columns of float16
SMS = (
    132  # blocks of threads at once: an H200's multiprocessors. With another number the kernel is only slower
)


def silu(x):
    """x / (1 + exp(-x)), within a few units in the last place."""
    power = lanes.ptx(
        lanes.f32(), [arith.mulf(x, lanes.real(-math.log2(math.e)))], "ex2.approx.f32 $0, $1;", "=f,f"
    )
    whole = arith.addf(power, lanes.real(1))
    return arith.mulf(x, lanes.ptx(lanes.f32(), [whole], "rcp.approx.f32 $0, $1;", "=f,f"))


def lane():
    """(warp of its warpgroup, lane, g, t) of this thread, lane = 4 g + t."""
    thread = lanes.thread()
    warp = arith.remui(arith.divui(thread, lanes.index(32)), lanes.index(4))
    number = arith.remui(thread, lanes.index(32))
    return warp, number, arith.divui(number, lanes.index(4)), arith.remui(number, lanes.index(4))


def fragment(registers, shape, layout, signed=None):
    """Lanes' registers as an array of Mosaic's."""
    held = np.empty(layout.registers_shape(shape), dtype=object)
    held.flat[:] = registers
    return fragments.FragmentedArray(_registers=held, _layout=layout, _is_signed=signed)
