"""Speculation on texts of known repetition, beside plain decoding: the speed of its steps, whatever the
model writes.

    python benchmarks/scripted_speculation.py [-m synth:bonsai-8b:q1_0] [--rows 1] [-n 256] > rows.jsonl
    python benchmarks/scripted_speculation.py -m synth:bonsai-27b-mtp:q1_0 --right 0.8,0.65,0.5 > rows.jsonl

A model with random weights writes no text that repeats its prompt, and one that does repeats it as often as
its rounding lets it. So a script says what is drawn: a logits_processor lifts the script's next token above
all others, in plain decoding too. All else is real: the model reads its tokens, n-grams are looked for in
prompt and answer, and proposals are accepted where they are what is drawn. Of a prompt of tokens that differ:

    free     other tokens: nothing can be proposed
    wrong    the prompt's tokens at random: something is proposed for each, and is wrong
    quarter  each token with probability 1 / 4 the one that follows in the prompt: where guessing costs most
    edits    the prompt again, with another token in place of every twelfth
    repeats  the prompt again

With --right the model's draft layer proposes, and each of its proposals is right with such a probability: one
that is right is then replaced by the script's token. It has drafted all the same.

`tok_s` and `plain_tok_s` are medians of interleaved runs. `unscripted_tok_s` is plain decoding without the
processor, which is part of both others.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import statistics
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import bonsai_jax as bj
from bonsai_jax.decoding import jitted, steps
from bonsai_jax.decoding.proposers import mtp
from bonsai_jax.measure import bench

FORCED = 1e6  # a logit above all others


@dataclasses.dataclass(frozen=True)
class Row(bench.Origin):
    """One text. `speculating` is tok_s / plain_tok_s."""

    model: str
    rows: int
    text: str
    tokens_per_step: float
    tok_s: float
    plain_tok_s: float
    speculating: float
    unscripted_tok_s: float


def texts(vocabulary: int, size: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A prompt [size], and scripts of answers to it, [size] each."""
    rng = np.random.default_rng(0)
    prompt, others = np.split(rng.permutation(vocabulary)[: 2 * size].astype(np.int32), 2)
    at, quarter = 0, np.empty(size, np.int64)
    for i in range(size):
        at = (at + 1) % size if rng.random() < 0.25 else rng.integers(size)
        quarter[i] = at
    return prompt, {
        "free": others,
        "wrong": prompt[rng.permutation(size)],
        "quarter": prompt[quarter],
        "edits": np.where(np.arange(size) % 12 == 11, others, prompt),
        "repeats": prompt,
    }


