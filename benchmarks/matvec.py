"""Each matrix product of a decode step, alone: time, bytes a second, share of the copy rate.

    uv run python benchmarks/matvec.py [-m bonsai-8b,bonsai-4b,bonsai-1.7b] [--rows 1,8] [-o jsonl]

A product is chained over the layers of its stack by its residual: y <- W_l x + y, so that each launch waits
for the one before and nothing stands between them. gate and up have no residual: they are timed together with
down, as the feed-forward of a layer, and down's time is taken off. The head has none either: a slice of its
logits is the next one's input.

Activations are whole numbers times powers of two with the largest code in each group, so that kernels which
quantize them do so exactly, and a whole chain is within 1e-5 of its definition. That of the feed-forward is
not (its second half quantizes what its first half makes): there one gate and up is compared.
"""

import argparse
import functools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import one_op

from bonsai_jax import ModelConfig, architectures, bench
from checkpoints import open_checkpoint
from pallas_kernels import LayerStack, QTensor, device, dispatch, formats, gated, matmul
from pallas_kernels.qtensor import dequantize, tile

EPS = 1e-6
LIMIT = 1e-5


def stack(
    format: str, shape: tuple[int, int], layers: int, seed: int, bits: int
) -> tuple[LayerStack, LayerStack]:
    """Random weights of each layer, as the device's kernels want them and as the format's blocks."""
    impl = dispatch.choose(dispatch.Problem("matmul", device.platform(), format, shape))
    lead = (layers, shape[0], shape[1] // formats.get(format).WEIGHTS)
    fields = formats.random_fields(format, jax.random.key(seed), lead, 0.0, shape[1] ** -0.5)
    blocks = QTensor(fields, format, shape, activation_bits=bits)
    where = tuple((0, layer) for layer in range(layers))
    held = blocks if impl == "xla" else jax.jit(tile)(blocks)
    return LayerStack((held,), where), blocks


def exact_activations(rng: np.random.Generator, rows: int, columns: int, bits: int) -> jax.Array:
    """Whole numbers up to the largest code, which every group of 128 has, times powers of two."""
    top = 2 ** (bits - 1) - 1
    x = rng.integers(-top, top + 1, (rows, -(-columns // 128), 128)).astype(np.float64)
    x[..., 5] = top
    x *= 2.0 ** (rng.integers(-1, 2, (*x.shape[:2], 1)) - bits + 1)
    return jnp.asarray(x.reshape(rows, -1)[:, :columns], jnp.float32)


def difference(got: jax.Array, want: jax.Array) -> float:
    got, want = (np.asarray(a, np.float64) for a in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@jax.jit
def exact(x: jax.Array, blocks: QTensor, layer: jax.Array) -> jax.Array:
    """x W_l.T in float32, from the blocks of the file, which no kernel reads."""
    return jnp.einsum("rk,nk->rn", x, dequantize(blocks[layer]), precision=jax.lax.Precision.HIGHEST)


def normed_x(x: jax.Array, gamma: jax.Array) -> jax.Array:
    x64 = np.asarray(x, np.float64)
    norm = np.sqrt((x64**2).mean(-1, keepdims=True) + EPS)
    return jnp.asarray(x64 * np.asarray(gamma, np.float64) / norm, jnp.float32)


class Products:
    """The matrix products of one model's layer, at a number of rows."""

    def __init__(self, arguments: argparse.Namespace, model: str, config: ModelConfig, rows: int):
        self.arguments, self.model, self.config, self.rows = arguments, model, config, rows
        self.rng = np.random.default_rng(0)
        self.counts = {"repetitions": arguments.repetitions, "calls": arguments.calls}

    def layers_of(self, *shapes: tuple[int, int]) -> tuple[int, int]:
        """(layers of the chain, bytes of a launch)"""
        module = formats.get(self.arguments.format)
        moved = sum(math.prod(s) // module.WEIGHTS * module.BLOCK.itemsize for s in shapes)
        return one_op.layers_for(self.arguments, moved), moved

    def gamma(self, layers: int, columns: int) -> jax.Array:
        """Powers of two, one for a group: scaled by them, exact activations stay exact."""
        powers = 2.0 ** self.rng.integers(-1, 2, (layers, -(-columns // 128)))
        return jnp.asarray(np.repeat(powers, 128, axis=1)[:, :columns], jnp.float32)

    def row(self, op: str, times, light, moved, shape, layers, impl, error) -> one_op.Row:
        return one_op.row(
            self.arguments, times, light, moved, launches=layers, op=op, model=self.model, impl=impl,
            shape=" x ".join(map(str, shape)), rows=self.rows, layers=layers, error=error,
        )  # fmt: skip

    def product(self, op: str, shape: tuple[int, int], *, normed: bool, added: bool = True) -> one_op.Row:
        arguments = self.arguments
        layers, moved = self.layers_of(shape)
        held, blocks = stack(arguments.format, shape, layers, 1, arguments.activation_bits)
        x = exact_activations(self.rng, self.rows, shape[1], arguments.activation_bits)
        gamma = self.gamma(layers, shape[1]) if normed else None
        norms = [x if gamma is None else normed_x(x, gamma[layer]) for layer in range(layers)]

        @jax.jit
        def added_up(y, x, held, gamma):
            for layer in range(layers):
                y = matmul(x, held, layer, gamma=gamma, eps=EPS, residual=y)
            return y

        @jax.jit
        def handed_on(y, held, gamma):
            for layer in range(layers):
                y = matmul(y[:, : shape[1]], held, layer, gamma=gamma, eps=EPS)
            return y

        if added:
            start = want = jnp.zeros((self.rows, shape[0]))
            got = added_up(start, x, held, gamma)
            for layer in range(layers):
                want += exact(norms[layer], blocks, layer)
            chain = lambda y: added_up(y, x, held, gamma)  # noqa: E731
        else:
            got = start = jax.jit(functools.partial(matmul, eps=EPS))(x, held, layers - 1, gamma=gamma)
            want = exact(norms[-1], blocks, layers - 1)
            chain = lambda y: handed_on(y, held, gamma)  # noqa: E731
        error = difference(got, want)
        del blocks
        times = bench.seconds_per_call(chain, start, **self.counts)
        light = one_op.light_seconds(jax.tree.leaves(held), **self.counts)
        return self.row(op, times, light, moved, shape, layers, held.parts[0].impl, error)

    def feed_forward(self, down_us: Callable[[], float]) -> one_op.Row:
        arguments, config = self.arguments, self.config
        up_shape, down_shape = (config.ffn, config.hidden), (config.hidden, config.ffn)
        bits = arguments.activation_bits
        layers, _ = self.layers_of(up_shape, up_shape, down_shape)
        _, moved = self.layers_of(up_shape, up_shape)
        (gate, gate_blocks), (up, up_blocks), (down, _) = (
            stack(arguments.format, shape, layers, seed, bits)
            for seed, shape in enumerate((up_shape, up_shape, down_shape))
        )
        x = exact_activations(self.rng, self.rows, config.hidden, bits)
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
        both = bench.seconds_per_call(lambda x: chain(x, gate, up, down, gamma), x, **self.counts)
        light = one_op.light_seconds(jax.tree.leaves((gate, up)), **self.counts)
        times = [t - layers * 1e-6 * down_us() for t in both]
        return self.row(
            "gate, up (with down, less down)",
            times,
            light,
            moved,
            up_shape,
            layers,
            gate.parts[0].impl,
            error,
        )

    def all(self) -> Iterator[one_op.Row]:
        c = self.config
        yield self.product("qkv", (c.q_width + 2 * c.kv_width, c.hidden), normed=True)
        yield self.product("attention output", (c.hidden, c.q_width), normed=False)
        down = self.product("down", (c.hidden, c.ffn), normed=False)
        yield self.feed_forward(lambda: down.us)
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
