"""1-bit weights (Q1_0) times 1 to 8 rows of activations, in a launch of its own. Weights are in registers
(decode_b1.py, decode_s8.py) or in a ring of shared memory (decode_ring.py)."""

import abc
import dataclasses
import functools
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from pallas_kernels.activations import SILU, Activation
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import index, minimum
from pallas_kernels.matmul import epilogue, stacks
from pallas_kernels.matmul.bit_mma.product import GROUP, Product
from pallas_kernels.matmul.bit_mma.quantize_rows import Quantized
from pallas_kernels.matmul.prefill import in_order
from pallas_kernels.tiles import TILE_ROWS


@dataclasses.dataclass(frozen=True)
class Decode(abc.ABC):
    """A kernel with its sizes; `product` is what a block multiplies at a time."""

    name: ClassVar[str]
    product: Product

    @classmethod
    @abc.abstractmethod
    def plan(
        cls, rows: int, columns: int, n_tiles: int, pairs: int, matrices: int = 1, bits: int = 8, **rest
    ) -> Self | None:
        """The kernel for rows x columns of activations with so many bits, and such matrices; the rest as in
        Product. None if it cannot run them."""

    @property
    def tiles(self) -> int:
        """Tiles of a block."""
        return self.product.tiles

    @property
    @abc.abstractmethod
    def scratch(self) -> dict[str, Any]:
        """plgpu.SMEM, by the names of `block`'s arguments."""

    def operands(self, x: Any, gamma: jax.Array | None, layers: jax.Array) -> dict[str, Any]:
        """The activations, by the names of `block`'s arguments."""
        return {"x_gmem": x, "gamma_gmem": gamma}

    @abc.abstractmethod
    def block(self, *_: Any, **refs: Any):
        """The body of the kernel, traced for one lane: refs are weights_gmem, layers_gmem, residual_gmem,
        out_gmem, those of `operands` and those of `scratch`."""

    @classmethod
    def run(cls, x, weights, part_layer, layer, gamma, eps, residual, activation) -> jax.Array:
        """A module's `run` (execute.py), for any leading axes and QTensors with or without a layer axis.

        Returns float32 [*batch, N].
        """
        lead, n = x.shape[:-1], weights[0].shape[0]
        x = x.astype(jnp.float32).reshape(-1, x.shape[-1])
        matrices = tuple((w.fields["words"], w.fields["scales"]) for w in weights)
        matrices, part = stacks.whole(matrices, part_layer)
        gamma, norm_layer = stacks.whole(*stacks.gamma_stack(gamma, layer))
        if residual is not None:
            residual = jnp.pad(residual.reshape(-1, n), ((0, 0), (0, -n % TILE_ROWS)))
        # The third keeps XLA from making equal constants by a kernel of their own, a launch a layer.
        layers, bits = jnp.stack([part, norm_layer, jnp.int32(-1)]), weights[0].products.bits(len(x))
        y = bit_decode(
            x, matrices, layers, gamma, residual, kernel=cls, n=n, eps=eps, bits=bits,
            activation=activation if len(weights) == 2 else SILU,  # one matrix: any is the same program
        )  # fmt: skip
        return y.reshape(*lead, n)


