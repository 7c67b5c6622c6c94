"""1-bit weights (Q1_0) times up to 8 rows of activations, on the integer tensor cores: the bits of a word
become bytes once, for all rows.

decode_b1.py counts bits of one row's eight planes, and each block of threads quantizes the row itself. Of
more rows, each would cost as much again. Here a column of the tensor core is a row of x, no planes are made,
and a launch of its own quantizes (quantize_rows.py): otherwise every multiprocessor would read all rows as
float32, 52 MB for 8 rows of 12,288, more than the weights. With the same integers q and scales s

    sum_k w_k x_k = sum over groups of 128 of   d (2 s (sum_k b_k q_k) - s sum_k q_k)        w = d (2 b - 1)

which is exact within a group, as there. As formats/q1_0.py tiles them, lane 4 g + t has word t of rows g
and g + 8 of a group, bit 8 b + i of it being column 32 t + 8 b + i. `word << 7 - i & 0x80808080` is therefore
what mma.m16n8k32 wants as four neighbouring k of a row, a 1 being 128, if the activations' columns are taken
in the same order.

A block of threads has `tiles` tiles of 16 rows; its warps share the columns in pairs of groups:

    weights of the first round -> registers, its columns' integers and scales -> shared memory
    per round of tiles: loads of the next round begin; bits -> bytes -> mma -> float32 sums per warp
                        -> shared memory -> sum over warps, 1 / rms, SwiGLU or residual -> out
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.gpu import lanes, memory, shared_memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import as_real, as_word, fma, index, integer, minimum, real, select
from pallas_kernels.matmul import epilogue
from pallas_kernels.matmul.bit_mma import decode as bit_decode
from pallas_kernels.matmul.bit_mma.byte_product import bits_as_bytes, multiply_group
from pallas_kernels.matmul.bit_mma.decode import GROUP
from pallas_kernels.matmul.bit_mma.quantize_rows import ROWS, quantize_rows

ITEMS = 8  # tiles times pairs of a warp in one round: as many 16-byte loads a lane has in flight


def run(*arguments) -> jax.Array:
    """Products of 4 to 8 rows, which it makes as fast as fewer (execute.py)."""
    return bit_decode.run(bit_decode_s8, *arguments)


def plan(n_tiles: int, pairs: int, matrices: int, bits: int, shared: int) -> tuple[int, int, int] | None:
    """(warps of a block, tiles of a block, tiles of a round), for the least idle warps; None where
    integers and sums are more than so many bytes of shared memory."""
    warps = min((8, 12, 4), key=lambda w: -(-pairs // w) * w)
    tiles, per_warp = -(-n_tiles // device.multiprocessors()), -(-pairs // warps)
    together = max(1, min(tiles, ITEMS // (matrices * per_warp)))
    together = -(-tiles // -(-tiles // together))
    words = _scratch(warps, per_warp, together * matrices, bits)
    fits = shared_memory.bytes_taken(*(4 * count for count in words)) <= shared
    return (warps, tiles, together) if fits else None


def _scratch(warps: int, per_warp: int, sums: int, bits: int) -> tuple[int, int, int, int]:
    """Words of shared memory for integers, scales, sums and squares."""
    groups = 2 * warps * per_warp
    return groups * bits // 8 * 256, groups * 2 * ROWS, sums * ROWS * _sums_of_row(warps), ROWS * warps


def _sums_of_row(warps: int) -> int:
    return warps * 16 + 4  # 4: rows that are stored together lie in other banks


@functools.partial(jax.jit, static_argnames=("eps", "activation", "activation_bits"))
def bit_decode_s8(
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
    Returns float32 [rows, N padded to 16]. Activations are quantized by `quantize_rows`.
    """
    rows, columns = x.shape
    n_tiles, pairs = weights[0][0].shape[1:3]
    if columns < pairs * 2 * GROUP:
        padding = ((0, 0), (0, pairs * 2 * GROUP - columns))
        x = jnp.pad(x, padding)
        gamma = None if gamma is None else jnp.pad(gamma, padding)
    planned = plan(n_tiles, pairs, len(weights), activation_bits, device.shared_bytes())
    if planned is None:
        raise NotImplementedError(
            f"{rows} rows of {columns} activations do not fit {device.shared_bytes()} bytes of "
            "shared memory; split the rows"
        )
    product = ByteProduct(
        rows, columns, n_tiles, pairs, len(weights), *planned,
        normed=gamma is not None, eps=eps, bits=activation_bits, activation=activation,
    )  # fmt: skip
    i32, f32 = jnp.int32, jnp.float32
    dtypes = {"q_smem": i32, "scales_smem": f32, "sums_smem": f32, "squares_smem": f32}
    return launch(
        lambda **refs: _Block(product, **refs).run(),
        {
            "weight_gmem": weights,
            "quantized_gmem": quantize_rows(x, layers, gamma=gamma, activation_bits=activation_bits),
            "layers_gmem": layers,
            "residual_gmem": residual,
        },
        {"out_gmem": jax.ShapeDtypeStruct((rows, n_tiles * 16), jnp.float32)},
        name="bit_decode_s8",
        blocks=-(-n_tiles // product.tiles),
        threads=32 * product.warps,
        scratch={
            name: plgpu.SMEM((size,), dtype)
            for (name, dtype), size in zip(dtypes.items(), product.scratch, strict=True)
        },
    )


@dataclasses.dataclass(frozen=True)
class ByteProduct:
    """Static sizes: rows and columns of the activations, tiles of 16 rows and pairs of groups of a matrix,
    and the plan (warps and tiles of a block, tiles of a round)."""

    rows: int
    columns: int
    n_tiles: int
    pairs: int
    matrices: int
    warps: int
    tiles: int
    together: int
    normed: bool
    eps: float
    bits: int
    activation: Activation

    @property
    def per_warp(self) -> int:
        return -(-self.pairs // self.warps)

    @property
    def scratch(self) -> tuple[int, int, int, int]:
        return _scratch(self.warps, self.per_warp, self.together * self.matrices, self.bits)

    @property
    def group_bytes(self) -> int:
        """Of the integers of a group, for 8 rows."""
        return self.bits // 8 * 1024


class _Block:
    """What a block of threads does, as one of its lanes sees it."""

    def __init__(
        self, sizes: ByteProduct, weight_gmem, quantized_gmem, layers_gmem, residual_gmem, out_gmem,
        q_smem, scales_smem, sums_smem, squares_smem,
    ):  # fmt: skip
        self.sizes, self.weight_gmem, self.quantized_gmem = sizes, weight_gmem, quantized_gmem
        self.residual_gmem, self.out_gmem = residual_gmem, out_gmem
        self.q_smem, self.scales_smem = q_smem, scales_smem
        self.sums_smem, self.squares_smem = sums_smem, squares_smem
        self.thread = integer(lanes.thread())
        self.warp, self.lane = self.thread // 32, self.thread % 32
        self.g, self.t = self.lane // 4, self.lane % 4
        self.layer = index(memory.load(layers_gmem, 0))
        self.first_tile = integer(lanes.block()) * sizes.tiles
        self.count = minimum(integer(sizes.tiles), sizes.n_tiles - self.first_tile)
        self.first_pair = self.warp * sizes.per_warp
        self.pair = [minimum(self.first_pair + p, sizes.pairs - 1) for p in range(sizes.per_warp)]
        # Of a round: tile, matrix, pair.
        self.items = list(
            itertools.product(range(sizes.together), range(sizes.matrices), range(sizes.per_warp))
        )

    def run(self):
        ahead = self.load_round(integer(0))
        self.bring_activations()

        def one_round(first, loaded):
            first = integer(first)
            sizes = self.sizes
            ahead = self.load_round(first + sizes.together) if sizes.tiles > sizes.together else loaded
            self.store_sums(self.multiply(loaded))
            lanes.block_barrier()
            self.store_outputs(first)
            lanes.block_barrier()
            return ahead

        lanes.loop(0, self.count, self.sizes.together, ahead, one_round)

    def load_round(self, first) -> list:
        """Weights of a round from this block's tile `first` on: words, both groups' scales."""
        out = []
        for j, m, p in self.items:
            tile = index(minimum(self.first_tile + first + j, self.sizes.n_tiles - 1))
            words, scales = self.weight_gmem[m]
            at = [self.layer, tile, self.pair[p], self.lane, 0]
            out.append(memory.load_vector(4, words, at))
            for h in (0, 1):
                out.append(memory.load(scales, self.layer, tile, self.pair[p] * 2 + h, self.g))
        return out

    def bring_activations(self):
        """This warp's integers and scales to shared memory. Pairs behind the last count nothing."""
        sizes, lane = self.sizes, self.lane
        q_gmem, scales_gmem, squares_gmem = self.quantized_gmem
        of_pair, of_lane = self.first_pair * (2 * sizes.group_bytes), lane * 16
        self.q = memory.shared_address(self.q_smem) + of_pair + of_lane
        self.scales = memory.shared_address(self.scales_smem) + self.first_pair * (2 * ROWS * 8)
        q_at, squares = memory.address(q_gmem), real(0)
        for k in range(2 * sizes.per_warp):
            group = self.pair[k // 2] * 2 + k % 2
            counts = self.first_pair + k // 2 < sizes.pairs
            source = memory.at_byte(q_at, group, sizes.group_bytes, of_lane)
            for half in range(sizes.group_bytes // 512):
                memory.copy_async(self.q + k * sizes.group_bytes, source, 16, at=half * 512)
            scale = memory.load(scales_gmem, group, lane % 16 // 2, lane % 2)
            scale = as_word(select(counts, scale, 0.0))
            memory.store_shared([scale], self.scales + lane % 16 * 4, k * ROWS * 8)
            if sizes.normed:
                square = memory.load(squares_gmem, group, self.g)
                squares = squares + select(counts, square, 0.0)
        memory.commit_copies()
        if sizes.normed:
            memory.store(squares, self.squares_smem, self.g * sizes.warps + self.warp)
        memory.wait_copies(0)
        lanes.warp_barrier()

    def multiply(self, loaded: list) -> dict:
        """Weights of a round -> this warp's sums {(j, m): [row g, g + 8][row of x 2 t, 2 t + 1]}."""
        digits = self.sizes.bits // 8
        y = {(j, m): [[real(0)] * 2 for _ in range(2)] for j, m, _ in self.items}
        for p, h in itertools.product(range(self.sizes.per_warp), (0, 1)):
            at = (2 * p + h) * self.sizes.group_bytes
            b = [
                [
                    word
                    for half in (0, 1)
                    for word in memory.load_shared(4, self.q, at + digit * 1024 + half * 512)
                ]
                for digit in range(digits)
            ]
            stats = memory.load_shared(4, self.scales + self.t * 16, (2 * p + h) * ROWS * 8)
            stats = [as_real(v) for v in stats]
            for n, (j, m, of) in enumerate(self.items):
                if of != p:
                    continue
                words, d = loaded[3 * n], lanes.halves(loaded[3 * n + 1 + h])
                bits = [bits_as_bytes(lanes.element(words, 2 * h + r)) for r in (0, 1)]
                sums = multiply_group(bits, b)
                for r, c in itertools.product((0, 1), (0, 1)):
                    product = fma(sums[2 * r + c], stats[2 * c], stats[2 * c + 1])
                    y[j, m][r][c] = fma(d[r], product, y[j, m][r][c])
        return y

    def place(self, j, m, row):
        """Where the sums of a tile, a matrix and a row of x begin."""
        matrices = self.sizes.matrices
        return (j * (matrices * ROWS) + m * ROWS + row) * _sums_of_row(self.sizes.warps)

    def store_sums(self, y: dict):
        for (j, m), of_tile in y.items():
            for r, c in itertools.product((0, 1), (0, 1)):
                at = self.place(integer(j), m, self.t * 2 + c) + self.warp * 16 + self.g + 8 * r
                memory.store(of_tile[r][c], self.sums_smem, at)

    def store_outputs(self, first):
        """Of a round, one thread each."""
        sizes = self.sizes

        def over_warps(ref, at, stride):
            return epilogue.over_warps(lambda w: memory.load(ref, at + w * stride), sizes.warps)

        def one(at, carry):
            at = integer(at)
            inside, row, j = at % 16, at // 16 % sizes.rows, at // 16 // sizes.rows
            n = index((self.first_tile + first + j) * 16 + inside)
            y = [
                over_warps(self.sums_smem, self.place(j, m, row) + inside, 16) for m in range(sizes.matrices)
            ]
            norm = None
            if sizes.normed:
                squares = over_warps(self.squares_smem, row * sizes.warps, 1)
                norm = epilogue.inverse_rms(squares, sizes.columns, sizes.eps)
            y = epilogue.output(y, norm, sizes.activation)
            if self.residual_gmem is not None:
                y = y + memory.load(self.residual_gmem, row, n)
            memory.store(y, self.out_gmem, row, n)
            return carry

        last = minimum(integer(sizes.together), self.count - first)
        lanes.loop(self.thread, last * (16 * sizes.rows), 32 * sizes.warps, [], one)
