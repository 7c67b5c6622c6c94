"""The norm of a router's input and its logits, for the few tokens of a decode step, in one launch.

    block 0      sum of x^2 | (gamma x) W.T of rows 0 .. rows - 1
    block 1      sum of x^2 | (gamma x) W.T of the next rows
    ..
    last block   sum of x^2 | (gamma x) r, if there is one more row

1 / rms(x) is a factor of all outputs, so each block needs it only at its end. Threads share the columns, and
their sums meet in shared memory, in one order. Block t also writes the normed token t. More than 8 tokens are
several such groups of blocks, since a block multiplies its tokens one after the other.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import fma, integer, minimum, real, select, sum_of_squares
from pallas_kernels.matmul.epilogue import inverse_rms, over_warps
from pallas_kernels.qtensor import QTensor

THREADS = 256
WARPS = THREADS // 32
NUMBERS = 64  # of W in a thread's registers, at most
MOST_TOKENS = 8  # of a block
MOST_COLUMNS = 4 * THREADS * NUMBERS // 4


def run(x: jax.Array, vectors: tuple, w: QTensor, part_layer, layer, eps: float) -> tuple:
    """(normed [T, H], logits [T, E], row [T] or None), as routing.normed_logits; vectors: norms, bias and row
    of all layers."""
    norms, bias, row = vectors
    # One number each: XLA would fill an array of two equal ones in a launch of its own.
    indices = tuple(jnp.asarray(index, jnp.int32).reshape(1) for index in (part_layer, layer))
    matrices = w.fields["w"].reshape(-1, *w.shape)
    outputs = router_logits(x, norms, matrices, bias, row, indices, eps=eps)
    return (*outputs, None)[:3]


@functools.partial(jax.jit, static_argnames="eps")
def router_logits(
    x: jax.Array,
    norms: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    row: jax.Array | None,
    indices: tuple[jax.Array, jax.Array],
    *,
    eps: float,
) -> tuple[jax.Array, ...]:
    """n = gamma x / sqrt(mean(x^2) + eps),  logits = n W.T + bias,  n r

    x        float32 [T, H], H a multiple of 4 and at most MOST_COLUMNS
    norms    float32 [L, H]: gamma of each layer
    w        float32, float16 or bfloat16 [layers, E, H]
    bias     float32 [L, E]; row: float32 [L, H]; None: there is none
    indices  int32 [1] each: of the layer in w, and in the others
    Returns n [T, H], logits [T, E] and, of a row, n r [T]: float32.
    """
    (tokens, columns), count = x.shape, w.shape[1]
    if columns % 4 or columns > MOST_COLUMNS:
        raise NotImplementedError(
            f"a router of {columns} columns; multiples of 4 up to {MOST_COLUMNS} can run"
        )
    steps = -(-columns // (4 * THREADS))
    groups = -(-tokens // MOST_TOKENS)
    rows = max(1, min(-(-count * groups // device.multiprocessors()), NUMBERS // (4 * steps)))
    own_tokens = -(-tokens // groups)
    results = {
        "normed_gmem": jax.ShapeDtypeStruct((tokens, columns), jnp.float32),
        "logits_gmem": jax.ShapeDtypeStruct((tokens, count), jnp.float32),
    }
    if row is not None:
        results["product_gmem"] = jax.ShapeDtypeStruct((tokens,), jnp.float32)
    return launch(
        functools.partial(_body, rows=rows, own_tokens=own_tokens, eps=eps),
        {
            "x_gmem": x, "norms_gmem": norms, "w_gmem": w, "bias_gmem": bias, "row_gmem": row,
            "indices_gmem": indices,
        },
        results,
        name="router_logits",
        blocks=groups * (-(-count // rows) + (row is not None)),
        threads=THREADS,
        scratch={"sums_smem": plgpu.SMEM((own_tokens * (rows + 1) * WARPS,), jnp.float32)},
    )  # fmt: skip


def _body(
    x_gmem, norms_gmem, w_gmem, bias_gmem, row_gmem, indices_gmem, normed_gmem, logits_gmem,
    product_gmem=None, *, sums_smem, rows: int, own_tokens: int, eps: float,
):  # fmt: skip
    count = w_gmem.type.shape[1]
    blocks = -(-count // rows)
    group = integer(lanes.block()) // (blocks + (row_gmem is not None))
    block = integer(lanes.block()) - group * (blocks + (row_gmem is not None))
    w_layer, layer = (memory.load(index, 0) for index in indices_gmem)
    columns = _Columns(x_gmem, norms_gmem, layer, sums_smem, group * own_tokens, own_tokens, eps)

    def products_with_rows():
        first = block * rows
        numbers = [minimum(first + r, count - 1) for r in range(rows)]
        columns.multiply([columns.load(w_gmem, w_layer, number) for number in numbers])

        def store(token, r, y):
            number = first + r
            with lanes.when(number < count):
                y = y if bias_gmem is None else y + memory.load(bias_gmem, layer, number)
                memory.store(y, logits_gmem, token, number)

        columns.store_products(rows, store)
        columns.store_normed(normed_gmem, rows, block, blocks)

    def product_with_row():
        columns.multiply([columns.load(row_gmem, layer)])
        columns.store_products(1, lambda token, _, y: memory.store(y, product_gmem, token))

    if row_gmem is None:
        products_with_rows()
        return
    with lanes.when(block < blocks):
        products_with_rows()
    with lanes.when(block == blocks):
        product_with_row()


class _Columns:
    """The columns that a thread has, of each 4 * THREADS its 4, of `own_tokens` tokens or those that are left
    from the first on."""

    def __init__(self, x_gmem, norms_gmem, layer, sums_smem, first_token, own_tokens: int, eps: float):
        self.x_gmem, self.sums_smem, self.eps = x_gmem, sums_smem, eps
        tokens, self.columns = x_gmem.type.shape
        self.first_token = first_token
        self.tokens = minimum(tokens - first_token, own_tokens)
        self.thread = integer(lanes.thread(reuse=True))
        self.starts = [(self.thread + first) * 4 for first in range(0, -(-self.columns // 4), THREADS)]
        self.gamma = self.load(norms_gmem, layer)

    def load(self, ref, *indices) -> list:
        """This thread's numbers of a row; behind its end anything."""
        places = [minimum(start, self.columns - 4) for start in self.starts]
        return [v for place in places for v in memory.load_reals(4, ref, [*indices, place])]

    def token(self, token) -> list:
        """This thread's numbers of x of one of the block's tokens, zeros behind the end."""
        x = self.load(self.x_gmem, self.first_token + token)
        if self.columns % (4 * THREADS) == 0:
            return x
        return [*x[:-4], *(select(self.starts[-1] < self.columns, v, 0.0) for v in x[-4:])]

    def multiply(self, rows: list[list]):
        """Of each token the warps' sums of x^2, and of gamma x times each row, to shared memory."""

        def one(token, carry):
            x = self.token(token)
            scaled = [v * gamma for v, gamma in zip(x, self.gamma, strict=True)]
            sums = [sum_of_squares(x), *(total_of_products(scaled, row) for row in rows)]
            for number, value in enumerate(map(lanes.warp_sum_real, sums)):
                with lanes.when(self.thread % 32 == 0):
                    memory.store(
                        value, self.sums_smem, self.place(token, number, len(rows), self.thread // 32)
                    )
            return carry

        lanes.loop(0, self.tokens, 1, [], lambda token, carry: one(integer(token), carry))
        lanes.block_barrier()

    def place(self, token, number, rows: int, warp):
        """Where a warp's sum lies: number 0 is that of x^2."""
        return (token * (rows + 1) + number) * WARPS + warp

    def sum(self, token, number, rows: int):
        return over_warps(lambda w: memory.load(self.sums_smem, self.place(token, number, rows, w)), WARPS)

    def scale(self, token, rows: int):
        """1 / rms of a token."""
        return inverse_rms(self.sum(token, 0, rows), self.columns, self.eps)

    def store_products(self, rows: int, store):
        """store(token, row, product) of each."""

        def one(at, carry):
            token, row = integer(at) // rows, integer(at) % rows
            store(self.first_token + token, row, self.sum(token, row + 1, rows) * self.scale(token, rows))
            return carry

        lanes.loop(self.thread, self.tokens * rows, THREADS, [], one)

    def store_normed(self, normed_gmem, rows: int, first, step: int):
        """Each `step`th of the block's tokens from the first on."""

        def one(token, carry):
            token = integer(token)
            scale, x = self.scale(token, rows), self.token(token)
            for i, start in enumerate(self.starts):
                part = slice(4 * i, 4 * i + 4)
                y = [gamma * (v * scale) for v, gamma in zip(x[part], self.gamma[part], strict=True)]
                with lanes.when(start < self.columns):
                    memory.store_reals(y, normed_gmem, [self.first_token + token, start])
            return carry

        lanes.loop(first, self.tokens, step, [], one)


def total_of_products(a: list, b: list):
    """a . b, from left to right, each product rounded once."""
    return functools.reduce(lambda so_far, pair: fma(*pair, so_far), zip(a, b, strict=True), real(0))
