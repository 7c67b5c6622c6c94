"""Products by expert: the pairs of a token and an expert of its, sorted by expert, in tiles of so many rows,
each of one expert.

    chosen      2 0 | 0 1 | 0 2          of three tokens two experts each; pairs 0 .. 5
    sorted      pairs 1 2 4 | 3 | 0 5    of expert 0 | 1 | 2
    tiles of 2  1 2 | 4 . | 3 . | 0 5    one product each, by whatever multiplies the matrix of an expert

A stack of layers' experts, [layers, experts, N, K], is one of layers * experts matrices, and a tile's product
reads the one at layer * experts + expert: where kernels read stacks in place, no matrix is copied or
dequantized that is not multiplied. The number of tiles is that of the worst case; those that are left over
are skipped. On a GPU weights of 2 to 8 bits have all tiles in one launch (int_experts.py); and on Hopper the
many rows of a prefill go through a whole feed-forward once sorted (grouped.py), as do those of large decode
steps (grouped_decode.py).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import device, selection
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.matmul.execute import differentiated, product, same_part
from pallas_kernels.problems import Experts, Matmul
from pallas_kernels.qtensor import LayerStack, QTensor, leaves, noted
from pallas_kernels.selection import Candidate

MOST_ROWS = 256  # of a tile
STRAIGHT = 64  # most tiles that are straight code on a GPU, which would wait for the host in a loop
GEMMS = {"cublas", "int_prefill_sm90"}  # kernels of Matmul that round activations and weights to float16
GEMM_ROWS = 129  # the fewest for which matrices of heads are dequantized, and not read for each tile of rows


class Tiles(NamedTuple):
    """expert  int32 [tiles]; no expert's number: nothing is in it
    pairs   int32 [tiles, rows]: what is in a tile; any pair where nothing is
    places  int32 [pairs]: tile * rows + row of each pair; any where it has no expert
    """

    expert: jax.Array
    pairs: jax.Array | np.ndarray
    places: jax.Array | np.ndarray


def by_expert(
    x: jax.Array, weights: tuple[Any, ...], chosen, layer, activation: Activation = SILU, zeros: bool = True
) -> jax.Array:
    """float32 [*batch, used, N]: of each pair the product with its expert's matrix; of two matrices
    activation(x G.T, x U.T).

    x        [*batch, K], the same for all experts of a token, or [*batch, used, K]
    weights  QTensors or LayerStacks
    zeros    what has no expert is 0; else it may be anything, which saves a decode step a launch
    """
    weights = noted(weights, lambda: x, chosen)
    if len(weights) == 2:
        if (together := same_part(*weights, layer)) is None:
            return activation(*(by_expert(x, (w,), chosen, layer, zeros=zeros) for w in weights))
        return _by_stack(x, together[0], chosen, together[1], activation, zeros)
    (w,) = weights
    if isinstance(w, LayerStack):
        # No part is Rows: plan.JOINED.
        return w.at(layer, lambda part, index: _by_stack(x, (part,), chosen, index, activation, zeros))
    return _by_stack(x, weights, chosen, layer, activation, zeros)


def each(x: jax.Array, w: Any, layer) -> jax.Array:
    """float32 [*batch, matrices, N]: the product of each matrix with an input of its own, x [*batch,
    matrices, K or more]; w is a QTensor or a LayerStack. No pair has to be sorted. For many rows on a GPU one
    GEMM multiplies all matrices, rounded as matmul/cublas.py rounds others."""
    known = layer if isinstance(layer, int) else None
    rows = x.size // (x.shape[-1] * x.shape[-2])

    def by_gemm(x, w, index):
        flat = x.reshape(rows, *x.shape[-2:])[..., : w.shape[1]].astype(jnp.float32)
        return selection.get(Matmul, "cublas").module.run_each(flat, w, index).reshape(*x.shape[:-1], -1)

    def apart(in_one_launch: bool):
        def by_matrix(x, w, index):
            if isinstance(w, LayerStack):
                return w.at(index, lambda part, i: _each(in_one_launch, x, part, i))
            return _each(in_one_launch, x, w, index)

        return by_matrix

    def at_layer(product):
        return lambda x, w, index: product(x, w, index if known is None else known)

    kernels = {part.products.kernel(rows) for part in leaves(w)}
    folded = any(part.rotation is not None for part in leaves(w))
    is_gemm = rows >= GEMM_ROWS and kernels <= GEMMS and not folded
    product = by_gemm if is_gemm else apart(True)
    return differentiated(at_layer(product), at_layer(apart(False)))(x, w, layer if known is None else None)


def _each(in_one_launch: bool, x, w: Any, index) -> jax.Array:
    """`each` of one stack; in_one_launch: where there is a kernel for that."""
    kernel = _chosen((w,), 1)
    in_one_launch = in_one_launch and "most_rows" in kernel.offers
    if not in_one_launch or w.shape[1] % kernel.module.GROUP:
        x = x[..., : w.shape[1]]
    count = x.shape[-2]
    first, rows = 0, x.reshape(-1, count, x.shape[-1])
    if index is not None:
        w = w.replace(fields=jax.tree.map(lambda field: field.reshape(-1, *field.shape[2:]), w.fields))
        first = index * count
    if in_one_launch:
        tile_rows = min(len(rows), kernel.module.most_rows((w,)))
        tiles = -(-len(rows) // tile_rows)
        # Of numpy, so that they are constants of the program: XLA would make them in launches of their own.
        tokens = np.minimum(np.arange(tiles * tile_rows).reshape(1, tiles, tile_rows), len(rows) - 1)
        x_rows = (tokens * count + np.arange(count)[:, None, None]).reshape(-1, tile_rows).astype(np.int32)
        matrices = np.repeat(np.arange(count, dtype=np.int32), tiles)
        flat = x.reshape(-1, x.shape[-1])
        y = kernel(flat, (w,), jnp.asarray(matrices), jnp.asarray(x_rows), first, count)
        y = y.reshape(count, tiles * tile_rows, -1)[:, : len(rows)]
    elif device.platform().startswith("sm_") and count <= STRAIGHT:
        y = jnp.stack([product(rows[:, i], (w,), first + i, None, 0.0, None) for i in range(count)])
    else:

        def one(_, item):
            return None, product(item[1], (w,), first + item[0], None, 0.0, None)

        _, y = jax.lax.scan(one, None, (jnp.arange(count), rows.swapaxes(0, 1)))
    return y.swapaxes(0, 1).reshape(*x.shape[:-1], -1)


def feed_forward(
    x, stacks: tuple, chosen, weights, biases, layer, activation: Activation, exactly
) -> jax.Array | None:
    """The whole feed-forward by grouped.py or grouped_decode.py, stacks of gate, up and down, with the
    derivatives of exactly(x, (weights, biases), stacks, (chosen, layer)); None where these have no kernels
    for the matrices, or not for so few rows."""
    where = [w.where if isinstance(w, LayerStack) else None for w in stacks[:2]]
    formats = [[part.format for part in leaves(w)] for w in stacks[:2]]
    alike = where[0] == where[1] and formats[0] == formats[1]
    whole = _chosen(leaves(stacks), x.size // x.shape[-1], alike)
    if not whole.fused:
        return None
    known = layer if isinstance(layer, int) else None

    @jax.custom_batching.sequential_vmap
    def op(x, summed, stacks, indices):
        (weights, biases), (chosen, index) = summed, indices
        return whole(x, stacks, chosen, weights, index if known is None else known, activation, biases)

    indices = chosen, layer if known is None else None
    return differentiated(op, exactly)(x, (weights, biases), stacks, indices)


def _by_stack(x, weights: tuple[Any, ...], chosen, index, activation: Activation, zeros: bool) -> jax.Array:
    """by_expert of one stack, or two that are alike; index is into their first axis, None where it is that of
    the experts."""
    known = index if isinstance(index, int) else None

    def by(skips: bool):
        return lambda x, weights, indices: _tiled(
            skips, zeros, x, weights, indices[0], indices[1] if known is None else known, activation
        )

    # A branch that is skipped hands what its derivative needs on, whole stacks among it.
    op = differentiated(by(True), by(False))
    return op(x, weights, (chosen, index if known is None else None))


def _tiled(
    skips: bool, zeros: bool, x, weights: tuple[QTensor, ...], chosen, index, activation: Activation
) -> jax.Array:
    """skips  tiles in which nothing is are not multiplied
    zeros  as of `by_expert`
    """
    experts = jax.tree.leaves(weights[0].fields)[0].shape[0 if index is None else 1]
    if index is not None:
        flat = lambda field: field.reshape(-1, *field.shape[2:])  # noqa: E731
        weights = tuple(w.replace(fields=jax.tree.map(flat, w.fields)) for w in weights)
    first = 0 if index is None else index * experts
    n, pairs = weights[0].shape[0], chosen.reshape(-1)
    rows = x.reshape(-1, x.shape[-1])
    pairs_of_row = pairs.size // len(rows)
    valid = (pairs >= 0) & (pairs < experts)
    kernel, most_rows = _chosen(weights, 1), MOST_ROWS
    in_one_launch = skips and "most_rows" in kernel.offers
    if in_one_launch:
        most_rows = kernel.module.most_rows(weights)
    tiles = tiles_of(pairs if in_one_launch else jnp.where(valid, pairs, experts), experts, most_rows)

    def multiplied(expert, tile_pairs):
        return product(rows[tile_pairs // pairs_of_row], weights, first + expert, None, 0.0, None, activation)

    def tile(_, item):
        expert, tile_pairs = item
        if not skips:
            return None, multiplied(jnp.minimum(expert, experts - 1), tile_pairs)
        nothing = lambda *_: jnp.zeros((len(tile_pairs), n), jnp.float32)  # noqa: E731
        return None, jax.lax.cond(expert < experts, multiplied, nothing, expert, tile_pairs)

    if in_one_launch:
        rows_of_tiles = jnp.asarray(tiles.pairs // pairs_of_row)
        y = kernel(rows, weights, tiles.expert, rows_of_tiles, first, experts, activation)
    elif device.platform().startswith("sm_") and len(tiles.expert) <= STRAIGHT:
        each = zip(jnp.minimum(tiles.expert, experts - 1), tiles.pairs, strict=True)
        y = jnp.stack([multiplied(expert, tile_pairs) for expert, tile_pairs in each])
    else:
        _, y = jax.lax.scan(tile, None, (tiles.expert, tiles.pairs))
    y = y.reshape(-1, n)
    y = y if tiles.pairs.shape[1] == 1 else y[tiles.places]  # a tile of one row is a pair
    y = jnp.where(valid[:, None], y, 0.0) if zeros or not in_one_launch else y
    return y.reshape(*chosen.shape, n)


def _chosen(weights: Sequence[QTensor], tokens: int, alike: bool = False) -> Candidate:
    """The candidate for so many tokens; alike: gate and up, of a whole feed-forward's weights."""
    kernel, *others = dict.fromkeys(w.products.kernel(1) for w in weights)
    folded = any(w.rotation is not None for w in weights)
    whole = alike and not others
    columns = max(w.shape[1] for w in weights) if whole else 0
    problem = Experts(device.platform(), kernel, whole=whole, folded=folded, columns=columns)
    return selection.get(Experts, selection.choose(problem, tokens))


