"""Matrix-vector products with 1-bit weights (Q1_0), on the binary tensor cores, weights in registers.

One block of threads has `tiles` tiles of 16 rows, all in one round; its warps share the columns in pairs of
groups of 128 (product.py, plane_product.py):

    weights of all its tiles and pairs -> registers      (on their way while the activations are quantized)
    its pairs' activations -> norm, absmax, q, planes    (each warp those that it multiplies)
    popcounts -> float32 sums per warp -> shared memory -> sum over warps, 1 / rms, SwiGLU or residual -> out

Several rows are multiplied one after another by the same weights; more go through decode_s8.py where its
integers have room in shared memory.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import index
from pallas_kernels.matmul.bit_mma import decode
from pallas_kernels.matmul.bit_mma.plane_product import PlaneProduct
from pallas_kernels.matmul.bit_mma.product import Section

LOADS_PER_LANE = 16  # 16-byte loads that a lane has in flight before anything else: 256 bytes


def run(*arguments) -> jax.Array:
    """Products of 1 to 8 rows (execute.py)."""
    return decode.run(bit_decode_b1, *arguments)


def plan(n_tiles: int, pairs: int) -> tuple[int, int]:
    """(warps of a block, tiles of a block), for the least idle warps and, if there are enough tiles, as many
    blocks as multiprocessors, or a few less: tiles come in multiples of 32. Of so many columns that eight
    warps would have more than two tiles' loads, 16 quantize them."""
    each = lambda w: -(-pairs // w)  # noqa: E731
    few = [w for w in (8, 4) if 2 * each(w) <= LOADS_PER_LANE]
    warps = min(few, key=lambda w: (each(w) * w, -w)) if few else 16
    multiprocessors = device.multiprocessors()
    # Blocks of 16 warps are alone on a multiprocessor, and must all run at once.
    most = -(-n_tiles // multiprocessors) if warps == 16 else n_tiles // (max(1, multiprocessors // 32) * 32)
    return warps, max(1, min(LOADS_PER_LANE // each(warps), most))


@functools.partial(jax.jit, static_argnames=("eps", "activation_bits"))
def bit_decode_b1(
    x: jax.Array,
    weights: tuple[tuple[jax.Array, jax.Array], ...],
    layers: jax.Array,
    *,
    gamma: jax.Array | None = None,
    eps: float = 0.0,
    residual: jax.Array | None = None,
    activation_bits: int = 8,
) -> jax.Array:
    """y = x W.T for one matrix, or silu(x G.T) * (x U.T) for two.

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
    product = PlaneProduct(
        rows=1, columns=columns, n_tiles=n_tiles, pairs=pairs, warps=warps, tiles=tiles, round_tiles=tiles,
        matrices=len(weights), normed=gamma is not None, eps=eps, bits=activation_bits,
    )  # fmt: skip
    return launch(
        functools.partial(_multiply_rows, product),
        {
            "weight_gmem": weights, "x_gmem": x, "layers_gmem": layers, "gamma_gmem": gamma,
            "residual_gmem": residual,
        },
        {"out_gmem": jax.ShapeDtypeStruct((rows, n_tiles * 16), jnp.float32)},
        name="bit_decode_b1",
        blocks=-(-n_tiles // tiles),
        threads=32 * warps,
        scratch={f"sums_{row}": plgpu.SMEM((product.scratch,), jnp.float32) for row in range(rows)},
    )  # fmt: skip


def _multiply_rows(
    p: PlaneProduct, weight_gmem, x_gmem, layers_gmem, gamma_gmem, residual_gmem, out_gmem, **sums_smem
):
    block = decode.RegisterBlock(p, weight_gmem, layers_gmem, residual_gmem, out_gmem)
    me, section, sums = block.me, Section(index(0), 1), list(sums_smem.values())

    def columns(ref, i):
        return p.own_columns(me, lambda places: [memory.load(ref, i, at + more) for at, more in places])

    gamma = columns(gamma_gmem, index(memory.load(layers_gmem, 1))) if p.normed else {}
    outputs = p.outputs(me, section, index(0), block.first_tile)
    added = [block.added(outputs, row) for row in range(len(sums))]
    first_row = columns(x_gmem, 0)  # before the weights: these are near and wanted first
    loaded = block.load_round(index(0))
    for row, smem in enumerate(sums):
        x = p.quantize_own(me, columns(x_gmem, row) if row else first_row, gamma)
        with p.busy_warps(me):
            p.store_squares(me, section, x, smem)
            y = {}
            for item in p.items():
                y |= block.multiply(x, loaded, [item])
            p.store_sums(me, section, y, smem)
    lanes.block_barrier()
    for row, smem in enumerate(sums):
        block.finish(section, smem, outputs, added[row], row)
