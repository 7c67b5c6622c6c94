"""Products of pairs, a row of activations and the expert's matrix that it goes to, in one launch: what
matmul/kq_decode.py does for a row and a matrix, with blocks of their own for each pair.

    grid    blocks of pair 0 | blocks of pair 1 | ..          each pair's share its matrix's tiles of 16 rows
    index   list[pair], of the stack of all layers' experts

An expert that two rows have chosen is read twice, the second time out of the L2 if they are near. A pair
without an expert has blocks that end at once.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import integer
from pallas_kernels.matmul import kq_decode_block, kq_decode_plan
from pallas_kernels.matmul.activations_shared import eights
from pallas_kernels.matmul.kq_decode_ring import Ring, Share, Stream
from pallas_kernels.qtensor import QTensor
from pallas_kernels.tiles import COLUMNS, ROWS


def run(x: jax.Array, weights: tuple[QTensor, ...], experts: jax.Array) -> jax.Array:
    """What `by_expert` wants of a flat stack: x float32 [rows, K], of which each is that of pairs / rows
    neighbouring pairs; experts int32 [pairs], below 0 for none. Returns float32 [pairs, N]; what of a pair
    without an expert means nothing."""
    y = jax.custom_batching.sequential_vmap(
        functools.partial(
            kq_pairs,
            format=weights[0].format,
            activation_bits=weights[0].products.activation_bits,
            shared=device.shared_bytes(),
        )
    )(x.astype(jnp.float32), tuple(w.fields for w in weights), experts)
    return y[:, : weights[0].shape[0]]


@functools.partial(jax.jit, static_argnames=("format", "activation_bits", "shared"))
def kq_pairs(
    x: jax.Array,
    weights: tuple[dict[str, jax.Array], ...],
    experts: jax.Array,
    *,
    format: str,
    activation_bits: int = 8,
    shared: int = 96 * 1024,
) -> jax.Array:
    """y[p] = W[experts[p]] x[p // (pairs / rows)], or silu(G x) * (U x) of two stacks.

    weights  fields of W, or of G and U, as the format's `tile` makes them, each a stack
    The rest as for `kq_decode`; N is padded to 16.
    """
    (rows, columns), pairs = x.shape, experts.shape[0]
    steps, n_tiles = weights[0]["words"].shape[2], weights[0]["words"].shape[1]
    if columns < steps * COLUMNS:
        x = jnp.pad(x, ((0, 0), (0, steps * COLUMNS - columns)))
    of_pair = max(1, device.multiprocessors() // pairs)
    planned = kq_decode_plan.plan((weights,), 1, (format,), activation_bits, shared, blocks=of_pair)
    if planned is None:
        raise NotImplementedError(
            f"{format}: {columns} activations of {activation_bits} bits do not fit {shared} bytes of shared "
            "memory"
        )
    (part,) = planned.parts
    product = kq_decode_block.IntegerProduct(
        planned, 1, columns, n_tiles, steps, len(weights), 0.0, activation_bits
    )
    ring = planned.warps * part.depth * part.item_bytes(len(weights))
    return launch(
        functools.partial(_body, product, pairs // rows),
        {"weight_gmem": weights, "x_gmem": x, "experts_gmem": experts},
        {"out_gmem": jax.ShapeDtypeStruct((pairs, n_tiles * ROWS), jnp.float32)},
        name="kq_pairs",
        blocks=pairs * part.blocks,
        threads=32 * planned.warps,
        scratch={"ring_smem": plgpu.SMEM((ring // 4,), jnp.int32), **kq_decode_block.scratch([product])},
    )


def _body(
    product: kq_decode_block.IntegerProduct, of_row: int,
    *, weight_gmem, x_gmem, experts_gmem, out_gmem, ring_smem, **refs,
):  # fmt: skip
    """Of a block, whose pair its number says."""
    (part,) = product.plan.parts
    pair = integer(lanes.block()) // part.blocks
    share = Share.of(part, product.steps, product.plan.warps, integer(lanes.block()) - pair * part.blocks)
    expert = memory.load(experts_gmem, pair)
    row = pair // of_row
    # Numbers are without a sign (Share.of): below 0 is large.
    with lanes.when(share.here & (expert < integer(2**31 - 1))):
        block = kq_decode_block.Block(
            product, share, lambda y, _, n: memory.store(y, out_gmem, pair, n), None,
            lambda places: eights(x_gmem, [(row, column) for _, column in places]),
            gamma_gmem=None, norm_layer=None, **refs,
        )  # fmt: skip
        ring = Ring(
            [[Stream(share, weight_gmem, expert)]], ring_smem, part.depth, part.item_bytes(product.matrices)
        )
        first_pass = block.load()
        block.run(first_pass, ring, ring.filled())
        memory.wait_copies(0)
