"""RMSNorm to float16 with a power of two for each row, as a GEMM on tensor cores wants its activations.

    n = gamma x / sqrt(mean(x^2) + eps) = s a, but for a's rounding; s brings a row's largest |a| into [1, 2)

A block of threads has a row in its registers, so that it is read once; XLA reads it for the mean of squares,
again for the largest, and again to round it.
"""

import functools

import jax
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith
from jax._src.lib.mlir.dialects import math as mlir_math
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import lanes, memory

WIDTH = 8  # neighbouring columns that a lane has at a time: 16 bytes of float16
MOST = 48  # columns of a lane


@functools.partial(jax.jit, static_argnames=("eps",))
def half_rows(
    x: jax.Array, gamma: jax.Array, layer: jax.Array | None, eps: float
) -> tuple[jax.Array, jax.Array]:
    """float32 [M, K], K a multiple of 8 -> (a float16 [M, K], s float32 [M]).

    gamma   float32 [L, K], of which gamma[layer] counts
    layer   int32 []; None for a stack of one
    """
    rows, columns = x.shape
    warps = 4 * -(-columns // (128 * MOST))
    operands = [x, gamma] + ([] if layer is None else [jnp.asarray(layer, jnp.int32).reshape(1)])
    kernel = plgpu.kernel(
        functools.partial(_body, columns=columns, warps=warps, eps=eps, indexed=layer is not None),
        out_type=(
            jax.ShapeDtypeStruct((rows, columns), jnp.float16),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        grid=(rows,),
        grid_names=("rows",),
        num_threads=warps // 4,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((2, warps), jnp.float32)],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return tuple(kernel(*operands))


def _body(*refs, columns, warps, eps, indexed):
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
    def kernel(ctx, *refs):
        refs = list(refs)
        x_gmem, gamma_gmem = refs.pop(0), refs.pop(0)
        layer_gmem = refs.pop(0) if indexed else None
        a_gmem, scale_gmem, shared = refs
        row, thread = lanes.block(), lanes.to_integer(lanes.thread())
        warp = lanes.to_index(lanes.quotient(thread, 32))
        chunks, threads = columns // WIDTH, 32 * warps
        mine = [lanes.plus(thread, first) for first in range(0, chunks, threads)]
        # Lanes behind the row's end repeat its last columns: no harm but to a sum.
        whole = [first + threads <= chunks for first in range(0, chunks, threads)]
        there = [lanes.is_below(c, lanes.integer(chunks)) for c in mine]
        last = lanes.integer(chunks - 1)
        at = [
            lanes.to_index(lanes.scaled(c if w else arith.minui(c, last), WIDTH))
            for c, w in zip(mine, whole, strict=True)
        ]
        layer = lanes.index(0) if layer_gmem is None else lanes.to_index(memory.load(layer_gmem, 0))
        x = [_load(x_gmem, [row], start) for start in at]
        gamma = [_load(gamma_gmem, [layer], start) for start in at]
        total = lanes.real(0)
        for values, w, condition in zip(x, whole, there, strict=True):
            squares = functools.reduce(lambda sum, v: mlir_math.fma(v, v, sum), values, lanes.real(0))
            total = arith.addf(total, squares if w else arith.select(condition, squares, lanes.real(0)))
        memory.store(lanes.warp_sum_real(total), shared, 0, warp)
        lanes.block_barrier()
        total = functools.reduce(arith.addf, [memory.load(shared, 0, w) for w in range(warps)])
        mean = arith.mulf(total, lanes.real(1 / columns))
        norm = mlir_math.rsqrt(arith.addf(mean, lanes.real(eps)))
        n = [
            [arith.mulf(g, arith.mulf(v, norm)) for v, g in zip(values, of_chunk, strict=True)]
            for values, of_chunk in zip(x, gamma, strict=True)
        ]
        largest = functools.reduce(arith.maximumf, [mlir_math.absf(v) for values in n for v in values])
        memory.store(lanes.largest_of_warp(largest), shared, 1, warp)
        lanes.block_barrier()
        largest = functools.reduce(arith.maximumf, [memory.load(shared, 1, w) for w in range(warps)])
        # As gemm.scaled_to_half.
        exponent = lanes.masked(lanes.as_word(largest), 0x7F800000)
        exponent = arith.minui(arith.maxui(exponent, lanes.integer(27 << 23)), lanes.integer(227 << 23))
        inverse = lanes.as_real(arith.subi(lanes.integer(254 << 23), exponent))
        with lanes.when(lanes.is_equal(thread, lanes.integer(0))):
            memory.store(lanes.as_real(exponent), scale_gmem, row)
        for values, start, w, condition in zip(n, at, whole, there, strict=True):
            a = [arith.mulf(v, inverse) for v in values]
            pairs = [lanes.half_pair(*a[i : i + 2]) for i in range(0, WIDTH, 2)]
            if w:
                memory.store_halves(pairs, a_gmem, [row, start])
            else:
                with lanes.when(condition):
                    memory.store_halves(pairs, a_gmem, [row, start])

    kernel(*refs)


def _load(ref, before, start) -> list:
    """WIDTH neighbouring float32, by 16-byte loads."""
    return [
        v for first in range(0, WIDTH, 4)
        for v in memory.load_reals(4, ref, [*before, lanes.behind(start, first)])
    ]  # fmt: skip
