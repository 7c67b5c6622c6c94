"""Activations that are a sum, for decode.py: x + norm(y), where a norm follows what made y.

    y -> its sum of squares, over all warps of the block -> x + gamma y / rms(y) -> rounded as any x

A norm before a product is a factor of its outputs, so warps need not wait for each other there. This one is a
factor of y alone, so no warp can round before all have read their part of y: they meet once more.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import index, integer, real, select, sum_of_squares, total
from pallas_kernels.matmul.epilogue import inverse_rms
from pallas_kernels.matmul.int_mma.activations_shared import WarpActivations, eights

MOST_STEPS = 4  # of 256 columns of a row, whose y a warp has in registers until all have theirs


class PostNorm(NamedTuple):
    """The norm of what is added to x; what is Any is an MLIR value.

    gamma_gmem    float32 [1, K]
    load_x        [(row, column)] -> of each the 8 float32 of x from that column on
    keep          (8 float32 of the sum, row, column): store them, as whoever needs the sum again wants it
    squares_smem  float32 [rows x warps], where the warps' sums of squares meet
    scale_gmem    float32 [1, 1], by which the sum is multiplied; None for 1
    """

    gamma_gmem: jax.Array
    load_x: Callable[[list], list[list]]
    keep: Callable[[list, Any, Any], None]
    squares_smem: Any
    scale_gmem: Any = None


class SummedActivations(NamedTuple):
    """x + norm(y) of one warp, where `added` is y; all of the warp's steps are one pass (MOST_STEPS)."""

    added: WarpActivations
    post_norm: PostNorm
    warp: Any

    def load(self, s):
        """Begin to load x and gamma, which nobody has to be waited for, and then y."""
        columns = self.added.columns(self.added.steps_at(s))
        gammas = eights(self.post_norm.gamma_gmem, [(integer(0), column) for column in columns])
        x = self.post_norm.load_x([(row, columns[u]) for u, row in self.added.places])
        scale = None if self.post_norm.scale_gmem is None else memory.load(self.post_norm.scale_gmem, 0, 0)
        return gammas, x, scale, self.added.load(s)

    def store(self, first_pass, q, stats) -> list:
        """As WarpActivations has it, of the sum."""
        gammas, x, scale, (step, y, norm_gammas) = first_pass
        counts = [self.added.counts(integer(u), at) for u, at in enumerate(step)]
        factors, columns = self._factors(y, counts), self.added.columns(step)
        sums = {}
        for (u, row), x_8 in zip(self.added.places, x, strict=True):
            terms = zip(x_8, y[u, row], gammas[u], strict=True)
            sums[u, row] = [a + gamma * (b * factors[row]) for a, b, gamma in terms]
            if scale is not None:
                sums[u, row] = [v * scale for v in sums[u, row]]
            with lanes.when(counts[u]):
                self.post_norm.keep(sums[u, row], row, columns[u])
        none = [real(0)] * self.added.sizes.rows
        return self.added.store_pass(none, integer(0), (step, sums, norm_gammas), q, stats)

    def barrier(self):
        """As WarpActivations has it."""
        self.added.barrier()

    def _factors(self, y: dict, counts: list) -> list:
        """1 / rms(y) of each row. Each warp adds up the squares of its own columns.

        counts  for each step of the warp, whether the lane's columns belong to the matrix
        """
        sizes, smem = self.added.sizes, self.post_norm.squares_smem
        warps = sizes.plan.warps
        for row in range(sizes.rows):
            squares = [select(has, sum_of_squares(y[u, row]), 0.0) for u, has in enumerate(counts)]
            memory.store(lanes.warp_sum_real(total(squares)), smem, index(self.warp) + row * warps)
        lanes.block_barrier()
        factors = []
        for row in range(sizes.rows):
            parts = [v for w in range(0, warps, 4) for v in memory.load_reals(4, smem, [row * warps + w])]
            factors.append(inverse_rms(total(parts), sizes.columns, sizes.eps))
        return factors
