"""Answers that match a constraint: from a tiny model with random weights, which by itself writes noise."""

import dataclasses
import itertools
import json
import re
import threading
import time

import jsonschema
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax import constraints
from bonsai_jax.constraints import Matcher
from tests.bonsai_jax.json_schemas import BY_HAND, seeded
from tests.bonsai_jax.test_draft import tiny as with_draft_layer
from tests.bonsai_jax.test_engine import GREEDY, SHAPE, alone, assert_all_pages_are_back, prompt, tiny
from tests.bonsai_jax.test_speculation import HYBRID
from tests.bonsai_jax.tokens import assert_same

NOISE = bj.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "favourite colour": {"enum": ["red", "green"]},
    },
    "required": ["name", "age", "favourite colour"],
    "additionalProperties": False,
}
WORDS = bj.regex("([a-z]{1,6} ){4,8}end")


@pytest.fixture(scope="module")
def engine():
    with bj.Engine(tiny(), **SHAPE, logprobs=2) as engine:
        yield engine


def generate(prompts, constraint, **arguments):
    arguments = {"sampling": NOISE, "max_new_tokens": 60} | arguments
    return bj.generate(tiny(), prompts, constraint=constraint, **arguments)


def test_json_of_200_schemas_is_valid():
    schemas = [*BY_HAND, *seeded(200 - len(BY_HAND))]
    run = dataclasses.replace(tiny().run, batch_size=32, context=256)
    model = dataclasses.replace(tiny(), run=run)
    each = list(map(bj.json_schema, schemas))
    outputs = bj.generate(model, ["a"] * len(each), constraint=each, max_new_tokens=200, sampling=NOISE)
    ended = [
        (schema, out) for schema, out in zip(schemas, outputs, strict=True) if out.finish_reason == "stop"
    ]
    assert len(ended) >= 190
    for schema, output in ended:
        jsonschema.validate(json.loads(output.text), schema)


def test_texts_match_expressions_choices_and_grammars():
    pattern, choices = r"[A-Z][a-z]{2,5}-\d{3}(é|漢)?", ["north", "north east", "süd"]
    gbnf = 'root ::= item ("," item)* "."\nitem ::= [a-c]+ | "(" item ")"'
    lark = 'start: item ("," item)* "."\nitem: /[a-c]+/ | "(" item ")"'
    each = [bj.regex(pattern), bj.choice(choices), bj.grammar(gbnf), bj.grammar(lark), None]
    outputs = generate(["x"] * 20, [each[i % 5] for i in range(20)], max_new_tokens=80)
    for i, output in enumerate(outputs):
        ended = output.finish_reason == "stop"
        if i % 5 == 0:
            assert ended and re.fullmatch(pattern, output.text)
        if i % 5 == 1:
            assert ended and output.text in choices
        if i % 5 in (2, 3):
            assert re.fullmatch(r"[(),.abc]+", output.text)
            assert not ended or (output.text[-1] == "." and output.text.count("(") == output.text.count(")"))


def test_any_json_object():
    (output,) = generate(
        "x", bj.json_object(), max_new_tokens=90, sampling=dataclasses.replace(NOISE, seed=3)
    )
    assert output.text.startswith("{")
    if output.finish_reason == "stop":
        assert isinstance(json.loads(output.text), dict)


def test_the_pieces_of_a_stream_are_the_answer():
    (whole,) = generate([prompt(9, 4)], bj.json_schema(PERSON))
    pieces = list(
        bj.stream(tiny(), prompt(9, 4), constraint=bj.json_schema(PERSON), sampling=NOISE, max_new_tokens=60)
    )
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.tokens] == whole.tokens
    assert pieces[-1].finish_reason == whole.finish_reason == "stop"


def test_rows_without_a_constraint_are_as_they_would_be_alone(engine):
    """Greedy, and rows that begin before, with and after constrained ones."""
    prompts = [prompt(n, n) for n in (5, 21, 40, 9, 30, 3)]
    free = alone(prompts, [GREEDY] * len(prompts))
    handles = []
    for ids, other in itertools.zip_longest(prompts, range(4)):
        handles.append(engine.submit(ids, GREEDY, max_new_tokens=24, ignore_eos=True))
        if other is not None:
            engine.submit(prompt(4, other), NOISE, max_new_tokens=24, constraint=WORDS)
            time.sleep(0.02)
    assert [handle.result(60).tokens for handle in handles] == free
    assert_all_pages_are_back(engine)


