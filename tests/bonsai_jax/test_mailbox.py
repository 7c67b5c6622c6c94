"""Draws that wait on the device for masks, as on one GPU; here Python waits within them."""

import dataclasses
import re
import threading
import time

import jax
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.constraints import Matcher
from bonsai_jax.engine import runner
from bonsai_jax.engine.flights import Letters
from bonsai_jax.engine.mailbox import Mailbox
from pallas_kernels import host_masks
from tests.bonsai_jax.test_constrained_answers import NOISE, PERSON, WORDS
from tests.bonsai_jax.test_engine import GREEDY, SHAPE, alone, assert_all_pages_are_back, prompt, tiny
from tests.bonsai_jax.test_speculation import HYBRID
from tests.bonsai_jax.tokens import assert_same

EACH = [
    WORDS,
    bj.json_schema(PERSON),
    None,
    bj.regex("(ab|cd){3,9}!"),
    None,
    bj.choice(["north east", "süd"]),
]


@pytest.fixture(scope="module", autouse=True)
def as_on_a_gpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "has_mailbox", lambda model: model.mesh is None)
        yield


@pytest.fixture(scope="module")
def engine():
    with bj.Engine(tiny(), **SHAPE) as engine:
        assert engine._loop.runner.limits.mailbox
        yield engine


def asked(engine, each=EACH, **how):
    """Handles of an answer for each constraint."""
    how = {"max_new_tokens": 40} | how
    params = [dataclasses.replace(NOISE, seed=i, presence_penalty=0.5 * (i % 2)) for i in range(len(each))]
    return [
        engine.submit(prompt(5 + 3 * i, i), p, constraint=c, **how)
        for i, (c, p) in enumerate(zip(each, params, strict=True))
    ]


def said(engine, **how):
    return [handle.result(60).tokens for handle in asked(engine, **how)]


