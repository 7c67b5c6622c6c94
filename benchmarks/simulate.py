"""An engine's scheduler on a clock that is a number (bonsai_jax/measure/simulate.py): beside a real engine,
and to say how many devices some requests a minute need.

    python benchmarks/simulate.py check -m demo --rows 8 --requests 40 --rate 3
    python benchmarks/simulate.py need --rows 256 -m synth:bonsai-8b:q1_0 --a-minute 10,1000,100000 \\
        --also batch16=8260,batch256=30667 --dispatch-ms 6.5

check   measures steps and prefill of the model here as `bench` does, and what a dispatch costs beside (one
        request through an engine that runs nothing else). Then requests come at random, --rate a second on
        average (0: all at once), to a real engine and to the simulated one. --cpu-time counts seconds of this
        process on its processor: for a machine that others use, pinned to one core (taskset -c 0), and all
        requests at once, since such a clock stands still while an engine waits for the next
need    the highest rate of one device at which 95 of 100 requests of engine_requests.csv have their first
        token within --ttft seconds and their others within --per-token seconds each, by bisection; from it,
        devices for each number of requests a minute, and what these requests see then. Times are the newest
        rows of the model in --results, with those of --also beside them
A line for each result, as JSON. Arrivals are a Poisson process.
"""

import argparse
import asyncio
import csv
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import bonsai_jax as bj
from bonsai_jax.engine.plans import Limits
from bonsai_jax.engine.runner import ON_CPU
from bonsai_jax.measure import bench
from bonsai_jax.measure.simulate import Arrival, StepTimes, quantile, simulate

HERE = Path(__file__).parent
SHARE = 0.9  # of the most that a device can bear: near it, waits differ from draw to draw
Clock = Callable[[], float]
SAMPLING = bj.SamplingParams(seed=0)


def poisson(sizes: list[tuple[int, int]], rate: float, seed: int = 0) -> list[Arrival]:
    """Requests of these sizes, so many a second on average; 0: all at once."""
    if not rate:
        return [Arrival(0.0, *size) for size in sizes]
    at = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, len(sizes)))
    return [Arrival(s, *size) for s, size in zip(at.tolist(), sizes, strict=True)]


def trace(count: int) -> list[tuple[int, int]]:
    """Sizes of engine_requests.csv, again from the beginning where there are not enough."""
    with (HERE / "engine_requests.csv").open() as file:
        rows = [(int(row["prompt_tokens"]), int(row["new_tokens"])) for row in csv.DictReader(file)]
    return (rows * math.ceil(count / len(rows)))[:count]


def seen(times: list[tuple[float, float]], seconds: float, new_tokens: int) -> dict[str, float]:
    """times: of each request, to its first token and of each token behind."""
    out = {"seconds": seconds, "new_tok_s": new_tokens / seconds}
    for name, values in zip(("ttft", "per_token"), zip(*times, strict=True), strict=True):
        out |= {f"{name}_p{share}_s": quantile(values, share / 100) for share in (50, 95)}
    return out


# Beside a real engine.


def measured(model: bj.Model, most_rows: int, repetitions: int, clock: Clock) -> list[dict[str, Any]]:
    """Rows of `bench` that StepTimes asks for."""
    tests = [("pp", n, 0, 1) for n in (32, 128, 512)] + [("pp", 512, 512, 1)]
    tests += [("gen", 128, depth, 1) for depth in (0, 512)]
    tests += [("gen", 128, 128, 2**i) for i in range(1, 12) if 2**i <= most_rows]
    rows = []
    for sizes in tests:
        test = bench.Test(model, *sizes)
        seconds = []
        for _ in range(repetitions):
            began = clock()
            test.run()
            seconds.append(clock() - began)
        tokens = test.rows * test.tokens
        rows.append({"test": test.name, "tok_s": tokens / statistics.median(seconds)})
    return rows


