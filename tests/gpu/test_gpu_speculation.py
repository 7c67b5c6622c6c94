"""Steps that read several tokens of each sequence as rows of one launch: those of plain steps, and the same
text."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.decoding import jitted
from bonsai_jax.decoding.proposers import draft_model, mtp
from bonsai_jax.network import cache as kv
from checkpoints import synth
from tests.agreement import divergence, log_softmax

pytestmark = pytest.mark.gpu

CONTEXT = 512
KL = 5e-3  # nats, of activations rounded to 8 bits, as in test_gpu_rows.py
# Sequences and tokens of each: one launch up to 24 rows, then eight a layer.
SHAPES = [(1, 2), (1, 4), (1, 8), (2, 4), (4, 2), (3, 8), (16, 4)]
# From one 16 keys to the next; from one page, and one split, to the next; several splits.
CACHES = [(13, "float32"), (125, "float16"), (300, "int8")]


@pytest.fixture(scope="module", params=["q1_0", "q4_k_m"])
def models(request):
    """The same weights by kernels and by the reference: layers and vocabulary of the 8B are fewer, and all
    else is as it is. K-quants have two launches a layer, or a launch for each product."""
    with pytest.MonkeyPatch.context() as patch:
        few = dataclasses.replace(synth.MODELS["bonsai-8b"], layers=2, vocab=2048, specials=2000)
        patch.setitem(synth.MODELS, "few-8b", few)
        load = lambda impl: bj.load(  # noqa: E731
            f"synth:few-8b:{request.param}",
            bj.RunConfig(impl=impl, cache_dtype="float32", batch_size=64, context=CONTEXT),
        )
        yield load("auto"), load("reference")


def log_p(model, cache_dtype, pieces, lengths) -> list[np.ndarray]:
    """Log-probabilities [row, token, vocabulary] after each token of the pieces, which are read in turn.

    pieces   int32 [rows, tokens] each
    lengths  of each piece, how many of its tokens each row has
    """
    rows, run = len(pieces[0]), dataclasses.replace(model.run, cache_dtype=cache_dtype)
    cache, out = kv.empty(model.config, run, rows, CONTEXT), []
    for piece, own in zip(pieces, lengths, strict=True):
        own, offset = np.array(own, np.int32), np.arange(piece.shape[1])
        scores, cache = jitted.extend(model.params, cache, jnp.array(piece), jnp.array(own), model.config)
        out.append(log_softmax(np.where((offset < own[:, None])[..., None], scores, 0)))
    return out


@pytest.mark.parametrize(("keys", "cache_dtype"), CACHES)
@pytest.mark.parametrize(("rows", "tokens"), SHAPES)
def test_a_step_of_several_tokens_is_as_many_plain_steps(rows, tokens, keys, cache_dtype, models):
    """Sequences of different lengths, and some read fewer tokens. The step after it reads the keys that it
    has stored."""
    ids = np.random.default_rng(keys + rows).integers(0, 2000, (rows, keys + tokens + 1)).astype(np.int32)
    prompt, several, last = np.split(ids, [keys, keys + tokens], axis=1)
    prompts = [keys - i % 5 for i in range(rows)]
    counts = [tokens - (i % tokens if i % 3 == 1 else 0) for i in range(rows)]
    alone = [[t < count for count in counts] for t in range(tokens)]
    together = [prompt, several, last], [prompts, counts, [1] * rows]
    apart = [prompt, *np.split(several, tokens, axis=1), last], [prompts, *alone, [1] * rows]
    kernels, reference = models
    _, *got = log_p(kernels, cache_dtype, *together)
    _, *steps, end = log_p(kernels, cache_dtype, *apart)
    others = [(np.concatenate(steps, axis=1), end)]
    if cache_dtype != "int8" and kernels.params.step.schedule(8) == "one_launch":
        others.append(log_p(reference, cache_dtype, *together)[1:])  # as test_gpu_rows.py has it
    for other in others:
        kl, kl_after = (divergence(a, b).max() for a, b in zip(other, got, strict=True))
        print(f"{rows} x {tokens} after {keys} keys: KL at most {kl:.2e}, of the next step {kl_after:.2e}")
        assert max(kl, kl_after) < KL


def parts(one: list[int], other: list[int]) -> int | None:
    """Where two answers part; None: they are the same."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


