"""The recipe of examples/story_model at the size of a toy: its data, its trainer, and the file that is
written. And the model that it made, which comes with the library."""

# ruff: noqa: RUF001 - quotes as a model writes them

import importlib
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest

import bonsai_jax as bj
from checkpoints import CheckpointError, open_checkpoint, stories
from tests.bonsai_jax import llama_cpp
from tests.bonsai_jax.vocabularies import LlamaCpp

NEW_STORIES = Path(__file__).parent / "data" / "new_stories.jsonl"  # SmolLM2's, written after the training
FOLDER = Path(__file__).parent.parent / "examples" / "story_model"
SIZES = {"layers": 1, "hidden": 128, "ffn": 128, "heads": 2, "kv-heads": 1, "rows": 8, "length": 32}
TOY = [f"--{name}={value}" for name, value in (SIZES | {"capacity": 100_000, "vocab": 512}).items()]


@pytest.fixture(scope="module")
def recipe():
    """Its modules, which import each other as scripts in one folder do."""
    sys.path.insert(0, str(FOLDER))
    yield {name: importlib.import_module(name) for name in ("prompts", "write_stories", "data", "train")}
    sys.path.remove(str(FOLDER))


def test_from_stories_to_a_file(recipe, tmp_path):
    rng, stories = random.Random(0), tmp_path / "stories.jsonl"
    texts = [" ".join(recipe["prompts"].draw(rng)[1] or "The end." for _ in range(6)) for _ in range(300)]
    stories.write_text("".join(json.dumps(text) + "\n" for text in texts))
    main, data = recipe["train"].main, tmp_path / "data"
    main(["prepare", str(stories), "--data", str(data), "--vocab", "512", "--test", "20"])
    main(["train", "--data", str(data), "--out", str(tmp_path), "--steps", "60", "--warmup", "10", *TOY])
    report = json.loads((tmp_path / "one-bit.json").read_text())["report"]
    assert report["test perplexity"] < 200  # a new model's is 512

    path = tmp_path / "one-bit.gguf"
    formats = {t.format for t in open_checkpoint(path).tensors.values()}
    assert formats == {"q1_0", "q8_0", "f32"}
    model, theirs = bj.load(path), LlamaCpp(path)
    for text in (texts[0], "tabs\t and \"signs\",\n\n  it's 12 o'clock: Ünï 中文", "<|endoftext|>One day"):
        assert model.tokenizer.encode(text) == theirs.encode(text)
    assert bj.generate(model, "Once upon a time", max_new_tokens=4)[0].tokens


def test_rows_of_stories_that_are_not_trained(recipe):
    """Each story is once in a row, after a 0 and before another."""
    lengths = [3, 9, 2, 2, 5]
    tokens = np.concatenate([*([0, *[7] * n] for n in lengths), [0]])
    rows = recipe["data"].test_rows(tokens, 8, 4)
    assert rows.shape == (4, 8)
    assert rows.tolist()[:3] == [[0, 7, 7, 7, 0, -1, -1, -1], [0, *[7] * 7], [0, 7, 7, 0, 7, 7, 0, -1]]
    assert rows[3].tolist() == [0, *[7] * 5, 0, -1]


def test_stories_that_are_dropped(recipe):
    is_good = recipe["write_stories"].is_good
    good = " ".join(f"Pip saw {n} birds, {n}1 bees and {n}2 fish." for n in range(12))
    assert is_good(good)
    assert not is_good(good + " He loved it. " + "He loved his own box very much. " * 6)
    assert not is_good("Too short.") and not is_good(good + " 中.") and not is_good(good[:-1])
    whole, cleaned = recipe["write_stories"].whole, recipe["write_stories"].cleaned
    assert whole("One.\n\nTwo", ended=False) == "One." and whole("One.\n\nTwo", ended=True) == "One.\n\nTwo"
    assert cleaned("It’s — “so” \n \n\n end ") == 'It\'s - "so"\n\nend'


def test_the_model_of_the_library_knows_stories():
    """As docs/stories.md says. Half of the weights' signs turned would be at hundreds."""
    model = bj.load("stories", bj.RunConfig(context=1024, activation_bits=16))
    nats, count = 0.0, 0
    for line in NEW_STORIES.read_text().splitlines():
        ids = model.tokenizer.encode(json.loads(line))
        assert ids[0] in model.tokenizer.eos_ids
        logits = np.asarray(bj.logits(model, ids), np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        nats -= logprobs[np.arange(len(ids) - 1), ids[1:]].sum()
        count += len(ids) - 1
    assert np.exp(nats / count) == pytest.approx(4.675, abs=0.005)


def test_llama_cpp_knows_the_same_stories(tmp_path):
    """With float32 weights of the same values, as llama.cpp rounds the activations of Q1_0."""
    llama_cpp.write_float32(open_checkpoint("stories"), tmp_path / "float32.gguf")
    theirs = llama_cpp.LlamaCpp(tmp_path / "float32.gguf")
    ours = bj.load("stories", bj.RunConfig(activation_bits=16, cache_dtype="float32"))
    prompt = ours.tokenizer.encode("Once upon a time, there was a little fox named Pip.")
    want = theirs.greedy(prompt, 40, readable=ours.tokenizer.encode("!")[-1])
    logits = np.asarray(bj.logits(ours, prompt + want["tokens"][:-1]), np.float64)[len(prompt) - 1 :]
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert logprobs.argmax(axis=1).tolist() == want["tokens"]
    rows = np.arange(40)[:, None]
    np.testing.assert_allclose(logprobs[rows, np.array(want["top_ids"])], want["top_logprobs"], atol=2e-3)


def test_a_file_of_the_users_own_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("stories").metadata["general.name"] == "Stories"
    (tmp_path / "stories").write_bytes(stories.PATH.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="stories"):
        open_checkpoint("stories")