async def answered(
    engine: bj.Engine, arrivals: list[Arrival], clock: Clock
) -> tuple[list[tuple[float, float]], float]:
    """Times of each request of a real engine, as `seen` has them, and seconds to the last token."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 1000, arrival.prompt_tokens).tolist() for arrival in arrivals]
    began, ends = clock(), []

    async def one(arrival: Arrival, ids: list[int]) -> tuple[float, float]:
        await asyncio.sleep(arrival.at_s - (clock() - began))
        handle = engine.submit(ids, SAMPLING, max_new_tokens=arrival.new_tokens, ignore_eos=True)
        at = [clock() - began async for _ in handle]
        ends.append(at[-1])
        return at[0] - arrival.at_s, (at[-1] - at[0]) / max(1, arrival.new_tokens - 1)

    times = await asyncio.gather(*map(one, arrivals, prompts))
    return times, max(ends) - arrivals[0].at_s


def check(o: argparse.Namespace) -> Iterator[dict]:
    prompt, new = 256, 64
    model = bj.load(o.model, bj.RunConfig(context=1024, batch_size=1))
    clock, wait = (time.process_time, None) if o.cpu_time else (time.perf_counter, 0.1)
    rows = measured(model, o.rows, o.repetitions, clock)
    yield {"rows": rows}
    pages = o.rows * (prompt + new) // model.run.page_size + o.rows
    limits = Limits.for_engine(o.rows, pages, page_size=model.run.page_size, prefill_tokens=512, **ON_CPU)
    sizes = np.random.default_rng(2).integers((16, 8), (prompt, new), (o.requests, 2)).tolist()
    arrivals = poisson([(p, n) for p, n in sizes], o.rate)
    with bj.Engine(model, max_batch_size=o.rows, pages=pages, context=512, max_wait_s=wait or 1e9) as engine:
        assert engine._loop.scheduler.limits == limits
        engine.warmup()
        alone = [Arrival(0.0, 32, new)]
        asyncio.run(answered(engine, alone, clock))
        took = sorted(asyncio.run(answered(engine, alone, clock))[1] for _ in range(3))[1]
        times = StepTimes.measured(rows)
        ideal = simulate(alone, times, limits, max_wait_s=wait)
        times = StepTimes.measured(rows, max(0.0, (took - ideal.seconds) / ideal.plans))
        yield {"dispatch_s": times.dispatch_s, "stored_s": times.stored_s, "pair_s": times.pair_s}
        new_tokens = sum(a.new_tokens for a in arrivals)
        real = seen(*asyncio.run(answered(engine, arrivals, clock)), new_tokens)
    outcome = simulate(arrivals, times, limits, max_wait_s=wait)
    expected = seen([(a.ttft_s, a.per_token_s) for a in outcome.answers], outcome.seconds, new_tokens)
    yield {"real": real, "simulated": expected, "ratio": {k: expected[k] / real[k] for k in real}}


# How many devices.


def need(o: argparse.Namespace) -> Iterator[dict]:
    rows = [json.loads(line) for line in Path(o.results).read_text().splitlines()]
    rows = [r for r in rows if r.get("model") == o.model and "test" in r and r.get("data_parallel", 1) == 1]
    also = [{"test": test, "tok_s": float(speed)} for test, speed in (x.split("=") for x in o.also)]
    times = StepTimes.measured([*rows, *also], o.dispatch_ms / 1e3)
    limits, sizes = Limits.for_engine(o.rows, o.pages), trace(o.requests)

    def at(rate: float) -> dict:
        outcome = simulate(poisson(sizes, rate), times, limits)
        times_of = [(a.ttft_s, a.per_token_s) for a in outcome.answers]
        new = sum(a.arrival.new_tokens for a in outcome.answers)
        return {**seen(times_of, outcome.seconds, new), "busy": outcome.busy_s / outcome.seconds}

    def fits(rate: float) -> bool:
        found = at(rate)
        return found["ttft_p95_s"] <= o.ttft and found["per_token_p95_s"] <= o.per_token

    low, high = 0.0, 1.0
    while fits(high):
        low, high = high, 2 * high
    while high - low > 0.03 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    yield {"decode_ms": {n: 1e3 * s for n, s in times.decode}, "stored_ns": 1e9 * times.stored_s}
    if not low:
        yield {"requests_a_minute": None, "why": "one request a second is too much for a device"}
        return
    yield {"most_a_minute_of_a_device": 60 * low, **at(low)}
    for minute in o.a_minute:
        devices = math.ceil(minute / 60 / (SHARE * low))
        yield {"requests_a_minute": minute, "devices": devices, **at(minute / 60 / devices)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def listed(kind: Any) -> Any:
        return lambda text: [kind(part) for part in text.split(",")]

    parser.add_argument("what", choices=("check", "need"))
    parser.add_argument("-m", "--model", default="demo")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--pages", type=int, default=2560)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=3.0)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("-r", "--repetitions", type=int, default=2)
    parser.add_argument("--results", default=HERE / "results" / "nvidia-h200.jsonl")
    parser.add_argument("--also", type=listed(str), default=[], metavar="TEST=TOK_S,...")
    parser.add_argument("--dispatch-ms", type=float, default=0.0)
    parser.add_argument("--ttft", type=float, default=1.0)
    parser.add_argument("--per-token", type=float, default=0.05)
    parser.add_argument("--a-minute", type=listed(float), default=[10, 1000, 100000])
    options = parser.parse_args()
    for line in {"check": check, "need": need}[options.what](options):
        about = {"what": options.what, "model": options.model, "at_most": options.rows}
        print(json.dumps({**bench.origin(), **about, **line}), flush=True)


if __name__ == "__main__":
    main()
