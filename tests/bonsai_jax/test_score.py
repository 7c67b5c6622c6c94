"""bj.score: log-probabilities of continuations, against logits that are read text by text, in float64."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.engine import programs
from bonsai_jax.research import reading
from bonsai_jax.research import score as score_module
from bonsai_jax.research.batches import FEW, Sizes, batches

DATA = Path(__file__).parent.parent / "data"


@functools.cache
def tiny(source="tiny-llama:q8_0") -> bj.Model:
    return bj.load(f"synth:{source}", bj.RunConfig(page_size=16, activation_bits=16))


def by_hand(model, prompt, ids):
    """float64 log-probabilities of the tokens of a continuation, and whether each is the likeliest."""
    x = bj.logits(model, [*prompt, *ids])[len(prompt) - 1 : -1].astype(np.float64)
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x[np.arange(len(ids)), ids], x.argmax(-1) == ids


def random_items(model, seed, prompts, longest_prompt, most, longest):
    """Prompts, and 1 to `most` continuations of each; some are what greedy decoding would write."""
    draw = np.random.default_rng(seed)

    def ids(longest):
        return draw.integers(0, 256, draw.integers(1, longest + 1)).tolist()

    prompts = [ids(longest_prompt) for _ in range(prompts)]
    continuations = [[ids(longest) for _ in range(draw.integers(1, most + 1))] for _ in prompts]
    for prompt, each in zip(prompts, continuations, strict=True):
        text = list(prompt)
        for _ in range(2):
            text.append(int(bj.logits(model, text)[-1].argmax()))
        each[-1] = text[len(prompt) :]
    return prompts, continuations


def compare(model, prompts, continuations, **options):
    scores = bj.score(model, prompts, continuations, **options)
    assert [len(each) for each in scores] == [len(each) for each in continuations]
    for prompt, each, own in zip(prompts, continuations, scores, strict=True):
        for ids, got in zip(each, own, strict=True):
            want, greedy = by_hand(model, prompt, ids)
            np.testing.assert_allclose(got.token_logprobs, want, atol=1e-4)
            assert abs(got.logprob - want.sum()) < 1e-3 and got.is_greedy == greedy.all()
            assert got.tokens == ids and got.token_logprobs.dtype == np.float32
    return scores


# Full attention, windows, and states that cannot be rewound.
@pytest.mark.parametrize("source", ["tiny-llama:q8_0", "tiny-gemma3:q8_0", "tiny-qwen35:q8_0"])
def test_scores_are_those_of_each_text_alone(source):
    model = tiny(source)
    scores = compare(model, *random_items(model, 0, prompts=9, longest_prompt=28, most=5, longest=6))
    greedy = [score.is_greedy for each in scores for score in each]
    assert any(greedy) and not all(greedy)


def test_a_batch_may_be_smaller_than_what_is_asked(monkeypatch):
    """Several batches of prompts, and several of continuations behind each."""
    monkeypatch.setattr("bonsai_jax.research.score.batch_tokens", lambda: 64)
    monkeypatch.setattr("bonsai_jax.research.score.scored_tokens", lambda: 8)
    model, asked = tiny(), []
    prompts, continuations = random_items(model, 1, prompts=12, longest_prompt=16, most=5, longest=5)
    compare(model, prompts, continuations, progress=lambda done, total: asked.append((done, total)))
    assert asked[0] == (0, 12) and asked[-1] == (12, 12) and len(asked) >= 3


def test_a_prompt_is_read_once_for_all_of_its_continuations(monkeypatch):
    tokens, padded = [], reading.Reader.padded

    def counted(self, ids, *shape):
        if ids:
            tokens.append(sum(map(len, ids)))
        return padded(self, ids, *shape)

    monkeypatch.setattr(reading.Reader, "padded", counted)
    prompt = list(range(20))
    bj.score(tiny(), [prompt], [[[4, 5], [1, 2, 3], [6], [7]]])
    assert tokens == [20 + 2, 1]
    tokens.clear()
    bj.score(tiny("tiny-qwen35:q8_0"), [prompt], [[[4, 5], [1, 2, 3], [6]]])  # a state cannot go back
    assert tokens == [20, 1 + 2]
    tokens.clear()
    bj.score(tiny(), [prompt, prompt], [[[1, 2, 3]], []])
    assert tokens == [20 + 2]
    tokens.clear()
    bj.score(tiny(), [prompt, prompt], [[[1, 2, 3]], [[4, 5]]])
    assert tokens == [20 + 2, 1]


@pytest.mark.parametrize("source", ["tiny-llama:q8_0", "tiny-qwen35:q8_0"])
def test_continuations_begin_and_end_anywhere_in_a_page(source):
    """A page has 16 tokens; the one in which a continuation goes on is copied, the others are shared."""
    model, draw = tiny(source), np.random.default_rng(3)
    prompts = [draw.integers(0, 256, n).tolist() for n in (1, 15, 16, 17, 31, 32, 33, 48)]
    continuations = [[draw.integers(0, 256, n).tolist() for n in (1, 2, 16, 17, 18, 34)] for _ in prompts]
    compare(model, prompts, continuations)


def test_what_is_read_behind_a_row_leaves_its_pages_as_they_are():
    reader = reading.Reader(tiny())
    reader.prepare([(2, 24)], [(4, 8)])
    reader.read(*reader.padded([list(range(20)), list(range(30, 53))], 2, 24))
    prompts, parents = np.array([20, 20, 23, 3], np.int32), np.array([0, 0, 1, 1], np.int32)
    tokens = reader.padded([[1, 2, 3], [4, 5], [1, 2, 3], list(range(33, 41))], 4, 8)
    one, again = (np.asarray(reader.read_behind(prompts, parents, *tokens)) for _ in range(2))
    np.testing.assert_array_equal(one, again)
    texts = [[*range(20), 1, 2, 3], [*range(20), 4, 5], [*range(30, 53), 1, 2, 3], list(range(30, 41))]
    whole, _ = reader.read(*reader.padded(texts, 4, 28))
    for row, (first, text) in enumerate(zip(prompts, texts, strict=True)):
        np.testing.assert_allclose(one[row, : len(text) - first], whole[row, first : len(text)], atol=1e-4)


def test_programs_are_begun_before_the_first_batch_and_shared_by_calls(monkeypatch):
    begun, run = [], reading.Reader._run

    def noted(self, *arrays):
        begun.append(self._call(*arrays).program in self._programs._begun)
        return run(self, *arrays)

    monkeypatch.setattr(reading.Reader, "_run", noted)
    model, made = tiny(), programs.compiled
    bj.score(model, *random_items(model, 4, prompts=30, longest_prompt=28, most=5, longest=6))
    assert len(begun) > 1 and all(begun)
    count = len(made)
    bj.score(model, *random_items(model, 4, prompts=30, longest_prompt=28, most=5, longest=6))
    assert len(made) == count


def test_tokens_of_a_text_are_those_behind_the_prompts():
    """Of both encoded together, where the prompt's stay as they are; else its own."""
    model = tiny()
    encode = model.tokenizer.encode
    for prompt, text in (
        ("The bonsai", " is small"),
        ("The bon", "sai"),
        (encode("The bonsai"), " is small"),
    ):
        ((score,),) = bj.score(model, [prompt], [[text]])
        own = encode(prompt) if isinstance(prompt, str) else prompt
        together = encode(prompt + text) if isinstance(prompt, str) else []
        same = together[: len(own)] == own
        assert score.tokens == (together[len(own) :] if same else encode(text, add_special=False))
        np.testing.assert_allclose(score.token_logprobs, by_hand(model, own, score.tokens)[0], atol=1e-4)


