"""Many requests through an engine's loop, beside fixed groups and beside steps without an engine.

    python benchmarks/engine.py trace groups rows same -m synth:bonsai-8b:q4_k_m --crowds 64,16,32,256

In this order, each line as soon as it is measured: of a call that ends early the rest is missing and nothing
else. Programs are compiled side by side beforehand; of an engine's those that are asked for and no more.

trace    the requests of engine_requests.csv, all there from the beginning, each with its own number of new
         tokens, through an engine of --rows rows and --pages pages, whose steps have --sizes rows
groups   the same requests as `generate` answered them before there was an engine: groups of neighbours in
         length, each one jitted call that waits for its longest answer. At equal pages: as many rows as
         --pages give 2,560 tokens each. --groups of them are measured, and the sum is extrapolated;
         speedup is the trace's, if that was measured before
rows     128 tokens of prompt and 128 new ones for --crowds requests at once, sampled with the defaults;
         through one engine; beside it `bench`'s row without sampling, steps in one loop on the device: 0.9 of
         it is required
same     what `reproducible` costs, for the first of --crowds: a request alone, whose first token is measured
         too, and a crowd, with and without it; and whether the first of the crowd gets the tokens that it got
         alone
host_ms  CPU time of the thread that plans and reads, for each plan; user_s that of all threads, on a CPU with
         the model's own work
A line for each measurement, as JSON. Prompts are random tokens, answers do not end before their length. What
is timed has been compiled by a run before.
"""

import argparse
import concurrent.futures
import csv
import dataclasses
import json
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import bonsai_jax as bj
from bonsai_jax.decoding import jitted
from bonsai_jax.decoding import steps as decoding
from bonsai_jax.engine import prompts
from bonsai_jax.engine.loop import Loop
from bonsai_jax.engine.options import Options
from bonsai_jax.measure import bench
from bonsai_jax.network import cache as kv

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
    tokens      of each request
    """

    seconds: float
    tok_s: float
    first_s: list[float]
    gaps_s: list[float]
    host_ms: float
    user_s: float
    tokens: list[list[int]]


def run(loop: Loop, requests: list[tuple[list[int], int]]) -> Run:
    first, last, gaps, answered = {}, {}, {}, []
    drawn: list[list[int]] = [[] for _ in requests]

    def teller(i):
        def note_piece(piece):
            now = time.perf_counter() - began
            gaps[i] = max(gaps.get(i, 0.0), now - last.get(i, now))
            first.setdefault(i, now)
            last[i] = now
            answered.append((now, len(piece.tokens)))
            drawn[i] += piece.tokens

        return note_piece

    began = time.perf_counter()
    for i, (ids, new) in enumerate(requests):
        params = bj.SamplingParams(seed=i)
        loop.add(loop.ask(ids, params, max_new_tokens=new, ignore_eos=True, on_piece=teller(i)))
    plans, host, user = loop.plans, time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
    while loop.turn():
        pass
    host_ms = (time.thread_time() - host) * 1e3 / (loop.plans - plans)
    user = resource.getrusage(resource.RUSAGE_SELF).ru_utime - user
    assert sum(tokens for _, tokens in answered) == sum(new for _, new in requests)
    end, all_run = max(last.values()), max(first.values())
    speed = sum(tokens for at, tokens in answered if at > all_run) / max(end - all_run, 1e-9)
    return Run(end, speed, sorted(first.values()), sorted(gaps.values()), host_ms, user, drawn)


def compiled(loop: Loop) -> int:
    return len(loop.scheduler.compiled)


def engine(model: bj.Model, rows: int, pages: int, context: int, **more) -> Loop:
    """The loop that an Engine's thread turns."""
    return Loop(model, Options(rows, pages, context, **more), threaded=True)


def compile_for(loop: Loop, sizes: Sequence[int | tuple[int, int]]) -> None:
    """Steps of so many rows, and these shapes of prefill."""
    loop.runner.warmup([loop.runner.calls.padding(size, None) for size in sizes], lambda done, total: None)
    loop.scheduler.compiled.update(sizes)


