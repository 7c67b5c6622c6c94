"""The matrix products of prefill, by model and format: TFLOP/s beside dense cuBLAS of the same shapes.

    uv run python benchmarks/gemm.py [-m bonsai-8b] [-f q4_k] [--rows 512,2048] [-o jsonl]

A product is what the model runs: activations to float16, weights decoded, the GEMM, residual or SwiGLU; each
of several layers, so that no weight is in the L2 cache from the time before. Beside it, in the same run: the
same products of bfloat16 by bfloat16, and of int8 by int8 with int32 sums, by XLA's choice of GEMM (cuBLAS),
with nothing before and nothing behind them.
"""

import argparse
import dataclasses
import math
import statistics
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import matvec
import numpy as np

from bonsai_jax import ModelConfig, architectures, bench
from checkpoints import open_checkpoint
from pallas_kernels import LayerStack, device, dispatch, ffn, formats, matmul

LIMIT = 2e-3  # activations and some formats' weights are rounded to float16


@dataclasses.dataclass(frozen=True)
class Row(bench.Origin):
    """One product at one shape, as it is kept for the record.

    rows        of activations
    us          median over repetitions, per layer; us_min, us_max: the spread
    tflops      10^12 operations a second, two for a weight and a row
    bf16_tflops, int8_tflops  of dense products of the same shapes
    share       tflops over bf16_tflops
    error       norm of the difference to the definition over the definition's norm, in this run
    """

    impl: str
    op: str
    model: str
    format: str
    shape: str
    rows: int
    us: float
    us_min: float
    us_max: float
    tflops: float
    bf16_tflops: float
    int8_tflops: float
    share: float
    error: float


def held(format: str, shape: tuple[int, int], layers: int, seed: int) -> tuple[LayerStack, LayerStack]:
    """Random weights as prefill wants them, and as their format's blocks."""
    stack, blocks = matvec.stack(format, shape, layers, seed, 8)
    gemm = dispatch.choose(dispatch.Problem("gemm", device.platform(), format, shape))
    tiled = stack.parts[0].replace(gemm=gemm)
    return LayerStack((tiled,), stack.where), LayerStack((blocks,), stack.where)


def dense_us(shapes: list[tuple[int, int]], rows: int, layers: int, dtype, **counts) -> float:
    """Microseconds of the dense products of one layer."""
    sums = jnp.int32 if dtype == jnp.int8 else dtype
    key = jax.random.key(0)
    weights = [
        [jax.random.randint(key, s, -8, 8, jnp.int8).astype(dtype) for s in shapes] for _ in range(layers)
    ]
    x = {k: jax.random.randint(key, (rows, k), -8, 8, jnp.int8).astype(dtype) for k in {k for _, k in shapes}}

    @jax.jit
    def products(x, weights):
        return [
            [jnp.einsum("mk,nk->mn", x[w.shape[1]], w, preferred_element_type=sums) for w in of_layer]
            for of_layer in weights
        ]

    times = bench.seconds_per_call(lambda _: products(x, weights), None, **counts)
    return 1e6 * statistics.median(times) / layers


def product(arguments: argparse.Namespace, model: str, config: ModelConfig, rows: int, op: str) -> Row:
    hidden, format = config.hidden, arguments.format
    shapes = {
        "qkv": [(config.q_width + 2 * config.kv_width, hidden)],
        "attention output": [(hidden, config.q_width)],
        "feed-forward": [(config.ffn, hidden), (config.ffn, hidden), (hidden, config.ffn)],
    }[op]
    layers = arguments.layers
    weights = [held(format, shape, layers, seed) for seed, shape in enumerate(shapes)]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((rows, shapes[0][1])), jnp.float32)

    @jax.jit
    def all_layers(x, y, weights):
        """Each behind the one before, by its residual."""
        for layer in range(layers):
            if len(weights) == 3:
                y = ffn(x, *weights, layer, residual=y)
            else:
                y = matmul(x, weights[0], layer, residual=y)
        return y

    start = jnp.zeros((rows, shapes[-1][0]))
    ours, theirs = ([pair[i] for pair in weights] for i in (0, 1))
    got, want = all_layers(x[:64], start[:64], ours), all_layers(x[:64], start[:64], theirs)
    counts = {"repetitions": arguments.repetitions, "calls": arguments.calls}
    times = bench.seconds_per_call(lambda _: all_layers(x, start, ours), None, **counts)
    us = [1e6 * t / layers for t in times]
    del weights, ours, theirs
    joined = [shapes[0]] if len(shapes) == 1 else [(2 * config.ffn, hidden), shapes[-1]]
    dense = [dense_us(joined, rows, layers, dtype, **counts) for dtype in (jnp.bfloat16, jnp.int8)]
    operations = 2 * rows * sum(math.prod(shape) for shape in shapes)
    tflops = [operations / t / 1e6 for t in (statistics.median(us), *dense)]
    problem = dispatch.Problem("gemm", device.platform(), format, shapes[0])
    return Row(
        **bench.origin(arguments.commit),
        impl=dispatch.choose(problem),
        op=op,
        model=model,
        format=format,
        shape=", ".join(" x ".join(map(str, shape)) for shape in joined),
        rows=rows,
        us=statistics.median(us),
        us_min=min(us),
        us_max=max(us),
        tflops=tflops[0],
        bf16_tflops=tflops[1],
        int8_tflops=tflops[2],
        share=tflops[0] / tflops[1],
        error=matvec.difference(got, want),
    )


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    for model in arguments.models.split(","):
        config = architectures.config_of(open_checkpoint(f"synth:{model}:{arguments.format}"))
        for rows in map(int, arguments.rows.split(",")):
            for op in ("qkv", "attention output", "feed-forward"):
                yield product(arguments, model, config, rows, op)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--models", default="bonsai-8b", help="synthetic models, for their shapes")
    parser.add_argument("-f", "--format", default="q4_k", choices=formats.names())
    parser.add_argument("--rows", default="512,2048", help="rows of activations")
    parser.add_argument("--layers", type=int, default=4, help="of which the weights are rotated")
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("--calls", type=int, default=5, help="calls in one repetition")
    parser.add_argument("--commit", help="for a checkout without history")
    parser.add_argument("-o", "--output", choices=("md", "jsonl"), default="md")
    arguments = parser.parse_args()
    if arguments.output == "md":
        print("| op | model | format | rows | us (spread) | TFLOP/s | bf16 | int8 | of bf16 | error |")
        print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    wrong = []
    for r in measure(arguments):
        wrong += [f"{r.op} of {r.model}: {r.error:.1e}"] if not r.error < LIMIT else []
        line = (
            f"| {r.op} ({r.impl}) | {r.model} | {r.format} | {r.rows} "
            f"| {r.us:.1f} ({r.us_min:.1f} to {r.us_max:.1f}) | {r.tflops:.0f} | {r.bf16_tflops:.0f} "
            f"| {r.int8_tflops:.0f} | {r.share:.0%} | {r.error:.1e} |"
        )
        print(line if arguments.output == "md" else bench.json_line(r), flush=True)
    if wrong:
        raise SystemExit(f"further than {LIMIT:.0e} from the definition: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