def test_constrained_answers_are_the_same_in_a_crowd(engine):
    each = [bj.json_schema(PERSON), WORDS, bj.regex("(ab|cd){3,9}!")] * 3
    params = [dataclasses.replace(NOISE, temperature=0.0 if i % 2 else 1.0, seed=i) for i in range(len(each))]
    one_by_one = [
        engine.submit(prompt(6 + i, i), p, max_new_tokens=40, constraint=c).result(60)
        for i, (c, p) in enumerate(zip(each, params, strict=True))
    ]
    handles = [
        engine.submit(prompt(6 + i, i), p, max_new_tokens=40, constraint=c)
        for i, (c, p) in enumerate(zip(each, params, strict=True))
    ]
    for handle, output in zip(handles, one_by_one, strict=True):
        assert handle.result(60).tokens == output.tokens
    assert_all_pages_are_back(engine)


def test_several_answers_to_one_prompt_have_matchers_of_their_own(engine):
    outputs = engine.submit(prompt(5, 1), NOISE, max_new_tokens=60, constraint=WORDS, n=3).results(60)
    singly = [
        engine.submit(
            prompt(5, 1), dataclasses.replace(NOISE, seed=1 + i), max_new_tokens=60, constraint=WORDS
        )
        for i in range(3)
    ]
    assert [out.tokens for out in outputs] == [handle.result(60).tokens for handle in singly]
    assert all(re.fullmatch(WORDS.text, out.text) for out in outputs)
    assert len({out.text for out in outputs}) == 3


def test_answers_survive_pre_emption():
    """Pages for one and a half of them: requests lose their rows, and continue where they were."""
    long = bj.regex("([a-z]{1,3} ){30}")
    with bj.Engine(tiny(), **SHAPE) as roomy, bj.Engine(tiny(), **SHAPE | {"pages": 8}) as tight:

        def answers(engine):
            gate = threading.Event()
            engine._send(gate.wait)  # all of them are there before the first runs
            params = [dataclasses.replace(NOISE, seed=i) for i in range(4)]
            how = {"max_new_tokens": 40, "constraint": long}
            handles = [engine.submit(prompt(28, i), own, **how) for i, own in enumerate(params)]
            gate.set()
            return [handle.result(60).tokens for handle in handles]

        assert answers(tight) == answers(roomy)
        assert tight._loop.scheduler.preempted > 0
        assert_all_pages_are_back(tight)


def test_a_mixed_crowd_has_the_answers_that_each_has_alone():
    """Constraints or none, shared beginnings, priorities, cancellations, and too few pages."""
    rng, shared = np.random.default_rng(5), prompt(20, 1)
    each = [
        None,
        bj.json_schema(PERSON),
        WORDS,
        bj.choice(["alpha beta", "alpha", "be"]),
        bj.regex("[a-f]{30}"),
    ]
    with bj.Engine(tiny(), **SHAPE | {"pages": 7}) as engine:

        def submit(i: int):
            ids = [*shared[: 4 * (i % 6)], *prompt(1 + i % 13, i)]
            how = {"ignore_eos": i % 4 == 0, "priority": i % 2, "max_new_tokens": 5 + 7 * (i % 6)}
            params = dataclasses.replace(NOISE, seed=i, temperature=float(i % 3 > 0))
            return engine.submit(ids, params, constraint=each[i % 5], **how)

        singly = [submit(i).result(60) for i in range(40)]
        gate = threading.Event()
        engine._send(gate.wait)
        handles = [submit(i) for i in range(40)]
        gate.set()
        for i in np.flatnonzero(rng.random(40) < 0.15):
            threading.Timer(float(rng.random()) * 0.1, handles[i].cancel).start()
        for handle, output in zip(handles, singly, strict=True):
            again = handle.result(60)
            cancelled = again.finish_reason == "cancelled"
            assert again.tokens == (output.tokens[: len(again.tokens)] if cancelled else output.tokens)
        assert engine._loop.scheduler.preempted > 0 and engine._loop.scheduler.constrained == 0
        assert_all_pages_are_back(engine)


def test_a_shared_beginning_is_read_once(engine):
    ids = prompt(40, 77)
    first, second = (
        engine.submit(ids, GREEDY, max_new_tokens=30, constraint=bj.json_schema(PERSON)).result(60)
        for _ in range(2)
    )
    assert first.tokens == second.tokens and first.cached_tokens == 0 and second.cached_tokens >= 39