def rows_of_tile(pairs: int, experts: int, most: int = MOST_ROWS) -> int:
    """A power of two: about as many as an expert has, were all equally likely."""
    return min(most, 1 << max(0, (pairs // experts).bit_length() - 1))


def tiles_of(experts_of_pairs: jax.Array, experts: int, most_rows: int = MOST_ROWS) -> Tiles:
    """int32 [pairs] -> their tiles; what is no expert's number stands for none."""
    pairs = experts_of_pairs.size
    rows = rows_of_tile(pairs, experts, most_rows)
    if rows == 1:  # constants, of numpy: in a decode step each launch of XLA's counts
        each = np.arange(pairs, dtype=np.int32)
        return Tiles(experts_of_pairs, each[:, None], each)
    everyone = jnp.arange(pairs, dtype=jnp.int32)
    is_one = (experts_of_pairs >= 0) & (experts_of_pairs < experts)
    experts_of_pairs = jnp.where(is_one, experts_of_pairs, experts)
    order = jnp.argsort(experts_of_pairs, stable=True)
    count = jnp.zeros(experts, jnp.int32).at[experts_of_pairs].add(1, mode="drop")
    begin = jnp.cumsum(count) - count  # of each expert's pairs, sorted
    tiles = -(-count // rows)
    end = jnp.cumsum(tiles)
    most = min(pairs, pairs // rows + experts)
    tile = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.searchsorted(end, tile, side="right").astype(jnp.int32)
    within = tile - (end - tiles)[jnp.minimum(expert, experts - 1)]
    sorted_place = begin[jnp.minimum(expert, experts - 1)] + rows * within
    tile_pairs = order[jnp.clip(sorted_place[:, None] + jnp.arange(rows), 0, pairs - 1)]
    rank = jnp.zeros(pairs, jnp.int32).at[order].set(everyone)
    own = jnp.minimum(experts_of_pairs, experts - 1)
    places = (end - tiles)[own] * rows + rank - begin[own]
    return Tiles(expert, tile_pairs.astype(jnp.int32), jnp.clip(places, 0, most * rows - 1))
