"""layer_products.py on a model's stacks of weights, layer by layer."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import device, formats
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.qtensor import LayerStack, QTensor, leaves
from pallas_kernels.step.layer_products import layer_products
from pallas_kernels.tiles import TILE_ROWS


class OfLayer(NamedTuple):
    """A weight of a layer, or gamma of a norm: the stack and the index into it; None for no norm."""

    stack: Any
    index: int

    @property
    def gamma(self) -> jax.Array | None:
        return None if self.stack is None else self.stack[self.index : self.index + 1]

    def pieces(self) -> list[QTensor]:
        """The layer's matrices, rows below rows, each a stack of one: XLA makes an offset of that slice."""
        part, index = self.stack.where[self.index]
        return [piece[index : index + 1] for piece in leaves(self.stack.parts[part])]


def run(
    mixed: jax.Array,
    x: jax.Array,
    o: OfLayer,
    ffn: tuple[OfLayer, OfLayer, OfLayer, OfLayer],
    following: tuple[OfLayer, OfLayer] | None,
    layer: int,
    workspace: jax.Array,
    eps: float,
    rounded: tuple[bool, bool, bool],
    activation: Activation = SILU,
    post_norms: tuple[OfLayer, OfLayer] | None = None,
    scale: OfLayer | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """`layer_products` of a model's stacks.

    ffn        its norm, gate, up and down
    following  the next layer's norm, and q, k and v or what a delta net has in their place; None behind the
               last layer
    rounded    `rounded_vectors` of the model
    post_norms  the norms after o and after down; None: there are none
    scale      of the layer's output, with post norms; None: it has none
    Returns x and what the following product gives, or None, and the workspace.
    """
    norm, gate, up, down = ffn
    stacks, gammas = [(o,), (gate, up), (down,)], [None, norm.gamma, None]
    if following is not None:
        stacks.append(following[1:])
        gammas.append(following[0].gamma)
    pieces = [list(zip(*(weight.pieces() for weight in phase), strict=True)) for phase in stacks]
    kernel = functools.partial(
        layer_products,
        formats_of=tuple(tuple(part[0].format for part in parts) for parts in pieces),
        eps=eps,
        bits=tuple(parts[0][0].products.bits(len(x)) for parts in pieces),
        rounded=rounded,
        activation=activation,
    )
    weights = tuple(tuple(tuple(w.fields for w in part) for part in parts) for parts in pieces)
    rotations = tuple(parts[0][0].rotation for parts in pieces)
    number = jnp.asarray(layer, jnp.int32).reshape(1)
    after = post_norms and tuple(norm.gamma for norm in post_norms)
    x, made, workspace = jax.custom_batching.sequential_vmap(kernel)(
        mixed, x, weights, tuple(gammas), number, workspace, rotations, after, scale and scale.gamma
    )
    return x, None if following is None else made[:, : following[1].stack.shape[0]], workspace


def rounded_vectors(
    outputs: Sequence[LayerStack],
    ffn: tuple[LayerStack, LayerStack, LayerStack],
    inputs: Sequence[LayerStack],
    post_norms: bool = False,
) -> tuple[bool, bool, bool]:
    """Which of the vectors that go from block to block are passed on as integers: what o, gate and up, and
    down make. In all layers or in none, since a tag tells a layer from the two before only.

    outputs  of each kind of mixer, attention or delta net, all of the model's o
    ffn      gate, up and down
    inputs   of each kind q, k and v, or what a delta net has in their place
    post_norms  whether norms follow o and down: then x is a sum of what these make, so nobody may round it
    """
    gate, up, down = ffn
    return (
        not post_norms and _is_rounded(outputs, (gate, up)),
        _is_rounded((gate,), (down,)),
        not post_norms and _is_rounded((down,), inputs),
    )


def _is_rounded(makers: Sequence[LayerStack], users: Sequence[LayerStack]) -> bool:
    """Of 8 bits that are not rotated, where every block makes whole groups of 32 and all parts of
    what follows have the same groups. For 1-bit weights these are 128 columns, more than most blocks make."""
    if any(formats.family(w.format) == "bit" for w in leaves(users)):
        return False
    tiles = [-(-maker.shape[0] // TILE_ROWS) for maker in makers]
    block_tiles = [-(-n_tiles // device.multiprocessors()) for n_tiles in tiles]
    groups = [
        {formats.get(piece.format).LANES.activation_group for piece in leaves(part)}
        for user in users
        for part in user.parts
    ]
    return (
        all(w.products.activation_bits == 8 and w.rotation is None for w in leaves(users))
        and all(n % 2 == 0 for n in (*tiles, *block_tiles))
        and all(len(leaves(part)) == 1 for maker in makers for part in maker.parts)
        and all(len(part_groups) == 1 for part_groups in groups)
    )
