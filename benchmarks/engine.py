"""Many requests through an engine's loop, beside fixed groups and beside steps without an engine.

    python benchmarks/engine.py trace -m synth:bonsai-8b:q4_k_m --rows 128 --pages 1280 --crowd 64
    python benchmarks/engine.py groups -m synth:bonsai-8b:q4_k_m --rows 32 --groups 3
    python benchmarks/engine.py rows -m synth:bonsai-8b:q4_k_m --rows 16,32,64

trace    the requests of engine_requests.csv, all there from the beginning, each with its own number of new
         tokens. Then --crowd requests of 128 + 128 tokens at once, in the same engine
groups   the same requests as `generate` answered them before there was an engine: groups of neighbours in
         length, each one jitted call that waits for its longest answer. At equal pages: rows x 2,560 tokens
         (the last number of --rows). --groups of them are measured, and the sum is extrapolated
rows     128 tokens of prompt and 128 new ones for so many requests at once, sampled with the defaults; beside
         it `bench`'s row, the same steps in one loop on the device
A line for each measurement, as JSON. Prompts are random tokens, answers do not end before their length. What
is timed has been compiled by a run before.
"""

import argparse
import csv
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import bonsai_jax as bj
from bonsai_jax import bench, decoding, jitted, prompts
from bonsai_jax import cache as kv
from bonsai_jax.engine.loop import Loop, Options

TRACE = Path(__file__).parent / "engine_requests.csv"
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


def run(loop: Loop, requests: list[tuple[list[int], int]]) -> tuple[float, float, list[float], list[float]]:
    """Seconds to the end; tokens a second once all requests have their first one; of each request its time to
    the first token, and its longest wait between two pieces."""
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
    while loop.turn():
        pass
    assert sum(tokens for _, tokens in answered) == sum(new for _, new in requests)
    end, all_run = max(last.values()), max(first.values())
    speed = sum(tokens for at, tokens in answered if at > all_run) / max(end - all_run, 1e-9)
    return end, speed, sorted(first.values()), sorted(gaps.values())


def compiled(loop: Loop) -> int:
    return len(loop.scheduler.compiled)


def of_trace(model: bj.Model, o: argparse.Namespace) -> Iterator[dict]:
    requests = trace(o.requests)
    ids = random_prompts(model, [length for length, _ in requests])
    loop = Loop(model, Options(max_rows=o.rows[0], pages=o.pages, context=CONTEXT, max_wait_s=o.max_wait_s))
    began = time.perf_counter()
    run(loop, [(i, 4) for i in ids[: o.rows[0] + 40]])
    yield {"compiling_s": time.perf_counter() - began, "executables": compiled(loop)}
    before, programs = loop.scheduler.preempted, compiled(loop)
    seconds, _, first, gaps = run(loop, [(i, new) for i, (_, new) in zip(ids, requests, strict=True)])
    new = sum(new for _, new in requests)
    yield {
        "seconds": seconds,
        "requests_s": len(requests) / seconds,
        "new_tok_s": new / seconds,
        "prompt_tok_s": sum(map(len, ids)) / seconds,
        "ttft_median_s": statistics.median(first),
        "gap_median_s": statistics.median(gaps),
        "gap_most_s": gaps[-1],
        "preempted": loop.scheduler.preempted - before,
        "compiled_meanwhile": compiled(loop) - programs,
    }
    if o.crowd:
        yield {"crowd": o.crowd, **of_crowd(model, loop, o.crowd, o.repetitions)}


def of_crowd(model: bj.Model, loop: Loop, rows: int, repetitions: int) -> dict:
    """So many requests of 128 + 128 tokens at once."""
    loop.scheduler.compiled.add(rows)  # as `warmup` does
    n, times = 128, []
    for repetition in range(repetitions + 1):
        ids = [np.random.default_rng((repetition, i)).integers(0, 1000, n).tolist() for i in range(rows)]
        end, speed, _, gaps = run(loop, [(i, n if repetition else 4) for i in ids])
        times.append((speed, rows * n / end, gaps[-1]))
    names = ("engine_tok_s", "with_prefill_tok_s", "gap_most_s")
    return dict(zip(names, map(statistics.median, zip(*times[1:], strict=True)), strict=True))


def of_groups(model: bj.Model, o: argparse.Namespace) -> Iterator[dict]:
    requests = trace(o.requests)
    ids = sorted(random_prompts(model, [length for length, _ in requests]), key=lambda i: -len(i))
    most = max(new for _, new in trace(1000))
    size = decoding.bucket(most)

    def group(ids: list[list[int]], new: int) -> None:
        ids = [*ids, *[ids[0][:1]] * (o.rows[-1] - len(ids))]
        tokens, lengths = prompts.pad(ids)
        context = min(tokens.shape[1] + size, CONTEXT)
        sampling = [bj.SamplingParams(seed=i) for i in range(len(ids))]
        state = bj.new_state(model, len(ids), context, sampling, new, ignore_eos=True)
        _, drawn = jitted.generate_tokens(model.params, state, tokens, lengths, model.config, size=size)
        np.asarray(drawn)

    groups = [ids[first : first + o.rows[-1]] for first in range(0, len(ids), o.rows[-1])]
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
        "measured_groups": len(chosen),
        "of_groups": len(groups),
        "seconds_extrapolated": whole,
        "requests_s": len(requests) / whole,
        "new_tok_s": new / whole,
    }


def of_rows(model: bj.Model, o: argparse.Namespace) -> Iterator[dict]:
    n = 128
    for rows in o.rows:
        test = bench.Test(model, "gen", n, n, rows)
        speeds = [test.run() for _ in range(o.repetitions)]
        yield {"rows": rows, "bench_tok_s": statistics.median(speeds)}
        del test
        pages = rows * kv.page_count(2 * n, model.run.page_size)
        for wait in (None, o.max_wait_s):
            loop = Loop(model, Options(max_rows=rows, pages=pages, context=2 * n, max_wait_s=wait))
            line = of_crowd(model, loop, rows, o.repetitions)
            share = line["engine_tok_s"] / statistics.median(speeds)
            yield {"rows": rows, "max_wait_s": wait, **line, "share_of_bench": share}
            loop.release()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=("trace", "groups", "rows"))
    parser.add_argument("-m", "--model", default="demo")
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",")], default=[8])
    parser.add_argument("--pages", type=int, default=2560)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--crowd", type=int, default=0)
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--max-wait-s", type=float)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    options = parser.parse_args()
    run_config = bj.RunConfig(context=CONTEXT, rows=1)  # the memory is the engine's to give
    model = bj.load(options.model, run_config)
    for what in options.what:
        measure = {"trace": of_trace, "groups": of_groups, "rows": of_rows}[what]
        about = {"what": what, "at_most": options.rows, "pages": options.pages, "model": options.model}
        for line in measure(model, options):
            print(json.dumps({**bench.origin(), **about, **line}), flush=True)


if __name__ == "__main__":
    main()
