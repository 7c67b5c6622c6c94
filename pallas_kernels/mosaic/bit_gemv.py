"""Matrix-vector products with 1-bit weights (Q1_0), on the binary tensor cores: packed weights are never
unpacked.

An activation x is an integer q of 8 (or 16) bits times the scale s of its group of 128: x = s q, q = sum_p
2^p b_p with the highest plane negative. A weight is d (2 b - 1) with one d per group and row. So over a group

    sum_k w_k x_k = d s (2 sum_p 2^p popcount(b & b_p) - sum_k q_k)

and `mma.m16n8k128 and.popc` counts 16 rows against 8 planes at once. One block of threads has `tiles` tiles
of 16 rows; its warps share the columns in pairs of groups:

    weights of all its tiles and pairs -> registers      (on their way while the activations are quantized)
    its pairs' activations -> norm, absmax, q, planes    (each warp those that it multiplies)
    popcounts -> float32 sums per warp -> shared memory -> sum over warps, 1 / rms, SwiGLU or residual -> out

Layout (`tile`): words [L, N / 16, K / 256, 32 lanes, 4], for lane 4 g + t and a pair of groups (h = 0, 1)
word t of rows g and g + 8: one 16-byte load; scales [L, N / 16, K / 128, 8], the float16 scales of rows g and
g + 8. Rows are padded to 16 and columns to 256, by weights whose scale is 0.
"""

import functools

import jax
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith
from jax._src.lib.mlir.dialects import math as mlir_math
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import lanes

GROUP = 128
LOADS_PER_LANE = 16  # 16-byte loads that a lane has in flight before anything else: 256 bytes


def run(x, weights, part_layer, layer, gamma, eps, residual) -> jax.Array:
    """matmul's candidate: any leading axes of up to 8 rows, QTensors with or without a layer axis."""
    lead, n = x.shape[:-1], weights[0].shape[0]
    stacks = [w.fields if layer is not None else jax.tree.map(lambda a: a[None], w.fields) for w in weights]
    norm_layer = layer if gamma is not None and gamma.ndim == 2 else 0
    if residual is not None:
        residual = jnp.pad(residual.reshape(-1, n), ((0, 0), (0, -n % 16)))
    y = bit_gemv(
        x.astype(jnp.float32).reshape(-1, x.shape[-1]),
        tuple((stack["words"], stack["scales"]) for stack in stacks),
        jnp.stack([jnp.asarray(0 if i is None else i, jnp.int32) for i in (part_layer, norm_layer)]),
        gamma=gamma if gamma is None or gamma.ndim == 2 else gamma[None],
        eps=eps,
        residual=residual,
        activation_bits=weights[0].activation_bits,
    )
    return y[:, :n].reshape(*lead, n)