def test_forced_tokens_that_are_cached_are_not_of_the_prompt(engine):
    """They are read with it, so the prefix cache has both."""
    ids, forced = prompt(12, 78), bj.regex("a text that no token can leave (x|y)")
    first, second = (
        engine.submit(ids, GREEDY, max_new_tokens=40, constraint=forced).result(60) for _ in range(2)
    )
    assert first.tokens == second.tokens and len(first.tokens) > len(ids)
    assert first.cached_tokens == 0 and second.cached_tokens == len(ids) - 1


def test_a_cancelled_answer_leaves_others_alone(engine):
    handles = [engine.submit(prompt(9, i), NOISE, max_new_tokens=60, constraint=WORDS) for i in range(4)]
    next(iter(handles[1]))
    handles[1].cancel()
    handles[2].cancel()
    assert [handles[i].result(60).finish_reason for i in (1, 2)] == ["cancelled"] * 2
    assert all(re.fullmatch(WORDS.text, handles[i].result(60).text) for i in (0, 3))
    assert_all_pages_are_back(engine)


def test_an_answer_ends_where_the_constraint_ends_or_its_tokens_do():
    # The last tokens are forced, so no end token is drawn.
    ends = bj.regex("a or else")
    (output,) = generate("x", ends)
    assert output.text == "a or else" and output.finish_reason == "stop"
    (output,) = generate("x", ends, max_new_tokens=2)
    assert (
        output.finish_reason == "length" and len(output.tokens) == 2 and "a or else".startswith(output.text)
    )
    # The model may end it early, unless it ignores its end tokens: then the constraint ends it.
    optional = bj.regex("(ab){1,12}")
    (early,) = generate("x", optional, sampling=dataclasses.replace(NOISE, logit_bias={306: 50.0, 308: 50.0}))
    (late,) = generate(
        "x", optional, sampling=dataclasses.replace(NOISE, logit_bias={306: 50.0, 308: 50.0}), ignore_eos=True
    )
    assert (early.text, late.text) == ("ab", "ab" * 12)
    assert early.finish_reason == late.finish_reason == "stop"


def test_stop_strings_end_constrained_answers_too():
    (output,) = generate("x", bj.regex("(one|two) and (three|four)"), stop=" and")
    assert output.text in ("one", "two") and output.finish_reason == "stop"


def test_log_probabilities_are_those_of_the_model_itself(engine):
    """Of all tokens, forced ones too, and raw: compared with teacher-forced logits."""
    ids, constraint = prompt(9, 3), bj.json_schema(PERSON)
    output = engine.submit(ids, NOISE, max_new_tokens=60, constraint=constraint, logprobs=2).result(60)
    plain = engine.submit(ids, NOISE, max_new_tokens=60, constraint=constraint).result(60)
    assert output.tokens == plain.tokens
    scores = bj.logits(tiny(), [*ids, *output.tokens])[len(ids) - 1 : -1].astype(np.float64)
    raw = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    assert output.logprobs is not None
    expected = raw[np.arange(len(output.tokens)), output.tokens]
    np.testing.assert_allclose(output.logprobs.token, expected, atol=2e-3)
    assert (expected < np.log(0.5)).any()  # a mask changes what is drawn, and not these


def test_penalties_and_biases_work_below_the_mask():
    bias = {token: 100.0 for token in range(512) if tiny().tokenizer.token_bytes(token) == b"c"}
    params = dataclasses.replace(NOISE, logit_bias=bias)
    (output,) = generate("x", bj.regex("[abc]{8}"), sampling=params)
    assert output.text == "c" * 8
    (banned,) = generate("x", bj.regex("[ab]{8}"), sampling=params)
    assert re.fullmatch("[ab]{8}", banned.text)
    penalty = dataclasses.replace(GREEDY, frequency_penalty=2.0, presence_penalty=2.0)
    (varied,) = generate("x", bj.regex("([a-z])( [a-z]){9}"), sampling=penalty, max_new_tokens=40)
    assert len(set(varied.text.split())) > 5


def test_what_no_token_can_say_is_an_error():
    """A bias that bans all that the constraint allows."""
    bans = {t: float("-inf") for t in range(512) if tiny().tokenizer.token_bytes(t) in (b"a", b"b")}
    with pytest.raises(ValueError, match="no token can be drawn"):
        generate("x", bj.regex("[ab]"), sampling=dataclasses.replace(NOISE, logit_bias=bans))


