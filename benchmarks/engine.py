"""Many requests through an engine's loop, beside fixed groups and beside steps without an engine.

    python benchmarks/engine.py trace -m synth:bonsai-8b:q4_k_m --rows 256 --pages 2560
    python benchmarks/engine.py groups -m synth:bonsai-8b:q4_k_m --rows 64 --requests 192
    python benchmarks/engine.py rows -m synth:bonsai-8b:q4_k_m --rows 16,32,64

trace    the requests of engine_requests.csv, all there from the beginning, each with its own number of new
         tokens
groups   the same requests as `generate` answered them before there was an engine: groups of neighbours in
         length, each one jitted call that waits for its longest answer. At equal pages: --rows x 2,560 tokens
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

import jax
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


def of_groups(model: bj.Model, o: argparse.Namespace) -> Iterator[dict]:
    requests = trace(o.requests)
    ids = sorted(random_prompts(model, [length for length, _ in requests]), key=lambda i: -len(i))
    most = max(new for _, new in trace(1000))
    size = decoding.bucket(most)

    def group(ids: list[list[int]], new: int) -> None:
        ids = [*ids, *[ids[0][:1]] * (o.rows[0] - len(ids))]
        tokens, lengths = prompts.pad(ids)
        context = min(tokens.shape[1] + size, CONTEXT)
        sampling = [bj.SamplingParams(seed=i) for i in range(len(ids))]
        state = bj.new_state(model, len(ids), context, sampling, new, ignore_eos=True)
        _, drawn = jitted.generate_tokens(model.params, state, tokens, lengths, model.config, size=size)
        np.asarray(drawn)

    groups = [ids[first : first + o.rows[0]] for first in range(0, len(ids), o.rows[0])]
    began = time.perf_counter()
    for one in groups:
        group(one, 2)
    yield {"compiling_s": time.perf_counter() - began}
    began = time.perf_counter()
    for one in groups:
        group(one, most)
    seconds = time.perf_counter() - began
    new = sum(new for _, new in requests)
    yield {"seconds": seconds, "requests_s": len(requests) / seconds, "new_tok_s": new / seconds}


def of_rows(model: bj.Model, o: argparse.Namespace) -> Iterator[dict]:
    n = 128
    for rows in o.rows:
        test = bench.Test(model, "gen", n, n, rows)
        speeds = [test.run() for _ in range(o.repetitions)]
        yield {"rows": rows, "bench_tok_s": statistics.median(speeds)}
        del test
        ids = random_prompts(model, [n] * rows)
        pages = rows * kv.page_count(2 * n, model.run.page_size)
        for wait in (None, o.max_wait_s):
            loop = Loop(model, Options(max_rows=rows, pages=pages, context=2 * n, max_wait_s=wait))
            run(loop, [(i, 4) for i in ids])
            times = []
            for _ in range(o.repetitions):
                for i in ids:  # none of them is known
                    i[0] = (i[0] + 1) % model.config.vocab_size
                end, speed, _, gaps = run(loop, [(i, n) for i in ids])
                times.append((speed, end, gaps[-1]))
            speed, end, gap = (statistics.median(t) for t in zip(*times, strict=True))
            yield {
                "rows": rows,
                "max_wait_s": wait,
                "engine_tok_s": speed,
                "with_prefill_tok_s": rows * n / end,
                "gap_most_s": gap,
                "share_of_bench": speed / statistics.median(speeds),
            }
            loop.release()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("trace", "groups", "rows"))
    parser.add_argument("-m", "--model", default="demo")
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",")], default=[8])
    parser.add_argument("--pages", type=int, default=2560)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--max-wait-s", type=float)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    options = parser.parse_args()
    run_config = bj.RunConfig(context=CONTEXT, rows=1)  # the memory is the engine's to give
    model = bj.load(options.model, run_config)
    measure = {"trace": of_trace, "groups": of_groups, "rows": of_rows}[options.what]
    about = {"what": options.what, "at_most": options.rows, "pages": options.pages, "model": options.model}
    for line in measure(model, options):
        print(json.dumps({**bench.origin(), **about, **line}), flush=True)
    jax.clear_caches()


if __name__ == "__main__":
    main()
