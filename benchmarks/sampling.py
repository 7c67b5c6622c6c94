"""The draw of a token alone: what a decode step does between its logits and its token.

    python benchmarks/sampling.py [--rows 1,8,64] [--vocabulary 151669] [--only defaults,greedy] > rows.jsonl

A chain of draws unrolled in one jit, each from logits of its own, normal with a deviation of 3, and behind
the one before, whose token it finds in its tables. (A loop in the jit costs 20 us a turn on a GPU: LOG.md.)
Implementations and settings take turns in every repetition. The same run counts the draws whose token is not
the definition's: exp, log and sums may differ in the last place, so that one in a million may.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import one_op

import bonsai_jax as bj
from bonsai_jax.decoding import sampling
from bonsai_jax.measure import bench

CHAIN = 16
PLAIN = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
SETTINGS = {
    "defaults": {},
    "greedy": {"temperature": 0.0},
    "temperature": PLAIN,
    "top-k 1000": PLAIN | {"top_k": 1000},
    "no top-k": {"top_k": 0},
    "top-p 0.95 alone": PLAIN | {"top_p": 0.95},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "bias": {"logit_bias": dict.fromkeys(range(0, 320, 10), -1.0)},
}


@dataclasses.dataclass(frozen=True)
class Row(bench.Origin):
    """One setting of one implementation.

    us        median over repetitions, per draw of all rows; us_min, us_max: the spread
    empty_us  a launch that does nothing, in a chain like this one; None where there are no kernels
    draws, other  tokens drawn in the check, and how many are not the definition's
    """

    op: str
    impl: str
    setting: str
    rows: int
    vocabulary: int
    us: float
    us_min: float
    us_max: float
    empty_us: float | None
    draws: int
    other: int


@functools.partial(jax.jit, donate_argnums=0)
def chain(
    s: sampling.Sampler, steps: list[tuple[jax.Array, jax.Array]]
) -> tuple[sampling.Sampler, jax.Array]:
    """A draw for each (logits, positions): the sampler, and tokens [steps, B]."""
    drawn = []
    for logits, positions in steps:
        tokens, s = sampling.sample(s, logits, positions)
        drawn.append(tokens)
    return s, jnp.stack(drawn)


def made(change: dict, rows: int, vocabulary: int, impl: str) -> sampling.Sampler:
    s = sampling.sampler(bj.SamplingParams(**{"seed": 1, **change}), rows, vocabulary)
    prompt = jax.random.randint(jax.random.key(1), (rows, 64), 0, vocabulary)
    return sampling.read_prompt(s, prompt, jnp.ones(prompt.shape, bool)).replace(impl=impl)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--rows", default="1,8,64")
    p.add_argument("--vocabulary", type=int, default=151669)
    p.add_argument("--only", help="settings, such as defaults,greedy")
    p.add_argument("--impl", help="one alone: reference, two_launches (on GPUs) or cpu")
    p.add_argument("-r", "--repetitions", type=int, default=9)
    p.add_argument("--calls", type=int, default=8, help="chains of a repetition")
    p.add_argument("--commit", help="for a checkout without history")
    arguments = p.parse_args()
    vocabulary = arguments.vocabulary
    impls = [arguments.impl] if arguments.impl else ["reference"]
    if not arguments.impl and (chosen := sampling.kernel(vocabulary)) not in impls:
        impls.insert(0, chosen)
    settings = arguments.only.split(",") if arguments.only else list(SETTINGS)
    for rows in map(int, arguments.rows.split(",")):
        keys = jax.random.split(jax.random.key(rows), CHAIN)
        steps = [
            (3 * jax.random.normal(key, (rows, vocabulary)), jnp.full(rows, position))
            for position, key in enumerate(keys)
        ]
        state, tokens, times = {}, {}, {}
        for setting in settings:
            for impl in dict.fromkeys([*impls, "reference"]):
                s = made(SETTINGS[setting], rows, vocabulary, impl)
                state[setting, impl], tokens[setting, impl] = chain(s, steps)
        state = {(setting, impl): s for (setting, impl), s in state.items() if impl in impls}
        for _ in range(bench.WARMUP_CALLS):
            for key in state:
                state[key], _ = chain(state[key], steps)
        for _ in range(arguments.repetitions):
            for key, s in state.items():
                jax.block_until_ready(s)
                began = time.perf_counter()
                for _ in range(arguments.calls):
                    s, _ = chain(s, steps)
                jax.block_until_ready(s)
                us = 1e6 * (time.perf_counter() - began) / arguments.calls / CHAIN
                state[key] = s
                times.setdefault(key, []).append(us)
        for setting in settings:
            for impl in impls:
                us = times[setting, impl]
                other = np.asarray(tokens[setting, impl]) != np.asarray(tokens[setting, "reference"])
                row = Row(
                    **bench.origin(arguments.commit),
                    op="sampling", impl=impl, setting=setting, rows=rows, vocabulary=vocabulary,
                    us=statistics.median(us), us_min=min(us), us_max=max(us), empty_us=one_op.empty_us(),
                    draws=other.size, other=int(other.sum()),
                )  # fmt: skip
                print(json.dumps(dataclasses.asdict(row)), flush=True)


if __name__ == "__main__":
    main()
