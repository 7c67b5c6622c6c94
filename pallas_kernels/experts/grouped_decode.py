"""Feed-forwards of experts for the tokens of a large decode step, in small tiles of one expert each.

    chosen -> places of pairs, sorted by expert, and tiles of 4 or 8 of them     places.py
      -> activation(x G.T, x U.T), tile by tile                                  int_experts.py
      -> h W.T, tile by tile                                                     int_experts.py
      -> of each token the weighted sum of its pairs                             XLA

It is what grouped.py does for a prefill, whose tiles of 16 tokens and more are multiplied in float16. Here an
expert has few tokens: two of 32, if there are 128 experts and a token uses 8. Reading weights takes most of
the time, and blocks that multiply small tiles read more of them at once.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.activations import SILU, Activation
from pallas_kernels.experts import int_experts, places
from pallas_kernels.experts.grouped import weighted_sum, with_layer
from pallas_kernels.qtensor import QTensor

SMALL, LARGE = 4, 8  # pairs of a tile; those of an expert that has more are several tiles
MOST_OF_SMALL = 3  # pairs of an expert on average, with which tiles are small


def feed_forward(
    x: jax.Array,
    stacks: tuple,
    chosen: jax.Array,
    weights: jax.Array,
    layer,
    activation: Activation = SILU,
    biases: tuple[jax.Array, jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """As grouped.feed_forward, but activations are rounded as int_decode rounds them."""
    *gate_up, down = stacks
    pairs, used = chosen.reshape(-1), chosen.shape[-1]
    experts = jax.tree.leaves(down)[0].shape[0 if layer is None else 1]
    tile = SMALL if pairs.size <= MOST_OF_SMALL * experts else LARGE
    at, tiles, _, tokens = places.expert_places(pairs, experts=experts, tokens=tile, step=tile, used=used)
    count = min(len(tiles), tokens.size // tile)  # both are bounds
    tokens = tokens.reshape(-1, tile)[:count]
    own = np.arange(tokens.size, dtype=np.int32).reshape(-1, tile)

    def product(x, rows, matrices: tuple[QTensor, ...], index):
        if index is not None:
            flat = lambda field: field.reshape(-1, *field.shape[2:])  # noqa: E731
            matrices = tuple(w.replace(fields=jax.tree.map(flat, w.fields)) for w in matrices)
        first = 0 if index is None else index * experts
        return int_experts.run(x, matrices, tiles, jnp.asarray(rows), first, experts, activation)

    def hidden_rows(matrices, index):
        flat = x.reshape(-1, x.shape[-1])
        if biases is None:
            return product(flat, tokens, matrices, index)
        each = (product(flat, tokens, (w,), index) for w in matrices)
        expert = jnp.repeat(tiles[:count, 0], tile)
        biased = (y + b.at[expert].get(mode="clip") for y, b in zip(each, biases[:2], strict=True))
        return activation(*biased)

    hidden = with_layer(tuple(gate_up), layer, hidden_rows)
    y = with_layer((down,), layer, lambda w, index: product(hidden, own, w, index))
    token_places = at.reshape(-1, used)
    total = weighted_sum(y, token_places, chosen, weights, None if biases is None else biases[2])
    return total.reshape(*x.shape[:-1], -1)
