"""What the prefix cache has of an answer that has ended: the tokens that its row has read, and the state of a
hybrid model after exactly these. Else the next turn's answer would be another."""

import pytest

import bonsai_jax as bj
from tests.bonsai_jax.test_engine import GREEDY, alone, assert_all_pages_are_back, prompt, tiny
from tests.bonsai_jax.test_speculation import HYBRID

IDS, NEXT = prompt(20, 5), prompt(3, 9)
AGAIN = 7  # a token that is drawn over and over, so that proposals are accepted
# How it ends, and how many of its tokens the next turn reads: the newest where the device ends it, none where
# the host sees that the constraint is complete, and forced tokens at the end, which are said unread.
ENDS = {
    "length": ({"max_new_tokens": 9, "sampling": bj.SamplingParams(0.0, logit_bias={AGAIN: 99.0})}, 1),
    "constraint": ({"max_new_tokens": 24, "constraint": bj.regex("[a-z]{9}")}, 0),
    "constraint and length": ({"max_new_tokens": 7, "constraint": bj.regex("[a-z]*")}, 1),
    "forced tokens": ({"max_new_tokens": 24, "constraint": bj.regex("(a|b)cdefg")}, 5),
}


@pytest.fixture(
    scope="module",
    params=[
        ("synth:tiny-llama:q8_0", None),
        (HYBRID, "ngram"),
        pytest.param((HYBRID, None), marks=pytest.mark.slow),
        pytest.param(("synth:tiny-llama:q8_0", "ngram"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def engine(request):
    model, speculate = request.param
    how = {"max_batch_size": 1, "context": 96, "prefill_tokens": 32, "speculate": speculate}
    with bj.Engine(tiny(model), **how) as engine:
        yield engine
        assert_all_pages_are_back(engine)


@pytest.mark.parametrize("end", ENDS)
def test_the_next_turn_reads_on_after_an_answer(engine, end):
    how, unread = ENDS[end]
    output = engine.submit(IDS, **{"sampling": GREEDY, "ignore_eos": True, **how}).result(60)
    turn = [*IDS, *output.tokens, *NEXT]
    following = engine.submit(turn, GREEDY, max_new_tokens=24, ignore_eos=True).result(60)
    assert following.cached_tokens == len(IDS) + len(output.tokens) - unread
    assert following.tokens == alone([turn], [GREEDY], engine.model)[0]
    if engine.options.speculate is not None and end == "length":
        assert output.steps < 8  # proposals were accepted


def test_after_a_stop_string_the_next_turn_is_right(engine):
    """The device may have gone on, but what was saved before the answer is there."""
    before = len(IDS) - 2
    how = {"sampling": GREEDY, "max_new_tokens": 24, "ignore_eos": True, "checkpoints_at": [before]}
    free = engine.submit(IDS, **how).result(60)
    output = engine.submit(IDS, **how, stop=free.text[5:8]).result(60)
    assert output.finish_reason == "stop"
    turn = [*IDS, *output.tokens, *NEXT]
    following = engine.submit(turn, GREEDY, max_new_tokens=24, ignore_eos=True).result(60)
    assert following.cached_tokens >= before
    assert following.tokens == alone([turn], [GREEDY], engine.model)[0]
