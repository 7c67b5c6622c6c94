"""The matrix products of prefill, by model and format: TFLOP/s beside dense cuBLAS of the same shapes.

    uv run python benchmarks/gemm.py [-m bonsai-8b] [-f q4_k] [--rows 512,2048] [-o jsonl]

Each product is timed twice, and two dense ones beside it, in the same run:

    op      what the model runs: float32 activations rounded to float16 with a scale for each row (for the
            kernel of Q1_0: to 8 bits with a scale for each group), in the kernel's order, and then all of
    gemm    activations given so, with their scales; weights decoded, the GEMM, scales, SwiGLU or residual
            (q, k and v have none), float32 results. The feed-forward's second half is given its activations
            too.
    bf16    the same numbers in bfloat16 to bfloat16, all given, nothing behind it, by cuBLAS
    int8    rounded to int8, one scale for all, to int32, the same way

So `gemm` is what compares with bf16, like with like but for the decoding, which is its task, and for 32-bit
results with what stands behind them; `op` says what the model pays. Each is of several layers, so that no
weight is in the L2 cache from the time before, and of so many that a call takes about a millisecond: the
host's part of it is over while the device still works on the call before.

All programs of a model are compiled first, at the same time (XLA locks the device while it tries candidates),
and nothing is compiled while the clock runs. The four are timed in turns. They have the same numbers: at
these rates a GPU is at the limit of its power, and what a product takes of that depends on its operands: with
small integers cuBLAS is faster than with what a model has.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import math
import statistics
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import matvec
import numpy as np

from bonsai_jax import ModelConfig
from bonsai_jax.measure import bench
from bonsai_jax.network import architectures
from checkpoints import open_checkpoint
from pallas_kernels import LayerStack, QTensor, dequantize, formats, gated, matmul
from pallas_kernels.matmul.execute import kernel_of

CALL_OPERATIONS = 0.6e12  # at 600 TFLOP/s, cuBLAS's best on an H200, a millisecond
CHECKED = 64  # rows that are compared with the definition
OPS = ("qkv", "attention output", "feed-forward")
CUBLAS = {"xla_gpu_enable_triton_gemm": False}
# Of a row's error. Activations and some formats' weights are rounded to float16; or activations to 8 bits,
# which is 8e-3 of normal ones, and in the feed-forward comes three times: in gate, in up, on their product.
LIMIT, LIMIT_OF_CODES = 2e-3, 2e-2


def limit(impl: str) -> float:
    return LIMIT_OF_CODES if impl in ("bit_prefill_sm90", "cpu") else LIMIT


@dataclasses.dataclass(frozen=True)
class Row(bench.Origin):
    """One product at one shape, as it is kept for the record.

    rows        of activations
    layers      of one call
    us          of the op, median over repetitions, per layer; us_min, us_max: the spread
    gemm_us     of the GEMM alone, the same way; None where it is not apart from the op (definition, CPU)
    tflops, gemm_tflops  10^12 operations a second, two for a weight and a row
    bf16_tflops, int8_tflops  of dense products of the same shapes
    share, gemm_share  tflops and gemm_tflops over bf16_tflops
    error       norm of the difference to the definition over the definition's norm, in this run; the larger
                of the op's and the GEMM's
    """

    impl: str
    op: str
    model: str
    format: str
    shape: str
    rows: int
    layers: int
    us: float
    us_min: float
    us_max: float
    gemm_us: float | None
    gemm_us_min: float | None
    gemm_us_max: float | None
    tflops: float
    gemm_tflops: float | None
    bf16_tflops: float
    int8_tflops: float
    share: float
    gemm_share: float | None
    error: float


def weight_stacks(
    format: str, shape: tuple[int, int], layers: int, seed: int
) -> tuple[LayerStack, LayerStack]:
    """Random weights as prefill wants them, and as their format's blocks."""
    return matvec.stack(format, shape, layers, seed, 8)


