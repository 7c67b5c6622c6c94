"""Grammars of calls: every text that one allows is a call, whose arguments keep to the schema."""

import json
import random

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from bonsai_jax.tokens.answer_parser import Tags
from bonsai_jax.tokens.calls import tool_grammar
from tests.bonsai_jax.test_calls import BY_NAME, SEVERAL, WRITTEN, calls, joined, texts

TOKENIZER = LLTokenizer("byte")
MOST = 3000  # bytes of a text
ENDS = ("</｜DSML｜parameter>\n", "\n</parameter>\n", "</parameter>\n", "</arg_value>\n", '<|"|>')
PLACE = {"type": "object", "properties": {"name": {"type": "string"}}, "additionalProperties": False}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
        "fine": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        "where": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "unit", "where"],
    "additionalProperties": False,
    "$defs": {"place": PLACE},
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = {"weather": SCHEMA, "now": EMPTY}


def matcher(name: str, choice: str, **how) -> LLMatcher:
    grammar = tool_grammar(BY_NAME[name], TOOLS, choice, **how)
    own = LLMatcher(TOKENIZER, grammar)
    assert not own.is_error(), own.get_error()
    return own


def drawn(own: LLMatcher, chance: random.Random, most: int = MOST) -> str:
    """A text that the grammar allows, drawn at random; ends of strings often, so that they are short."""
    data = bytearray()
    while not own.is_stopped() and len(data) < most:
        mark, ahead = chance.choice(ENDS).encode(), own.deep_copy()
        if chance.random() < 0.2 and ahead.try_consume_tokens([*mark]) == len(mark):
            data, own = data + mark, ahead
            continue
        mask = own.compute_bitmask()
        allowed = [b for b in range(256) if mask[b // 8] >> (b % 8) & 1]
        allowed = [b for b in allowed if b < 127] or allowed
        if own.is_accepting() and (not allowed or chance.random() < 0.5):
            return data.decode()
        plain = [b for b in allowed if not chr(b).isalnum() and b >= 32] if chance.random() < 0.7 else []
        byte = chance.choice(plain or [b for b in allowed if b >= 32 or b == 10] or allowed)
        assert own.consume_token(byte), own.get_error()
        data.append(byte)
    return data.decode()


@pytest.mark.parametrize("name", WRITTEN)
def test_every_text_that_the_grammar_allows_is_a_call(name):
    whole = 0
    for seed in range(12):
        text = drawn(matcher(name, ("required", "weather", "now")[seed % 3]), random.Random(seed))
        parser = Tags(False, BY_NAME[name], TOOLS)
        events = joined(parser.next(text) + parser.end())
        if len(text.encode()) >= MOST:  # an endless string
            continue
        whole += 1
        assert texts(events) == "", text
        for function, arguments in calls(events):
            jsonschema.validate(arguments, TOOLS[function])
    assert whole >= 6


def consumes(own: LLMatcher, text: str) -> bool:
    data = list(text.encode())
    return own.try_consume_tokens(data) == len(data) and own.is_accepting()


@pytest.mark.parametrize("name", WRITTEN)
def test_what_models_write_is_allowed(name):
    plain = {"weather": {"type": "object", "properties": {"city": {"type": "string"}}}, "now": EMPTY}
    written = WRITTEN[name].replace(', "id": "Ab1Cd2Ef3"', "")
    for thought, before in (("none", ""), ("begun", "Hm.</think>\n\n"), ("possible", "<think>a</think>")):
        for choice in ("auto", "required", "weather"):
            grammar = tool_grammar(BY_NAME[name], plain, choice, thought=thought)
            assert consumes(LLMatcher(TOKENIZER, grammar), before + written), (choice, thought)
        grammar = tool_grammar(BY_NAME[name], plain, "auto", thought=thought)
        assert consumes(LLMatcher(TOKENIZER, grammar), before + "Just text.")
        grammar = tool_grammar(BY_NAME[name], plain, "required", thought=thought)
        assert not consumes(LLMatcher(TOKENIZER, grammar), before + "Just text.")
    assert name in SEVERAL


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_that_has_begun_in_free_text_cannot_break(name):
    grammar = BY_NAME[name].grammar
    own, words = matcher(name, "auto"), "" if grammar.whole_answer else "Hi. "
    begun = list(f"{words}{grammar.opening}".encode())
    assert own.try_consume_tokens(begun) == len(begun) and not own.is_accepting()
    assert own.try_consume_tokens(list(b"zzz")) == 0


def test_a_call_alone_where_calls_are_not_parallel():
    two = WRITTEN["hermes"] + "\n" + WRITTEN["hermes"]
    plain = {"weather": {"type": "object", "properties": {"city": {"type": "string"}}}}
    for parallel in (True, False):
        grammar = tool_grammar(BY_NAME["hermes"], plain, "required", parallel=parallel)
        assert consumes(LLMatcher(TOKENIZER, grammar), two) == parallel


def test_control_tokens_stand_by_their_ids():
    grammar = tool_grammar(BY_NAME["mistral"], TOOLS, "required", control_ids={"[TOOL_CALLS]": 5})
    assert "start: <[5]>" in grammar and json.dumps("[TOOL_CALLS]") not in grammar
    with pytest.raises(ValueError, match="'other' is not one of the tools weather, now"):
        tool_grammar(BY_NAME["mistral"], TOOLS, "other")
