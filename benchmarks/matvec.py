"""Each matrix product of a decode step, alone: time, bytes a second, share of the copy rate.

    uv run python benchmarks/matvec.py [-m bonsai-8b,bonsai-4b,bonsai-1.7b] [--rows 1,8] [-o jsonl]

A product is chained over the layers of its stack by its residual: y <- W_l x + y, so that each launch waits
for the one before and nothing stands between them. gate and up have no residual: they are timed together with
down, as the feed-forward of a layer, and down's time is taken off, median from median; its spread is then
that of the whole less that of down, the least of the one less the most of the other. The head has none
either: a slice of its logits is the next one's input.

Activations are whole numbers times powers of two with the largest code in each group that a kernel rounds
together, so that kernels which quantize them do so exactly. A whole chain is then within 1e-5 of its
definition, whatever the format. What is left is the rounding of float32 sums, 2^-24 of a partial sum at each
addition:

    one sum of K products    partial sums grow as sqrt(k), so the norm of the error over the norm of the
                             result is about 2^-24 sqrt(K / 8), 2.3e-6 for K = 12288, if one sum is made one
                             product after the other. That is no bound but what random signs give (1.7e-6 to
                             3.2e-6 when tried); who splits the sum is nearer, as all here do: XLA's product
                             8e-7, a kernel in tests/pallas_kernels/lockstep 1e-7.
    codes times codes        whole numbers: exact; an addition for each group of 16, 32 or 128 is rounded
    weights d sc q - m       d sc and d sc q have at most 23 bits, so their difference alone is rounded. The
                             kernel sums the two parts apart, with an error of each part's own size: for
                             random weights they are 1.2 and 1.1 times the difference.
    chain of L layers        errors of products add as the products do, as sqrt(L)

The feed-forward is not that near (its second half quantizes what its first half makes): there one gate and up
is compared.
"""

import argparse
import functools
import math
import statistics
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import one_op

from bonsai_jax import ModelConfig
from bonsai_jax.measure import bench
from bonsai_jax.network import architectures
from checkpoints import open_checkpoint
from pallas_kernels import LayerStack, QTensor, for_device, formats, gated, matmul
from pallas_kernels.qtensor import dequantize

EPS = 1e-6
LIMIT = 1e-5
DISTINCT_MB = 256  # of a stack's weights: layers beyond have those of earlier ones, in memory of their own


