"""bj.score over multiple-choice items, beside prefill in the same process.

    python benchmarks/score.py [-m demo] [--items 1000] [--choices 4] [-r 3] [--commit NAME] > rows.jsonl

Items are token ids, random ones of random lengths: a prompt of 30 to 400 tokens (most have about 100) and
continuations of 1 to 16. Tokens are counted once that are read once: a prompt, and each of its continuations.
Prefill is that of `bonsai-jax bench`: one prompt of 512 tokens, and the logits of the last. Both take turns.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

import bonsai_jax as bj
from bonsai_jax.measure import bench

PREFILL = 512  # tokens


@dataclasses.dataclass(frozen=True)
class Row(bench.Origin):
    """One model.

    tokens         of all prompts and continuations
    first_s        the first call, which compiles
    tok_s          median over the repetitions; tok_s_min, tok_s_max: the spread
    prefill_tok_s  median
    share          tok_s / prefill_tok_s
    """

    model: str
    items: int
    choices: int
    tokens: int
    first_s: float
    tok_s: float
    tok_s_min: float
    tok_s_max: float
    prefill_tok_s: float
    share: float


def random_items(items: int, choices: int, vocabulary: int) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Prompts and their continuations."""
    draw = np.random.default_rng(0)

    def ids(length: float) -> list[int]:
        return draw.integers(0, vocabulary, int(length)).tolist()

    lengths = np.clip(100 * np.exp(0.6 * draw.standard_normal(items)), 30, 400)
    prompts = [ids(length) for length in lengths]
    return prompts, [[ids(draw.integers(1, 17)) for _ in range(choices)] for _ in prompts]


def prefill_seconds(model: bj.Model) -> Callable[[], float]:
    """A function that reads a prompt, and says how long it took."""
    tokens = jax.numpy.asarray(np.random.default_rng(1).integers(0, model.config.vocab_size, (1, PREFILL)))
    cache = bj.new_cache(model, 1, PREFILL)

    def seconds() -> float:
        nonlocal cache
        began = time.perf_counter()
        logits, cache = bench.last_logits(model.params, cache.reset(), tokens, model.config)
        jax.block_until_ready(logits)
        return time.perf_counter() - began

    for _ in range(bench.WARMUP_CALLS):
        seconds()
    return seconds


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-m", "--model", default="demo")
    p.add_argument("--items", type=int, default=1000)
    p.add_argument("--choices", type=int, default=4)
    p.add_argument("-r", "--repetitions", type=int, default=3)
    p.add_argument("--commit", help="for a checkout without history")
    arguments = p.parse_args()
    model = bj.load(arguments.model)
    prompts, continuations = random_items(arguments.items, arguments.choices, model.config.vocab_size)
    tokens = sum(map(len, prompts)) + sum(len(ids) for each in continuations for ids in each)

    def score_seconds() -> float:
        began = time.perf_counter()
        bj.score(model, prompts, continuations)
        return time.perf_counter() - began

    first_s, prefill = score_seconds(), prefill_seconds(model)
    speeds, prefill_speeds = [], []
    for _ in range(arguments.repetitions):
        prefill_speeds += [PREFILL / prefill() for _ in range(5)]
        speeds.append(tokens / score_seconds())
        prefill_speeds += [PREFILL / prefill() for _ in range(5)]
    tok_s, prefill_tok_s = statistics.median(speeds), statistics.median(prefill_speeds)
    row = Row(
        **bench.origin(arguments.commit),
        model=model.name, items=arguments.items, choices=arguments.choices, tokens=tokens, first_s=first_s,
        tok_s=tok_s, tok_s_min=min(speeds), tok_s_max=max(speeds), prefill_tok_s=prefill_tok_s,
        share=tok_s / prefill_tok_s,
    )  # fmt: skip
    print(json.dumps(dataclasses.asdict(row)), flush=True)


if __name__ == "__main__":
    main()
