"""Constraints without a model: masks against brute force over the vocabulary, errors, limits."""

import functools
import itertools
import json
import pickle
import random
import re
import subprocess
import sys
import time

import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax import constraints
from bonsai_jax.constraints import compiled as compiling
from bonsai_jax.constraints import matcher as matching
from bonsai_jax.constraints.masks import QUICK_S, Masks
from bonsai_jax.constraints.matcher import Together
from checkpoints import open_checkpoint


@functools.cache
def tokenizer() -> bj.Tokenizer:
    return bj.Tokenizer.from_checkpoint(open_checkpoint("synth:tiny-llama:q8_0"))


VOCABULARY = 520  # the tokenizer has 512: a model can have more rows


def compiled(constraint: bj.Constraint) -> constraints.Matcher:
    return constraints.compile(constraint, tokenizer(), VOCABULARY).matcher()


def bits(mask: np.ndarray) -> set[int]:
    """The tokens of a mask."""
    assert mask.dtype == np.uint32 and mask.shape == (-(-VOCABULARY // 32),)
    return {token for token in range(len(mask) * 32) if mask[token // 32] >> np.uint32(token % 32) & 1}


# A random finite language: how it is written in each syntax, and all of its texts.

Language = tuple[str, str, set[str]]  # regular expression, Lark, texts
LETTERS = 'abcdet inrs"é\u6f22'


def language(rng: random.Random, depth: int) -> Language:
    kind = rng.choice(["text", "class", *["join", "or", "maybe", "repeat"] * (depth > 0)])
    if kind == "text":
        text = "".join(rng.choices(LETTERS, k=rng.randint(1, 3)))
        return re.escape(text), json.dumps(text, ensure_ascii=False), {text}
    if kind == "class":
        letters = sorted(set(rng.sample("abcdeinrst", 3)))
        return f"[{''.join(letters)}]", f"/[{''.join(letters)}]/", set(letters)
    parts = [language(rng, depth - 1) for _ in range(2 if kind in ("join", "or") else 1)]
    expressions, larks, texts = zip(*parts, strict=True)
    if kind == "join":
        joined = {"".join(pair) for pair in itertools.product(*texts)}
        return "".join(f"(?:{e})" for e in expressions), " ".join(f"({lark})" for lark in larks), joined
    if kind == "or":
        return (
            "|".join(f"(?:{e})" for e in expressions),
            " | ".join(f"({lark})" for lark in larks),
            texts[0] | texts[1],
        )
    if kind == "maybe":
        return f"(?:{expressions[0]})?", f"({larks[0]})?", texts[0] | {""}
    twice = {a + b for a in texts[0] for b in texts[0]}
    return f"(?:{expressions[0]}){{1,2}}", f"({larks[0]}){{1,2}}", texts[0] | twice


def allowed_by_brute_force(texts: set[str], said: bytes) -> set[int]:
    """Each token after which some text can still be completed; those that end an answer where it is one."""
    data = {text.encode() for text in texts}
    tokens = set()
    for token in range(VOCABULARY):
        own = tokenizer().token_bytes(token)
        if token in tokenizer().eos_ids:
            tokens |= {token} if said in data else set()
        elif own and tokenizer().kinds[token] != 3 and any(text.startswith(said + own) for text in data):
            tokens.add(token)
    return tokens


def finite(seed: int) -> Language:
    rng = random.Random(seed)
    while True:
        found = language(rng, 3)
        if found[2] != {""} and len(found[2]) < 400:
            return found


@pytest.mark.parametrize("seed", range(60))
def test_masks_are_those_of_a_look_at_every_token(seed):
    expression, lark, texts = finite(seed)
    ways = [bj.regex(expression), bj.grammar(f"start: {lark}")]
    ways += [] if "" in texts else [bj.choice(sorted(texts))]
    rng = random.Random(seed)
    for constraint in ways:
        for _ in range(3):
            matcher, said = compiled(constraint), b""
            while not matcher.complete:
                matcher.find()
                expected = allowed_by_brute_force(texts, said)
                if matcher.forced:  # every text that can follow begins with them
                    forced = b"".join(map(tokenizer().token_bytes, matcher.forced))
                    rest = {text.encode() for text in texts if text.encode().startswith(said)}
                    assert forced and all(text.startswith(said + forced) for text in rest)
                    assert bits(matcher.allowed) == {matcher.forced[0]} and matcher.forced[0] in expected
                    token = matcher.forced[0]
                else:
                    assert bits(matcher.allowed) == expected, (constraint, said)
                    token = rng.choice(sorted(expected))
                if token in tokenizer().eos_ids:
                    break
                matcher.consume([token])
                said += tokenizer().token_bytes(token)
            assert said.decode() in texts


@pytest.mark.parametrize("seed", range(20))
def test_masks_along_drafts_are_those_after_each_token(seed):
    """Drafts of which some are allowed: cut where one is not, or ends the answer; then some are drawn."""
    expression, _, texts = finite(seed)
    rng = random.Random(seed)
    for _ in range(4):
        matcher = compiled(bj.regex(expression))
        text = rng.choice(sorted(texts - {""}))
        drafts = tokenizer().encoder(text, False)
        if rng.random() < 0.5:
            drafts.insert(rng.randrange(len(drafts) + 1), rng.choice([66, min(tokenizer().eos_ids)]))
        matcher.find()
        matcher.drafts = drafts
        matcher.find()
        plain, kept, masks = compiled(bj.regex(expression)), [], [matcher.allowed]
        for token in drafts:
            plain.find()
            if token not in bits(plain.allowed) - tokenizer().eos_ids:
                break
            plain.consume([token])
            if plain.complete:
                break
            plain.find()
            kept.append(token)
            masks.append(plain.allowed)
        assert matcher.drafts == kept
        np.testing.assert_array_equal(matcher.allowed_along, masks)
        count = rng.randint(0, len(kept))
        choices = sorted(bits(masks[count]) - tokenizer().eos_ids)
        if choices:
            drawn, plain = [*kept[:count], rng.choice(choices)], compiled(bj.regex(expression))
            matcher.consume(drawn)
            for token in drawn:
                plain.find()
                plain.consume([token])
            assert (matcher.complete, matcher.forced) == (plain.complete, plain.forced)
            matcher.find()
            plain.find()
            assert (matcher.forced, matcher.drafts) == (plain.forced, [])
            if not plain.complete:
                np.testing.assert_array_equal(matcher.allowed, plain.allowed)


def test_json_strings_allow_what_json_allows():
    """An infinite language: the inside of a JSON string of letters, escapes and half characters."""
    matcher = compiled(bj.json_schema({"type": "string"}))
    matcher.find()
    (quote,) = [token for token in range(512) if tokenizer().token_bytes(token) == b'"']
    matcher.consume([quote])
    matcher.find()
    mask = bits(matcher.allowed)
    for token in range(VOCABULARY):
        own = tokenizer().token_bytes(token)
        if tokenizer().kinds[token : token + 1] == b"\x03" or not own:
            assert token not in mask
        elif own.isascii() and b"\x7f" not in own:  # JSON allows it, llguidance does not
            text = '"' + own.decode()
            ends = [text, text + '"', text + '\\"', text + 'n"', text + '0000"', text + '"']
            assert (token in mask) == any(map(is_json, ends)), own


def is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), str)
    except ValueError:
        return False


def test_an_answer_that_goes_on_past_its_end_may_not_draw_end_tokens():
    matcher = compiled(bj.regex("a*"))
    assert bits(matcher.allowed) > tokenizer().eos_ids
    matcher.past_end = True
    assert bits(matcher.allowed) and not bits(matcher.allowed) & tokenizer().eos_ids


def test_each_matcher_has_a_place_of_its_own():
    first, second = compiled(bj.regex("ab|cd")), compiled(bj.regex("ab|cd"))
    ids = {text: token for token in range(512) if (text := tokenizer().token_bytes(token)) in (b"a", b"c")}
    third = first.copy()
    first.consume([ids[b"a"]])
    second.consume([ids[b"c"]])
    for matcher, texts in ((first, {"b"}), (second, {"d"})):
        matcher.find()
        assert matcher.forced or bits(matcher.allowed) == allowed_by_brute_force(texts, b"")
    assert bits(third.allowed) == allowed_by_brute_force({"ab", "cd"}, b"")


SAME = [
    (bj.json_object(), bj.json_schema('{"type": "object"}')),
    (bj.choice(["a", "b", "a"]), bj.choice(("a", "b"))),
]


@pytest.mark.parametrize("one, other", SAME)
def test_constraints_are_values(one, other):
    assert one == other and hash(one) == hash(other) and pickle.loads(pickle.dumps(one)) == one


def test_what_is_compiled_is_found_again_and_bounded(monkeypatch):
    first = constraints.compile(bj.regex("x+"), tokenizer(), VOCABULARY)
    assert constraints.compile(bj.regex("x+"), tokenizer(), VOCABULARY) is first
    monkeypatch.setattr(compiling, "MOST_COMPILED", 3)
    for n in range(1, 5):
        constraints.compile(bj.regex(f"y{{{n}}}"), tokenizer(), VOCABULARY)
    assert constraints.compile(bj.regex("x+"), tokenizer(), VOCABULARY) is not first


WRONG = {
    "no JSON": (lambda: bj.json_schema("{"), ValueError, "json_schema: schema is not JSON"),
    "no schema": (lambda: bj.json_schema([1]), TypeError, "json_schema: schema is a list"),
    "a schema with a set": (lambda: bj.json_schema({"enum": {1}}), ValueError, "json_schema: "),
    "a text for choice": (lambda: bj.choice("yes"), TypeError, "choice: texts is 'yes'; give a list"),
    "no choice": (lambda: bj.choice([]), ValueError, "choice: texts is []"),
    "an empty choice": (lambda: bj.choice(["a", ""]), ValueError, "none of them empty"),
    "a number for regex": (lambda: bj.regex(3), TypeError, "regex: pattern is a int; give a text"),
    "too long": (lambda: bj.grammar("x" * 70_000), ValueError, "70,000 characters; it may have 65,536"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    make, error, message = WRONG[name]
    with pytest.raises(error) as raised:
        make()
    assert message in str(raised.value)


BROKEN = {
    "a type that JSON does not have": (bj.json_schema({"type": "strin"}), "json_schema: Invalid type: strin"),
    "an unknown keyword": (bj.json_schema({"not": {}}), 'json_schema: Unimplemented keys: ["not"]'),
    "a reference to nothing": (bj.json_schema({"$ref": "#/$defs/a"}), "json_schema: "),
    "a schema on the network": (bj.json_schema({"$ref": "http://example.com/a"}), "http://example.com/a"),
    "a reference to itself": (
        bj.json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
        "json_schema: no text matches it",
    ),
    "an open bracket": (bj.regex("(a"), "unclosed group"),
    "look-ahead": (bj.regex("(?=a)b"), "look-around"),
    "an unknown rule": (bj.grammar("start: other"), 'unknown name: "other"'),
    "a rule without end": (bj.grammar("start: start"), "grammar: "),
    "no start": (bj.grammar('a: "b"'), "grammar: "),
    "broken GBNF": (bj.grammar('root ::= "a'), "grammar: "),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_compiled_is_named_on_one_line(name):
    constraint, message = BROKEN[name]
    with pytest.raises(ValueError) as raised:
        compiled(constraint)
    assert message in str(raised.value) and "\n" not in str(raised.value) and len(str(raised.value)) < 400


def nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def properties(count: int) -> dict:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}


HOSTILE = {
    "a power of repeats": bj.regex("x(a{1000}){1000}"),
    "powers of repeats": bj.regex("((a{0,100}){0,100}){0,100}"),
    "a?^n a^n": bj.regex("x" + "a?" * 500 + "a" * 500),
    "a long memory": bj.regex("(.|\n)*a(.|\n){200}"),
    "many stars": bj.regex("(.*(1|2)?.*){30}x"),
    "many ways": bj.regex("|".join(f"x{i}.*y{i}" for i in range(4000))),
    "classes": bj.regex(r"(\p{L}\p{N}){200}(\w{50,100}){30}"),
    "deep": bj.json_schema(nested(300)),
    "wide": bj.json_schema(properties(1500)),
    "any of many": bj.json_schema(
        {"anyOf": [{"type": "string", "pattern": f"^x{i}.*z$"} for i in range(1000)]}
    ),
    "all of any of": bj.json_schema(
        {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": True}} for j in range(6)]} for i in range(12)]}
    ),
    "a large multiple": bj.json_schema({"type": "integer", "multipleOf": 999_999_937}),
    "many items": bj.json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 100_000}),
    "ambiguous": bj.grammar('start: a\na: a a | "x" | '),
    "doubling": bj.grammar(
        "start: a0\n"
        + "".join(f"a{i}: a{i + 1} a{i + 1} | a{i + 1}\n" for i in range(100))
        + 'a100: "x" | ""'
    ),
    "many texts": bj.grammar("start: " + " | ".join(f'"w{i}"' for i in range(5000))),
    "many choices": bj.choice([f"word {i}" for i in range(4000)]),
}


EACH_HOSTILE = """
import pickle, random, resource, sys, time
sys.path.insert(0, ".")
from tests.bonsai_jax.test_constraints import HOSTILE, bits, compiled, tokenizer
rng = random.Random(0)
for name, constraint in HOSTILE.items():
    before, began, reason = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time(), ""
    try:
        matcher = compiled(constraint)
        for _ in range(30):
            matcher.find()
            choices = sorted(bits(matcher.allowed) - tokenizer().eos_ids)
            if matcher.complete or not choices:
                break
            matcher.consume([rng.choice(choices)])
    except ValueError as error:
        reason = str(error)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(name, grown // 1024, time.process_time() - began, reason, sep="|")
"""


def test_hostile_constraints_end_and_their_memory_is_bounded():
    """In a process of its own, whose memory is theirs."""
    done = subprocess.run([sys.executable, "-c", EACH_HOSTILE], capture_output=True, text=True, timeout=120)
    lines = [line.split("|", 3) for line in done.stdout.splitlines()]
    assert [name for name, *_ in lines] == list(HOSTILE), done.stderr
    for name, megabytes, seconds, reason in lines:
        assert int(megabytes) < 400 and float(seconds) < 5, (name, megabytes, seconds, reason)
    assert sum(bool(reason) for *_, reason in lines) >= 6  # refused, at once or when it grew too large


@pytest.mark.parametrize("begin_s", [-1, 0, 100])  # in llguidance's threads, some of them, one after another
@pytest.mark.parametrize("seed", range(5))
def test_what_may_come_next_is_the_same_together_and_alone(seed, begin_s, monkeypatch):
    """Of answers at random places, of which some are complete, some forced, one has failed, and some have
    drafts."""
    rng, matchers = random.Random(seed), []
    for number in range(12):
        expression, _, texts = finite(100 * seed + number)
        matcher = compiled(bj.regex(expression))
        ids = tokenizer().encoder(rng.choice(sorted(texts - {""})), False)
        matcher.consume(ids[: rng.randint(0, len(ids))])
        matcher.drafts, matcher.past_end = ids[:2] if number % 3 == 0 else [], number % 2 == 0
        matchers.append(matcher)
    matchers[5] = compiled(bj.regex("[a-f]"))
    with pytest.raises(ValueError):
        matchers[5].consume(tokenizer().encoder("abc", False))
    alone, errors = [matcher.copy() for matcher in matchers], []
    for matcher, one in zip(matchers, alone, strict=True):
        one.drafts = list(matcher.drafts)
        try:
            one.find()
            errors.append(None)
        except ValueError as error:
            errors.append(str(error))
    monkeypatch.setattr(matching, "BEGIN_S", begin_s)
    together = Together(2).find(matchers)
    assert [error and str(error) for error in together] == errors and errors[5]
    for matcher, one, error in zip(matchers, alone, errors, strict=True):
        assert (matcher.forced, matcher.ends, matcher.complete) == (one.forced, one.ends, one.complete)
        if error is None:
            np.testing.assert_array_equal(matcher.allowed_along, one.allowed_along)


def test_a_mask_that_was_slow_before_does_not_hold_up_others():
    quick, broken, slow = (compiled(bj.regex("[a-f]*")) for _ in range(3))
    with pytest.raises(ValueError):
        broken.consume(tokenizer().encoder("a1", False))
    find, slow.find_s = slow.find, 0.3
    slow.find = lambda: (time.sleep(0.3), find())
    masks, order = Masks(), []
    for name, matcher in (("slow", slow), ("quick", quick), ("broken", broken)):
        masks.start(matcher, lambda error, name=name: order.append((name, error is None)))
    masks.send()
    masks.collect(0.1)
    assert order == [("quick", True), ("broken", False)] and masks.pending == 1
    began = time.perf_counter()
    masks.collect(5)  # it waits once
    assert time.perf_counter() - began < 0.15 and masks.pending == 1
    masks.wait(5)
    masks.collect(5)
    assert order[2:] == [("slow", True)] and masks.pending == 0
    assert (slow.allowed == quick.allowed).all()
    masks.close()


def test_threads_that_begin_late_do_not_make_masks_slow():
    """Else all answers would have their next masks made in Python threads, for which a step waits longer."""
    together, matchers = Together(16), [compiled(bj.regex("[a-f]*")) for _ in range(32)]

    class Late:
        def unsafe_compute_mask_ptr(self, *arguments):
            time.sleep(matching.BEGIN_S)
            executor.unsafe_compute_mask_ptr(*arguments)
            began_late.append(True)

    executor, together._executor, began_late, seen = together._executor, Late(), [], []
    for _ in range(20):  # a busy machine may be later still
        together._in_threads(matchers)
        seen.append(matchers[0].find_s)
    assert len(began_late) == 20 and min(seen) < QUICK_S


def test_without_llguidance_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r'pip install "bonsai-jax\[constraints\]"'):
        constraints.compile(bj.regex("a"), tokenizer(), VOCABULARY + 1)
