"""The gated delta net between a layer's projections, alone: by the kernel and by the definition.

    uv run python benchmarks/delta_net.py [-m bonsai-27b] [--tokens 1,512,2048] [--rows 1,8]

Chained over the layers of one state, which each call updates in place. One token a row is a decode step,
whose gates are made of the layer's input on the way; more are prefill. The bytes are those of S and of the
convolution's tail, read and written, of what is projected, and of the outputs. A row's error is against the
definition on the same device, outputs and states together.
"""

import argparse
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import one_op

from bonsai_jax.config import RunConfig
from bonsai_jax.measure import bench
from bonsai_jax.network import architectures
from bonsai_jax.network.kinds.delta_net import DeltaNet
from checkpoints import open_checkpoint
from pallas_kernels import delta_net, selection
from pallas_kernels.delta import Gates

EPS = 1e-6
LIMIT = 1e-3  # of chunks, which multiply TF32; tests hold a step to less


@functools.partial(jax.jit, static_argnums=range(5))  # one program, not one for each array
def drawn(d: DeltaNet, hidden: int, layers: int, rows: int, tokens: int):
    """Arguments of `delta_net` behind many tokens, of numbers as a model has them."""
    draw = iter(jax.random.split(jax.random.key(0), 12))
    normal = lambda *shape: jax.random.normal(next(draw), shape)  # noqa: E731
    states = normal(layers, rows, d.v_heads, d.k_dim, d.v_dim)
    tails = normal(layers, rows, d.conv, d.qkv_width)
    positions = jnp.broadcast_to(jnp.arange(1000, 1000 + tokens), (rows, tokens)).astype(jnp.int32)
    weights = {
        "conv": normal(layers, d.qkv_width, d.conv),
        "decay": -jnp.exp(normal(layers, d.v_heads)),
        "dt": normal(layers, d.v_heads),
        "norm": 1 + 0.1 * normal(layers, d.v_dim),
    }
    matrix = (normal(layers, 2 * d.v_heads, hidden) * hidden**-0.5).astype(jnp.bfloat16)
    gates = Gates(normal(rows, tokens, hidden), 1 + 0.1 * normal(layers, hidden), matrix)
    return normal(rows, tokens, d.qkv_width + d.v_width), gates, states, tails, positions, weights


def measure_one(
    arguments: argparse.Namespace, model: str, d: DeltaNet, hidden: int, rows: int, tokens: int, impl: str
) -> one_op.Row:
    kept = d.v_heads * d.k_dim * d.v_dim + (d.conv - 1) * d.qkv_width
    written = d.v_heads * d.k_dim * d.v_dim + min(tokens, d.conv) * d.qkv_width
    moved = 4 * rows * (kept + written + tokens * (d.qkv_width + 2 * d.v_width))
    layers = one_op.layers_for(arguments, moved)
    qkv_z, gates, states, tails, positions, weights = drawn(d, hidden, layers, rows, tokens)
    options = {"eps": EPS, "grouped": d.grouped}

    def call(states, tails, layer, impl):
        return delta_net(
            qkv_z, gates, states, tails, positions, layer, **weights, **options, impl=impl, prefill_impl=impl
        )

    def all_layers(kept, impl):
        (states, tails), y = kept, None
        for layer in range(layers):
            y, states, tails = call(states, tails, layer, impl)
        return (states, tails), y

    last = layers - 1
    one = jax.jit(
        lambda states, tails, impl: [x[last] if x.ndim > 3 else x for x in call(states, tails, last, impl)],
        static_argnames="impl",
    )
    want, got = (
        np.concatenate([np.ravel(x).astype(np.float64) for x in one(states, tails, name)])
        for name in ("reference", impl)
    )
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    chain = jax.jit(functools.partial(all_layers, impl=impl), donate_argnums=0)
    counts = {"repetitions": arguments.repetitions, "calls": arguments.calls}
    state = chain((states, tails))
    times = bench.seconds_per_call(lambda state: chain(state[0]), state, **counts)
    # Of what lies in memory from layer to layer: the rest of a prefill is made by the products before.
    light = one_op.light_seconds([jax.random.normal(jax.random.key(1), (layers, rows, kept))], **counts)
    return one_op.row(
        arguments, times, light, moved, launches=layers, op=f"delta net, {tokens} tokens", model=model,
        impl=impl, shape=f"{d.k_heads} x {d.k_dim} / {d.v_heads} x {d.v_dim}", rows=rows, layers=layers,
        error=error,
    )  # fmt: skip


def measure(arguments: argparse.Namespace) -> Iterator[one_op.Row]:
    for model in arguments.models.split(","):
        config = architectures.config_of(open_checkpoint(f"synth:{model}:q1_0"))
        if config.delta_net is None:
            raise SystemExit(f"{model} has no layers with a gated delta net; bonsai-27b has")
        for rows in map(int, arguments.rows.split(",")):
            for tokens in map(int, arguments.tokens.split(",")):
                problem = config.delta_net.problems(RunConfig())[tokens > 1]
                for impl in dict.fromkeys((selection.choose(problem), "reference")):
                    yield measure_one(arguments, model, config.delta_net, config.hidden, rows, tokens, impl)


def main() -> None:
    parser = one_op.parser((__doc__ or "").splitlines()[0], "bonsai-27b")
    parser.add_argument("--tokens", default="1,512,2048", help="of each row: 1 is a decode step")
    arguments = parser.parse_args()
    one_op.report_and_check(measure(arguments), arguments.output, LIMIT)


if __name__ == "__main__":
    main()