@functools.partial(
    jax.jit, static_argnames=("kernel", "n", "eps", "bits", "activation", "rows", "normed", "summed")
)
def bit_decode(
    x: jax.Array | Quantized,
    weights: tuple[tuple[jax.Array, jax.Array], ...],
    layers: jax.Array,
    gamma: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    kernel: type[Decode],
    n: int,
    eps: float = 0.0,
    bits: int = 8,
    activation: Activation = SILU,
    rows: int | None = None,
    normed: bool = False,
    summed: bool = True,
) -> jax.Array:
    """y = x W.T for one matrix, or activation(x G.T, x U.T) for two.

    x         float32 [rows, K], 1 to 8 rows; with gamma, float32 [L, K], x is rms_norm(x; gamma[i], eps).
              Or Quantized, of `rows` rows, for decode_s8.Rounds
    weights   ((words, scales),) of W, or of G and U, tiled stacks (formats/q1_0.py)
    layers    int32 [2 or more], the index into the weights' stacks and the one into gamma's
    residual  float32 [rows, N padded to 16], added to y
    n         N, rows of each matrix; its tiles may have more
    bits      of an activation, 8 or 16; they are quantized here, symmetric per group of 128
    normed    of Quantized: whether they are gamma x, and 1 / rms(x) is still to come
    summed    False: blocks may have parts of the columns, and their sums are returned one by one
    Returns float32 [rows, N]; not summed, [splits, rows, N].
    """
    if isinstance(x, Quantized):
        assert rows is not None
        columns = len(x.q) * GROUP
    else:
        rows, columns = x.shape
    n_tiles, pairs = weights[0][0].shape[1:3]
    plan = kernel.plan(
        rows, columns, n_tiles, pairs, len(weights), bits, normed=normed or gamma is not None, eps=eps,
        activation=activation,
    )  # fmt: skip
    if plan is None:
        raise NotImplementedError(
            f"{kernel.name} is not for {rows} rows of {columns} activations of {bits} bits times "
            f"{len(weights)} matrices of {16 * n_tiles} rows; leave the choice to selection.py"
        )
    splits = plan.product.splits
    y = launch(
        plan.block,
        {
            "weights_gmem": weights, "layers_gmem": layers,
            "residual_gmem": residual if splits == 1 else None, **plan.operands(x, gamma, layers),
        },
        {"out_gmem": jax.ShapeDtypeStruct((splits, rows, n), jnp.float32)},
        name=kernel.name,
        blocks=splits * -(-n_tiles // plan.tiles),
        threads=32 * plan.product.warps,
        scratch=plan.scratch,
    )  # fmt: skip
    if not summed:
        return y
    return in_order(y, None if residual is None or splits == 1 else residual[:, :n])


class RegisterBlock:
    """A block of threads, as one of its lanes sees it, with the weights of a round in registers."""

    def __init__(self, product: Product, weights_gmem, layers_gmem, residual_gmem, out_gmem):
        self.product, self.weights_gmem = product, weights_gmem
        self.residual_gmem, self.out_gmem = residual_gmem, out_gmem
        self.me, block, self.split = product.lane_columns(), lanes.block(), 0
        if product.splits > 1:
            block, self.split = block // product.splits, block % product.splits
            self.me = self.me.shifted(self.split * product.pairs)
        self.layer = index(memory.load(layers_gmem, 0))
        self.first_tile = block * product.tiles

    def round_tiles(self, first) -> list:
        """The matrix's tiles in the round that begins at this block's tile `first`; the last one again in
        place of those beyond it."""
        p = self.product
        return [minimum(self.first_tile + first + u, p.n_tiles - 1) for u in range(p.together)]

    def load_round(self, tiles: list) -> list:
        """Request the weights of a round: of each tile, matrix and pair the words and both scales."""
        p, me, out = self.product, self.me, []
        for u, m in p.items():
            (words, scales), tile = self.weights_gmem[m], tiles[u]
            for k in range(p.per_warp):
                out.append(memory.load_vector(4, words, [self.layer, tile, me.pair[k], me.lane, 0]))
                out += [memory.load(scales, self.layer, tile, me.scale_group[k, h], me.g) for h in (0, 1)]
        return out

    def multiply(self, x, loaded: list) -> dict:
        """This warp's sums of a round."""
        p = self.product
        place = lambda m, u, k: 3 * ((u * p.matrices + m) * p.per_warp + k)  # noqa: E731
        words = lambda m, u, k: loaded[place(m, u, k)]  # noqa: E731
        return p.multiply(self.me, x, words, lambda m, u, k, h: loaded[place(m, u, k) + 1 + h])

    def added(self, outputs: list, row: int = 0) -> list:
        """The residual at each of this thread's outputs, whose rows count from `row` on."""
        if self.residual_gmem is None:
            return []
        last = 16 * self.product.n_tiles - 1
        return [memory.load(self.residual_gmem, x_row + row, minimum(n, last)) for *_, n, x_row in outputs]

    def finish(self, sums_smem, outputs: list, added: list, row: int = 0):
        """After a block barrier: sums to outputs."""

        def store(i, x_row, n, y):
            epilogue.store(y + added[i] if added else y, self.out_gmem, self.split, x_row + row, n)

        self.product.finish(sums_smem, outputs, store)
