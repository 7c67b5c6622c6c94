"""Decode kernels of 1-bit weights that are a launch of their own: how they are called, and a block of threads
that has its weights in registers (decode_b1.py, decode_s8.py; decode_ring.py has them in shared memory)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import index, minimum
from pallas_kernels.matmul import stacks
from pallas_kernels.matmul.bit_mma.product import Product, Section
from pallas_kernels.tiles import ROWS


def run(kernel: Callable, x, weights, part_layer, layer, gamma, eps, residual) -> jax.Array:
    """A module's `run` (execute.py), for any leading axes and QTensors with or without a layer axis.

    kernel  (x, stacks, layers, **options) -> y
    Returns float32 [*batch, N].
    """
    lead, n = x.shape[:-1], weights[0].shape[0]
    x = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    matrices = tuple((w.fields["words"], w.fields["scales"]) for w in weights)
    matrices, part = stacks.whole(matrices, part_layer)
    gamma, norm_layer = stacks.whole(*stacks.of_gamma(gamma, layer))
    if residual is not None:
        residual = jnp.pad(residual.reshape(-1, n), ((0, 0), (0, -n % ROWS)))
    y = kernel(
        x,
        matrices,
        # The third keeps XLA from making equal constants by a kernel of their own, a launch a layer.
        jnp.stack([part, norm_layer, jnp.int32(-1)]),
        gamma=gamma,
        eps=eps,
        residual=residual,
        activation_bits=weights[0].products.activation_bits,
    )
    return y[:, :n].reshape(*lead, n)


class RegisterBlock:
    """A block of threads, as one of its lanes sees it, with the weights of a round in registers."""

    def __init__(self, product: Product, weight_gmem, layers_gmem, residual_gmem, out_gmem):
        self.product, self.weight_gmem = product, weight_gmem
        self.residual_gmem, self.out_gmem = residual_gmem, out_gmem
        self.layer = index(memory.load(layers_gmem, 0))
        self.me, self.first_tile = product.lane_columns(), lanes.block() * product.tiles

    def load_round(self, first) -> list:
        """Weights of a round from this block's tile `first` on, all on their way at once: for each tile,
        matrix and pair the words and both groups' scales."""
        p, me, out = self.product, self.me, []
        for u, m in p.items():
            (words, scales), tile = self.weight_gmem[m], minimum(self.first_tile + first + u, p.n_tiles - 1)
            for k in range(p.per_warp):
                out.append(memory.load_vector(4, words, [self.layer, tile, me.pair[k], me.lane, 0]))
                out += [memory.load(scales, self.layer, tile, me.scale_group[k, h], me.g) for h in (0, 1)]
        return out

    def multiply(self, x, loaded: list, items: list) -> dict:
        """This warp's sums of some items of a round, of which all weights are there."""
        p = self.product
        place = lambda m, u, k: 3 * ((u * p.matrices + m) * p.per_warp + k)  # noqa: E731
        return p.multiply(
            self.me, x, items,
            lambda m, u, k: loaded[place(m, u, k)],
            lambda m, u, k, h: loaded[place(m, u, k) + 1 + h],
        )  # fmt: skip

    def added(self, outputs: list, row: int = 0) -> list:
        """The residual of each of this thread's outputs, which are of rows from `row` on."""
        if self.residual_gmem is None:
            return []
        last = 16 * self.product.n_tiles - 1
        return [memory.load(self.residual_gmem, x_row + row, minimum(n, last)) for *_, n, x_row in outputs]

    def finish(self, section: Section, sums_smem, outputs: list, added: list, row: int = 0):
        """After a block barrier: outputs from their sums."""

        def store(i, x_row, n, y):
            memory.store(y + added[i] if added else y, self.out_gmem, x_row + row, n)

        self.product.finish(section, sums_smem, outputs, store)
