"""Products by expert in one launch: what matmul/decode.py does for up to 16 rows of activations and one
matrix, for many tiles (groups.py), each of a few rows and the matrix of its expert, with blocks of its own.

    grid      blocks of tile 0 | blocks of tile 1 | ..       a tile's blocks share its matrix's rows
    experts   of each tile its expert, as the router chose it; none of a layer's: the blocks end at once
    first     where the layer's experts begin in the stack of all layers'
    rows      of each tile the rows of x that it has

The shared expert, which all tokens use, may be one more: number `count`, with matrices in stacks of its own.
With the logits of a router in place of `experts`, each block makes its token's choice itself (choice.py), and
behind the last tile's a block for each token stores it.

A decode step has a tile of one row for each chosen expert. Of many rows an expert has several tiles, and its
matrix is read once for each, if they run side by side out of the L2.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.experts import choice as choices
from pallas_kernels.experts.router import LANES
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import integer, minimum, not_negative, select
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
    activation: Activation = SILU, shared: tuple[QTensor, ...] | None = None, shared_at: int = 0,
) -> jax.Array:  # fmt: skip
    """`int_experts` of the `count` matrices of a flat stack that begin at `first`, and of that of `shared` at
    `shared_at`, with which `first` is an int: float32 [tiles * rows of a tile, N]."""
    kernel = functools.partial(int_experts, count=count, **_static(weights, activation))
    y = jax.custom_batching.sequential_vmap(kernel)(
        x.astype(jnp.float32), _fields(weights), experts, rows, _places(first, shared, shared_at),
        _fields(shared),
    )  # fmt: skip
    return y[:, : weights[0].shape[0]]


def run_and_choose(
    x: jax.Array, weights: tuple[QTensor, ...], logits: choices.Logits, choice: choices.Choice, first: int,
    activation: Activation = SILU, shared: tuple[QTensor, ...] | None = None, shared_at: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """As `run`, of the experts that each token, a row of x, chooses by a router's logits: float32 [tokens *
    columns, N], and the choice as of choice.route."""
    kernel = functools.partial(choosing_experts, choice=choice, **_static(weights, activation))
    y, *chosen = jax.custom_batching.sequential_vmap(kernel)(
        x.astype(jnp.float32), _fields(weights), logits, _places(first, shared, shared_at), _fields(shared)
    )
    return y[:, : weights[0].shape[0]], *chosen


def _static(weights: tuple[QTensor, ...], activation: Activation) -> dict[str, Any]:
    bits = weights[0].products.activation_bits
    return {"format": weights[0].format, "activation": activation, "activation_bits": bits}


def _fields(weights: tuple[QTensor, ...] | None):
    return None if weights is None else tuple(w.fields for w in weights)


def _places(first, shared: tuple[QTensor, ...] | None, shared_at: int) -> tuple[jax.Array, ...]:
    """One number each: XLA would fill an array of two equal ones in a launch of its own."""
    places = (first,) if shared is None else (first, shared_at)
    return tuple(jnp.asarray(place, jnp.int32).reshape(1) for place in places)


@functools.partial(jax.jit, static_argnames=("count", "format", "activation", "activation_bits"))
def int_experts(
    x: jax.Array,
    weights: tuple[dict[str, jax.Array], ...],
    experts: jax.Array,
    rows: jax.Array,
    places: tuple[jax.Array, ...],
    shared: tuple[dict[str, jax.Array], ...] | None = None,
    *,
    count: int,
    format: str,
    activation: Activation = SILU,
    activation_bits: int = 8,
) -> jax.Array:
    """y[t, r] = W[places[0][0] + experts[t]] x[rows[t, r]], or activation(G x, U x) of two stacks.

    x        float32 [M, K], or wider, where K is a multiple of 32: then the first K columns count
    weights  fields of W, or of G and U, as the format's `tile` makes them, each a stack
    experts  int32 [tiles], or the first of the columns of [tiles, columns]; what is returned of a tile with a
             number that is no expert's means nothing
    rows     int32 [tiles, 1 to 16]
    places   int32 [1]: first; with `shared` another: that of expert number `count` in its stacks
    shared   fields of W, or of G and U, of one more expert; None: there is none
    Returns float32 [tiles * rows of a tile, N], N padded to 16. The rest as for `int_decode`.
    """
    operands = {"experts_gmem": experts, "rows_gmem": rows, "places_gmem": places, "shared_gmem": shared}
    how = {"format": format, "activation": activation, "activation_bits": activation_bits}
    return _launch(x, weights, operands, count, None, **how)


@functools.partial(jax.jit, static_argnames=("choice", "format", "activation", "activation_bits"))
def choosing_experts(
    x: jax.Array,
    weights: tuple[dict[str, jax.Array], ...],
    logits: choices.Logits,
    places: tuple[jax.Array, ...],
    shared: tuple[dict[str, jax.Array], ...] | None = None,
    *,
    choice: choices.Choice,
    format: str,
    activation: Activation = SILU,
    activation_bits: int = 8,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`int_experts` with weights and chosen of choice.route: float32 [T * columns, N], float32 and int32 [T,
    columns]. Tile t * columns + j is that of expert chosen[t, j] and row t of x, [T, K]."""
    pairs = np.arange(len(x) * choice.columns, dtype=np.int32)
    rows = jnp.asarray(pairs[:, None] // choice.columns)
    operands = {"logits_gmem": logits, "rows_gmem": rows, "places_gmem": places, "shared_gmem": shared}
    how = {"format": format, "activation": activation, "activation_bits": activation_bits}
    return _launch(x, weights, operands, choice.experts.count, choice, **how)


def _launch(
    x, weights, operands: dict[str, Any], count: int, choice: choices.Choice | None,
    *, format: str, activation: Activation, activation_bits: int,
):  # fmt: skip
    """operands: of `_body`, but for x and the weights."""
    tiles, tile_rows = operands["rows_gmem"].shape
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
    out = jax.ShapeDtypeStruct((tiles * tile_rows, n_tiles * TILE_ROWS), jnp.float32)
    chosen = {} if choice is None else {"chosen_smem": plgpu.SMEM((choice.columns,), jnp.int32)}
    return launch(
        functools.partial(_body, product, count, choice),
        {"weight_gmem": weights, "x_gmem": x, **operands},
        {"out_gmem": out} | ({} if choice is None else choices.results(len(x), choice)),
        name="int_experts",
        blocks=tiles * part.blocks + (0 if choice is None else len(x)),
        threads=32 * planned.warps,
        scratch={
            "ring_smem": plgpu.SMEM((ring // 4,), jnp.int32),
            **int_decode_block.scratch([product]),
            **chosen,  # in the room that plans leave for mailboxes
        },
    )


def _body(
    product: int_decode_plan.IntegerProduct,
    count: int,
    choice: choices.Choice | None,
    *, weight_gmem, x_gmem, rows_gmem, places_gmem, shared_gmem, out_gmem, ring_smem, experts_gmem=None,
    logits_gmem=None, weights_gmem=None, chosen_gmem=None, chosen_smem=None, **refs,
):  # fmt: skip
    """Of a block, whose tile its number says."""
    (part,) = product.plan.parts
    number = integer(lanes.block())
    tile = number // part.blocks
    share = Share.for_block(part, product.steps, product.plan.warps, number - tile * part.blocks)

    # Behind the matrix's columns are weights of 0, in groups of their own: any activations do.
    last = x_gmem.type.shape[1] - 8
    is_short = last + 8 < product.columns

    def load_x(places):
        within = [(row, minimum(column, last) if is_short else column) for row, column in places]
        return eights(x_gmem, [(memory.load(rows_gmem, tile, row), column) for row, column in within])

    def store(y, row, n, _):
        memory.store(y, out_gmem, tile * product.rows + integer(row), n)

    if choice is None or logits_gmem is None:
        assert experts_gmem is not None
        expert = memory.load(experts_gmem, tile, *[0] * (len(experts_gmem.type.shape) - 1))
    else:
        stores = Stores(number - rows_gmem.type.shape[0] * part.blocks, weights_gmem, chosen_gmem)
        expert = _chosen_expert(tile, choice, logits_gmem, stores, chosen_smem)
    at, numbers = memory.load(places_gmem[0], 0) + expert, count
    if shared_gmem is not None:
        is_shared = expert == count
        at, numbers = select(is_shared, memory.load(places_gmem[1], 0), at), count + 1
        weight_gmem = tuple(
            {name: memory.Either(is_shared, shared[name], ref) for name, ref in fields.items()}
            for shared, fields in zip(shared_gmem, weight_gmem, strict=True)
        )
    with lanes.when(share.has_tiles & (expert < numbers)):  # below 0 is large: numbers have no sign
        block = int_decode_block.Block(
            product, share, store, None, load_x, gamma_gmem=None, norm_layer=None, **refs
        )
        block.run_alone(weight_gmem, at, ring_smem)


class Stores(NamedTuple):
    """The token whose choice this block stores, negative in blocks that have a tile; and where to."""

    token: Any
    weights_gmem: Any
    chosen_gmem: Any


def _chosen_expert(tile, choice: choices.Choice, logits_gmem: choices.Logits, stores: Stores, chosen_smem):
    """Of a tile; -1 for padding and in blocks that have none. A barrier of the block."""
    thread, in_use = integer(lanes.thread()), not_negative(stores.token)
    (tokens,) = logits_gmem.positions.type.shape
    token = minimum(tile // choice.columns, tokens - 1)
    is_token = not_negative(memory.load(logits_gmem.positions, token))
    with lanes.when(thread < LANES):
        own = select(in_use, stores.token, token)
        chooser = choices.Token(own, thread % LANES, logits_gmem, choice, chosen_smem)
        chooser.store_numbers()
        with lanes.when(in_use):
            chooser.store(stores.weights_gmem, stores.chosen_gmem)
    lanes.block_barrier()
    expert = memory.load(chosen_smem, tile % choice.columns)
    return select(is_token & ~in_use, expert, -1)
