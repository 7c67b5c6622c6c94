"""Decoding with proposals from the text itself, and without, in turns: tokens per step, time per token, and
whether the text is the same.

    python benchmarks/speculation.py [-m demo] [-n 96] [--only repeats,edits] [--commit NAME] > rows.jsonl

Prompts that ask for a text of theirs again (`repeats`), with a word replaced (`edits`), and one that asks for
a text of its own (`free`), greedy and with the default sampling. `first_difference` is where the two texts
part, if they do, and `nats` how far apart their tokens are there: rounding decides near-ties.
"""

import argparse
import dataclasses
import json
import statistics
import time

import jax
import numpy as np

import bonsai_jax as bj
from bonsai_jax.decoding import jitted, steps
from bonsai_jax.engine import prompts
from bonsai_jax.measure import bench

TEXT = (
    "The harbour master counts the boats every evening. On Monday there were twelve boats, and two of them "
    "had come from the islands in the north. On Tuesday the wind turned, so that only three boats went out, "
    "and the old lighthouse keeper wrote in his book that the sea was as grey as the sky."
)
PROMPTS = {
    "repeats": f"Repeat this text word for word, and write nothing else:\n\n{TEXT}",
    "edits": f'Write this text again, with the word "boats" replaced by "ships":\n\n{TEXT}',
    "free": "Write a short story about a lighthouse keeper.",
}
SAMPLING = {"greedy": bj.SamplingParams(temperature=0.0), "default": bj.SamplingParams(seed=1)}


@dataclasses.dataclass(frozen=True)
class Row(bench.Origin):
    """One prompt, one way to draw.

    ms, plain_ms      per token behind the first, with speculation and without; medians of the repetitions
    tokens, steps     drawn behind the first, and steps that drew them
    first_difference  token at which the texts part; None: they are the same
    nats              between those two tokens, by the model's log-probabilities
    """

    model: str
    prompt: str
    sampling: str
    proposer: str
    width: int
    tokens: int
    steps: int
    tokens_per_step: float
    ms: float
    plain_ms: float
    first_difference: int | None
    nats: float | None


class Answer:
    """One prompt's answer, decoded as often as wanted."""

    def __init__(self, model: bj.Model, ids: list[int], new: int, params: bj.SamplingParams, proposer):
        self.model, self.new = model, new
        self.decode = bench.as_dispatched(steps.decode, "state", on_mesh=False)
        tokens, lengths = prompts.pad([ids])
        self.fresh = lambda: jitted.prefill(
            model.params,
            bj.new_state(model, 1, tokens.shape[1] + new, params, new, speculate=proposer),
            tokens,
            lengths,
            model.config,
        )
        for _ in range(bench.WARMUP_CALLS):
            self.run(limit=bench.WARMUP_STEPS)

    def run(self, limit: int | None = None) -> float:
        """Milliseconds per token behind the first."""
        model, (state, first, _) = self.model, jax.block_until_ready(self.fresh())
        limit = np.int32(limit or self.new)
        began = time.perf_counter()
        state, drawn, _ = self.decode(model.params, state, model.config, limit=limit, size=self.new)
        jax.block_until_ready(drawn)
        seconds = time.perf_counter() - began
        drawn = [token for token in drawn[0].tolist() if token >= 0]
        self.tokens, self.speculation = first.tolist() + drawn, state.speculation
        return 1e3 * seconds / len(drawn)


def difference(model: bj.Model, ids: list[int], one: list[int], other: list[int]):
    """Where two answers part, and the nats between their tokens there."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if at is None:
        return None, None
    scores = bj.logits(model, ids + one[:at])[-1]
    return at, float(abs(scores[one[at]] - scores[other[at]]))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-m", "--model", default="demo")
    p.add_argument("-n", "--new", type=int, default=96)
    p.add_argument("--only", help="prompts, such as repeats,edits")
    p.add_argument("--proposer", default="ngram")
    p.add_argument("--draft", help="the draft model, which is the proposer then")
    p.add_argument("-r", "--repetitions", type=int, default=5)
    p.add_argument("--commit", help="for a checkout without history")
    arguments = p.parse_args()
    proposer = "draft_model" if arguments.draft else arguments.proposer
    model = bj.load(arguments.model, bj.RunConfig(draft=proposer == "mtp", draft_model=arguments.draft))
    for prompt in arguments.only.split(",") if arguments.only else PROMPTS:
        ids = model.tokenizer.encode_chat([{"role": "user", "content": PROMPTS[prompt]}])
        for sampling, params in SAMPLING.items():
            plain = Answer(model.without_draft_model(), ids, arguments.new, params, None)
            spec = Answer(model, ids, arguments.new, params, proposer)
            times = [(spec.run(), plain.run()) for _ in range(arguments.repetitions)]
            ms, plain_ms = map(statistics.median, zip(*times, strict=True))
            tokens, steps = len(spec.tokens) - 1, int(spec.speculation.steps[0])
            first_difference, nats = difference(model, ids, plain.tokens, spec.tokens)
            row = Row(
                **bench.origin(arguments.commit),
                model=model.name, prompt=prompt, sampling=sampling,
                proposer=proposer, width=spec.speculation.width,
                tokens=tokens, steps=steps, tokens_per_step=tokens / steps, ms=ms, plain_ms=plain_ms,
                first_difference=first_difference, nats=nats,
            )  # fmt: skip
            print(json.dumps(dataclasses.asdict(row)), flush=True)


if __name__ == "__main__":
    main()
