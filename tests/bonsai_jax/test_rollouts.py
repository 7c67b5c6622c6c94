"""What training needs of an engine: other weights between two steps (update_params), by which no request is
lost and each token is that of the weights which its answer says have drawn it; and log-probabilities of
tokens as `forward` has them, and as they were drawn."""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.engine.prefix import PrefixCache
from bonsai_jax.network.params import Params
from pallas_kernels import dequantize, for_device, quantize
from tests.bonsai_jax.test_engine import assert_all_pages_are_back, prompt, tiny
from tests.bonsai_jax.test_sampling import kept_by_sorting
from tests.bonsai_jax.tokens import assert_same

SHAPE = {"max_batch_size": 4, "context": 64, "prefill_tokens": 32, "pages": 13, "logprobs": 0}
GREEDY, SAMPLED = bj.SamplingParams(temperature=0.0), bj.SamplingParams(seed=3)
HOW = {"ignore_eos": True, "logprobs": 0}
WEIGHTS = 3  # that updates take in turn
PROMPTS = [prompt(length, length) for length in (5, 18, 33, 40)]


@functools.cache
def weights(version: int) -> Params:
    """Those of version 0 are the model's own; of others every norm is another."""
    number = version % WEIGHTS
    rng = np.random.default_rng(number)

    def other(path, x):
        scale = 1 + 0.5 * rng.standard_normal(x.shape, np.float32)
        return x * scale if number and "norm" in jax.tree_util.keystr(path) else x

    return jax.tree_util.tree_map_with_path(other, tiny().params)


def engine_with(version: int, **options) -> bj.Engine:
    return bj.Engine(dataclasses.replace(tiny(), params=weights(version)), **SHAPE | options)


@functools.cache
def fresh(version: int) -> list[list[int]]:
    """Greedy answers to PROMPTS of an engine that never had other weights."""
    with engine_with(version) as engine:
        handles = [engine.submit(ids, GREEDY, max_new_tokens=16, **HOW) for ids in PROMPTS]
        return [handle.result(60).tokens for handle in handles]


@contextlib.contextmanager
def waiting_for_an_update(engine: bj.Engine, plans: int):
    """After so many plans, with the last perhaps unread, the engine makes none before it has other weights.
    Steps are plans of their own. Gives a function that waits until then."""
    turn, last, version = engine._loop.turn, engine._loop.plans + plans, engine.version
    reached = threading.Event()

    def checked():
        engine._loop.scheduler.idle_steps = 1
        if engine._loop.plans >= last and engine.version == version:
            reached.set()
            time.sleep(0.001)
            return True
        return turn()

    engine._loop.turn = checked
    yield lambda: reached.wait(60)
    engine._loop.turn = turn


@functools.partial(jax.jit, static_argnames="config")
def forward_logprobs(params, tokens, lengths, config):
    logits, _ = bj.forward(params, tokens, lengths, config)
    return jax.nn.log_softmax(logits), logits