def all_layers(x, y, weights: list[LayerStack], layers: int, added: bool):
    """The op of each layer, each behind the one before, by its residual and by a barrier: XLA would round the
    same x once for all of them. Returns what the last layer makes, and what others make that is not added."""
    others = []
    for layer in range(layers):
        x, y = jax.lax.optimization_barrier((x, y))
        if len(weights) == 3:
            gate, up, down = weights
            y = matmul(gated(x, gate, up, layer), down, layer, residual=y)
        else:
            others.append(None if added else y)
            y = matmul(x, weights[0], layer, residual=y if added else None)
    return y, others


def all_gemms(given, y, weights: list[LayerStack], layers: int, added: bool):
    """Their GEMMs alone. `given`: (a, scale) of the first product and of the last, as their kernels'
    prologues make them. Returns also what SwiGLU makes in each layer, which nobody reads here."""
    *two, last = [stack.parts[0] for stack in weights]
    others = []
    for layer in range(layers):
        if two:
            others.append(kernel_of(two[0], y).module.gemm(*given[0], tuple(two), layer, None))
        others.append(None if added else y)
        y = kernel_of(last, y).module.gemm(*given[-1], (last,), layer, y if added else None)
    return y, others


def dense(x, weights: list[list[jax.Array]], sums):
    """Products with each matrix of each layer, x of as many columns."""
    return [
        [jnp.einsum("mk,nk->mn", x[w.shape[1]], w, preferred_element_type=sums) for w in of_layer]
        for of_layer in weights
    ]


DENSE = {"bfloat16": jnp.bfloat16, "int8": jnp.int32}  # of products, and of their sums


@functools.partial(jax.jit, static_argnums=1)
def as_dense(x: jax.Array, dtype: str) -> jax.Array:
    """x in a dense type: bfloat16, or int8 with the largest |x| as 127."""
    return (jnp.round(x * (127 / jnp.abs(x).max())) if dtype == "int8" else x).astype(dtype)


@functools.partial(jax.jit, static_argnums=2)
def decoded(weights: list[QTensor], layer: jax.Array, dtype: str) -> jax.Array:
    """A layer of matrices of the same K, rows below rows, in a dense type."""
    return as_dense(jnp.concatenate([dequantize(w[layer]) for w in weights]), dtype)


class Weights:
    """Of one op of a model, for as many layers as its products with the fewest rows want.

    shapes         of one layer's matrices; joined: those that are one product, gate and up, as one
    ours, blocks   of each matrix, as prefill wants them and as their format's blocks
    dense          {dtype: [layer][matrix]}, the same numbers in dense types
    """

    def __init__(self, arguments: argparse.Namespace, config: ModelConfig, op: str, rows: list[int]):
        hidden, ffn_width = config.hidden, config.mlp.ffn
        self.op = op
        self.shapes = {
            "qkv": [(config.attention.q_width + 2 * config.attention.kv_width, hidden)],
            "attention output": [(hidden, config.attention.q_width)],
            "feed-forward": [(ffn_width, hidden), (ffn_width, hidden), (hidden, ffn_width)],
        }[op]
        self.joined = self.shapes if len(self.shapes) == 1 else [(2 * ffn_width, hidden), self.shapes[-1]]
        self.layers = {r: self.layers_for(arguments, r) for r in rows}
        most = max(self.layers.values())
        pairs = [weight_stacks(arguments.format, shape, most, seed) for seed, shape in enumerate(self.shapes)]
        self.ours, self.blocks = ([pair[i] for pair in pairs] for i in (0, 1))
        of_product = [self.blocks[:-1], self.blocks[-1:]][-len(self.joined) :]
        self.dense = {
            dtype: [
                [decoded([w.parts[0] for w in ws], ws[0].where[layer][1], dtype) for ws in of_product]
                for layer in range(most)
            ]
            for dtype in DENSE
        }

    def operations(self, rows: int) -> int:
        return 2 * rows * sum(math.prod(shape) for shape in self.shapes)

    def layers_for(self, arguments: argparse.Namespace, rows: int) -> int:
        num_layers = max(arguments.layers, round(CALL_OPERATIONS / self.operations(rows)))
        return min(num_layers, arguments.most_layers)