@pytest.mark.parametrize(
    "source",
    [
        *("bonsai-1.7b:q1_0", "bonsai-1.7b:q4_k_m", "tiny-qwen3moe:q4_k_m"),
        *("tiny-qwen35:f32", "tiny-qwen35:q1_0", "tiny-qwen35:pq2_0"),  # with recurrent states
    ],
)
@pytest.mark.parametrize("rows", [1, 3])
def test_speculation_draws_what_plain_decoding_does(source, rows):
    """A text that a bias makes repeat itself, and texts of the model; where they part, two tokens are equally
    likely but for rounding."""
    model, new = bj.load(f"synth:{source}", bj.RunConfig(context=CONTEXT, batch_size=rows)), 64
    rng = np.random.default_rng(rows)
    ids = [np.tile(rng.integers(0, 200, 12), 3).tolist() for _ in range(rows)]
    greedy = bj.SamplingParams(temperature=0.0)
    biased = dataclasses.replace(greedy, logit_bias={60: 1e6})
    for params in (greedy, biased, bj.SamplingParams(seed=3)):
        how = {"sampling": params, "max_new_tokens": new, "ignore_eos": True}
        want, got = (bj.generate(model, ids, speculate=speculate, **how) for speculate in (None, "ngram"))
        for prompt, one, other in zip(ids, want, got, strict=True):
            at = parts(one.tokens, other.tokens)
            print(f"{source}, {rows} rows: {other.steps} steps of {one.steps}, texts part at {at}")
            if at is None or params.temperature > 0:  # noise decides near-ties of samples
                continue
            scores = log_softmax(np.asarray(bj.logits(model, prompt + one.tokens[:at])[-1]))
            assert abs(scores[one.tokens[at]] - scores[other.tokens[at]]) < 0.1
        assert params is not biased or max(other.steps for other in got) < new - 1


@pytest.mark.parametrize("source", ["tiny-qwen35-mtp:q1_0", "tiny-qwen35-mtp:q4_k_m"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_draft_layer_draws_what_plain_decoding_does(source, rows, monkeypatch):
    """Random weights: it is seldom right, drafts in the first steps, and then reads tokens of plain steps
    together."""
    monkeypatch.setattr(mtp, "time", lambda params, config: 0.05)  # as beside a large model
    model, new = bj.load(f"synth:{source}", bj.RunConfig(context=CONTEXT, batch_size=rows, draft=True)), 64
    ids = [np.random.default_rng(rows).integers(0, 200, 12 + row).tolist() for row in range(rows)]
    how = {"sampling": bj.SamplingParams(temperature=0.0), "max_new_tokens": new, "ignore_eos": True}
    want, got = (bj.generate(model, ids, speculate=speculate, **how) for speculate in (None, "mtp"))
    for prompt, one, other in zip(ids, want, got, strict=True):
        at = parts(one.tokens, other.tokens)
        print(f"{source}, {rows} rows: {other.steps} steps of {one.steps}, texts part at {at}")
        if at is not None:
            scores = log_softmax(np.asarray(bj.logits(model, prompt + one.tokens[:at])[-1]))
            assert abs(scores[one.tokens[at]] - scores[other.tokens[at]]) < 0.1


@pytest.mark.parametrize("draft", ["bonsai-1.7b:q1_0", "tiny-qwen3:q1_0"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_draft_model_draws_what_plain_decoding_does(draft, rows, monkeypatch):
    """A draft model that is the model, taken to be small, is right nearly always; one of other weights never.
    The vocabulary of the tiny one is made as large."""
    monkeypatch.setattr(draft_model, "time", lambda params, config: 0.05)
    few = {"layers": 2, "vocab": 2048, "specials": 2000}
    for name in ("bonsai-1.7b", "tiny-qwen3"):
        monkeypatch.setitem(synth.MODELS, name, dataclasses.replace(synth.MODELS[name], **few))
    run = bj.RunConfig(context=CONTEXT, batch_size=rows, draft_model=f"synth:{draft}")
    model, new = bj.load("synth:bonsai-1.7b:q1_0", run), 64
    ids = [np.random.default_rng(rows).integers(0, 200, 12 + row).tolist() for row in range(rows)]
    for params in (bj.SamplingParams(temperature=0.0), bj.SamplingParams(seed=3)):
        how = {"sampling": params, "max_new_tokens": new, "ignore_eos": True}
        want, got = (bj.generate(each, ids, **how) for each in (model.without_draft_model(), model))
        for prompt, one, other in zip(ids, want, got, strict=True):
            at = parts(one.tokens, other.tokens)
            print(f"{draft}, {rows} rows: {other.steps} steps of {one.steps}, texts part at {at}")
            assert draft.startswith("tiny") or other.steps < new / 1.5
            if at is None or params.temperature > 0:
                continue
            scores = log_softmax(np.asarray(bj.logits(model, prompt + one.tokens[:at])[-1]))
            assert abs(scores[one.tokens[at]] - scores[other.tokens[at]]) < 0.1