def explained(ids: list[list[int]], outputs: list[bj.Output], greedy: list[bool]) -> np.ndarray:
    """Check that `forward` with the weights of each token's version, on all tokens before it, gives the
    greedy token. Returns log p(token) of `forward` less the engine's, of all tokens."""
    longest = max(len(p) + len(out.tokens) for p, out in zip(ids, outputs, strict=True))
    texts = np.zeros((len(ids), -(-longest // 32) * 32), np.int32)
    for row, prompt_ids, out in zip(texts, ids, outputs, strict=True):
        text = [*prompt_ids, *out.tokens]
        row[: len(text)] = text
    lengths = jnp.array([len(p) + len(out.tokens) for p, out in zip(ids, outputs, strict=True)])
    each = [
        jax.tree.map(np.asarray, forward_logprobs(weights(v), texts, lengths, tiny().config))
        for v in range(WEIGHTS)
    ]
    errors = []
    for row, (prompt_ids, out) in enumerate(zip(ids, outputs, strict=True)):
        assert len(out.versions) == len(out.tokens) == len(out.logprobs.token)
        assert out.versions == sorted(out.versions)
        at = len(prompt_ids) - 1 + np.arange(len(out.tokens))
        number = np.array(out.versions) % WEIGHTS
        scores, logits = (np.stack([own[k] for own in each])[number, row, at] for k in (0, 1))
        own = np.take_along_axis(logits, np.array(out.tokens)[:, None], 1)[:, 0]
        if greedy[row]:
            assert (own >= logits.max(1) - 1e-3).all(), row
        errors.append(scores[np.arange(len(own)), out.tokens] - out.logprobs.token)
    return np.concatenate(errors)


def test_tokens_after_an_update_are_those_of_a_fresh_engine():
    with engine_with(0) as engine:
        for version in range(4):
            for cached in (False, True):  # nothing is, with new weights
                handles = [engine.submit(ids, GREEDY, max_new_tokens=16, **HOW) for ids in PROMPTS]
                outputs = [handle.result(60) for handle in handles]
                assert [out.tokens for out in outputs] == fresh(version % WEIGHTS)
                assert all((out.cached_tokens > 0) is cached for out in outputs)
                assert {v for out in outputs for v in out.versions} == {engine.version}
            assert engine.version == version
            assert asyncio.run(_update_beside_an_answer(engine, weights(version + 1))) == version + 1
        assert_all_pages_are_back(engine)
    assert_same(fresh(0) + fresh(1), fresh(0) + fresh(1))
    assert fresh(0) != fresh(1) != fresh(2)


async def _update_beside_an_answer(engine: bj.Engine, params: Params) -> int:
    answer = engine.submit([7, 8, 9], GREEDY, max_new_tokens=8, **HOW)
    version = await asyncio.to_thread(engine.update_params, params)
    assert len((await asyncio.wait_for(answer, 60)).tokens) == 8
    return version


@pytest.mark.parametrize(
    ("requests", "updates"), [(200, 20), pytest.param(1000, 50, marks=pytest.mark.slow)], ids=str
)
def test_requests_under_updates(requests, updates):
    """Rows and pages are too few for all that run. Every token of every answer is that of its weights, which
    read all tokens before it; so an answer of one version is a fresh engine's."""
    rng = np.random.default_rng(0)
    ids = [prompt(int(rng.integers(1, 41)), i % 60) for i in range(requests)]
    greedy = [i % 4 != 0 for i in range(requests)]
    new = rng.integers(1, 17, requests).tolist()
    with engine_with(0) as engine:
        handles = [
            engine.submit(p, GREEDY if g else SAMPLED, max_new_tokens=n, **HOW)
            for p, g, n in zip(ids, greedy, new, strict=True)
        ]
        for update in range(updates):
            handles[update * requests // updates // 2].result(60)
            assert engine.update_params(weights(update + 1), restart=True) == update + 1
        outputs = [handle.result(60) for handle in handles]
        assert_all_pages_are_back(engine)
    assert [len(out.tokens) for out in outputs] == new
    assert sum(len(set(out.versions)) > 1 for out in outputs) >= 5
    errors = explained(ids, outputs, greedy)
    # An estimate of KL(engine || forward) from tokens alone, with less variance than the mean (k3).
    assert abs(errors).max() < 1e-3 and (np.expm1(errors) - errors).mean() < 1e-6


def test_a_cancelled_answer_goes_on_where_it_was():
    """With its tokens so far behind the prompt, and its seed."""
    with engine_with(0) as engine:
        whole = engine.submit(PROMPTS[1], SAMPLED, max_new_tokens=16, **HOW).result(60)
        handle = engine.submit(PROMPTS[1], SAMPLED, max_new_tokens=40, **HOW)
        for _ in handle:
            handle.cancel()
        before = handle.result(60)
        assert before.finish_reason == "cancelled" and 0 < len(before.tokens) < 40
        tokens = before.tokens[:10]
        text = [*PROMPTS[1], *tokens]
        after = engine.submit(text, SAMPLED, max_new_tokens=16 - len(tokens), **HOW).result(60)
        assert_same([tokens + after.tokens], [whole.tokens])
        assert_all_pages_are_back(engine)


def test_running_answers_go_on_with_the_keys_that_they_have():
    """A token was read by the weights that drew the next one."""
    with engine_with(0) as engine:
        with waiting_for_an_update(engine, plans=7) as ready:
            handles = [engine.submit(ids, GREEDY, max_new_tokens=16, **HOW) for ids in PROMPTS[:2]]
            assert ready() and engine.update_params(weights(1)) == 1
        outputs = [handle.result(60) for handle in handles]
        again = [engine.submit(ids, GREEDY, max_new_tokens=16, **HOW) for ids in PROMPTS[:2]]
        again = [handle.result(60) for handle in again]
        assert [out.cached_tokens for out in again] == [0, 0]
        assert [out.tokens for out in again] == fresh(1)[:2]
        assert_all_pages_are_back(engine)
    for ids, out in zip(PROMPTS[:2], outputs, strict=True):
        assert 0 < sum(out.versions) < 16
        assert out.tokens == _by_the_functions(ids, out.versions)
        assert out.tokens not in (fresh(0)[PROMPTS.index(ids)], fresh(1)[PROMPTS.index(ids)])


def _by_the_functions(ids: list[int], versions: list[int]) -> list[int]:
    """Greedy tokens where the weights of these versions draw each, over one cache."""
    cache, read, tokens = bj.new_cache(tiny(), 1, 64), ids, []
    for version in versions:
        padded = np.zeros((1, 32), np.int32)
        padded[0, : len(read)] = read
        count = np.array([len(read)])
        logits, cache = bj.jitted.extend(weights(version), cache, padded, count, tiny().config)
        read = [int(logits[0, len(read) - 1].argmax())]
        tokens += read
    return tokens


def test_restart_reads_running_answers_again():
    with engine_with(0) as engine:
        with waiting_for_an_update(engine, plans=7) as ready:
            handles = [engine.submit(ids, GREEDY, max_new_tokens=16, **HOW) for ids in PROMPTS]
            assert ready() and engine.update_params(weights(1), restart=True) == 1
        outputs = [handle.result(60) for handle in handles]
        assert any(0 < sum(out.versions) < 16 for out in outputs)
        assert engine.load().preempted == 0
    assert abs(explained(PROMPTS, outputs, [True] * len(PROMPTS))).max() < 1e-3


def test_the_old_arrays_are_not_needed():
    with engine_with(1) as engine:
        for _ in range(2):
            params = jax.tree.map(jnp.copy, weights(1))
            norm = weakref.ref(params.final_norm)
            engine.update_params(params)
            engine.submit([1, 2, 3], GREEDY, max_new_tokens=4, **HOW).result(60)
            del params
            assert norm() is not None
            engine.update_params(jax.tree.map(np.asarray, weights(2)))  # numpy, as a file's would be
            gc.collect()
            assert norm() is None


def _with_head(params: Params, head) -> Params:
    return params.replace(head=head)


WRONG = {
    "shape": (
        lambda p: p.replace(final_norm=p.final_norm[:-1]),
        r"params\.final_norm is float32\[255\]; .*256",
    ),
    "dtype": (
        lambda p: p.replace(final_norm=p.final_norm.astype(jnp.bfloat16)),
        r"params\.final_norm is bfloat",
    ),
    "missing": (lambda p: _with_head(p, None), r"params\.head\.fields\['d'\] is missing"),
    "more": (lambda p: p.replace(peers=jnp.ones(2)), r"params\.peers is no array of the engine's"),
    "format": (
        lambda p: _with_head(p, for_device(quantize(dequantize(p.head), "q4_0"))),
        r"params\.head\.fields\['d'\] belongs to a part whose format",
    ),
    "number": (lambda p: p.replace(final_norm=1.0), r"params\.final_norm is 1\.0; give an array"),
    "list": (lambda p: p.replace(final_norm=[1.0]), r"params\.final_norm.* is missing"),
    "deleted": (lambda p: p.replace(final_norm=_deleted(p.final_norm)), r"params\.final_norm was donated"),
}


def _deleted(array: jax.Array) -> jax.Array:
    array = jnp.copy(array)
    array.delete()
    return array


def test_other_weights_are_refused_and_change_nothing():
    with engine_with(0) as engine:
        model = engine.model
        for make, message in WRONG.values():
            with pytest.raises(ValueError, match=message):
                engine.update_params(make(weights(1)))
        for other in (None, {}, model, jax.tree.leaves(model.params)):
            with pytest.raises(TypeError, match=r"update_params is a .*; give weights like"):
                engine.update_params(other)
        with pytest.raises(ValueError, match="restart"):
            engine.update_params(weights(1), restart=1)
        with pytest.raises(ValueError, match="outside of jit"):
            jax.jit(engine.update_params)(weights(1))
        assert engine.version == 0 and engine.model is model
        assert engine.submit(PROMPTS[0], GREEDY, max_new_tokens=16, **HOW).result(60).tokens == fresh(0)[0]
    with pytest.raises(RuntimeError, match="closed"):
        engine.update_params(weights(1))


def test_a_cleared_prefix_cache_knows_nothing_and_frees_what_has_no_holder():
    cache = PrefixCache(count=6, page_size=2, checkpoints=3)
    tables = [cache.pages.take(2), cache.pages.take(2)]
    for table, tokens in zip(tables, ([1, 2, 3, 4], [5, 6, 7, 8]), strict=True):
        cache.insert(tokens, table, ready=True)
    saved = [cache.save(own, table) for own, table in zip(([1, 2], [5, 6]), tables, strict=True)]
    cache.checkpoints.hold(saved[0])  # a request will begin with it
    cache.release(tables[0])
    cache.clear()
    assert cache.match([1, 2, 3, 4], 4).tokens == cache.match([5, 6, 7, 8], 4).tokens == 0
    assert (cache.pages.available, cache.pages.idle) == (4, 0)
    assert (cache.checkpoints.available, cache.checkpoints.idle) == (2, 0)
    cache.release(tables[1])
    cache.release_checkpoint(saved[0])
    assert (cache.pages.available, cache.pages.idle) == (6, 0)
    assert (cache.checkpoints.available, cache.checkpoints.idle) == (3, 0)
    assert len({*cache.pages.take(6)}) == 6 and len({*cache.checkpoints.take(3)}) == 3


AS_SAMPLED = [
    GREEDY,
    bj.SamplingParams(temperature=0.7, top_k=0, top_p=1.0, min_p=0.0, seed=1),
    bj.SamplingParams(temperature=1.3, top_k=30, top_p=0.8, min_p=0.01, seed=2),
    bj.SamplingParams(
        temperature=0.9, top_k=0, top_p=0.9, min_p=0.0, seed=3, repetition_penalty=1.3, presence_penalty=0.4,
        frequency_penalty=0.2, logit_bias={7: 3.0, 11: -50.0},
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"speculate": "ngram"}, marks=pytest.mark.slow)], ids=str
)
def test_log_probabilities_as_sampled(options):
    """Beside those of the model's own distribution: of the one that a token was drawn from, in numpy from the
    logits of `forward`."""
    with engine_with(0, sampled_logprobs=True, **options) as engine:
        handles = [
            engine.submit(ids, params, max_new_tokens=20, **HOW)
            for ids, params in zip(PROMPTS, AS_SAMPLED, strict=True)
        ]
        outputs = [handle.result(60) for handle in handles]
    assert abs(explained(PROMPTS, outputs, [True, False, False, False])).max() < 1e-3
    for ids, params, out in zip(PROMPTS, AS_SAMPLED, outputs, strict=True):
        want = _as_sampled(ids, out.tokens, params)
        np.testing.assert_allclose(out.logprobs.sampled, want, atol=1e-4)
        assert (params is GREEDY) or not np.allclose(out.logprobs.sampled, out.logprobs.token, atol=1e-2)


def _penalized(params: bj.SamplingParams, x: np.ndarray, ids: list[int], answer: list[int]) -> np.ndarray:
    x = x.copy()
    seen, counts = list({*ids, *answer}), np.bincount(answer, minlength=len(x))
    x[seen] = np.where(x[seen] > 0, x[seen] / params.repetition_penalty, x[seen] * params.repetition_penalty)
    x -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    return x


def _as_sampled(ids: list[int], tokens: list[int], params: bj.SamplingParams) -> list[float]:
    text = np.zeros((len(PROMPTS), 64), np.int32)
    text[0, : len(ids) + len(tokens)] = [*ids, *tokens]
    lengths = jnp.array([len(ids) + len(tokens)] * len(PROMPTS))
    logits = np.asarray(forward_logprobs(weights(0), text, lengths, tiny().config)[1])[0].astype(np.float64)
    out = []
    for i, token in enumerate(tokens):
        x = _penalized(params, logits[len(ids) - 1 + i], ids, tokens[:i])
        scores = np.full(len(x), -np.inf)
        left = sorted(kept_by_sorting(x, params))
        scores[left] = x[left] / (params.temperature or 1)
        scores -= np.log(np.exp(scores - scores.max()).sum()) + scores.max()
        out.append(scores[token] if params.temperature else 0.0)
    return out


def test_log_probabilities_as_sampled_need_log_probabilities():
    with pytest.raises(ValueError, match=r"sampled_logprobs needs logprobs; give logprobs=0"):
        bj.Engine(tiny(), sampled_logprobs=True)
    with engine_with(0) as engine:
        assert engine.submit([1], GREEDY, max_new_tokens=2, **HOW).result(60).logprobs.sampled is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [{"mirostat": 2}, {"typical_p": 0.6, "top_k": 50}, {"dry_multiplier": 0.8}], ids=str
)
def test_log_probabilities_as_sampled_by_other_samplers(change):
    """They belong to one distribution: those of a token that was drawn often enough are its frequency."""
    params = bj.SamplingParams(temperature=1.0, top_p=1.0, **{"top_k": 0, "min_p": 0.0, **change})
    with engine_with(0, sampled_logprobs=True) as engine:
        handle = engine.submit(PROMPTS[0], params, max_new_tokens=1, n=2000, **HOW)
        outputs = handle.results(300)
    tokens, scores = (
        np.array([x[0] for x in xs])
        for xs in zip(*[(o.tokens, o.logprobs.sampled) for o in outputs], strict=True)
    )
    _, first, counts = np.unique(tokens, return_index=True, return_counts=True)
    chance = np.exp(scores[first])
    assert chance.sum() <= 1 + 1e-4
    spread = np.sqrt(chance * (1 - chance) / len(tokens))
    assert (abs(counts / len(tokens) - chance) < 5 * spread + 1e-3).all()


@pytest.mark.slow
def test_log_probabilities_as_sampled_under_a_mask():
    with engine_with(0, sampled_logprobs=True) as engine:
        some = bj.choice(["a", "b"])
        outputs = engine.submit(
            [1, 2, 3], SAMPLED, max_new_tokens=4, n=8, logprobs=0, constraint=some
        ).results(300)
        free = engine.submit([1, 2, 3], SAMPLED, max_new_tokens=1, logprobs=0).result(60)
    by_text = {out.text: float(np.exp(out.logprobs.sampled[0])) for out in outputs}
    assert sum(by_text.values()) == pytest.approx(1, abs=1e-4) or len(by_text) == 1
    assert free.logprobs.sampled[0] < 0