def weight_bytes(format: str, *shapes: tuple[int, int]) -> int:
    module = formats.get(format)
    return sum(math.prod(s) // module.WEIGHTS * module.BLOCK.itemsize for s in shapes)


# One program, not one for each field.
random_fields = jax.jit(formats.random_fields, static_argnums=(0, 2))


def stack(
    format: str, shape: tuple[int, int], layers: int, seed: int, bits: int, matrices: int = 1
) -> tuple[LayerStack, LayerStack]:
    """Random weights of each layer, as the device's kernels want them and as the format's blocks (of which
    layers with the same weights share one)."""
    # To draw 4 GB would take tens of GB of numbers between; to a cache equal bytes elsewhere are others.
    distinct = min(layers, max(2, -(-DISTINCT_MB * 10**6 // weight_bytes(format, shape))))
    lead = (distinct, shape[0], shape[1] // formats.get(format).WEIGHTS)
    fields = random_fields(format, jax.random.key(seed), lead, 0.0, shape[1] ** -0.5)
    blocks = QTensor(fields, format, shape)
    weights = jax.jit(functools.partial(for_device, matrices=matrices, bits=bits))(blocks)
    return (
        LayerStack((repeated(weights, layers),), tuple((0, layer) for layer in range(layers))),
        LayerStack((blocks,), tuple((0, layer % distinct) for layer in range(layers))),
    )


@functools.partial(jax.jit, static_argnums=1)
def repeated(w: QTensor, layers: int) -> QTensor:
    """As many layers, again and again those there are."""
    return jax.tree.map(lambda a: jnp.concatenate([a] * -(-layers // len(a)))[:layers], w)


def codes(format: str, bits: int) -> tuple[int, int]:
    """(columns that the format's kernel rounds together, its largest code)"""
    if formats.family(format) != "int":
        return 128, 2 ** (bits - 1) - 1
    # Of two digits, each a signed byte.
    return formats.get(format).LANES.activation_group, 127 if bits == 8 else 127 * 257


def exact_activations(rng: np.random.Generator, rows: int, columns: int, format: str, bits: int) -> jax.Array:
    """Whole numbers up to the largest code, times powers of two. Every eight columns have the largest code,
    because kernels on CPUs round parts of a group by themselves."""
    group, top = codes(format, bits)
    x = rng.integers(-top, top + 1, (rows, -(-columns // group), group)).astype(np.float64)
    x[..., 5::8] = top
    x *= 2.0 ** (rng.integers(-1, 2, (*x.shape[:2], 1)) - bits + 1)
    return jax.device_put(np.float32(x.reshape(rows, -1)[:, :columns]))


def difference(got: jax.Array, want: jax.Array) -> float:
    got, want = (np.asarray(a, np.float64) for a in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


# To search for the fastest product would take longer than the products.
@functools.partial(
    jax.jit, compiler_options={"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
)
def _exact(x: jax.Array, blocks: QTensor, index: jax.Array) -> jax.Array:
    return jnp.einsum("rk,nk->rn", x, dequantize(blocks[index]), precision=jax.lax.Precision.HIGHEST)


def exact(x: jax.Array, blocks: LayerStack, layer: int) -> jax.Array:
    """x W_l.T in float32, from the blocks of the file, which no kernel reads."""
    part, index = blocks.where[layer]
    return _exact(x, blocks.parts[part], index)


def normed_x(x: jax.Array, gamma: jax.Array) -> jax.Array:
    x64 = np.asarray(x, np.float64)
    norm = np.sqrt((x64**2).mean(-1, keepdims=True) + EPS)
    return jax.device_put(np.float32(x64 * np.asarray(gamma, np.float64) / norm))


class Products:
    """The matrix products of one model's layer, at a number of rows."""

    def __init__(self, arguments: argparse.Namespace, model: str, config: ModelConfig, rows: int):
        self.arguments, self.model, self.config, self.rows = arguments, model, config, rows
        self.rng = np.random.default_rng(0)
        self.counts = {"repetitions": arguments.repetitions, "calls": arguments.calls}

    def layers_with(self, *shapes: tuple[int, int]) -> tuple[int, int]:
        """(layers of the chain, bytes of a launch)"""
        moved = weight_bytes(self.arguments.format, *shapes)
        return one_op.layers_for(self.arguments, moved), moved

    def gamma(self, layers: int, columns: int) -> jax.Array:
        """Powers of two, one for 128 columns, whole groups: scaled by them, exact activations stay exact."""
        powers = 2.0 ** self.rng.integers(-1, 2, (layers, -(-columns // 128)))
        return jax.device_put(np.float32(np.repeat(powers, 128, axis=1)[:, :columns]))

    def activations(self, columns: int) -> jax.Array:
        arguments = self.arguments
        return exact_activations(self.rng, self.rows, columns, arguments.format, arguments.activation_bits)

    def row(self, op: str, times, light, moved, shape, layers, impl, error) -> one_op.Row:
        return one_op.row(
            self.arguments, times, light, moved, launches=layers, op=op, model=self.model, impl=impl,
            shape=" x ".join(map(str, shape)), rows=self.rows, layers=layers, error=error,
        )  # fmt: skip

    def product(self, op: str, shape: tuple[int, int], *, normed: bool, added: bool = True) -> one_op.Row:
        arguments = self.arguments
        layers, moved = self.layers_with(shape)
        weights, blocks = stack(arguments.format, shape, layers, 1, arguments.activation_bits)
        x = self.activations(shape[1])
        gamma = self.gamma(layers, shape[1]) if normed else None
        norms = [x if gamma is None else normed_x(x, gamma[layer]) for layer in range(layers)]

        @jax.jit
        def added_up(y, x, weights, gamma):
            for layer in range(layers):
                y = matmul(x, weights, layer, gamma=gamma, eps=EPS, residual=y)
            return y

        @jax.jit
        def handed_on(y, weights, gamma):
            for layer in range(layers):
                y = matmul(y[:, : shape[1]], weights, layer, gamma=gamma, eps=EPS)
            return y

        if added:
            start = want = jnp.zeros((self.rows, shape[0]))
            got = added_up(start, x, weights, gamma)
            for layer in range(layers):
                want += exact(norms[layer], blocks, layer)
            chain = lambda y: added_up(y, x, weights, gamma)  # noqa: E731
        else:
            got = start = jax.jit(functools.partial(matmul, eps=EPS))(x, weights, layers - 1, gamma=gamma)
            want = exact(norms[-1], blocks, layers - 1)
            chain = lambda y: handed_on(y, weights, gamma)  # noqa: E731
        error = difference(got, want)
        del blocks
        times = bench.seconds_per_call(chain, start, **self.counts)
        light = one_op.light_seconds(jax.tree.leaves(weights), **self.counts)
        return self.row(
            op, times, light, moved, shape, layers, weights.parts[0].products.kernel(self.rows), error
        )

    def feed_forward(self, down: one_op.Row) -> one_op.Row:
        arguments, config = self.arguments, self.config
        up_shape, down_shape = (config.mlp.ffn, config.hidden), (config.hidden, config.mlp.ffn)
        bits = arguments.activation_bits
        layers, _ = self.layers_with(up_shape, up_shape, down_shape)
        _, moved = self.layers_with(up_shape, up_shape)
        (gate, gate_blocks), (up, up_blocks), (w_down, _) = (
            stack(arguments.format, shape, layers, seed, bits, matrices=2 if seed < 3 else 1)
            for seed, shape in enumerate((up_shape, up_shape, down_shape))
        )
        x = self.activations(config.hidden)
        gamma = self.gamma(layers, config.hidden)

        @jax.jit
        def chain(x, gate, up, down, gamma):
            for layer in range(layers):
                hidden = gated(x, gate, up, layer, gamma=gamma, eps=EPS)
                x = matmul(hidden, down, layer, residual=x)
            return x

        last = layers - 1
        one = jax.jit(lambda x, gate, up, gamma: gated(x, gate, up, last, gamma=gamma, eps=EPS))
        g, u = (exact(normed_x(x, gamma[last]), w, last) for w in (gate_blocks, up_blocks))
        error = difference(one(x, gate, up, gamma), jax.nn.silu(g) * u)
        del gate_blocks, up_blocks
        both = bench.seconds_per_call(lambda x: chain(x, gate, up, w_down, gamma), x, **self.counts)
        light = one_op.light_seconds(jax.tree.leaves((gate, up)), **self.counts)
        less = [layers * 1e-6 * us for us in (down.us_max, down.us, down.us_min)]
        whole = (min(both), statistics.median(both), max(both))
        times = [all_of_it - part for all_of_it, part in zip(whole, less, strict=True)]
        return self.row(
            "gate, up (with down, less down)",
            times,
            light,
            moved,
            up_shape,
            layers,
            gate.parts[0].products.kernel(self.rows),
            error,
        )

    def all(self) -> Iterator[one_op.Row]:
        c, a = self.config, self.config.attention
        yield self.product("qkv", (a.q_width + 2 * a.kv_width, c.hidden), normed=True)
        yield self.product("attention output", (c.hidden, a.q_width), normed=False)
        down = self.product("down", (c.hidden, c.mlp.ffn), normed=False)
        yield self.feed_forward(down)
        yield down
        yield self.product("head", (c.vocab_size, c.hidden), normed=True, added=False)


def measure(arguments: argparse.Namespace) -> Iterator[one_op.Row]:
    for model in arguments.models.split(","):
        config = architectures.config_of(open_checkpoint(f"synth:{model}:{arguments.format}"))
        for rows in map(int, arguments.rows.split(",")):
            yield from Products(arguments, model, config, rows).all()


def main() -> None:
    parser = one_op.parser(__doc__.splitlines()[0], "bonsai-8b,bonsai-4b,bonsai-1.7b")
    parser.add_argument("-f", "--format", default="q1_0", choices=formats.names())
    parser.add_argument("--activation-bits", type=int, choices=(8, 16), default=8)
    arguments = parser.parse_args()
    one_op.report_and_check(measure(arguments), arguments.output, LIMIT)


if __name__ == "__main__":
    main()