def test_forced_tokens_are_read_in_chunks_and_say_the_same():
    """Chunks or one by one: an answer alone has chunks, with log-probabilities none."""
    choice = bj.regex("(x|y) this is a long text that no token can leave (x|y)")
    with bj.Engine(tiny(), **SHAPE, logprobs=0) as engine:
        chunked = engine.submit(prompt(9, 3), NOISE, max_new_tokens=70, constraint=choice).result(60)
        plans = engine._loop.plans
        singly = engine.submit(prompt(9, 3), NOISE, max_new_tokens=70, constraint=choice, logprobs=0).result(
            60
        )
        assert engine._loop.plans - plans > 3 * plans
    assert chunked.tokens == singly.tokens and chunked.steps < len(chunked.tokens) // 3
    assert re.fullmatch(choice.text, chunked.text)


def test_an_answer_that_is_known_needs_no_device(engine):
    plans = engine._loop.plans
    output = engine.submit("x", NOISE, constraint=bj.choice(["the only one"]), max_new_tokens=40).result(60)
    assert (output.text, output.finish_reason) == ("the only one", "stop") and engine._loop.plans == plans


def test_models_with_recurrent_states():
    model = tiny(HYBRID)
    outputs = bj.generate(model, ["a b", "c"], constraint=WORDS, sampling=NOISE, max_new_tokens=60)
    assert all(re.fullmatch(WORDS.text, output.text) for output in outputs)
    (alone_,) = bj.generate(model, ["a b"], constraint=WORDS, sampling=NOISE, max_new_tokens=60)
    assert alone_.tokens == outputs[0].tokens


def test_beside_speculation_answers_are_the_same_and_others_go_on_guessing(engine):
    """Greedy: a text that repeats itself, beside constrained rows that come and go, and too few pages."""
    each = [bj.json_schema(PERSON), WORDS, bj.regex("(ab|cd){3,9}!"), None, WORDS]
    same, repeated = [7] * 40, dataclasses.replace(GREEDY, logit_bias={60: 1e6})

    def asked(engine):
        params = [dataclasses.replace(NOISE, seed=i, temperature=float(i % 2)) for i in range(len(each))]
        how = {"max_new_tokens": 40, "ignore_eos": True}
        gate = threading.Event()
        engine._send(gate.wait)  # all of them are there before the first runs
        free = engine.submit(same, repeated, **how)
        handles = [
            engine.submit(prompt(6 + i, i), own, constraint=one, **how)
            for i, (one, own) in enumerate(zip(each, params, strict=True))
        ]
        gate.set()
        return free.result(60), [handle.result(60) for handle in handles]

    free, outputs = asked(engine)
    with bj.Engine(tiny(), **SHAPE | {"pages": 8}, speculate="ngram") as speculating:
        guessed, again = asked(speculating)
        assert [output.tokens for output in again] == [output.tokens for output in outputs]
        assert guessed.tokens == free.tokens and guessed.steps < free.steps * 0.8
        assert speculating._loop.scheduler.constrained == 0 < speculating._loop.scheduler.preempted
        assert_all_pages_are_back(speculating)


LIST = {"type": "array", "items": PERSON, "minItems": 2, "maxItems": 3}


def test_constrained_rows_guess_too_and_a_mask_holds_after_each_guess(engine):
    """The same answers, log-probabilities and ends, in fewer steps."""
    penalized = dataclasses.replace(NOISE, frequency_penalty=0.5, repetition_penalty=1.1)
    each = [bj.regex("[ab]{40}"), bj.regex("((one|two|three), )*end"), bj.json_schema(LIST), WORDS]
    each += [bj.regex("(ab|ba){1,20}")]

    def asked(engine):
        return [
            engine.submit(prompt(9, 3), params, max_new_tokens=70, constraint=constraint, **how).result(60)
            for constraint in each
            for params in (GREEDY, NOISE, penalized)
            for how in ({}, {"logprobs": 2, "ignore_eos": True})
        ]

    with bj.Engine(tiny(), **SHAPE | {"max_batch_size": 1}, logprobs=2, speculate="ngram") as speculating:
        assert speculating._loop.runner.limits.guess_width == 8
        outputs, plain = asked(speculating), asked(engine)
        assert_all_pages_are_back(speculating)
    for one, other in zip(outputs, plain, strict=True):
        assert (one.tokens, one.text, one.finish_reason) == (other.tokens, other.text, other.finish_reason)
        if one.logprobs is not None:
            np.testing.assert_allclose(one.logprobs.token, other.logprobs.token, atol=1e-4)
    assert sum(output.steps for output in outputs) < 0.6 * sum(output.steps for output in plain)


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["ngram", "mtp"])
def test_speculation_and_recurrent_states(proposer):
    model = tiny(HYBRID) if proposer == "ngram" else with_draft_layer()
    how = {"constraint": [WORDS, None], "sampling": NOISE, "max_new_tokens": 50}
    plain = bj.generate(model, ["a b", "c"], **how)
    guessed = bj.generate(model, ["a b", "c"], **how, speculate=proposer)
    assert_same([output.tokens for output in guessed], [output.tokens for output in plain])