def test_ids_may_be_arrays_and_nothing_may_be_asked():
    model = tiny()
    ((a, b),) = bj.score(model, [np.array([1, 2, 3])], [[np.array([4, 5]), (6,)]])
    assert (a.tokens, b.tokens) == ([4, 5], [6])
    assert bj.score(model, [], []) == [] and bj.score(model, [[1]], [[]]) == [[]]


@pytest.mark.parametrize(
    ("prompts", "continuations", "error", "message"),
    [
        (["a"], [[""]], ValueError, r"continuations\[0\] has an empty one"),
        (["a", "b"], [["c"], [[]]], ValueError, r"continuations\[1\] has an empty one"),
        (["a"], ["b"], TypeError, r"continuations\[0\] is 'b'; give a list"),
        (["a"], "b", TypeError, "continuations are a str"),
        (["a"], [], ValueError, "0 lists of continuations for 1 prompts"),
        ([[]], [["a"]], ValueError, "a prompt is empty"),
        ("a", [["b"]], TypeError, "prompts are a str"),
        ([np.zeros((2, 256), np.float32)], [["b"]], TypeError, "vectors"),
        ([[1]], [[np.zeros((2, 256), np.float32)]], TypeError, "vectors"),
        ([[1]], [[[10**6]]], ValueError, "beyond the vocabulary"),
        ([[1] * 4000], [[[2] * 4000]], ValueError, "exceed the context"),
    ],
)
def test_what_cannot_be_scored_is_refused(prompts, continuations, error, message):
    with pytest.raises(error, match=message):
        bj.score(tiny(), prompts, continuations)


