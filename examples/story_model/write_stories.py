"""Stories by a teacher, as many as fit into a number of seconds: one process per GPU.

    CUDA_VISIBLE_DEVICES=3 python examples/story_model/write_stories.py stories/3.jsonl --seed 3 --seconds 150

Each line of the file is a story, as a JSON string.
"""

# ruff: noqa: RUF001 - quotes as a model writes them

import argparse
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from prompts import draw  # beside this file

import bonsai_jax as bj

PROMPT = 128  # tokens that prompts are padded to: one compiled shape
# Little temperature, for the scenes differ already, and penalties because a small teacher repeats itself.
SAMPLING = {
    "temperature": 0.5,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.1,
    "repetition_penalty": 1.05,
    "frequency_penalty": 0.1,
}

LET_END = 2.5  # added to the logits of tokens that end a story: the rest is cut at a paragraph


def batches(model: bj.Model, rows: int, most: int, seed: int) -> Iterator[list[tuple[str, list[int], bool]]]:
    """(opening, tokens of the answer after it, whether it has ended) of `rows` stories at a time."""
    rng, count = random.Random(seed), 0
    ends = dict.fromkeys(model.tokenizer.eos_ids, LET_END)
    while True:
        scenes: list[tuple[str, list[int]]] = []
        while len(scenes) < rows:
            prompt, opening = draw(rng)
            if len(ids := model.tokenizer.encode(prompt)) <= PROMPT:
                scenes.append((opening, ids))
        tokens = np.zeros((rows, PROMPT), np.int32)
        for row, (_, ids) in zip(tokens, scenes, strict=True):
            row[: len(ids)] = ids
        lengths = jnp.array([len(ids) for _, ids in scenes])
        sampling = bj.SamplingParams(**SAMPLING, logit_bias=ends, seed=seed * 1_000_003 + count)
        state = bj.new_state(model, rows, PROMPT + most, sampling, most)
        drawn = bj.jitted.generate_tokens(
            model.params, state, jnp.asarray(tokens), lengths, model.config, size=most
        )
        answers = [[token for token in row if token >= 0] for row in np.asarray(drawn.tokens).tolist()]
        yield [
            (opening, answer, answer[-1] in model.tokenizer.eos_ids)
            for (opening, _), answer in zip(scenes, answers, strict=True)
        ]
        count += rows


def cleaned(text: str) -> str:
    """Plain quotes and dashes, no spaces at the ends of lines, one empty line between paragraphs."""
    text = text.translate(
        str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "—": "-", "–": "-", "…": "..."})
    )
    return re.sub(r"\s*\n\s*", "\n\n", text).strip()


def whole(text: str, ended: bool) -> str:
    """A story that was cut off ends with its last whole paragraph."""
    return text if ended else text.rpartition("\n\n")[0]


def is_good(text: str, words: tuple[int, int] = (50, 400)) -> bool:
    """Whether a story is plain ASCII prose of some length that does not go round in circles."""
    said = text.lower().split()
    if not text.isascii() or not words[0] <= len(said) <= words[1] or not text.endswith((".", "!", "?", '"')):
        return False
    if re.search(r"[*#<>\[\]{}|_=\\/]|AI assistant|[Ww]rite a|In conclusion|story", text):
        return False  # lists, titles, and talk about the task
    fours = Counter(zip(said, said[1:], said[2:], said[3:], strict=False))
    return max(fours.values()) <= 4 and len(fours) >= 0.85 * fours.total()


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="demo", help="a GGUF file; the prompts are SmolLM2's")
    parser.add_argument(
        "--seconds", type=float, default=150, help="from the start of this process; no batch begins after"
    )
    parser.add_argument("--rows", type=int, default=512, help="stories at once")
    parser.add_argument("--most", type=int, default=352, help="tokens of a story")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    model = bj.load(options.model, bj.RunConfig(context=PROMPT + options.most, activation_bits=16))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    seen, counts, before = set(), Counter(), time.monotonic()
    with open(options.out, "w") as file:
        for batch in batches(model, options.rows, options.most, options.seed):
            for opening, tokens, ended in batch:
                answer = model.tokenizer.decode(tokens[:-1] if ended else tokens)
                text = whole(cleaned(opening + answer), ended)
                counts["tokens"] += len(tokens)
                counts["ended"] += ended
                if text not in seen and is_good(text):
                    seen.add(text)
                    counts["good"] += 1
                    counts["good words"] += len(text.split())
                    print(json.dumps(text), file=file)
            file.flush()
            took, before = time.monotonic() - before, time.monotonic()
            counts["stories"] += len(batch)
            speed = sum(len(tokens) for _, tokens, _ in batch) / took
            print(f"{before - began:.0f} s: {dict(counts)}, {speed:.0f} tok/s", flush=True)
            if before - began + took > options.seconds:
                break


if __name__ == "__main__":
    main()
