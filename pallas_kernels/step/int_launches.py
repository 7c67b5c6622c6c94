"""A layer of a step of 5 to 8 rows in five launches, for weights of 2 to 8 bits: each product leaves its
outputs as the integers that the next product is multiplied by.

    x -> [q, k, v] -> [attention] -> [o, + x, round] -> [gate, up, activation, round] -> [down, + x, round]

Every block of a product reads the activations of all rows. Where each block rounds them for itself, that
takes several microseconds a layer (LOG.md), so here they are rounded once, by the blocks that make them. A
norm's gamma is in the integers; its root mean square commutes with the product and comes from sums of squares
beside them. What attention makes is rounded by the blocks of o. What a product makes whose blocks have no
whole groups of columns is rounded by the blocks that read it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import cache_layouts, formats
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.attention.decode import decode_attention
from pallas_kernels.matmul.int_mma import decode_plan
from pallas_kernels.matmul.int_mma.decode import Rounded, int_decode
from pallas_kernels.qtensor import LayerStack, QTensor, leaves
from pallas_kernels.step.inputs import StepInputs
from pallas_kernels.step.int_layers_plan import phases_of
from pallas_kernels.tiles import TILE_ROWS

BITS = 8  # to which activations are rounded


class Vector(NamedTuple):
    """float32 [rows, N], and int_decode's integers of it; None: nobody rounded it."""

    x: jax.Array
    rounded: Rounded | None = None


class Reader(NamedTuple):
    """The product that reads a vector: its weights, which layer's, and the gammas of the norm before it."""

    weights: LayerStack
    layer: int
    norm: jax.Array | None = None

    @property
    def gamma(self) -> jax.Array | None:
        return None if self.norm is None else self.norm[self.layer : self.layer + 1]

    @property
    def groups(self) -> tuple[int, ...]:
        """How many columns share a scale of its activations, of all its matrices."""
        pieces = _pieces(self.weights, self.layer)
        return tuple(sorted({formats.get(w.format).LANES.activation_group for w in pieces}))


def run(
    x: Vector,
    weights: Sequence[LayerStack],
    inputs: StepInputs,
    workspace: jax.Array,
    *,
    layer: int,
    eps: float,
    interleaved: bool,
    activation: Activation = SILU,
    tokens: int = 1,
) -> tuple[Vector, cache_layouts.Pages, cache_layouts.Pages, jax.Array]:
    """One token of every row through a layer.

    x <- x + W_o attention(norm(x));  x <- x + W_down activation(W_gate n, W_up n),  n = norm(x)

    x          [rows, hidden]
    weights    of qkv, o, gate, up and down
    workspace  of attention (pallas_kernels.attention.empty_workspace)
    tokens     so many neighbouring rows are one sequence's (attention/decode_plan.py)
    Returns x, the pages, which are updated in place, and the workspace.
    """
    qkv, o, gate, up, down = weights
    bias = None
    if inputs.bias is not None:
        bias = jnp.broadcast_to(inputs.bias[layer], (len(x.x), inputs.bias.shape[1]))

    def product(x: Vector, reads: Reader, *others: LayerStack, residual=None, reader: Reader | None = None):
        return _product(x, reads, others, residual, reader, eps=eps, activation=activation)

    q_k_v = product(x, Reader(qkv, layer, inputs.attn_norm), residual=bias)
    attended, k_pages, v_pages, workspace = decode_attention(
        q_k_v.x, inputs.k_pages, inputs.v_pages, inputs.block_table, inputs.positions, layer,
        *inputs.rotation, inputs.head_norms, workspace, eps=eps, interleaved=interleaved, tokens=tokens,
    )  # fmt: skip
    to_gate, to_down, following = Reader(gate, layer, inputs.ffn_norm), Reader(down, layer), None
    if layer + 1 < len(qkv.where):
        following = Reader(qkv, layer + 1, inputs.attn_norm)
    middle = product(Vector(attended), Reader(o, layer), residual=x.x, reader=to_gate)
    hidden = product(middle, to_gate, up, reader=to_down)
    x = product(hidden, to_down, residual=middle.x, reader=following)
    return x, k_pages, v_pages, workspace


def summed(x: Vector) -> jax.Array:
    """float32 [rows, hidden]"""
    return x.x


def _product(
    x: Vector, reads: Reader, others: Sequence[LayerStack], residual: jax.Array | None, reader: Reader | None,
    *, eps: float, activation: Activation,
) -> Vector:  # fmt: skip
    """x by the matrix of `reads`, of pieces rows below rows; or, with up as `others`, the activation."""
    each = (_pieces(stack, reads.layer) for stack in (reads.weights, *others))
    pieces = tuple(zip(*each, strict=True))
    parts = tuple(tuple(w.fields for w in part) for part in pieces)
    formats_of, rows = tuple(part[0].format for part in pieces), len(x.x)
    groups, gamma = (), None
    if reader is not None:
        plan = decode_plan.plan(parts, rows, formats_of, BITS)
        if plan is not None and decode_plan.makes_groups(plan):
            groups, gamma = reader.groups, reader.gamma
    y = int_decode(
        x.x if x.rounded is None else x.rounded, parts, None, formats_of=formats_of,
        n=sum(part[0].shape[0] for part in pieces), gamma=reads.gamma, eps=eps, residual=residual,
        next_groups=groups, next_gamma=gamma, activation=activation,
    )  # fmt: skip
    return Vector(*y) if groups else Vector(y)


def refuses(rows: int, hidden: int, ffn: int, heads: tuple[int, int, int], layers) -> str | None:
    """Why it cannot run these layers on the default device, or None; arguments as int_layers_plan.refuses
    has them."""
    if any(gate != up for _, _, gate, up, _ in layers):
        return "gate and up have different formats"
    for what, width in (("hidden", hidden), ("feed-forward", ffn)):
        if width % TILE_ROWS:
            return f"{what} is {width} wide, no multiple of {TILE_ROWS}"
    for phase in (phase for each in phases_of(hidden, ffn, heads, layers) for phase in each):
        if decode_plan.plan(phase.parts, rows, phase.formats, BITS) is None:
            return f"integers of {phase.columns} activations, rows: {rows}, leave no room for weights"
    return None


def _pieces(stack: LayerStack, layer: int) -> list[QTensor]:
    """A layer's matrices, rows below rows, each a stack of one: XLA makes an offset of that slice."""
    number, at = stack.where[layer]
    return [piece[at : at + 1] for piece in leaves(stack.parts[number])]