def plan(n_tiles: int, pairs: int) -> tuple[int, int]:
    """(warps of a block, tiles of a block), for the least idle warps and, if there are enough tiles, 132
    blocks."""
    warps = min((8, 4), key=lambda w: (-(-pairs // w) * w, -w))
    per_warp = -(-pairs // warps)
    return warps, max(1, min(LOADS_PER_LANE // per_warp, n_tiles // 128))


@functools.partial(jax.jit, static_argnames=("eps", "activation_bits"))
def bit_gemv(
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
    weights   ((words, scales),) of W, or of G and U, tiled stacks as above
    layers    int32 [2], the index into the weights' stacks and the one into gamma's
    residual  float32 [rows, N], added to y
    activation_bits  8 or 16
    Returns float32 [rows, N padded to 16]. Activations are quantized here, symmetric per group of 128.
    """
    rows, columns = x.shape
    n_tiles, pairs = weights[0][0].shape[1:3]
    if columns < pairs * 2 * GROUP:
        padding = ((0, 0), (0, pairs * 2 * GROUP - columns))
        x = jnp.pad(x, padding)
        gamma = None if gamma is None else jnp.pad(gamma, padding)
    warps, tiles = plan(n_tiles, pairs)
    operands = [a for pair in weights for a in pair] + [x, layers]
    operands += [gamma] if gamma is not None else []
    operands += [residual] if residual is not None else []
    body = functools.partial(
        _body,
        rows=rows, columns=columns, n_tiles=n_tiles, pairs=pairs, warps=warps, tiles=tiles,
        matrices=len(weights), normed=gamma is not None, added=residual is not None, eps=eps,
        bits=activation_bits,
    )  # fmt: skip
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, n_tiles * 16), jnp.float32),
        grid=(-(-n_tiles // tiles),),
        grid_names=("tiles",),
        num_threads=warps // 4,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((len(weights) * tiles, rows, warps, 16), jnp.float32),
            plgpu.SMEM((rows, warps), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(*operands)


def _body(*refs, rows, columns, n_tiles, pairs, warps, tiles, matrices, normed, added, eps, bits):
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
    def phase(ctx, *refs):
        refs = list(refs)
        weight_gmem = [(refs.pop(0), refs.pop(0)) for _ in range(matrices)]
        x_gmem, layers_gmem = refs.pop(0), refs.pop(0)
        gamma_gmem = refs.pop(0) if normed else None
        residual_gmem = refs.pop(0) if added else None
        out_gmem, sums_smem, squares_smem = refs

        thread = lanes.thread()
        warp, lane = arith.divui(thread, lanes.index(32)), arith.remui(thread, lanes.index(32))
        g, t = arith.divui(lane, lanes.index(4)), arith.remui(lane, lanes.index(4))
        layer, norm_layer = (lanes.to_index(lanes.load(layers_gmem, i)) for i in (0, 1))
        per_warp = -(-pairs // warps)
        first_tile = arith.muli(lanes.block(), lanes.index(tiles))
        tile = [
            arith.minui(arith.addi(first_tile, lanes.index(j)), lanes.index(n_tiles - 1))
            for j in range(tiles)
        ]
        # Pairs behind the last are read again, and count nothing.
        wanted = [
            arith.addi(arith.muli(lanes.index(per_warp), warp), lanes.index(p)) for p in range(per_warp)
        ]
        pair = [arith.minui(p, lanes.index(pairs - 1)) for p in wanted]
        counts = [
            arith.select(lanes.is_below(p, lanes.index(pairs)), lanes.real(1), lanes.real(0)) for p in wanted
        ]
        group = {
            (p, h): arith.addi(arith.muli(pair[p], lanes.index(2)), lanes.index(h))
            for p in range(per_warp)
            for h in (0, 1)
        }

        gammas = {
            (p, h, i): lanes.load(gamma_gmem, norm_layer, _column(group[p, h], i, lane))
            for p, h in group for i in range(4) if normed
        }  # fmt: skip

        def activations(row):
            return {
                (p, h, i): lanes.load(x_gmem, row, _column(group[p, h], i, lane))
                for p, h in group
                for i in range(4)
            }

        first_row = activations(0)  # before the weights: these are near and wanted first
        # All weights of this block, on their way at once.
        words, scales = {}, {}
        for m, (words_gmem, scales_gmem) in enumerate(weight_gmem):
            for j in range(tiles):
                for p in range(per_warp):
                    words[m, j, p] = lanes.load_vector(
                        4, words_gmem, [layer, tile[j], pair[p], lane, lanes.index(0)]
                    )
                    for h in (0, 1):
                        scales[m, j, p, h] = lanes.load(scales_gmem, layer, tile[j], group[p, h], g)

        highest = lanes.is_equal(
            t, lanes.index(3)
        )  # of this lane's planes 2 t and 2 t + 1, the second is negative
        plane_weight = arith.sitofp(
            lanes.f32(), arith.shli(lanes.integer(2), arith.muli(lanes.to_integer(t), lanes.integer(2)))
        )

        for row in range(rows):
            planes, scale, correction, squares = {}, {}, {}, lanes.real(0)
            loaded = activations(row) if row else first_row
            for p, h in group:
                x = [loaded[p, h, i] for i in range(4)]
                for v in x:
                    squares = mlir_math.fma(arith.mulf(v, counts[p]), v, squares)
                if normed:
                    x = [arith.mulf(v, gammas[p, h, i]) for i, v in enumerate(x)]
                planes[p, h], step, total = _quantize(x, lane, bits)
                scale[p, h] = arith.mulf(step, counts[p])
                correction[p, h] = arith.mulf(scale[p, h], total)
            if normed:
                squares = lanes.warp_sum_real(squares)
                lanes.store(squares, squares_smem, row, warp)
            for m in range(matrices):
                for j in range(tiles):
                    y, sums = [lanes.real(0)] * 2, [lanes.real(0)] * 2  # rows g and g + 8 of the tile
                    for p, h in group:
                        a0, a1 = (lanes.element(words[m, j, p], 2 * h + r) for r in (0, 1))
                        counted = [None, None]
                        for byte, plane in enumerate(planes[p, h]):
                            c = lanes.count_common_bits(a0, a1, plane)
                            last = byte == bits // 8 - 1
                            second = (
                                arith.select(highest, lanes.integer(-2), lanes.integer(2))
                                if last
                                else lanes.integer(2)
                            )
                            for r in (0, 1):
                                both = arith.addi(c[2 * r], arith.muli(c[2 * r + 1], second))
                                both = arith.shli(both, lanes.integer(8 * byte))
                                counted[r] = both if byte == 0 else arith.addi(counted[r], both)
                        d = lanes.halves(scales[m, j, p, h])
                        for r in (0, 1):
                            y[r] = mlir_math.fma(
                                arith.mulf(d[r], scale[p, h]), arith.sitofp(lanes.f32(), counted[r]), y[r]
                            )
                            sums[r] = mlir_math.fma(d[r], correction[p, h], sums[r])
                    for r in (0, 1):
                        total = lanes.warp_sum_real(arith.mulf(y[r], plane_weight), lanes=4)
                        total = arith.subf(total, sums[r])
                        with lanes.when(lanes.is_equal(t, lanes.index(0))):
                            lanes.store(
                                total, sums_smem, m * tiles + j, row, warp, arith.addi(g, lanes.index(8 * r))
                            )
        lanes.block_barrier()

        def over_warps(ref, before, after):
            """Sum of ref[before, warp, after] over the warps."""
            return functools.reduce(arith.addf, [lanes.load(ref, *before, w, *after) for w in range(warps)])

        # One thread an output: tiles x rows x 16 of them.
        outputs, threads = tiles * rows * 16, warps * 32
        for first in range(0, outputs, threads):
            at = arith.addi(thread, lanes.index(first))
            inside = arith.remui(at, lanes.index(16))
            row = arith.remui(arith.divui(at, lanes.index(16)), lanes.index(rows))
            j = arith.divui(at, lanes.index(16 * rows))
            n_tile = arith.addi(first_tile, j)
            valid = arith.andi(
                lanes.is_below(at, lanes.index(outputs)), lanes.is_below(n_tile, lanes.index(n_tiles))
            )
            with lanes.when(valid):
                n = arith.addi(arith.muli(n_tile, lanes.index(16)), inside)
                y = []
                for m in range(matrices):
                    slot = arith.addi(j, lanes.index(m * tiles))
                    y.append(over_warps(sums_smem, [slot, row], [inside]))
                if normed:
                    mean = arith.mulf(over_warps(squares_smem, [row], []), lanes.real(1 / columns))
                    norm = mlir_math.rsqrt(arith.addf(mean, lanes.real(eps)))
                    y = [arith.mulf(v, norm) for v in y]
                if matrices == 2:
                    denominator = arith.addf(lanes.real(1), mlir_math.exp(arith.negf(y[0])))
                    y = [arith.mulf(arith.divf(y[0], denominator), y[1])]
                if added:
                    y = [arith.addf(y[0], lanes.load(residual_gmem, row, n))]
                lanes.store(y[0], out_gmem, row, n)

    phase(*refs)


def _column(group, word: int, lane):
    """Column of bit `lane` of word `word` of a group."""
    return arith.addi(arith.muli(group, lanes.index(GROUP)), arith.addi(lanes.index(32 * word), lane))


def _quantize(x, lane, bits: int):
    """A warp's 128 activations (4 a lane) -> (planes, scale, sum of q as float32).

    planes   per 8 bits of q one word: lane 4 p + t holds word t of plane p, as the tensor core wants it
    """
    largest = lanes.integer(0)
    for v in x:
        magnitude = arith.andi(arith.bitcast(lanes.i32(), v), lanes.integer(0x7FFFFFFF))
        largest = arith.maxui(largest, magnitude)
    largest = arith.maximumf(arith.bitcast(lanes.f32(), lanes.warp_max(largest)), lanes.real(1e-20))
    top = 2 ** (bits - 1) - 1
    inverse = arith.divf(lanes.real(top), largest)
    q = [lanes.round_to_integer(arith.mulf(v, inverse)) for v in x]
    total = functools.reduce(arith.addi, q)
    # Word t of plane p is bit p of the lanes' q[t]. Transposed, lane 8 t + p holds it; lane 4 p + t wants it.
    t, p = arith.remui(lane, lanes.index(4)), arith.divui(lane, lanes.index(4))
    source = lanes.to_integer(arith.addi(arith.muli(t, lanes.index(8)), p))
    planes = []
    for byte in range(bits // 8):
        packed = lanes.integer(0)
        for i, value in enumerate(q):
            low = arith.andi(arith.shrui(value, lanes.integer(8 * byte)), lanes.integer(255))
            packed = arith.ori(packed, arith.shli(low, lanes.integer(8 * i)))
        planes.append(lanes.from_lane(lanes.transposed_bits(packed, lane), source))
    return planes, arith.mulf(largest, lanes.real(1 / top)), arith.sitofp(lanes.f32(), lanes.warp_sum(total))