def test_a_model_is_asked_for():
    with pytest.raises(TypeError, match="model is a str"):
        bj.score("demo", ["a"], [["b"]])


def test_smollm2_scores_llama_cpps_answers_as_llama_cpp_does():
    """Its greedy answers and their log-probabilities, on the same weights in float32."""
    from tests.bonsai_jax.test_oracle import smollm2

    model = bj.load(str(smollm2()), bj.RunConfig(activation_bits=16))
    kept = json.loads((DATA / "smollm2_oracle.json").read_text())["float32"]
    rows = sorted(kept, key=lambda row: len(row["prompt"]))[:6]
    scores = bj.score(model, [row["prompt"] for row in rows], [[row["tokens"][:12]] for row in rows])
    for row, (score,) in zip(rows, scores, strict=True):
        assert [top[0] for top in row["top_ids"][:12]] == score.tokens
        want = [top[0] for top in row["top_logprobs"][:12]]
        np.testing.assert_allclose(score.token_logprobs, want, atol=0.02)
        ties = [top[0] - top[1] < 0.01 for top in row["top_logprobs"][:12]]
        assert score.is_greedy or any(ties)


def test_of_equal_logits_the_first_is_greedy():
    """As argmax has it."""
    model = tiny()
    head = model.params.embed if model.params.head is None else model.params.head
    hidden = np.zeros((3, model.config.hidden), np.float32)  # all logits are 0
    columns = np.array([[0, 0, token] for token in (0, 1, 255)], np.int32)
    logprobs, greedy = score_module.score_tokens(model.params, hidden, columns, model.config)
    assert greedy.tolist() == [True, False, False]
    np.testing.assert_allclose(logprobs, -np.log(head.shape[0]), atol=1e-5)
    _, greedy = score_module.score_tokens(model.params, hidden * np.nan, columns, model.config)
    assert not greedy.any()


@pytest.mark.parametrize(("sizes", "padding", "shapes"), [(Sizes(4, 4), 1.15, 18), (Sizes(8, 2), 1.25, 10)])
def test_batches_have_every_item_once_and_few_shapes(sizes, padding, shapes):
    draw = np.random.default_rng(0)
    for count in (0, 1, 5, 300):
        lengths = draw.integers(1, 400, count).tolist()
        cut = list(batches(lengths, 2048, sizes, most_rows=64))
        assert sorted(i for numbers, *_ in cut for i in numbers) == list(range(count))
        for numbers, rows, width in cut:
            assert 1 <= len(numbers) <= rows <= max(1, min(64, 2048 // width))
            assert sizes.padded(max(lengths[i] for i in numbers)) == width
        widths = [width for *_, width in cut]
        assert widths == sorted(widths, reverse=True)
    lengths = np.clip(100 * np.exp(0.6 * draw.standard_normal(1000)), 30, 400).astype(int).tolist()
    cut = list(batches(lengths, 2048, sizes))
    assert sum(rows * width for _, rows, width in cut) < padding * sum(lengths)
    assert len({shape[1:] for shape in cut}) <= shapes


def test_strangers_who_choose_lengths_get_few_programs():
    draw, seen = np.random.default_rng(1), set()
    for _ in range(3000):
        lengths = np.exp(draw.uniform(0, np.log(4096), draw.integers(1, 65))).astype(int).tolist()
        seen |= {shape[1:] for shape in batches(lengths, 2048, FEW.widths, rows=FEW.rows)}
    assert len(seen) <= 45 and all(rows * width <= 4096 for rows, width in seen)


def test_sizes_are_at_least_as_large_and_little_larger():
    widths = [Sizes(4, 4).padded(n) for n in range(1, 5000)]
    assert all(n <= w and w - n < max(4, n / 4 + 1) and w % 4 == 0 for n, w in enumerate(widths, 1))
    assert len(set(widths)) < 45
    assert [Sizes(1, 2).padded(n) for n in range(1, 10)] == [1, 2, 3, 4, 6, 6, 8, 8, 12]
    assert [Sizes(8, 2).padded(n) for n in (1, 8, 9, 17, 33, 65)] == [8, 8, 16, 24, 48, 96]
