"""Feed-forwards of experts for the many tokens of a prefill, on Hopper's tensor cores.

    chosen -> places of pairs, sorted by expert, and tiles of them     places.py
    x -> float16, each token at the places of its pairs                activations_float16.py
      -> activation(x G.T, x U.T), tile by tile                        prefill_sm90.py
      -> float16
      -> h W.T, tile by tile
      -> of each token the weighted sum of its pairs                   XLA

Each product is one launch, in which tiles of rows come from a list with the expert that multiplies them: an
expert's weights are dequantized once for each of its tiles, and those that nobody has chosen are not read.
Where a row lies does not change its numbers, and a token's sum is always in the same order.
"""

import math

import jax
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.experts import places
from pallas_kernels.matmul.int_mma import activations_float16
from pallas_kernels.matmul.int_mma.prefill_plan import Tiles
from pallas_kernels.matmul.int_mma.prefill_sm90 import int_prefill_sm90
from pallas_kernels.qtensor import LayerStack, QTensor

MOST_TOKENS = 256  # of a tile: sums of 64 outputs with as many are half of a lane's registers


def tiles_for(pairs: int, experts: int) -> Tiles:
    """What nearly all experts fit in where all are equally likely: as few tiles as there can be, because
    weights are dequantized once a tile."""
    likely = pairs / experts + 2 * math.sqrt(pairs / experts)
    each = math.ceil(likely / MOST_TOKENS)
    step = 16 if likely <= 64 else 32
    tokens = -(-math.ceil(likely / each) // step) * step
    return Tiles(experts, experts * each, tokens, 32 if tokens % 32 == 0 else 16)


def feed_forward(
    x: jax.Array,
    stacks: tuple,
    chosen: jax.Array,
    weights: jax.Array,
    layer,
    activation: Activation = SILU,
    biases: tuple[jax.Array, jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """float32 [*batch, N]: sum_j weights[..., j] (D_e activation(G_e x + g_e, U_e x + u_e) + d_e),
    e = chosen[..., j].

    x                [*batch, K]
    stacks           of G, U and D: QTensors or LayerStacks of matrices in the tiles of the "int" kernels; in
                     each layer G and U have one format
    chosen, weights  [*batch, used]
    biases           of g, u and d in this layer, [experts, ...]; None: there are none. With them G and U are
                     multiplied one after the other, and the activation is XLA's
    """
    *gate_up, down = stacks
    used = chosen.shape[-1]
    pairs = chosen.reshape(-1)
    experts = jax.tree.leaves(down)[0].shape[0 if layer is None else 1]
    tiles = tiles_for(pairs.size, experts)
    at, *listed = places.expert_places(pairs, experts=experts, tokens=tiles.tokens, step=tiles.stored)
    token_places = at.reshape(-1, used)
    rows = places.rows_of(pairs.size, experts, tiles.stored)
    flat = x.reshape(-1, x.shape[-1]).astype(jnp.float32)

    def rounded(x, at, matrices: tuple[QTensor, ...]):
        group = formats.get(matrices[0].format).LANES.group
        return activations_float16.activations_float16(x, places=at, group=group, rows=rows)

    def product(x_float16, matrices: tuple[QTensor, ...], index):
        """Of each row with its expert's matrix, or of two matrices the activation."""
        fields = tuple(w.fields for w in matrices)
        if index is not None:
            fields = jax.tree.map(lambda field: field.reshape(-1, *field.shape[2:]), fields)
        return int_prefill_sm90(
            *x_float16, fields, 0 if index is None else index, matrices[0].shape[0], None, tuple(listed),
            format=matrices[0].format, activation=activation, tiles_of=tiles,
        )  # fmt: skip

    def hidden_rows(matrices, index):
        x_float16 = rounded(flat, token_places, matrices)
        if biases is None:
            return product(x_float16, matrices, index)
        expert = jnp.zeros(rows, jnp.int32).at[at].set(pairs, mode="drop", wrap_negative_indices=False)
        each = (product(x_float16, (w,), index) for w in matrices)
        return activation(*(y + bias[expert] for y, bias in zip(each, biases[:2], strict=True)))

    hidden = with_layer(tuple(gate_up), layer, hidden_rows)
    y = with_layer((down,), layer, lambda w, index: product(rounded(hidden, None, w), w, index))
    total = weighted_sum(y, token_places, chosen, weights, None if biases is None else biases[2])
    return total.reshape(*x.shape[:-1], -1)


def weighted_sum(y, token_places, chosen, weights, bias: jax.Array | None = None) -> jax.Array:
    """float32 [tokens, N]: of each token sum_j weights[j] (y[token_places[j]] + bias[chosen[j]]), without
    pairs whose place is below 0."""
    used, total = chosen.shape[-1], jnp.zeros((), jnp.float32)
    for j, weight in enumerate(weights.reshape(-1, used).T):
        row = y.at[token_places[:, j]].get(mode="clip")
        row = row if bias is None else row + bias.at[chosen.reshape(-1, used)[:, j]].get(mode="clip")
        total += jnp.where(token_places[:, j, None] >= 0, weight[:, None] * row, 0.0)
    return total


def with_layer(stacks: tuple, layer, use):
    """use(matrices, index) of a layer, which has one part of each stack."""
    if isinstance(stacks[0], QTensor):
        return use(stacks, layer)
    parts = zip(*(stack.parts for stack in stacks), strict=True)
    return LayerStack(tuple(parts), stacks[0].where).at(layer, use)  # pyrefly: ignore[bad-argument-type]