class Decoding:
    """Answers of `new` tokens to a prompt, with a proposer or without."""

    def __init__(self, model: bj.Model, prompt: np.ndarray, rows: int, new: int, proposer: str | None):
        self.model, self.prompt, self.new = model, np.tile(prompt, (rows, 1)), new
        greedy = bj.SamplingParams(temperature=0.0)
        context = prompt.size + new + 1
        self.state = functools.partial(
            bj.new_state, model, rows, context, greedy, new, ignore_eos=True, speculate=proposer
        )
        # As an engine has it: no wait for the host between two steps.
        self.decode = jax.jit(self._decode, donate_argnums=1, compiler_options=bench.ONE_GRAPH)

    def _decode(self, params, state, script, limit, right):
        def scripted(logits, state):
            token = script[jnp.minimum(state.cache.lengths - self.prompt.shape[1], script.size - 1)]
            return jnp.where(jnp.arange(logits.shape[1]) == token[:, None], FORCED, logits)

        def made_right(drafted, positions):
            """What was drafted for these positions, or what the script has there, where it is to be right."""
            place = jnp.clip(positions - self.prompt.shape[1], 0, script.size - 1)
            return jnp.where((drafted >= 0) & right[place], script[place], drafted)

        def propose(params, state, config, count, own=mtp.propose):
            drafted, state = own(params, state, config, count)
            return made_right(drafted, state.cache.lengths[:, None] + 1 + jnp.arange(count)), state

        def follow_and_guess(params, state, unread, tokens, positions, config, own=mtp.follow_and_guess):
            draft, guesses = own(params, state, unread, tokens, positions, config)
            return draft, made_right(guesses, positions + 1)

        processor = None if script is None else scripted
        size, config = self.new, self.model.config
        known = contextlib.nullcontext()
        if right is not None:
            known = mock.patch.multiple(mtp, propose=propose, follow_and_guess=follow_and_guess)
        with known:
            return steps.decode(params, state, config, limit=limit, size=size, logits_processor=processor)

    def run(
        self, script: np.ndarray | None, share: float | None = None, limit: int | None = None
    ) -> tuple[float, float]:
        """Tokens per second after the answer's first, and per step of a row; share: of the draft layer's
        proposals that are right."""
        rows, size = self.prompt.shape
        lengths = np.full(rows, size, np.int32)
        state, *_ = jitted.prefill(self.model.params, self.state(), self.prompt, lengths, self.model.config)
        if script is not None:
            state = state.replace(tokens=jnp.full(rows, script[0]))
            if (s := state.speculation) is not None:
                state = state.replace(speculation=s.replace(ids=s.ids.at[:, size].set(script[0])))
        steps_made = np.int32(limit or self.new)
        given = None if script is None else jnp.asarray(script)
        right = None if share is None else jnp.asarray(np.random.default_rng(1).random(self.new + 1) < share)
        jax.block_until_ready(state)
        began = time.perf_counter()
        state, drawn, _ = self.decode(self.model.params, state, given, steps_made, right)
        jax.block_until_ready(drawn)
        seconds = time.perf_counter() - began
        drawn = np.asarray(drawn)
        counts = (drawn >= 0).sum(1)
        if script is not None:
            for row, count in zip(drawn, counts, strict=True):
                np.testing.assert_array_equal(row[:count], script[1 : 1 + count])
        made = counts if state.speculation is None else np.asarray(state.speculation.steps)
        return float(counts.sum()) / seconds, float((counts / made).mean())


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-m", "--model", default="synth:bonsai-8b:q1_0")
    p.add_argument("--rows", type=int, default=1)
    p.add_argument("-n", "--new", type=int, default=256, help="tokens of an answer after its first")
    p.add_argument("-r", "--repetitions", type=int, default=5)
    p.add_argument("--right", help="shares of the draft layer's proposals that are right, such as 0.8,0.5")
    p.add_argument("--commit", help="for a checkout without history")
    arguments = p.parse_args()
    shares = [float(share) for share in (arguments.right or "").split(",") if share]
    model = bj.load(arguments.model, bj.RunConfig(draft=bool(shares)))
    prompt, scripts = texts(model.config.vocab_size, arguments.new + 1)
    decoding = functools.partial(Decoding, model, prompt, arguments.rows, arguments.new)
    plain, spec = decoding(None), decoding("mtp" if shares else "ngram")
    runs = {"unscripted": (plain, None), "plain": (plain, scripts["free"])}
    if shares:
        runs |= {f"{share} right": (spec, scripts["free"], share) for share in shares}
    else:
        runs |= {text: (spec, script) for text, script in scripts.items()}
    for one, *how in [*runs.values()] * bench.WARMUP_CALLS:
        one.run(*how, limit=bench.WARMUP_STEPS)
    times = [
        {name: one.run(*how) for name, (one, *how) in runs.items()} for _ in range(arguments.repetitions)
    ]
    speed = {name: statistics.median(each[name][0] for each in times) for name in runs}
    for text in [*runs][2:]:
        row = Row(
            **bench.origin(arguments.commit), model=model.name, rows=arguments.rows, text=text,
            tokens_per_step=times[0][text][1], tok_s=speed[text], plain_tok_s=speed["plain"],
            speculating=speed[text] / speed["plain"], unscripted_tok_s=speed["unscripted"],
        )  # fmt: skip
        print(json.dumps(dataclasses.asdict(row)), flush=True)


if __name__ == "__main__":
    main()
