"""Inputs of folded weights (rotation.py), behind RMSNorm where there is one: normed, rotated and stored as
the product wants them, by one launch that reads them once (rotated_columns.py).

    n = H(s * P(gamma x)) / sqrt(mean(x^2) + eps): the norm's scalar commutes with all that is linear

A warp rotates 1,024 columns at a time, and each lane ends up with 32 neighbouring columns. They are stored as
float32, or in the form that the next product reads. Each `Form` is defined beside its product:
activations_float16.rotated_form, activations_shared.ROTATED_WORDS and bit_mma's activations.ROTATED_INTEGERS.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import index, real, select, sum_of_squares
from pallas_kernels.matmul import prologue
from pallas_kernels.matmul.epilogue import inverse_rms
from pallas_kernels.matmul.rotated_columns import CHUNK, LANES, WORDS, RotatedColumns
from pallas_kernels.rotation import Rotation

MOST_WARPS = 20  # of a block: 100 registers are left to each lane
WARPS_OF_PART = 4


class Piece(NamedTuple):
    """What a lane has of a chunk.

    values   n before the norm, of 32 neighbouring columns from `start` on; zeros behind the row's end
    squares  the sum of x^2 of as many columns of the chunk, though not of these
    exists   whether the row has the chunk
    """

    values: list
    squares: Any
    start: Any
    exists: Any


@dataclasses.dataclass(frozen=True)
class Row:
    """A row, or a part of it, that a block has rotated, as one of its lanes sees it.

    number    of the row
    columns   of x; `places` are those that are stored, with zeros behind the row's end
    is_whole  whether the block has all of the row; if not, x_gmem has the rest
    """

    pieces: list[Piece]
    number: Any
    columns: int
    places: int
    is_whole: bool
    is_normed: bool
    eps: float
    x_gmem: Any
    shared_smem: Any
    thread: Any
    warps: int

    @property
    def warp(self):
        return self.thread // LANES

    def squares_of_warp(self):
        """The warp's part of the row's sum of x^2; None without a norm."""
        if not self.is_normed:
            return None
        if self.is_whole:
            return lanes.warp_sum_real(
                functools.reduce(operator.add, [piece.squares for piece in self.pieces])
            )
        return lanes.warp_sum_real(self._squares_of_row())

    def norm(self):
        """1 / sqrt(mean(x^2) + eps), which n has yet to be multiplied by; None without a norm."""
        squares = self.squares_of_warp()
        if squares is None:
            return None
        (squares,) = prologue.over_warps(self.shared_smem, self.warp, (squares, operator.add))
        return inverse_rms(squares, self.columns, self.eps)

    def _squares_of_row(self):
        """This thread's part of all of them."""
        threads, squares = 32 * self.warps, real(0)
        for first in range(0, self.columns, 4 * threads):
            at = self.thread * 4 + first
            inside = at < self.columns
            x = memory.load_reals(4, self.x_gmem, [self.number, select(inside, at, index(0))])
            squares = squares + select(inside, sum_of_squares(x), 0.0)
        return squares


@dataclasses.dataclass(frozen=True)
class Form:
    """How rotated rows are stored.

    results   (rows, columns of x, places of a row) -> shapes, by the names of their refs in `store`
    store     (Row, **refs)
    multiple  of which a row's places are
    by_parts  whether blocks may share a row: of few rows
    """

    results: Callable[[int, int, int], dict[str, jax.ShapeDtypeStruct]]
    store: Callable[..., None]
    multiple: int = 1
    by_parts: bool = False


def _store_reals(row: Row, n_gmem):
    norm = row.norm()
    for piece in row.pieces:
        values = piece.values if norm is None else [v * norm for v in piece.values]
        with lanes.when(piece.start < row.columns):
            for i in range(0, LANES, 4):
                memory.store_reals(values[i : i + 4], n_gmem, [row.number, piece.start + i])


REALS = Form(
    lambda rows, columns, _: {"n_gmem": jax.ShapeDtypeStruct((rows, columns), jnp.float32)},
    _store_reals,
    by_parts=True,
)


@functools.partial(jax.jit, static_argnames=("eps", "form"))
def activations_rotated(
    x: jax.Array,
    rotation: Rotation,
    gamma: jax.Array | None = None,
    layer: jax.Array | None = None,
    eps: float = 0.0,
    *,
    form: Form = REALS,
):
    """rotation(x), or rotation(rms_norm(x; gamma[layer], eps)), of x float32 [M, K].

    gamma  float32 [L, K]; None for no norm
    layer  int32 []; None for a stack of one
    form   of what is returned: REALS, float32 [M, K], or what a product reads
    """
    rows, columns = x.shape
    places = columns + -columns % form.multiple
    chunks, parts = -(-places // CHUNK), 1
    if form.by_parts and rows <= prologue.FEW_ROWS:
        warps, parts = WARPS_OF_PART, -(-chunks // WARPS_OF_PART)
    else:
        warps = -(-chunks // -(-chunks // MOST_WARPS))
        warps += -warps % 4
    return launch(
        functools.partial(
            _body, block=rotation.block, heads=rotation.heads, places=places, parts=parts, warps=warps,
            eps=eps, store=form.store,
        ),
        {
            "x_gmem": x,
            "flips_gmem": rotation.flips,
            "gamma_gmem": gamma,
            "layer_gmem": None if layer is None else jnp.asarray(layer, jnp.int32).reshape(1),
        },
        form.results(rows, columns, places),
        name="activations_rotated",
        blocks=rows * parts,
        threads=32 * warps,
        scratch={
            "rotated_smem": plgpu.SMEM((warps * WORDS,), jnp.float32),
            "shared_smem": plgpu.SMEM((2, warps), jnp.float32),
        },
    )  # fmt: skip


def _body(
    x_gmem, flips_gmem, gamma_gmem, layer_gmem, *, rotated_smem, shared_smem, block, heads, places, parts,
    warps, eps, store, **results,
):  # fmt: skip
    columns = x_gmem.type.shape[1]
    row, part = lanes.block() // parts, lanes.block() % parts
    thread = lanes.thread(reuse=True)
    warp, lane = thread // LANES, thread % LANES
    chunks = -(-places // CHUNK)
    own_chunks = [part * warps + warp + warps * i for i in range(-(-chunks // (warps * parts)))]
    norm_layer = 0 if layer_gmem is None or gamma_gmem is None else memory.load(layer_gmem, 0)
    warp_columns = RotatedColumns(
        functools.partial(memory.load_each, x_gmem), columns, flips_gmem, gamma_gmem, norm_layer, block,
        heads, rotated_smem, warp, lane,
    )  # fmt: skip

    def rotate(chunk):
        n, squares = warp_columns.rotated(warp_columns.load(row, chunk))
        return [*n, squares]

    pieces = []
    for chunk in own_chunks:
        exists = chunk < chunks
        *n, squares = lanes.choose(exists, functools.partial(rotate, chunk), [real(0)] * (LANES + 1))
        pieces.append(Piece(n, squares, (chunk * LANES + lane) * LANES, exists))
    store(
        Row(
            pieces, row, columns, places, parts == 1, gamma_gmem is not None, eps, x_gmem, shared_smem,
            thread, warps,
        ),
        **results,
    )  # fmt: skip
