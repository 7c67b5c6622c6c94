"""Whole calls of `generate`, and first pieces of `stream`, by programs that are there.

    python benchmarks/generate.py -m synth:bonsai-8b:q1_0 -b 1,8,64,256 [-p 128] [-n 256] [-r 5] > rows.jsonl

Each call has other prompts, of random tokens, and goes on past ends of answers. Four calls before do not
count: the last of them compiles what programs of other sizes stood in for (engine/stand_in.py). With more
than 64 prompts RunConfig.batch_size is as large; all else is as the library has it. A row has the commit,
the device and:

    prompts         of a call
    tok_s, tok_s_min, tok_s_max  new tokens per second of whole calls: the median and the extremes
    first_piece_ms  median time of `stream` until it yields, for one prompt, else null
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

import bonsai_jax as bj
from bonsai_jax.measure import bench

BATCH_SIZE = 64  # that a model has if nothing is said
UNCOUNTED = 4


@dataclasses.dataclass(frozen=True)
class Row(bench.Origin):
    """Calls with one number of prompts; see the top of this file."""

    model: str
    prompts: int
    prompt_tokens: int
    new_tokens: int
    tok_s: float
    tok_s_min: float
    tok_s_max: float
    first_piece_ms: float | None


def seconds(call: Callable[[int], object], repetitions: int) -> list[float]:
    """Of each call(number) that counts."""
    times = []
    for number in range(UNCOUNTED + repetitions):
        begin = time.perf_counter()
        call(number)
        times.append(time.perf_counter() - begin)
    return times[UNCOUNTED:]


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    counts = [int(count) for count in arguments.prompts.split(",")]
    most = max(counts)
    model = bj.load(arguments.model, bj.RunConfig(batch_size=most if most > BATCH_SIZE else 0))
    how = {"max_new_tokens": arguments.new_tokens, "ignore_eos": True}

    def prompts(count: int, call: int) -> list[list[int]]:
        rng = np.random.default_rng(count << 16 | call)
        return rng.integers(0, model.config.vocab_size, (count, arguments.prompt_tokens)).tolist()

    for count in counts:
        times = seconds(
            lambda call, n=count: bj.generate(model, prompts(n, call), **how), arguments.repetitions
        )
        speeds = [count * arguments.new_tokens / t for t in times]
        first_piece = None
        if count == 1:
            pieces = seconds(
                lambda call: next(bj.stream(model, *prompts(1, call), **how)), arguments.repetitions
            )
            first_piece = round(1e3 * statistics.median(pieces), 2)
        yield Row(
            **bench.origin(arguments.commit),
            model=arguments.model,
            prompts=count,
            prompt_tokens=arguments.prompt_tokens,
            new_tokens=arguments.new_tokens,
            tok_s=round(statistics.median(speeds), 1),
            tok_s_min=round(min(speeds), 1),
            tok_s_max=round(max(speeds), 1),
            first_piece_ms=first_piece,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", default="demo")
    parser.add_argument("-b", "--prompts", default="1", help="numbers of prompts of a call, by commas")
    parser.add_argument("-p", "--prompt-tokens", type=int, default=128)
    parser.add_argument("-n", "--new-tokens", type=int, default=256)
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("--commit", help="for a checkout without history")
    for row in measure(parser.parse_args()):
        print(bench.json_line(row), flush=True)


if __name__ == "__main__":
    main()
