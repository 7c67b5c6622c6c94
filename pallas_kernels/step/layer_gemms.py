"""A layer of a step of many rows in as few launches as its kernels allow: what stands between two of them is
done by the one or the other.

    x -> [add, norm, round] -> [q, k, v] -> [add, attention, round] -> [o] -> [add, norm, round]
      -> [gate, up, activation] -> [round] -> [down] -> x

Each [launch] is a kernel that there is: a prologue and a GEMM of matmul/prefill.py, and decode_attention.
Where blocks have parts of a product's columns, who reads the product adds them, in the same order as ever,
and writes the residual stream once. For weights of 1 bit a block of attention rounds what it makes: whole
groups of 128 outputs of a row. Others want the largest of a whole row, and a launch for it. Where q, k and v
differ in format they are a product each, of activations that are rounded once for all.

Layers that mix tokens by something else than plain attention, a delta net above all, go through
`mixer_inputs` and `after_mixer`, with that between them (network/fused.py). A delta net of 1-bit weights
rounds what it makes, too. Up to 8 rows of 1-bit weights have other kernels: quantize_rows, which begins the
delta net's gates as well, and bit_decode_s8.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels import cache_layouts, formats
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.attention.decode import decode_attention
from pallas_kernels.delta import GateSums
from pallas_kernels.matmul.bit_mma import decode_s8
from pallas_kernels.matmul.bit_mma import prefill_sm90 as bit_prefill_sm90
from pallas_kernels.matmul.bit_mma.product import MMA_COLUMNS
from pallas_kernels.matmul.bit_mma.quantize_rows import Quantized
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
    qkv, o, *ffn = weights
    rows = len(inputs.positions)
    q_k_v, x_before, _ = mixer_inputs(x, qkv, inputs.attn_norm, layer=layer, eps=eps, rows=rows)
    if inputs.bias is not None:
        q_k_v = [joined(q_k_v, rows) + inputs.bias[layer]]
    (w, _), *_ = _pieces(o, layer)
    as_integers = _gemm(w, rows) is bit_prefill_sm90
    attended, k_pages, v_pages, workspace = decode_attention(
        tuple(q_k_v), inputs.k_pages, inputs.v_pages, inputs.block_table, inputs.positions, layer,
        *inputs.rotation, inputs.head_norms, workspace, eps=eps, interleaved=interleaved,
        integers=as_integers, tokens=tokens,
    )  # fmt: skip
    x = after_mixer(
        attended, x_before, (o, layer), inputs.ffn_norm, ffn, layer, eps=eps, activation=activation
    )
    return x, k_pages, v_pages, workspace


def mixer_inputs(
    x: Parts, weights: LayerStack, norm: jax.Array, gates: jax.Array | None = None,
    *, layer: int, eps: float, rows: int,
) -> tuple[list[jax.Array], jax.Array, GateSums | None]:  # fmt: skip
    """norm(x) W.T, for what mixes tokens.

    x       of float32 [rows or more, hidden]
    norm    float32 [L, hidden], gammas; layer: index into them and the weights
    gates   float32, float16 or bfloat16 [L, 2 heads, hidden]: a delta net's, which up to 8 rows of
            1-bit weights are begun with; else None is returned
    Returns of each of W's pieces, which lie below each other, the parts of the sums, float32 [splits, rows or
    more, N]; x, summed; and the gates that were begun.
    """
    made, sums = [], None
    for _, group in itertools.groupby(_pieces(weights, layer), lambda piece: _gemm(piece[0], rows)):
        pieces = list(group)
        if gates is not None and _gemm(pieces[0][0], rows) is decode_s8:
            each = [w for w, _ in pieces]
            rounded, summed, products = decode_s8.prologue(x, each, layer, norm, eps, rows, gates)
            activations, sums = [rounded], GateSums(products, rounded.quantized.squares)
        else:
            *activations, summed = _rounded(x, pieces, layer, norm, eps, rows)
        made += [_product(activations, [piece], rows) for piece in pieces]
        x = Parts(summed[None])
    return made, x.parts[0], sums


def joined(parts: list[jax.Array], rows: int) -> jax.Array:
    """What `mixer_inputs` gives of each piece, summed and side by side: float32 [rows, N]."""
    sums = [in_order(y, None)[:rows] for y in parts]
    return sums[0] if len(sums) == 1 else jnp.concatenate(sums, axis=-1)


def after_mixer(
    y: Any, x: jax.Array, o: tuple[LayerStack, int], norm: jax.Array, ffn: Sequence[LayerStack], layer: int,
    *, eps: float, activation: Activation = SILU,
) -> Parts:  # fmt: skip
    """x + W_o y, and the feed-forward behind it.

    y      float32 [rows, K]; or rounded as a product of 1-bit weights reads it (`rounds_for`)
    x      float32 [rows, hidden]
    o      its stack, and the layer's index into it
    norm   float32 [L, hidden]
    ffn    gate, up and down; layer: index into the norm and them
    """
    rows, pieces = len(x), _pieces(*o)
    (gate, up, down) = (_pieces(stack, layer) for stack in ffn)
    if isinstance(y, Quantized):
        y = [decode_s8.Rounded(y, rows)]
    elif not isinstance(y, (tuple, list)):
        y = _rounded(y, pieces, o[1], None, eps, rows)
    *activations, x = _rounded(Parts(_product(y, pieces, rows), x), gate, layer, norm, eps, rows)
    (hidden,) = _product(activations, [*gate, *up], rows, activation)
    return Parts(_product(_rounded(hidden, down, layer, None, eps, rows), down, rows), x)


def rounds_for(weights: LayerStack, layer: int, rows: int) -> Literal["few", "many"] | None:
    """How the product with these weights wants a delta net's outputs (delta/step.py)."""
    (w, _), *_ = _pieces(weights, layer)
    gemm = _gemm(w, rows)
    return "few" if gemm is decode_s8 else "many" if gemm is bit_prefill_sm90 else None


def _product(activations: Any, pieces: "Pieces", rows: int, activation: Activation = SILU) -> jax.Array:
    """Parts of sums with one matrix, or with gate and up."""
    (w, at), *_ = pieces
    weights = [w for w, _ in pieces]
    gemm = _gemm(w, rows)
    if gemm is decode_s8:
        return decode_s8.gemm(activations[0], weights, at, activation)
    if gemm is int_prefill_sm90:
        activations = int_prefill_sm90.order_of(activations, w)
    # pyrefly: ignore[bad-argument-count, bad-argument-type, bad-keyword-argument, unexpected-keyword]
    return gemm.gemm(*activations, weights, at, None, activation, summed=False)


def _rounded(x, pieces: "Pieces", layer: int, norm, eps: float, rows: int) -> list[Any]:
    """x as the GEMM with each of the pieces wants it; of Parts also their sum."""
    weights = [w for w, _ in pieces]
    return [*_gemm(weights[0], rows).prologue(x, weights, layer, norm, eps, rows)]


Pieces = list[tuple[QTensor, int]]  # rows below rows: stacks of layers, and the index into each


def _pieces(stack: LayerStack, layer: int) -> Pieces:
    number, at = stack.where[layer]
    part = stack.parts[number]
    return [(piece, at) for piece in (part.pieces if isinstance(part, Rows) else (part,))]


def _gemm(w: QTensor, rows: int):
    """The module (matmul/prefill.py) that multiplies with it."""
    family = formats.family(w.format) or ""
    return decode_s8 if family == "bit" and rows <= MMA_COLUMNS else GEMMS[family]


def summed(x: Parts) -> jax.Array:
    """float32 [rows, hidden]"""
    return in_order(*x)
