"""Matrix-vector products with 1-bit weights (Q1_0), on the binary tensor cores.

bit_product.py has what a warp does. One block of threads has `tiles` tiles of 16 rows; its warps share the
columns in pairs of groups of 128:

    weights of all its tiles and pairs -> registers      (on their way while the activations are quantized)
    its pairs' activations -> norm, absmax, q, planes    (each warp those that it multiplies)
    popcounts -> float32 sums per warp -> shared memory -> sum over warps, 1 / rms, SwiGLU or residual -> out

More rows go through decode_s8.py where its integers have room in shared memory.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.activations import SILU, Activation
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import index, minimum
from pallas_kernels.matmul.bit_mma import decode as bit_decode
from pallas_kernels.matmul.bit_mma.bit_product import BitProduct, LaneColumns

LOADS_PER_LANE = 16  # 16-byte loads that a lane has in flight before anything else: 256 bytes


def run(*arguments) -> jax.Array:
    """Products of 1 to 8 rows (execute.py)."""
    return bit_decode.run(bit_decode_b1, *arguments)


def plan(n_tiles: int, pairs: int) -> tuple[int, int]:
    """(warps of a block, tiles of a block), for the least idle warps and, if there are enough tiles, 132
    blocks. Of so many columns that eight warps would have more than two tiles' loads, 16 quantize them."""
    each = lambda w: -(-pairs // w)  # noqa: E731
    few = [w for w in (8, 4) if 2 * each(w) <= LOADS_PER_LANE]
    warps = min(few, key=lambda w: (each(w) * w, -w)) if few else 16
    # Blocks of 16 warps are alone on a multiprocessor, and must all run at once.
    most = -(-n_tiles // 132) if warps == 16 else n_tiles // 128
    return warps, max(1, min(LOADS_PER_LANE // each(warps), most))


@functools.partial(jax.jit, static_argnames=("eps", "activation", "activation_bits"))
def bit_decode_b1(
    x: jax.Array,
    weights: tuple[tuple[jax.Array, jax.Array], ...],
    layers: jax.Array,
    *,
    gamma: jax.Array | None = None,
    eps: float = 0.0,
    residual: jax.Array | None = None,
    activation: Activation = SILU,
    activation_bits: int = 8,
) -> jax.Array:
    """y = x W.T for one matrix, or activation(x G.T, x U.T) for two.

    x         float32 [rows, K], 1 to 8 rows; with gamma, float32 [L, K], x is rms_norm(x; gamma[i], eps)
    weights   ((words, scales),) of W, or of G and U, tiled stacks (formats/q1_0.py)
    layers    int32 [2 or more], the index into the weights' stacks and the one into gamma's
    residual  float32 [rows, N], added to y
    activation_bits  8 or 16
    Returns float32 [rows, N padded to 16]. Activations are quantized here, symmetric per group of 128.
    """
    rows, columns = x.shape
    n_tiles, pairs = weights[0][0].shape[1:3]
    warps, tiles = plan(n_tiles, pairs)
    phase = BitProduct(
        rows=rows, columns=columns, n_tiles=n_tiles, pairs=pairs, warps=warps, tiles=tiles,
        matrices=len(weights), normed=gamma is not None, eps=eps, bits=activation_bits, activation=activation,
    )  # fmt: skip
    return launch(
        functools.partial(_multiply_rows, phase),
        {
            "weight_gmem": weights, "x_gmem": x, "layers_gmem": layers, "gamma_gmem": gamma,
            "residual_gmem": residual,
        },
        {"out_gmem": jax.ShapeDtypeStruct((rows, n_tiles * 16), jnp.float32)},
        name="bit_decode_b1",
        blocks=-(-n_tiles // tiles),
        threads=32 * warps,
        scratch={"scratch_smem": plgpu.SMEM((phase.scratch,), jnp.float32)},
    )  # fmt: skip


def _multiply_rows(
    phase: BitProduct, weight_gmem, x_gmem, layers_gmem, gamma_gmem, residual_gmem, out_gmem, scratch_smem
):
    me = LaneColumns.of(phase)
    layer, norm_layer = (index(memory.load(layers_gmem, i)) for i in (0, 1))
    first_tile = lanes.block() * phase.tiles
    tile = [minimum(first_tile + j, phase.n_tiles - 1) for j in range(phase.tiles)]

    def row_of(ref, i):
        return phase.gather(me, lambda columns: [memory.load(ref, i, at + more) for at, more in columns])

    gamma = row_of(gamma_gmem, norm_layer) if phase.normed else {}
    outputs = phase.my_outputs(me, first_tile, phase.n_tiles)
    residual = []
    if residual_gmem is not None:
        last = 16 * phase.n_tiles - 1
        residual = [memory.load(residual_gmem, row, minimum(n, last)) for *_, row, _, n in outputs]
    first_row = row_of(x_gmem, 0)  # before the weights: these are near and wanted first
    # All weights of this block, on their way at once.
    words, scales = {}, {}
    for m, (words_gmem, scales_gmem) in enumerate(weight_gmem):
        for j in range(phase.tiles):
            for p in range(phase.per_warp):
                at = [layer, tile[j], me.pair[p], me.lane, 0]
                words[m, j, p] = memory.load_vector(4, words_gmem, at)
                for h in (0, 1):
                    at = [layer, tile[j], me.scale_group[p, h], me.g]
                    scales[m, j, p, h] = memory.load(scales_gmem, *at)

    for row in range(phase.rows):
        x = phase.quantize(me, first_row if row == 0 else row_of(x_gmem, row), gamma)
        phase.store_squares(me, x, scratch_smem, row)
        sums = [
            (m, j, phase.tile_product(
                me, x, lambda p, at=(m, j): words[*at, p], lambda p, h, at=(m, j): scales[*at, p, h]
            ))
            for m in range(phase.matrices)
            for j in range(phase.tiles)
        ]  # fmt: skip
        phase.store_sums(me, sums, scratch_smem, row)
    lanes.block_barrier()

    def store(i, row, n, y):
        memory.store(y + residual[i] if residual else y, out_gmem, row, n)

    phase.outputs(me, scratch_smem, outputs, store)