class Product:
    """An op at a number of rows: its programs, what they are given, and what comes out."""

    def __init__(self, arguments: argparse.Namespace, model: str, weights: Weights, rows: int):
        self.arguments, self.model, self.weights, self.rows = arguments, model, weights, rows
        self.layers, self.operations = weights.layers[rows], weights.operations(rows)
        self.shapes, self.joined, self.op = weights.shapes, weights.joined, weights.op
        parts = [stack.parts[0] for stack in weights.ours]
        self.kernel = parts[0].products.kernel(rows)
        rng = np.random.default_rng(0)
        self.added = self.op != "qkv"
        self.xs = [jnp.asarray(rng.standard_normal((rows, k)), jnp.float32) for _, k in self.joined]
        self.start = jnp.zeros((rows, self.shapes[-1][0]))
        factors = [tuple(parts[:-1]), tuple(parts[-1:])][-len(self.joined) :]
        self.given = []
        self.apart = self.kernel not in ("reference", "cpu")  # a GEMM behind a prologue
        if self.apart:
            self.given = [
                kernel_of(w[0], x).module.prologue(x, w, None, None, 0.0)
                for x, w in zip(self.xs, factors, strict=True)
            ]
        self.dense_x = {dtype: {x.shape[1]: as_dense(x, dtype) for x in self.xs} for dtype in DENSE}

    def programs(self) -> dict[str, tuple[jax.stages.Lowered, tuple, dict]]:
        """{name: (a call of all layers, its arguments, options of its compilation)}"""
        out, counts = {}, (self.layers, self.added)
        arguments = (self.xs[0], self.start, self.weights.ours)
        out["op"] = jax.jit(all_layers, static_argnums=(3, 4)).lower(*arguments, *counts), arguments, {}
        if self.apart:
            arguments = (self.given, self.start, self.weights.ours)
            out["gemm"] = jax.jit(all_gemms, static_argnums=(3, 4)).lower(*arguments, *counts), arguments, {}
        for dtype, sums in DENSE.items():
            arguments = (self.dense_x[dtype], self.weights.dense[dtype][: self.layers])
            out[dtype] = jax.jit(dense, static_argnums=2).lower(*arguments, sums), arguments, CUBLAS
        return out

    def definition(self) -> dict[str, jax.Array]:
        """What the first rows of "op" and "gemm" are by definition."""
        x, x_last = self.xs[0][:CHECKED], self.xs[-1][:CHECKED]
        want = {name: jnp.zeros((len(x), self.shapes[-1][0])) for name in ("op", "gemm")}
        for layer in range(self.layers) if self.added else [self.layers - 1]:
            if len(self.shapes) == 3:
                gate, up = (matvec.exact(x, w, layer) for w in self.weights.blocks[:2])
                want["op"] += matvec.exact(jax.nn.silu(gate) * up, self.weights.blocks[2], layer)
            else:
                want["op"] += matvec.exact(x, self.weights.blocks[0], layer)
            want["gemm"] += matvec.exact(x_last, self.weights.blocks[-1], layer)
        return want

    def row(self, compiled: dict[str, tuple[jax.stages.Compiled, tuple]]) -> Row:
        arguments = self.arguments
        times = {name: [] for name in compiled}
        for _ in range(arguments.repetitions):
            for name, (program, given) in compiled.items():
                step = lambda _: program(*given)  # noqa: B023, E731
                times[name] += bench.seconds_per_call(step, None, repetitions=1, calls=arguments.calls)
        us = {name: 1e6 * statistics.median(of) / self.layers for name, of in times.items()}
        spread = {name: [1e6 * end(of) / self.layers for end in (min, max)] for name, of in times.items()}
        tflops = {name: self.operations / time / 1e6 for name, time in us.items()}
        want, found = self.definition(), {}
        for name, result in want.items():
            if name in compiled:
                program, given = compiled[name]
                y, _ = program(*given)
                found[name] = matvec.difference(y[: len(result)], result)
        gemm_min, gemm_max = spread.get("gemm", [None, None])
        return Row(
            **bench.origin(arguments.commit),
            impl=self.kernel,
            op=self.op,
            model=self.model,
            format=arguments.format,
            shape=", ".join(" x ".join(map(str, shape)) for shape in self.joined),
            rows=self.rows,
            layers=self.layers,
            us=us["op"],
            us_min=spread["op"][0],
            us_max=spread["op"][1],
            gemm_us=us.get("gemm"),
            gemm_us_min=gemm_min,
            gemm_us_max=gemm_max,
            tflops=tflops["op"],
            gemm_tflops=tflops.get("gemm"),
            bf16_tflops=tflops["bfloat16"],
            int8_tflops=tflops["int8"],
            share=tflops["op"] / tflops["bfloat16"],
            gemm_share=tflops["gemm"] / tflops["bfloat16"] if "gemm" in tflops else None,
            error=max(found.values()),
        )


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    for model in arguments.models.split(","):
        config = architectures.config_of(open_checkpoint(f"synth:{model}:{arguments.format}"))
        all_rows = [int(rows) for rows in arguments.rows.split(",")]
        of_op = [Weights(arguments, config, op, all_rows) for op in OPS]
        products = [Product(arguments, model, weights, rows) for rows in all_rows for weights in of_op]
        with concurrent.futures.ThreadPoolExecutor() as threads:
            compiling = [
                {
                    name: (threads.submit(lowered.compile, compiler_options=options), given)
                    for name, (lowered, given, options) in product.programs().items()
                }
                for product in products
            ]
        for product, programs in zip(products, compiling, strict=True):
            yield product.row({name: (done.result(), given) for name, (done, given) in programs.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--models", default="bonsai-8b", help="synthetic models, for their shapes")
    parser.add_argument("-f", "--format", default="q4_k", choices=formats.names())
    parser.add_argument("--rows", default="512,2048", help="rows of activations")
    parser.add_argument("--layers", type=int, default=4, help="of a call, at least: weights are rotated")
    parser.add_argument("--most-layers", type=int, default=48, help="bounds what is compiled")
    parser.add_argument("-r", "--repetitions", type=int, default=11)
    parser.add_argument("--calls", type=int, default=5, help="calls in one repetition")
    parser.add_argument("--commit", help="for a checkout without history")
    parser.add_argument("-o", "--output", choices=("md", "jsonl"), default="md")
    arguments = parser.parse_args()
    if arguments.output == "md":
        print(
            "| op | model | format | rows | us (spread) | TFLOP/s | of bf16 | GEMM us (spread) | TFLOP/s "
            "| of bf16 | bf16 | int8 | error |"
        )
        print("| --- | --- | --- " + "| ---: " * 10 + "|")
    wrong = []
    for r in measure(arguments):
        if not r.error < limit(r.impl):
            wrong.append(f"{r.op} of {r.model}: {r.error:.1e}, at most {limit(r.impl):.0e}")
        alone = "- | - | -"
        if r.gemm_us is not None:
            alone = (
                f"{r.gemm_us:.1f} ({r.gemm_us_min:.1f} to {r.gemm_us_max:.1f}) | {r.gemm_tflops:.0f} "
                f"| {r.gemm_share:.0%}"
            )
        line = (
            f"| {r.op} ({r.impl}) | {r.model} | {r.format} | {r.rows} "
            f"| {r.us:.1f} ({r.us_min:.1f} to {r.us_max:.1f}) | {r.tflops:.0f} | {r.share:.0%} | {alone} "
            f"| {r.bf16_tflops:.0f} | {r.int8_tflops:.0f} | {r.error:.1e} |"
        )
        print(line if arguments.output == "md" else bench.json_line(r), flush=True)
    if wrong:
        raise SystemExit(f"too far from the definition: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
