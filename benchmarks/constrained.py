"""Rows with constraints through an engine, beside as many without, in turns.

    python benchmarks/constrained.py [-m synth:bonsai-8b:q4_k_m] [--rows 32] [-n 128] [-r 5]

free     no row has a constraint: whole steps, many in a dispatch
words    short words without end, of which no token is forced
people   JSON with a list of people: names of properties are forced, and read in chunks or not at all

tok_s    tokens a second of all rows, from when each has its first one; the median of the repetitions
share    of the tok_s of `free` in the same repetition; likewise

A line for each, as JSON. Prompts are random tokens, and answers do not end before -n new tokens. Whether a
constraint allows its answers is checked.
"""

import argparse
import dataclasses
import json
import statistics
import time

import numpy as np

import bonsai_jax as bj
from bonsai_jax import constraints
from bonsai_jax.engine.loop import Loop
from bonsai_jax.engine.options import Options
from bonsai_jax.measure import bench
from bonsai_jax.network import cache as kv

PROMPT = 32  # tokens
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "town": {"type": "string", "maxLength": 24},
        "likes": {"enum": ["tea", "coffee", "neither"]},
    },
    "required": ["name", "age", "town", "likes"],
    "additionalProperties": False,
}
KINDS = {
    "free": None,
    "words": bj.regex("([a-z]{1,8} )*"),
    "people": bj.json_schema({"type": "array", "items": PERSON, "minItems": 100}),
}


@dataclasses.dataclass(frozen=True)
class Row(bench.Origin):
    """One kind of answers. steps: plans of the engine, for each of the answers' tokens."""

    model: str
    kind: str
    rows: int
    new: int
    tok_s: float
    share: float
    steps: float


def run(loop: Loop, kind: str, rows: int, new: int, seed: int) -> tuple[float, float]:
    """Answer `rows` prompts. Returns tokens a second, and plans for each token of an answer."""
    first: dict[int, float] = {}
    said: list[tuple[float, int, list[int]]] = []

    def teller(row: int):
        def note(piece):
            if isinstance(piece, Exception):
                raise piece
            first.setdefault(row, time.perf_counter())
            said.append((time.perf_counter(), row, piece.tokens))

        return note

    vocab_size = loop.model.config.vocab_size
    for row in range(rows):
        ids = np.random.default_rng((seed, row)).integers(0, min(vocab_size, 1000), PROMPT).tolist()
        how = {"max_new_tokens": new, "ignore_eos": True, "constraint": KINDS[kind]}
        loop.add(loop.ask(ids, bj.SamplingParams(seed=row), **how, on_piece=teller(row)))
    plans = loop.plans
    while loop.turn():
        pass
    _check(
        loop.model,
        kind,
        [[t for _, own, tokens in said if own == row for t in tokens] for row in range(rows)],
        new,
    )
    all_run, end = max(first.values()), max(at for at, *_ in said)
    tokens = sum(len(tokens) for at, _, tokens in said if at > all_run)
    return tokens / max(end - all_run, 1e-9), (loop.plans - plans) / new


def _check(model: bj.Model, kind: str, answers: list[list[int]], new: int) -> None:
    constraint = KINDS[kind]
    for tokens in answers:
        assert len(tokens) == new, f"{kind}: {len(tokens)} tokens of {new}"
        if constraint is not None:  # raises ValueError for tokens that it does not allow
            constraints.compile(constraint, model.tokenizer, model.config.vocab_size).matcher().consume(
                tokens
            )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-m", "--model", default="synth:tiny-llama:q8_0")
    p.add_argument("--rows", type=int, default=32)
    p.add_argument("-n", "--new", type=int, default=64)
    p.add_argument("-r", "--repetitions", type=int, default=5)
    p.add_argument("--commit", help="for a checkout without history")
    o = p.parse_args()
    context = PROMPT + o.new
    model = bj.load(o.model, bj.RunConfig(batch_size=o.rows, context=context))
    pages = o.rows * kv.page_count(context, model.run.page_size)
    loop = Loop(model, Options(o.rows, pages, context, max_wait_s=0.1), threaded=True)
    loop.warmup(lambda done, total: None, constraints=True)  # what is timed has been compiled
    for kind in KINDS:
        run(loop, kind, o.rows, o.new, 0)
    each = [
        {kind: run(loop, kind, o.rows, o.new, seed) for kind in KINDS} for seed in range(1, o.repetitions + 1)
    ]
    loop.close()
    for kind in KINDS:
        row = Row(
            **bench.origin(o.commit), model=model.name, kind=kind, rows=o.rows, new=o.new,
            tok_s=statistics.median(one[kind][0] for one in each),
            share=statistics.median(one[kind][0] / one["free"][0] for one in each),
            steps=statistics.median(one[kind][1] for one in each),
        )  # fmt: skip
        print(json.dumps(dataclasses.asdict(row)), flush=True)


if __name__ == "__main__":
    main()