def sent(model=None):
    """The same answers, by an engine that sends masks with its draws."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "has_mailbox", lambda model: False)
        with bj.Engine(model or tiny(), **SHAPE) as engine:
            return said(engine)


def holding_some(monkeypatch, seed: int, share: float) -> list[int]:
    """Hold whole draws at random. Returns the list that counts them."""
    post, rng, count = Letters.post, np.random.default_rng(seed), []

    def hold_some(self, flight, hold=False):
        count.append(int(hold or rng.random() < share))
        post(self, flight, bool(count[-1]))

    monkeypatch.setattr(Letters, "post", hold_some)
    return count


def test_answers_are_those_whose_masks_are_sent(engine, monkeypatch):
    """Also where draws are held: a row goes on from what it has read."""
    want = sent()
    assert_same(said(engine), want)
    count = holding_some(monkeypatch, 0, 0.4)
    assert_same(said(engine), want)
    assert 0.2 < np.mean(count) < 0.6 and len(count) > 20
    assert_all_pages_are_back(engine)


def test_rows_that_are_held_keep_their_recurrent_states(monkeypatch):
    want = sent(tiny(HYBRID))
    holding_some(monkeypatch, 1, 0.4)
    with bj.Engine(tiny(HYBRID), **SHAPE) as engine:
        assert_same(said(engine), want)


def test_a_plan_is_dispatched_before_its_masks_are_made(engine, monkeypatch):
    """The loop has planned once more than it has written letters, whenever it writes some."""
    post, ahead = Letters.post, []

    def noted(self, flight, hold=False):
        ahead.append(engine._loop._unread_plans())
        post(self, flight, hold)

    monkeypatch.setattr(Letters, "post", noted)
    engine.submit("x", NOISE, max_new_tokens=30, constraint=WORDS).result(60)
    assert len(ahead) > 10 and set(ahead) == {1}


def test_slow_masks_delay_their_own_row_alone(engine, monkeypatch):
    slow, quick = bj.grammar("start: /[a-f]{6}/"), bj.regex("[g-m]{12}")
    find, rows, hold = Matcher.find, [], Mailbox.hold

    def late(self):
        find(self)
        if self._kind == "grammar":
            time.sleep(0.3)

    def noted(self, row):
        rows.append(row)
        hold(self, row)

    monkeypatch.setattr("bonsai_jax.constraints.masks.QUICK_S", -1.0)  # all masks are made in threads
    monkeypatch.setattr(Matcher, "find", late)
    monkeypatch.setattr(Mailbox, "hold", noted)
    first = engine.submit("x", NOISE, max_new_tokens=20, constraint=slow)
    second = engine.submit("x", NOISE, max_new_tokens=20, constraint=quick)
    third = engine.submit("x", GREEDY, max_new_tokens=8, ignore_eos=True)
    assert re.fullmatch(quick.text, second.result(60).text) and len(third.result(60).tokens) == 8
    assert not first.done and len(rows) > 3
    assert re.fullmatch("[a-f]{6}", first.result(60).text)


def test_answers_that_are_cancelled_leave_others_alone(engine):
    """At random moments, so some while their draw waits."""
    want, rng = said(engine), np.random.default_rng(3)
    for _ in range(3):
        handles = asked(engine)
        others = asked(engine, [WORDS] * 5, max_new_tokens=60)
        for other in others:
            time.sleep(float(rng.random()) * 0.02)
            other.cancel()
        assert_same([handle.result(60).tokens for handle in handles], want)
    assert_all_pages_are_back(engine)


def test_pre_emption_and_forced_tokens():
    """Few pages, and texts that are mostly forced, so that they are read in chunks."""
    text = "north by north-west, said the old sailor, and then east. "
    each = [bj.regex(f"{text}(a|b|c){{20,30}}"), WORDS, bj.regex(f"[xyz]{text}{{1}}(d|e){{9}}"), None] * 2
    want = []
    with bj.Engine(tiny(), **SHAPE | {"pages": 24}) as engine:
        for i, handle in enumerate(asked(engine, each, max_new_tokens=70)):
            want.append(handle.result(60).tokens)
            assert each[i] is None or want[-1]
    with bj.Engine(tiny(), **SHAPE | {"pages": 8}) as engine:
        assert_same([h.result(120).tokens for h in asked(engine, each, max_new_tokens=70)], want)
        assert engine.load().preempted


def test_rows_without_a_constraint_are_as_they_would_be_alone(engine):
    prompts = [prompt(n, n) for n in (5, 21, 40, 9)]
    handles = []
    for i, ids in enumerate(prompts):
        handles.append(engine.submit(ids, GREEDY, max_new_tokens=24, ignore_eos=True))
        engine.submit(prompt(4, i), NOISE, max_new_tokens=24, constraint=WORDS)
    assert_same([handle.result(60).tokens for handle in handles], alone(prompts, [GREEDY] * 4))


def test_an_engine_can_be_closed_while_a_draw_waits(monkeypatch):
    engine = bj.Engine(tiny(), **SHAPE)
    waits, go_on = threading.Event(), threading.Event()
    find = Matcher.find

    def stuck(self):
        find(self)
        waits.set()
        go_on.wait(20)

    engine.submit("x", NOISE, max_new_tokens=20, constraint=WORDS).result(60)
    dispatches, dispatch = [], engine._loop.runner.dispatch
    monkeypatch.setattr(
        engine._loop.runner, "dispatch", lambda call: dispatches.append(dispatch(call)) or dispatches[-1]
    )
    monkeypatch.setattr(Matcher, "find", stuck)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bonsai_jax.constraints.masks.QUICK_S", -1.0)  # all masks are made in threads
        handle = engine.submit("x", NOISE, max_new_tokens=20, constraint=WORDS)
        assert waits.wait(20)
        began = time.monotonic()
        engine.close()
    go_on.set()
    assert time.monotonic() - began < 10 and handle.result(10).finish_reason == "cancelled"
    drawn = [array for one in dispatches for array in jax.tree.leaves(one.drawn.result())]
    assert drawn and all(array.is_ready() for array in drawn)  # none looks into the mailbox any more


def test_an_engine_goes_on_after_a_draw_that_failed(engine, monkeypatch):
    mailbox, post = engine._loop.runner.mailbox, Letters.post

    def fails(self, flight, hold=False):
        monkeypatch.setattr(Letters, "post", post)
        raise OSError("no more letters")

    monkeypatch.setattr(Letters, "post", fails)
    with pytest.raises(RuntimeError, match="no more letters"):
        engine.submit("x", NOISE, max_new_tokens=20, constraint=WORDS).result(60)
    text = engine.submit("x", NOISE, max_new_tokens=60, constraint=WORDS).result(60).text
    assert re.fullmatch(WORDS.text, text) and engine._loop.runner.mailbox is not mailbox


def test_who_uses_a_sampler_of_the_chain_beside_constrained_rows(engine):
    """Its part of the pool is made while a draw may wait."""
    others = asked(engine, [WORDS] * 3, max_new_tokens=60)
    chained = engine.submit(
        "x", dataclasses.replace(NOISE, typical_p=0.9), max_new_tokens=20, ignore_eos=True
    )
    assert len(chained.result(60).tokens) == 20
    assert all(re.fullmatch(WORDS.text, other.result(60).text) for other in others)


@pytest.mark.parametrize(("rows", "words"), [(1, 1), (5, 33), (7, 40)])
def test_the_masks_of_a_mailbox(rows, words):
    rng = np.random.default_rng(rows)
    places, free = rng.permutation(rows + 3)[:rows], rng.random(rows) < 0.3
    mailbox = Mailbox(rows + 3, words)
    receive = jax.jit(lambda address: host_masks.receive(address, places, ~free, words))
    for _ in range(3):
        masks = rng.integers(0, 2**32, (rows, words), dtype=np.uint32)
        holds = ~free & (rng.random(rows) < 0.3)
        for i in np.flatnonzero(~free):
            mailbox.hold(places[i]) if holds[i] else mailbox.allow(places[i], masks[i])
        masks[holds], masks[free] = 0, 2**32 - 1
        allowed, draws = receive(np.array(mailbox.address, np.int32))
        np.testing.assert_array_equal(draws, ~holds)
        np.testing.assert_array_equal(allowed, masks)
    mailbox.close()
    np.testing.assert_array_equal(receive(np.array(mailbox.address, np.int32))[1], free)
