"""What becomes of a product's sums before they are stored, in a decode kernel: a thread has an output."""

from collections.abc import Callable

from pallas_kernels.activations import Activation
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.activation_math import PRECISE
from pallas_kernels.gpu.values import rsqrt, total
from pallas_kernels.tiles import TILE_ROWS


def over_warps(load: Callable, warps: int):
    """load(0) + load(1) + .. of what each warp has, in order."""
    return total([load(w) for w in range(warps)])


def inverse_rms(squares, columns: int, eps: float):
    """1 / sqrt(mean(x^2) + eps), from the sum of squares of a row."""
    return rsqrt(squares * (1 / columns) + eps)


def store(y, out_gmem, *at):
    """Store an output, whose number is last, unless it is one of a last tile's rows that the matrix does not
    have."""
    *_, n = at
    *_, width = out_gmem.type.shape
    if width % TILE_ROWS == 0:
        memory.store(y, out_gmem, *at)
    else:
        with lanes.when(n < width):
            memory.store(y, out_gmem, *at)


def output(y: list, norm, activation: Activation):
    """y norm of one matrix, or activation(gate norm, up norm) of two; norm: `inverse_rms`, or None for 1."""
    y = y if norm is None else [v * norm for v in y]
    return y[0] if len(y) == 1 else activation(*y, math=PRECISE)