def of_trace(model: bj.Model, o: argparse.Namespace) -> Iterator[dict]:
    requests = trace(o.requests)
    ids = random_prompts(model, [length for length, _ in requests])
    began = time.perf_counter()
    loop = engine(model, o.rows, o.pages, CONTEXT, max_wait_s=o.max_wait_s)
    compile_for(loop, [*o.sizes, o.rows, *loop.runner.limits.shapes])
    run(loop, [(i[:600], 4) for i in ids[: max(o.sizes, default=0) + 40]])
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
    seen = []
    for repetition in range(repetitions + 1):
        ids = [np.random.default_rng((repetition, i)).integers(0, 1000, PROMPT).tolist() for i in range(rows)]
        seen.append(run(loop, [(i, new if repetition else 4) for i in ids]))

    def median(of):
        return statistics.median(map(of, seen[1:]))

    return {
        "engine_tok_s": median(lambda run: run.tok_s),
        "engine_tok_s_all": [run.tok_s for run in seen[1:]],
        "with_prefill_tok_s": median(lambda run: rows * new / run.seconds),
        "first_s": median(lambda run: run.first_s[-1]),
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
        drawn = jitted.generate_tokens(model.params, state, tokens, lengths, model.config, size=size)
        np.asarray(drawn.tokens)

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
    context, most = PROMPT + o.new, max(o.crowds)
    pages = most * kv.page_count(context, model.run.page_size)
    with concurrent.futures.ThreadPoolExecutor() as pool:  # beside the engine's programs
        began = time.perf_counter()
        tests = [pool.submit(steps, model, rows, o.new) for rows in o.crowds]
        loop = engine(model, most, pages, context, max_wait_s=o.max_wait_s)
        compile_for(loop, [*o.crowds, max(loop.runner.limits.shapes)])
        tests = [test.result() for test in tests]
    yield {"compiling_s": time.perf_counter() - began, "executables": compiled(loop) + len(tests)}
    for rows, test in zip(o.crowds, tests, strict=True):
        line = of_crowd(loop, rows, o.new, o.repetitions)
        of_bench = [test.run() for _ in range(o.repetitions)]
        share = line["engine_tok_s"] / statistics.median(of_bench)
        yield {"rows": rows, "share_of_bench": share, "bench_tok_s": of_bench, **line}
    loop.close()


def steps(model: bj.Model, rows: int, new: int) -> bench.Test:
    """bench's test of so many rows behind PROMPT tokens each, which are read one by one too: so its loop is
    all that is compiled."""
    test = bench.Test(model, "tg", PROMPT + new, 0, rows)
    test.run()
    test.depth, test.tokens = PROMPT, new
    return test


def of_same(model: bj.Model, o: argparse.Namespace) -> Iterator[dict]:
    context, rows = PROMPT + o.new, o.crowds[0]
    pages = rows * kv.page_count(context, model.run.page_size)
    requests = [(ids, o.new) for ids in random_prompts(model, [PROMPT] * rows)]
    for reproducible in (False, True):
        loop = engine(model, rows, pages, context, max_wait_s=o.max_wait_s, reproducible=reproducible)
        widest = max(loop.runner.limits.shapes)
        compile_for(loop, [rows, widest] if reproducible else [1, rows, (1, PROMPT), widest])
        alone, crowd = (
            [run(loop, some) for _ in range(o.repetitions + 1)] for some in (requests[:1], requests)
        )
        yield {
            "rows": rows,
            "reproducible": reproducible,
            "alone_first_s": [one.first_s[0] for one in alone],
            "alone_tok_s": [one.tok_s for one in alone],
            "crowd_first_s": [one.first_s[-1] for one in crowd],
            "crowd_tok_s": [one.tok_s for one in crowd],
            "crowd_s": [one.seconds for one in crowd],
            "same_tokens": all(one.tokens[0] == alone[0].tokens[0] for one in [*alone, *crowd]),
        }
        loop.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=("trace", "groups", "rows", "same"))
    parser.add_argument("-m", "--model", default="demo")
    parser.add_argument("--rows", type=int, default=256)
    numbers = lambda text: [int(n) for n in text.split(",") if n]  # noqa: E731
    parser.add_argument("--crowds", type=numbers, default=[16, 32, 64, 256])
    parser.add_argument("--sizes", type=numbers, default=[8, 16, 32, 64, 128])
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--pages", type=int, default=2560)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--max-wait-s", type=float, default=0.1)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    options = parser.parse_args()
    options.trace_s = None
    context = PROMPT + options.new if {*options.what} <= {"rows", "same"} else CONTEXT
    run_config = bj.RunConfig(context=context, batch_size=1)  # the memory is the engine's to give
    model = bj.load(options.model, run_config)
    for what in options.what:
        measure = {"trace": of_trace, "groups": of_groups, "rows": of_rows, "same": of_same}[what]
        about = {
            "what": what,
            "at_most": options.rows,
            "pages": options.pages,
            "model": options.model,
        }
        for line in measure(model, options):
            print(json.dumps({**bench.origin(), **about, **line}), flush=True)


if __name__ == "__main__":
    main()
