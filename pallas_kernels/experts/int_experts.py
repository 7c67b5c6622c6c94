"""Products by expert in one launch: what matmul/decode.py does for up to 16 rows of activations and one
matrix, for many tiles (groups.py), each of a few rows and the matrix of its expert, with blocks of its own.

    grid      blocks of tile 0 | blocks of tile 1 | ..       a tile's blocks share its matrix's rows
    experts   of each tile its expert, as the router chose it; none of a layer's: the blocks end at once
    first     where the layer's experts begin in the stack of all layers'
    rows      of each tile the rows of x that it has

A decode step has a tile of one row for each chosen expert. Of many rows an expert has several tiles, and its
matrix is read once for each, if they run side by side out of the L2.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import integer, minimum
from pallas_kernels.matmul.int_mma import decode_block as int_decode_block
from pallas_kernels.matmul.int_mma import decode_plan as int_decode_plan
from pallas_kernels.matmul.int_mma.activations_shared import eights
from pallas_kernels.matmul.int_mma.decode_ring import Share
from pallas_kernels.qtensor import QTensor
from pallas_kernels.tiles import TILE_COLUMNS, TILE_ROWS

GROUP = 32  # the most columns that share a scale


def most_rows(weights: tuple[QTensor, ...]) -> int:
    """Of a tile: as many as leave room for weights in shared memory, up to 16."""
    fields, format = tuple(w.fields for w in weights), weights[0].format
    bits = weights[0].products.activation_bits
    fits = lambda rows: int_decode_plan.plan((fields,), rows, (format,), bits, blocks=1)  # noqa: E731
    return next(rows for rows in (16, 8, 4, 2, 1) if rows == 1 or fits(rows))


def run(
    x: jax.Array, weights: tuple[QTensor, ...], experts: jax.Array, rows: jax.Array, first, count: int,
    activation: Activation = SILU,
) -> jax.Array:  # fmt: skip
    """`int_experts` of the `count` matrices of a flat stack that begin at `first`: float32 [tiles * rows of a
    tile, N]."""
    kernel = functools.partial(
        int_experts,
        count=count,
        format=weights[0].format,
        activation=activation,
        activation_bits=weights[0].products.activation_bits,
    )
    fields = tuple(w.fields for w in weights)
    y = jax.custom_batching.sequential_vmap(kernel)(
        x.astype(jnp.float32), fields, experts, rows, jnp.asarray(first, jnp.int32).reshape(1)
    )  # fmt: skip
    return y[:, : weights[0].shape[0]]


@functools.partial(jax.jit, static_argnames=("count", "format", "activation", "activation_bits"))
def int_experts(
    x: jax.Array,
    weights: tuple[dict[str, jax.Array], ...],
    experts: jax.Array,
    rows: jax.Array,
    first: jax.Array,
    *,
    count: int,
    format: str,
    activation: Activation = SILU,
    activation_bits: int = 8,
) -> jax.Array:
    """y[t, r] = W[first + experts[t]] x[rows[t, r]], or activation(G x, U x) of two stacks.

    x        float32 [M, K], or wider, where K is a multiple of 32: then the first K columns count
    weights  fields of W, or of G and U, as the format's `tile` makes them, each a stack
    experts  int32 [tiles]; what is returned of a tile with a number that is not below `count`, or below 0,
             means nothing
    rows     int32 [tiles, 1 to 16]
    first    int32 [1]
    Returns float32 [tiles * rows of a tile, N], N padded to 16. The rest as for `int_decode`.
    """
    tiles, tile_rows = rows.shape
    n_tiles, steps = weights[0]["words"].shape[1:3]
    columns = steps * TILE_COLUMNS
    if x.shape[1] % GROUP:
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % GROUP)))
    blocks = max(1, device.multiprocessors() // tiles)
    planned = int_decode_plan.plan((weights,), tile_rows, (format,), activation_bits, blocks=blocks)
    if planned is None:
        raise NotImplementedError(
            f"{format}: {tile_rows} rows of {columns} activations of {activation_bits} bits do not fit "
            f"{device.shared_bytes()} bytes of shared memory"
        )
    (part,) = planned.parts
    product = int_decode_plan.IntegerProduct(
        planned, tile_rows, columns, len(weights), 0.0, activation_bits, activation
    )
    ring = planned.warps * part.depth * part.item_bytes(len(weights))
    return launch(
        functools.partial(_body, product, count),
        {
            "weight_gmem": weights,
            "x_gmem": x,
            "experts_gmem": experts,
            "rows_gmem": rows,
            "first_gmem": first,
        },
        {"out_gmem": jax.ShapeDtypeStruct((tiles * tile_rows, n_tiles * TILE_ROWS), jnp.float32)},
        name="int_experts",
        blocks=tiles * part.blocks,
        threads=32 * planned.warps,
        scratch={"ring_smem": plgpu.SMEM((ring // 4,), jnp.int32), **int_decode_block.scratch([product])},
    )


def _body(
    product: int_decode_plan.IntegerProduct,
    count: int,
    *, weight_gmem, x_gmem, experts_gmem, rows_gmem, first_gmem, out_gmem, ring_smem, **refs,
):  # fmt: skip
    """Of a block, whose tile its number says."""
    (part,) = product.plan.parts
    tile = integer(lanes.block()) // part.blocks
    share = Share.for_block(
        part, product.steps, product.plan.warps, integer(lanes.block()) - tile * part.blocks
    )
    expert = memory.load(experts_gmem, tile)

    # Behind the matrix's columns are weights of 0, in groups of their own: any activations do.
    last = x_gmem.type.shape[1] - 8
    is_short = last + 8 < product.columns

    def load_x(places):
        within = [(row, minimum(column, last) if is_short else column) for row, column in places]
        return eights(x_gmem, [(memory.load(rows_gmem, tile, row), column) for row, column in within])

    def store(y, row, n, _):
        memory.store(y, out_gmem, tile * product.rows + integer(row), n)

    with lanes.when(share.has_tiles & (expert < count)):  # below 0 is large: numbers have no sign
        block = int_decode_block.Block(
            product, share, store, None, load_x, gamma_gmem=None, norm_layer=None, **refs
        )
        block.run_alone(weight_gmem, memory.load(first_gmem, 0) + expert, ring_smem)
