"""Which kernels a prefill or a decode step runs on a GPU, in order, and how long each takes.

    python benchmarks/kernel_trace.py -m synth:bonsai-8b:q1_0 -p 2048 -b 64

Runs tests of `bonsai-jax bench` under jax.profiler: prompts of so many tokens (-p), and decode steps of so
many sequences with 128 tokens in the cache (-b). Prints how many microseconds a prompt or a step spends in
each kernel, the longest first, and then a stretch from the middle of the trace: each kernel in order, its
time, and the gap behind it. The profiler slows the host down, so gaps between steps are longer than without.
"""

import argparse
import collections
import gzip
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax

import bonsai_jax as bj
from bonsai_jax.measure import bench


class Launch(NamedTuple):
    """A kernel that ran, or a copy: microseconds since the trace began, and its name."""

    start: float
    stop: float
    name: str


def launches(events: list[dict[str, Any]], process: str = "GPU", thread: str = "Stream") -> list[Launch]:
    """What GPUs ran, in order, of the events of a trace in Chrome's format: those of threads whose names, and
    whose processes' names, have these words in them."""
    processes, threads = (
        {
            (event["pid"], event.get("tid", 0) if kind == "thread_name" else 0): event["args"]["name"]
            for event in events
            if event.get("ph") == "M" and event["name"] == kind
        }
        for kind in ("process_name", "thread_name")
    )
    return sorted(
        Launch(event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("ph") == "X"
        and process in processes.get((event["pid"], 0), "")
        and thread in threads.get((event["pid"], event["tid"]), "")
    )


def report(each: list[Launch], units: int, most: int, stretch: int) -> list[str]:
    """Lines: sums by name of `units` prompts or steps, the `most` longest of them, and a stretch."""
    times, counts = collections.Counter[str](), collections.Counter[str]()
    for launch in each:
        times[launch.name] += launch.stop - launch.start
        counts[launch.name] += 1
    lines = [f"{sum(times.values()) / units:.1f} us of kernels in each"]
    lines += [
        f"  {name[:48]:48} {total / units:9.1f} us {counts[name] / units:6.1f} of {total / counts[name]:.2f}"
        for name, total in times.most_common(most)
    ]
    first = max(0, (len(each) - stretch) // 2)
    some = each[first : first + stretch + 1]
    lines += [
        f"    {launch.name[:48]:48} {launch.stop - launch.start:9.2f}   gap {after.start - launch.stop:6.2f}"
        for launch, after in itertools.pairwise(some)
    ]
    return lines


def traced(test: bench.Test, **names: str) -> list[Launch]:
    """What one repetition runs, behind another; names as for `launches`."""
    test.run()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            test.run()
        (path,) = Path(folder).rglob("perfetto_trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))
    return launches(events["traceEvents"] if isinstance(events, dict) else events, **names)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-p", "--prompts", default="", help="tokens of prompts: 512,2048")
    parser.add_argument("-b", "--batches", default="", help="sequences of steps: 1,64")
    parser.add_argument("-k", "--kernels", type=int, default=12, help="how many kernels to name (12)")
    parser.add_argument("-s", "--stretch", type=int, default=24, help="launches of the stretch (24)")
    options = parser.parse_args(arguments)
    prompts, batches = ([int(n) for n in text.split(",") if n] for text in (options.prompts, options.batches))
    if not prompts + batches:
        parser.error("give -p or -b")
    if jax.default_backend() == "cpu":
        parser.error("the kernels of a GPU are traced, and there is none")
    steps = bench.BATCH_TOKENS
    model = bj.load(options.model, bj.RunConfig(context=max([*prompts, 2 * steps])))
    tests = [("pp", n, 0, 1, 1) for n in prompts] + [("tg", steps, steps, n, steps) for n in batches]
    for kind, tokens, depth, rows, units in tests:
        test = bench.Test(model, kind, tokens, depth, rows)
        print(f"{test.name}:", *report(traced(test), units, options.kernels, options.stretch), sep="\n")


if __name__ == "__main__":
    main()
