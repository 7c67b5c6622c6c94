"""A layer of a step of 9 to 256 rows in as few launches as its kernels allow: what stands between two of them
is done by the one or the other.

    x -> [add, norm, round] -> [q, k, v] -> [add, attention, round] -> [o] -> [add, norm, round]
      -> [gate, up, activation] -> [round] -> [down] -> x

Each [launch] is a kernel that there is: a prologue and a GEMM of matmul/prefill.py, and decode_attention.
Where blocks have parts of a product's columns, who reads the product adds them, in the same order as ever,
and writes the residual stream once. For weights of 1 bit a block of attention rounds what it makes: whole
groups of 128 outputs of a row. Others want the largest of a whole row, and a launch for it. Where q, k and v
differ in format they are a product each, of activations that are rounded once for all.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import cache_layouts, formats
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.attention.decode import decode_attention
from pallas_kernels.matmul.bit_mma import prefill_sm90 as bit_prefill_sm90
from pallas_kernels.matmul.int_mma import prefill_sm90 as int_prefill_sm90
from pallas_kernels.matmul.prefill import in_order
from pallas_kernels.matmul.prologue import Parts
from pallas_kernels.qtensor import LayerStack, QTensor, Rows
from pallas_kernels.step.inputs import StepInputs

GEMMS = {"bit": bit_prefill_sm90, "int": int_prefill_sm90}


def run(
    x: Parts,
    weights: Sequence[LayerStack],
    inputs: StepInputs,
    workspace: jax.Array,
    *,
    layer: int,
    eps: float,
    interleaved: bool,
    activation: Activation = SILU,
    tokens: int = 1,
) -> tuple[Parts, cache_layouts.Pages, cache_layouts.Pages, jax.Array]:
    """One token of every row through a layer.

    x <- x + W_o attention(norm(x));  x <- x + W_down activation(W_gate n, W_up n),  n = norm(x)

    x          of float32 [rows, hidden]
    weights    of qkv, o, gate, up and down
    workspace  of attention (pallas_kernels.attention.empty_workspace)
    tokens     so many neighbouring rows are one sequence's (attention/decode_plan.py)
    Returns x, the pages, which are updated in place, and the workspace.
    """
    rows = len(inputs.positions)

    def product(activations, *matrices) -> jax.Array:
        ((w, at), *_), *_ = matrices
        matrices_of_pieces = [w for ((w, _),) in matrices]
        # pyrefly: ignore[bad-argument-count, bad-argument-type, bad-keyword-argument]
        return _gemm(w).gemm(*activations, matrices_of_pieces, at, None, activation, summed=False)

    def rounded(x, pieces: "Pieces", gamma=None):
        """x as the GEMM with each of the pieces wants it; of Parts also their sum."""
        matrices_of_pieces = [w for w, _ in pieces]
        return _gemm(matrices_of_pieces[0]).prologue(x, matrices_of_pieces, layer, gamma, eps, rows)

    qkv, o, gate, up, down = (_pieces(stack, layer) for stack in weights)
    joined = []
    for gemm, pieces in itertools.groupby(qkv, lambda piece: _gemm(piece[0])):
        pieces = list(pieces)
        *activations, x_before = rounded(x, pieces, inputs.attn_norm)
        for piece in pieces:
            several = gemm is int_prefill_sm90
            own = int_prefill_sm90.order_of(activations, piece[0]) if several else activations
            joined.append(product(own, [piece]))
        x = Parts(x_before[None])
    if inputs.bias is not None:
        joined = [jnp.concatenate([in_order(y, None)[:rows] for y in joined], axis=-1) + inputs.bias[layer]]
    as_integers = _gemm(o[0][0]) is bit_prefill_sm90
    attended, k_pages, v_pages, workspace = decode_attention(
        tuple(joined), inputs.k_pages, inputs.v_pages, inputs.block_table, inputs.positions, layer,
        *inputs.rotation, inputs.head_norms, workspace, eps=eps, interleaved=interleaved,
        integers=as_integers, tokens=tokens,
    )  # fmt: skip
    activations = attended if as_integers else rounded(attended, o)
    *activations, x_between = rounded(Parts(product(activations, o), x_before), gate, inputs.ffn_norm)
    (hidden,) = product(activations, gate, up)
    return Parts(product(rounded(hidden, down), down), x_between), k_pages, v_pages, workspace


Pieces = list[tuple[QTensor, int]]  # rows below rows: stacks of layers, and the index into each


def _pieces(stack: LayerStack, layer: int) -> Pieces:
    number, at = stack.where[layer]
    part = stack.parts[number]
    return [(piece, at) for piece in (part.pieces if isinstance(part, Rows) else (part,))]


def _gemm(w: QTensor):
    """The module (matmul/prefill.py) that multiplies with it."""
    return GEMMS[formats.family(w.format) or ""]


def summed(x: Parts) -> jax.Array:
    """float32 [rows, hidden]"""
    return in_order(*x)
