"""A layer of a step of 9 to 256 rows of 1-bit weights in eight launches: what stands between two kernels is
done by the one or the other.

    x -> [add, norm, round] -> [q, k, v] -> [add, attention, round] -> [o] -> [add, norm, round]
      -> [gate, up, SwiGLU] -> [round] -> [down] -> x

Each [launch] is the kernel that it is alone, with its bits: activations_int8, q1_prefill_sm90 and
decode_attention. Where blocks have parts of a product's columns, who reads the product adds them, in the same
order, and writes the residual stream once. A block of attention has whole groups of 128 outputs of a row, and
rounds them itself.
"""

from collections.abc import Sequence

import jax

from pallas_kernels import cache_layouts
from pallas_kernels.attention.decode import decode_attention
from pallas_kernels.matmul import q1_prefill_sm90, stacks
from pallas_kernels.matmul.activations_int8 import activations_int8
from pallas_kernels.matmul.prefill import in_order
from pallas_kernels.matmul.prologue import Parts
from pallas_kernels.qtensor import QTensor


def run(
    x: Parts,
    weights: Sequence[QTensor],
    norms: tuple[jax.Array, jax.Array],
    head_norms: tuple[jax.Array, jax.Array] | None,
    bias: jax.Array | None,
    k_pages: cache_layouts.Pages,
    v_pages: cache_layouts.Pages,
    block_table: jax.Array,
    positions: jax.Array,
    rotation: tuple[jax.Array, jax.Array],
    workspace: jax.Array | None,
    *,
    layer: int,
    eps: float,
    interleaved: bool,
) -> tuple[Parts, cache_layouts.Pages, cache_layouts.Pages, jax.Array]:
    """One token of every row through a layer.

    x <- x + W_o attention(norm(x));  x <- x + W_down (silu(W_gate n) * (W_up n)),  n = norm(x)

    x          of float32 [rows, hidden]
    weights    stacks of qkv, o, gate, up and down, of a multiple of 64 rows
    norms      float32 [L, hidden], gammas before attention and before the feed-forward
    head_norms float32 [L, head_dim] of queries and keys, or None
    bias       float32 [L, width of qkv], or None
    pages, table, positions, rotation, workspace   as for pallas_kernels.attend, for one token a row
    Returns x, the pages, which are updated in place, and the workspace.
    """
    qkv, o, gate, up, down = weights
    rows = len(positions)

    def rounded(x, gamma=None):
        gamma, index = stacks.narrowed(*stacks.of_gamma(gamma, layer))
        return activations_int8(x, gamma, index, eps, rows=rows)

    def product(q, scale, *matrices):
        return q1_prefill_sm90.gemm(q, scale, matrices, layer, None, summed=False)

    *activations, x_before = rounded(x, norms[0])
    joined = product(*activations, qkv)
    if bias is not None:
        joined = in_order(joined, None) + bias[layer]
    activations, k_pages, v_pages, workspace = decode_attention(
        joined, k_pages, v_pages, block_table, positions, layer, *rotation, head_norms, workspace,
        eps=eps, interleaved=interleaved, integers=True,
    )  # fmt: skip
    *activations, x_between = rounded(Parts(product(*activations, o), x_before), norms[1])
    (hidden,) = product(*activations, gate, up)
    return Parts(product(*rounded(hidden), down), x_between), k_pages, v_pages, workspace


def summed(x: Parts) -> jax.Array:
    """float32 [rows, hidden]"""
    return in_order(*x)
