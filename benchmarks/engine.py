"""Many requests through an engine's loop, beside fixed groups and beside steps without an engine.

    python benchmarks/engine.py trace groups rows -m synth:bonsai-8b:q4_k_m --rows 256 --crowds 16,32,64,256

trace, groups, rows in this order, each line as soon as it is measured: of a call that ends early the rest is
missing and nothing else.

trace    the requests of engine_requests.csv, all there from the beginning, each with its own number of new
         tokens, through an engine of --rows rows and --pages pages
groups   the same requests as `generate` answered them before there was an engine: groups of neighbours in
         length, each one jitted call that waits for its longest answer. At equal pages: as many rows as
         --pages give 2,560 tokens each. --groups of them are measured, and the sum is extrapolated;
         speedup is the trace's, if that was measured before
rows     128 tokens of prompt and 128 new ones for --crowds requests at once, sampled with the defaults;
         beside it `bench`'s row, the same steps in one loop on the device: 0.9 of it is required
host_ms  CPU time of the thread that plans and reads, for each plan; user_s that of all threads, on a CPU with
         the model's own work. --reproducible: the same bits alone and in a crowd, and what that costs
A line for each measurement, as JSON. Prompts are random tokens, answers do not end before their length. What
is timed has been compiled by a run before.
"""

import argparse
import csv
import dataclasses
import json
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import bonsai_jax as bj
from bonsai_jax import bench, decoding, jitted, prompts
from bonsai_jax import cache as kv
from bonsai_jax.engine.loop import Loop
from bonsai_jax.engine.runner import Options

TRACE = Path(__file__).parent / "engine_requests.csv"
PROMPT = 128  # tokens of each of a crowd's
CONTEXT = 2560  # a prompt of 2,048 tokens and 512 new ones


def trace(count: int) -> list[tuple[int, int]]:
    """(prompt tokens, new tokens) of each request, drawn once: logarithms are uniform over 20 to 2,000 and 10
    to 500, so that many are short and few are long."""
    with TRACE.open() as file:
        rows = [(int(row["prompt_tokens"]), int(row["new_tokens"])) for row in csv.DictReader(file)]
    return rows[:count]


def random_prompts(model: bj.Model, lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, model.config.vocab_size, length).tolist() for length in lengths]


@dataclasses.dataclass
class Run:
    """seconds  to the end
    tok_s       tokens a second once all requests have their first one
    first_s     time to the first token of each request, sorted
    gaps_s      longest wait between two pieces of each request, sorted
    host_ms, user_s   see above
    """

    seconds: float
    tok_s: float
    first_s: list[float]
    gaps_s: list[float]
    host_ms: float
    user_s: float


def run(loop: Loop, requests: list[tuple[list[int], int]]) -> Run:
    first, last, gaps, answered = {}, {}, {}, []

    def teller(i):
        def told(piece):
            now = time.perf_counter() - began
            gaps[i] = max(gaps.get(i, 0.0), now - last.get(i, now))
            first.setdefault(i, now)
            last[i] = now
            answered.append((now, len(piece.tokens)))

        return told

    began = time.perf_counter()
    for i, (ids, new) in enumerate(requests):
        params = bj.SamplingParams(seed=i)
        loop.add(loop.ask(ids, params, max_new_tokens=new, ignore_eos=True, told=teller(i)))
    plans, host, user = loop.plans, time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
    while loop.turn():
        pass
    host_ms = (time.thread_time() - host) * 1e3 / (loop.plans - plans)
    user = resource.getrusage(resource.RUSAGE_SELF).ru_utime - user
    assert sum(tokens for _, tokens in answered) == sum(new for _, new in requests)
    end, all_run = max(last.values()), max(first.values())
    speed = sum(tokens for at, tokens in answered if at > all_run) / max(end - all_run, 1e-9)
    return Run(end, speed, sorted(first.values()), sorted(gaps.values()), host_ms, user)


def compiled(loop: Loop) -> int:
    return len(loop.scheduler.compiled)


def engine(model: bj.Model, o: argparse.Namespace, rows: int, pages: int, context: int, **more) -> Loop:
    """The loop that an Engine's thread turns."""
    options = Options(rows, pages, context, reproducible=o.reproducible, **more)
    return Loop(model, options, threaded=True)


def of_trace(model: bj.Model, o: argparse.Namespace) -> Iterator[dict]:
    requests = trace(o.requests)
    ids = random_prompts(model, [length for length, _ in requests])
    loop = engine(model, o, o.rows, o.pages, CONTEXT, max_wait_s=o.max_wait_s)
    began = time.perf_counter()
    run(loop, [(i, 4) for i in ids[: o.rows + 40]])
    yield {"compiling_s": time.perf_counter() - began, "executables": compiled(loop)}
    before, programs, plans = loop.scheduler.preempted, compiled(loop), loop.plans
    seen = run(loop, [(i, new) for i, (_, new) in zip(ids, requests, strict=True)])
    new = sum(new for _, new in requests)
    o.trace_s = seen.seconds
    yield {
        "seconds": seen.seconds,
        "requests_s": len(requests) / seen.seconds,
        "new_tok_s": new / seen.seconds,
        "prompt_tok_s": sum(map(len, ids)) / seen.seconds,
        "ttft_median_s": statistics.median(seen.first_s),
        "gap_median_s": statistics.median(seen.gaps_s),
        "gap_most_s": seen.gaps_s[-1],
        "plans": loop.plans - plans,
        "host_ms": seen.host_ms,
        "user_s": seen.user_s,
        "preempted": loop.scheduler.preempted - before,
        "compiled_meanwhile": compiled(loop) - programs,
    }
    loop.close()


