"""Stories as tokens, and the windows that are trained on."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from new_model import END, train_tokenizer  # beside this file

TOKENIZER_STORIES = 50_000  # enough for a vocabulary of some thousand


def prepare(files: Sequence[Path], folder: Path, vocab: int, test: int) -> None:
    """Write tokenizer.json and data.npz: `train`, stories one behind another, each after END; `starts`, where
    they begin; `test`, stories that are not trained, and the END of the last."""
    texts = sorted({json.loads(line) for file in files for line in file.read_text().splitlines()})
    random.Random(0).shuffle(texts)
    test = min(test, len(texts) // 10)
    tokenizer = train_tokenizer(texts[test : test + TOKENIZER_STORIES], vocab)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    ids = [np.array([end, *encoding.ids], np.uint16) for encoding in tokenizer.encode_batch(texts)]
    parts = {"test": ids[:test], "train": ids[test:]}
    arrays = {name: np.concatenate([*part, np.array([end], np.uint16)]) for name, part in parts.items()}
    starts = np.cumsum([0, *map(len, ids[test:])])[:-1].astype(np.int32)
    np.savez(folder / "data.npz", **arrays, starts=starts)
    words = sum(len(text.split()) for text in texts)
    sizes = ", ".join(f"{array.size} tokens to {name}" for name, array in arrays.items())
    print(f"{len(texts)} stories, {words} words; {sizes}", flush=True)


def windows(starts: np.ndarray, tokens: int, length: int, rows: int, seed: int) -> Iterator[np.ndarray]:
    """Where the windows of each step begin, int32 [rows]: each story once before any comes again. A window
    has a story and what comes after it."""
    usable = starts[starts + length <= tokens]
    if not len(usable):
        raise ValueError(
            f"no story has {length} tokens after its start, of {tokens} in all: write more stories"
        )
    rng, queue = np.random.default_rng(seed), np.zeros(0, np.int32)
    while True:
        while len(queue) < rows:
            queue = np.concatenate([queue, rng.permutation(usable)])
        yield queue[:rows]
        queue = queue[rows:]


def test_rows(tokens: np.ndarray, length: int, rows: int) -> np.ndarray:
    """The stories to test, int32 [n * rows, length]: as many in a row as fit whole, each after END (0), and
    END after the last; -1 beyond."""
    bounds = np.flatnonzero(tokens == 0)
    lines, begin = [], 0
    while begin < len(bounds) - 1:
        last = begin + 1
        while last + 1 < len(bounds) and bounds[last + 1] - bounds[begin] < length:
            last += 1
        line = tokens[bounds[begin] : bounds[last] + 1][:length]
        lines.append(np.pad(line.astype(np.int32), (0, length - len(line)), constant_values=-1))
        begin = last
    return np.stack(lines + [np.full(length, -1, np.int32)] * (-len(lines) % rows))