def test_prompts_of_vectors():
    vectors = np.asarray(bj.embed(tiny().params, np.array([5, 9, 77])))
    (output,) = generate([vectors], bj.regex("no|yes"))
    assert output.text in ("no", "yes")


def test_reproducible_engines_have_the_same_bits_beside_constrained_rows():
    shape = {"max_batch_size": 3, "context": 96, "pages": 24, "reproducible": True, "logprobs": 0}
    with bj.Engine(tiny(), **shape) as engine:

        def asked(ids, constraint):
            return engine.submit(ids, NOISE, max_new_tokens=20, logprobs=0, constraint=constraint)

        free, bound = asked(prompt(9, 1), None).result(60), asked(prompt(7, 2), WORDS).result(60)
        crowd = [asked(prompt(9, 1), None), asked(prompt(7, 2), WORDS), asked(prompt(30, 3), WORDS)]
        for handle, output in zip(crowd, (free, bound), strict=False):
            again = handle.result(60)
            assert again.tokens == output.tokens
            np.testing.assert_array_equal(again.logprobs.token, output.logprobs.token)


def test_what_a_split_step_is_given_stays_where_it_was(engine, monkeypatch):
    """As on one GPU, whose graphs are written again where an array has moved; the answers are the same."""
    runner, asked = engine._loop.runner, [(prompt(7, n), WORDS) for n in range(3)]

    def answers():
        handles = [engine.submit(ids, NOISE, max_new_tokens=40, constraint=how) for ids, how in asked]
        return [handle.result(60).tokens for handle in handles]

    before, placed, places, sent = answers(), runner._placed, {}, set()

    def noted(call):
        arrays = placed(call)
        if call.stays:
            places.setdefault(call.program, []).append([x.unsafe_buffer_pointer() for x in arrays])
            sent.add(call.arrays[0].tobytes())
            np.testing.assert_array_equal(arrays[0], call.arrays[0])
        return arrays

    monkeypatch.setattr(runner, "_has_graphs", True)
    monkeypatch.setattr(runner, "_placed", noted)
    assert_same(answers(), before)
    assert max(map(len, places.values())) > 20 and len(sent) > 1
    for each in places.values():
        assert each == each[:1] * len(each)


def test_slow_masks_delay_their_own_row_alone(engine, monkeypatch):
    """Each mask of the grammar takes longer than all of the expression. The first comes as a surprise."""
    slow, quick = bj.grammar("start: /[a-f]{8}/"), bj.regex("[g-m]{8}")
    find, allow = Matcher.find, Matcher._allow

    def late(self, bits):
        allow(self, bits)
        if self._kind == "grammar":
            time.sleep(0.5)
            self.find_s = 0.5

    def late_alone(self):
        find(self)
        self.find_s = 0.5 if self._kind == "grammar" else 0.0

    engine.submit("x", NOISE, max_new_tokens=20, constraint=slow).result(60)  # compiled
    monkeypatch.setattr(Matcher, "_allow", late)
    monkeypatch.setattr(Matcher, "find", late_alone)
    first = engine.submit("x", NOISE, max_new_tokens=20, constraint=slow)
    second = engine.submit("x", NOISE, max_new_tokens=20, constraint=quick)
    third = engine.submit("x", GREEDY, max_new_tokens=8, ignore_eos=True)
    assert re.fullmatch(quick.text, second.result(60).text) and len(third.result(60).tokens) == 8
    assert not first.done
    assert re.fullmatch("[a-f]{8}", first.result(60).text)


