"""Decode steps at several batch sizes, and what each kernel takes of them.

    python benchmarks/steps.py -m synth:qwen3-30b-a3b:q4_k_m -b 17,32,64 --layers 12 --kernels > rows.jsonl

It times what `bonsai-jax bench -n 0 -p 0 -b 17,32,64` times. --layers gives a synth: model fewer layers, so
that its step compiles sooner; the output matrix and all else around the layers stay. --kernels adds the time
of each kernel. XLA then launches kernels one by one, without CUDA graphs, so the step itself is slower. A row
has the commit, the device and:

    us, us_min, us_max  of a step, the median and the extremes of the repetitions
    kernels             name -> [microseconds of a step, launches in a step], the slowest first; null without
                        --kernels
"""

import argparse
import dataclasses
import gc
import os
import statistics
from collections.abc import Iterator

import jax
from kernel_trace import sums, traced

import bonsai_jax as bj
from bonsai_jax.measure import bench
from checkpoints import synth


@dataclasses.dataclass(frozen=True)
class Row(bench.Origin):
    """Steps at one batch size; see the top of this file."""

    model: str
    layers: int
    rows: int
    depth: int
    us: float
    us_min: float
    us_max: float
    kernels: dict[str, tuple[float, float]] | None
    state_dtype: str = "float32"


def with_layers(source: str, layers: int | None) -> str:
    """The source of a synth: model, which has that many layers from now on; None: as it is. Raises SystemExit
    for a file."""
    if layers is None:
        return source
    prefix, _, rest = source.partition(":")
    name = rest.partition(":")[0]
    if prefix != "synth" or name not in synth.MODELS:
        raise SystemExit(f"--layers: {source} is a file; only synth: models can have fewer layers")
    synth.MODELS[name] = dataclasses.replace(synth.MODELS[name], layers=layers)
    return source


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    batch_sizes = [int(rows) for rows in arguments.batch_sizes.split(",")]
    source = with_layers(arguments.model, arguments.layers)
    context = arguments.depth + arguments.tokens
    run = bj.RunConfig(batch_size=max(batch_sizes), context=context, state_dtype=arguments.state_dtype)
    model = bj.load(source, run)
    for rows in batch_sizes:
        test = bench.Test(model, "tg", arguments.tokens, arguments.depth, rows)
        times = [rows * 1e6 / test.run() for _ in range(arguments.repetitions)]
        yield Row(
            **bench.origin(), model=source, layers=model.config.num_layers, rows=rows, depth=arguments.depth,
            us=statistics.median(times), us_min=min(times), us_max=max(times),
            kernels=sums(traced(test), test.tokens) if arguments.kernels else None,
            state_dtype=run.state_dtype,
        )  # fmt: skip
        del test
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", "--model", required=True, help="as bonsai-jax bench -m")
    parser.add_argument("-b", "--batch-sizes", default="1,8,32", help="rows of a step, as 1,8,32")
    parser.add_argument("-d", "--depth", type=int, default=bench.BATCH_TOKENS, help="tokens before")
    parser.add_argument("-n", "--tokens", type=int, default=bench.BATCH_TOKENS, help="steps of each")
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("--layers", type=int, help="of a synth: model; without: all")
    parser.add_argument("--state-dtype", default="float32", help="of delta nets' states")
    parser.add_argument("--kernels", action="store_true", help="add what each kernel takes")
    arguments = parser.parse_args()
    if arguments.kernels:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {bench.ONE_BY_ONE}"
        if jax.default_backend() == "cpu":
            raise SystemExit("--kernels: this is a CPU; kernels are timed on a GPU")
    for row in measure(arguments):
        print(bench.json_line(row), flush=True)


if __name__ == "__main__":
    main()