def of_crowd(loop: Loop, rows: int, new: int, repetitions: int) -> dict:
    """So many requests at once."""
    loop.scheduler.compiled.add(rows)  # as `warmup` does
    seen = []
    for repetition in range(repetitions + 1):
        ids = [np.random.default_rng((repetition, i)).integers(0, 1000, PROMPT).tolist() for i in range(rows)]
        seen.append(run(loop, [(i, new if repetition else 4) for i in ids]))

    def median(of):
        return statistics.median(map(of, seen[1:]))

    return {
        "engine_tok_s": median(lambda run: run.tok_s),
        "with_prefill_tok_s": median(lambda run: rows * new / run.seconds),
        "gap_most_s": median(lambda run: run.gaps_s[-1]),
        "host_ms": median(lambda run: run.host_ms),
        "user_s": median(lambda run: run.user_s),
    }


def of_groups(model: bj.Model, o: argparse.Namespace) -> Iterator[dict]:
    requests = trace(o.requests)
    ids = sorted(random_prompts(model, [length for length, _ in requests]), key=lambda i: -len(i))
    most = max(new for _, new in trace(1000))
    size = decoding.bucket(most)
    rows = max(1, o.pages * model.run.page_size // CONTEXT)

    def group(ids: list[list[int]], new: int) -> None:
        ids = [*ids, *[ids[0][:1]] * (rows - len(ids))]
        tokens, lengths = prompts.pad(ids)
        context = min(tokens.shape[1] + size, CONTEXT)
        sampling = [bj.SamplingParams(seed=i) for i in range(len(ids))]
        state = bj.new_state(model, len(ids), context, sampling, new, ignore_eos=True)
        _, drawn = jitted.generate_tokens(model.params, state, tokens, lengths, model.config, size=size)
        np.asarray(drawn)

    groups = [ids[first : first + rows] for first in range(0, len(ids), rows)]
    every = max(1, len(groups) // o.groups)
    chosen, seconds = groups[every // 2 :: every], []
    for one in chosen:
        began = time.perf_counter()
        group(one, 2)
        yield {"compiling_s": time.perf_counter() - began}
        began = time.perf_counter()
        group(one, most)
        seconds.append(time.perf_counter() - began)
        yield {"group_s": seconds[-1], "longest_prompt": len(one[0])}
    whole = statistics.mean(seconds) * len(groups)
    new = sum(new for _, new in requests)
    yield {
        "rows_of_a_group": rows,
        "measured_groups": len(chosen),
        "of_groups": len(groups),
        "seconds_extrapolated": whole,
        "requests_s": len(requests) / whole,
        "new_tok_s": new / whole,
        "speedup": None if o.trace_s is None else whole / o.trace_s,
    }


def of_rows(model: bj.Model, o: argparse.Namespace) -> Iterator[dict]:
    for rows in o.crowds:
        test = bench.Test(model, "gen", o.new, PROMPT, rows)
        of_bench = statistics.median(test.run() for _ in range(o.repetitions))
        yield {"rows": rows, "bench_tok_s": of_bench}
        del test
        context = PROMPT + o.new
        pages = rows * kv.page_count(context, model.run.page_size)
        for wait in (None, o.max_wait_s or 0.1):
            loop = engine(model, o, rows, pages, context, max_wait_s=wait)
            line = of_crowd(loop, rows, o.new, o.repetitions)
            share = line["engine_tok_s"] / of_bench
            yield {"rows": rows, "max_wait_s": wait, **line, "share_of_bench": share}
            loop.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=("trace", "groups", "rows"))
    parser.add_argument("-m", "--model", default="demo")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument(
        "--crowds", type=lambda text: [int(n) for n in text.split(",")], default=[16, 32, 64, 256]
    )
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--pages", type=int, default=2560)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--max-wait-s", type=float)
    parser.add_argument("--reproducible", action="store_true")
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    options = parser.parse_args()
    options.trace_s = None
    context = PROMPT + options.new if options.what == ["rows"] else CONTEXT
    run_config = bj.RunConfig(context=context, rows=1)  # the memory is the engine's to give
    model = bj.load(options.model, run_config)
    for what in options.what:
        measure = {"trace": of_trace, "groups": of_groups, "rows": of_rows}[what]
        about = {
            "what": what,
            "at_most": options.rows,
            "reproducible": options.reproducible,
            "pages": options.pages,
            "model": options.model,
        }
        for line in measure(model, options):
            print(json.dumps({**bench.origin(), **about, **line}), flush=True)


if __name__ == "__main__":
    main()
