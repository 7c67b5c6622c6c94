"""Engine.update_params: other weights between two steps. No request is lost, and each token is that of the
weights which its answer says have drawn it."""

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
    """Check that `forward` with the weights of each token's version, on all tokens before it, gives the greedy
    token. Returns log p(token) of `forward` less the engine's, of all tokens."""
    texts = np.zeros((len(ids), 64), np.int32)
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


def test_200_requests_under_20_updates():
    """Rows and pages are too few for all that run. Every token of every answer is that of its weights, which
    read all tokens before it; so an answer of one version is a fresh engine's."""
    rng = np.random.default_rng(0)
    ids = [prompt(int(rng.integers(1, 41)), i % 60) for i in range(200)]
    greedy = [i % 4 != 0 for i in range(200)]
    new = rng.integers(1, 24, 200).tolist()
    with engine_with(0) as engine:
        handles = [
            engine.submit(p, GREEDY if g else SAMPLED, max_new_tokens=n, **HOW)
            for p, g, n in zip(ids, greedy, new, strict=True)
        ]
        for update in range(20):
            handles[update * 10].result(60)
            assert engine.update_params(weights(update + 1), restart=True) == update + 1
        outputs = [handle.result(60) for handle in handles]
        assert_all_pages_are_back(engine)
    assert [len(out.tokens) for out in outputs] == new
    assert sum(len(set(out.versions)) > 1 for out in outputs) >= 10
    errors = explained(ids, outputs, greedy)
    # An estimate of KL(engine || forward) from tokens alone, with less variance than the mean (k3).
    assert abs(errors).max() < 1e-3 and (np.expm1(errors) - errors).mean() < 1e-6


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
    saved = [cache.save(tokens) for tokens in ([1, 2], [5, 6])]
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
