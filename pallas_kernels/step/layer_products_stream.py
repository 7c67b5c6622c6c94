"""The residual stream of layer_products.py where norms follow o and down: every block has all of it.

    x' = x + norm(y)      made by those that read y, for gate and up; in shared memory from there on
    x  = x' + norm(z)     made by those that read z, for the next q, k and v; the first block stores it. Times
                          a number, where layers' outputs are scaled

Behind the last layer nobody reads z, and the first block stores x'.
"""

import dataclasses
import functools
from typing import Any

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import select, true
from pallas_kernels.matmul.int_mma.activations_shared import eights
from pallas_kernels.matmul.int_mma.activations_summed import PostNorm
from pallas_kernels.matmul.int_mma.decode_ring import Share


@dataclasses.dataclass(frozen=True)
class ResidualStream:
    """gammas, scale_gmem   refs: of the norms after o and after down, and of x's scale [1, 1], or None
    x_gmem, x_out_gmem   of x before and after
    stream_smem, post_squares_smem  float32 [rows x hidden] and [rows x warps] of a block
    hidden     the stream's width
    following  whether the launch makes the next q, k and v
    """

    gammas: tuple[Any, Any]
    scale_gmem: Any
    x_gmem: Any
    x_out_gmem: Any
    stream_smem: Any
    post_squares_smem: Any
    hidden: int
    following: bool

    @property
    def after_o(self) -> PostNorm:
        keep = self._to_shared if self.following else self._to_result
        return PostNorm(self.gammas[0], functools.partial(eights, self.x_gmem), keep, self.post_squares_smem)

    @property
    def after_down(self) -> PostNorm:
        squares, scale = self.post_squares_smem, self.scale_gmem
        return PostNorm(self.gammas[1], self._from_shared, self._to_result, squares, scale)

    def _from_shared(self, places: list) -> list[list]:
        begins = [row * self.hidden + column for row, column in places]
        return [
            [v for half in (0, 4) for v in memory.load_reals(4, self.stream_smem, [at + half])]
            for at in begins
        ]

    def _to_shared(self, values: list, row: int, column):
        for half in (0, 4):
            at = row * self.hidden + column + half
            memory.store_reals(values[half : half + 4], self.stream_smem, [at])

    def _to_result(self, values: list, row: int, column):
        with lanes.when(lanes.block() == 0):
            for half in (0, 4):
                memory.store_reals(values[half : half + 4], self.x_out_gmem, [row, column + half])


def with_idle_blocks(shares: list[Share]) -> list[Share]:
    """A product's parts, the first also with those blocks that have no tiles of any: they read activations as
    others do, and multiply nothing."""
    first, *rest = shares
    others = [~share.has_tiles for share in rest]
    count = select(first.has_tiles, first.count, 0)
    has_none = functools.reduce(lambda a, b: a & b, others, true())
    return [first._replace(has_tiles=has_none, count=count), *rest]


def meet_if_idle(share: Share):
    """Behind a product of `with_idle_blocks`: a block that multiplied nothing has met at no barrier, and what
    follows writes where its warps may still read."""
    with lanes.when(share.count == 0):
        lanes.block_barrier()