def test_a_constraint_that_grows_too_large_ends_its_answer_alone(engine):
    grows = bj.regex("x[ab]" + "a?" * 500 + "a" * 500)
    bad = engine.submit("x", NOISE, constraint=grows, max_new_tokens=20)
    good = engine.submit("x", NOISE, constraint=WORDS, max_new_tokens=60)
    assert re.fullmatch(WORDS.text, good.result(60).text)
    with pytest.raises(RuntimeError, match=r"regex: .*too many expressions"):
        bad.result(60)
    with pytest.raises(ValueError, match=r"regex: .*too many expressions"):
        generate("x", grows)
    assert_all_pages_are_back(engine)


REFUSED = {
    "not a constraint": (
        {"constraint": "[0-9]+"},
        TypeError,
        "constraint is a str; give a constraint, such as",
    ),
    "too few": ({"constraint": [WORDS]}, ValueError, "constraint: 1 constraints for 2 prompts"),
    "cannot be compiled": ({"constraint": bj.regex("(")}, ValueError, "regex: .*unclosed group"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_before_anything_runs(name, monkeypatch):
    arguments, error, message = REFUSED[name]
    monkeypatch.setattr("bonsai_jax.text.Loop", None)
    with pytest.raises(error, match=message):
        bj.generate(tiny(), ["a", "b"], **arguments)


def test_submit_refuses_what_cannot_be_compiled(engine):
    with pytest.raises(ValueError, match=r"json_schema: Unimplemented keys"):
        engine.submit("x", constraint=bj.json_schema({"not": {}}), max_new_tokens=9)


def test_an_engine_without_constraints_compiles_none_of_their_programs(engine):
    with bj.Engine(tiny(), **SHAPE) as fresh:
        fresh.submit("x", GREEDY, max_new_tokens=3).result(60)
        assert not fresh._loop.runner._others and not fresh._loop.scheduler.compiled_split
        fresh.submit("x", GREEDY, max_new_tokens=3, constraint=WORDS).result(60)
        assert fresh._loop.scheduler.compiled_split and not fresh._loop.scheduler.constrained
        assert fresh.submit("x", GREEDY, max_new_tokens=3).result(60).finish_reason == "length"


def test_warmup_compiles_programs_for_constraints():
    with bj.Engine(tiny(), max_batch_size=1, context=64, prefill_tokens=32, pages=8) as engine:
        engine.warmup(constraints=True)
        assert engine._loop.scheduler.compiled_split == engine._loop.scheduler.compiled
        output = engine.submit("x", NOISE, max_new_tokens=20, constraint=bj.choice(["a", "b"])).result(60)
        assert output.text in ("a", "b")


def test_programs_for_constraints_are_compiled_while_an_engine_serves(monkeypatch):
    with bj.Engine(tiny(), max_batch_size=1, context=72, prefill_tokens=32, pages=8) as engine:
        monkeypatch.setattr(constraints, "prepare", lambda *_: None)
        monkeypatch.setattr(constraints, "installed", lambda: False)
        engine.compile_constrained()
        engine.submit("x", GREEDY, max_new_tokens=3).result(60)
        assert not engine._loop.runner._others
        monkeypatch.setattr(constraints, "installed", lambda: True)
        engine.compile_constrained()
        assert engine.submit("x", GREEDY, max_new_tokens=9).result(60).text  # meanwhile
        scheduler, ends = engine._loop.scheduler, time.monotonic() + 60
        while not scheduler.compiled_split:
            assert time.monotonic() < ends
            time.sleep(0.01)
        monkeypatch.setattr("bonsai_jax.engine.stored.compile", None)  # nothing more is compiled
        monkeypatch.setattr("bonsai_jax.engine.stored.load", None)
        output = engine.submit("x", NOISE, max_new_tokens=20, constraint=bj.choice(["a", "b"])).result(60)
        assert output.text in ("a", "b")


def test_an_engine_that_compiles_for_constraints_can_be_closed():
    engine = bj.Engine(tiny(), max_batch_size=2, context=80, prefill_tokens=32, pages=10)
    engine.compile_constrained()
    engine.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.compile_constrained()


@pytest.mark.slow
def test_smollm2_writes_json_of_a_schema():
    model = bj.load("demo", bj.RunConfig(context=256))
    ids = model.tokenizer.encode_chat([{"role": "user", "content": "Describe a person in JSON."}])
    (output,) = bj.generate(model, [ids], constraint=bj.json_schema(PERSON), sampling=GREEDY)
    assert output.finish_reason == "stop"
    jsonschema.validate(json.loads(output.text), PERSON)
