"""Which kernels a prefill or a decode step runs on a GPU, in order, and how long each takes.

    python benchmarks/kernel_trace.py -m synth:bonsai-8b:q1_0 -p 2048 -b 64

It runs tests of `bonsai-jax bench` under jax.profiler: prompts of so many tokens (-p), and decode steps of so
many sequences with 128 tokens in the cache (-b). For each it prints the kernels that take longest, with their
microseconds in a prompt or a step; then a stretch from the middle of the trace, in order, with each kernel's
time and the gap after it. The profiler slows the host down, so gaps between steps are longer than usual.
benchmarks/steps.py --kernels writes such sums of decode steps as rows.
"""

import argparse
import collections
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

import bonsai_jax as bj
from bonsai_jax.measure import bench


class Launch(NamedTuple):
    """A kernel that ran, or a copy, in microseconds."""

    start: float
    stop: float
    name: str


def traced(test: bench.Test, plane: str = "GPU", line: str = "Stream") -> list[Launch]:
    """What one repetition runs, in order: the events of planes with the one word in their names, and of lines
    whose names begin with the other."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            test.run()
        planes = [
            own
            for path in Path(folder).rglob("*.xplane.pb")
            for own in jax.profiler.ProfileData.from_file(str(path)).planes
        ]
        return sorted(
            Launch(event.start_ns / 1e3, (event.start_ns + event.duration_ns) / 1e3, event.name)
            for own in planes
            if plane in own.name
            for thread in own.lines
            if thread.name.startswith(line)
            for event in thread.events
        )


def sums(launches: Sequence[Launch], units: int) -> dict[str, tuple[float, float]]:
    """Kernel -> (microseconds of a unit, launches in a unit), the slowest first; a unit is a step or a
    prompt, and there are so many."""
    spent, counts = collections.Counter[str](), collections.Counter[str]()
    for launch in launches:
        spent[launch.name] += launch.stop - launch.start
        counts[launch.name] += 1
    return {name: (us / units, counts[name] / units) for name, us in spent.most_common()}


def report(launches: Sequence[Launch], units: int, most: int, stretch: int) -> list[str]:
    """Lines: sums of the `most` slowest kernels, then a stretch of so many launches."""
    by_name = sums(launches, units)
    lines = [f"{sum(us for us, _ in by_name.values()):.1f} us of kernels in each"]
    lines += [
        f"  {name[:48]:48} {us:9.1f} us {count:6.1f} of {us / count:.2f}"
        for name, (us, count) in itertools.islice(by_name.items(), most)
    ]
    first = max(0, (len(launches) - stretch) // 2)
    lines += [
        f"    {launch.name[:48]:48} {launch.stop - launch.start:9.2f}   gap {after.start - launch.stop:6.2f}"
        for launch, after in itertools.pairwise(launches[first : first + stretch + 1])
    ]
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", "--model", required=True, help="as bonsai-jax bench -m")
    parser.add_argument("-p", "--prompts", default="", help="tokens of prompts, as 512,2048")
    parser.add_argument("-b", "--batch-sizes", default="", help="rows of a step, as 1,64")
    parser.add_argument("--most", type=int, default=12, help="kernels to name")
    parser.add_argument("--stretch", type=int, default=24, help="launches to print in order")
    options = parser.parse_args(arguments)
    prompts, batch_sizes = (
        [int(n) for n in text.split(",") if n] for text in (options.prompts, options.batch_sizes)
    )
    if not prompts + batch_sizes:
        parser.error("nothing to trace: give -p or -b")
    if jax.default_backend() == "cpu":
        parser.error("this is a CPU; kernels are traced on a GPU")
    steps = bench.BATCH_TOKENS
    most_rows = max([1, *batch_sizes])
    model = bj.load(options.model, bj.RunConfig(context=max([*prompts, 2 * steps]), batch_size=most_rows))
    tests = [("pp", n, 0, 1, 1) for n in prompts] + [("tg", steps, steps, n, steps) for n in batch_sizes]
    for kind, tokens, depth, rows, units in tests:
        test = bench.Test(model, kind, tokens, depth, rows)
        test.run()
        print(f"{test.name}:", *report(traced(test), units, options.most, options.stretch), sep="\n")


if __name__ == "__main__":
    main()
