"""Calls of functions in every format: written examples, cut anywhere; broken ones; text around them."""

import json

import hypothesis
import hypothesis.strategies as st
import pytest

from bonsai_jax.tokens.answer_parser import MOST_BROKEN, Event, Tags
from bonsai_jax.tokens.calls import FORMATS, call_format, deepseek
from bonsai_jax.tokens.calls.values import ALL, as_json, types

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "fine": {"type": ["boolean", "null"]},
        "where": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
    "$defs": {"place": {"type": "object"}},
}
TOOLS = {"weather": WEATHER, "now": {"type": "object", "properties": {}}, "note": {}}
BY_NAME = {format.name: format for format in (*FORMATS, deepseek.FENCED)}
ROME, ANY = {"city": "Rome"}, {"city": 'a "b"\n\\ é', "days": 3, "fine": None, "tags": ["x", "y"]}

# What models write for one call of weather(city="Rome").
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "llama": '{"name": "weather", "parameters": {"city": "Rome"}}',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}, "id": "Ab1Cd2Ef3"}]',
    "mistral-args": '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}',
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    '```json\n{"city": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "qwen-xml": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n"
    "</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "deepseek-v3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" '
    'string="true">Rome</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
    "granite": '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}]',
    "nemotron": '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Rome"}}]</TOOLCALL>',
    "gemma": '<|tool_call>call:weather{city:<|"|>Rome<|"|>}<tool_call|>',
    "apriel": '<tool_calls>[{"name": "weather", "arguments": {"city": "Rome"}}]</tool_calls>',
    "command": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", '
    '"parameters": {"city": "Rome"}}]<|END_ACTION|>',
    "pythonic": '<|tool_call_start|>[weather(city="Rome")]<|tool_call_end|>',
    "functionary": '<function=weather>{"city": "Rome"}</function>',
}
WRITTEN["seed"] = WRITTEN["qwen-xml"].replace("tool_call>", "seed:tool_call>")


def joined(events):
    """Neighbours of a kind as one. An event with a name begins a call."""
    out: list[Event] = []
    for event in events:
        if out and event.name is None and out[-1].kind == event.kind:
            out[-1] = out[-1]._replace(text=out[-1].text + event.text)
        else:
            out.append(event)
    return out


def read(name: str, *pieces: str, within: bool = False) -> list[Event]:
    parser = Tags(within, BY_NAME[name], TOOLS)
    return joined([event for piece in pieces for event in parser.next(piece)] + parser.end())


def calls(events: list[Event]) -> list[tuple[str | None, object]]:
    return [(name, json.loads(text)) for kind, text, name in events if kind == "call"]


def texts(events: list[Event], kind: str = "answer") -> str:
    return "".join(event.text for event in events if event.kind == kind)


def test_every_format_has_an_example():
    assert WRITTEN.keys() == BY_NAME.keys()


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_alone(name):
    events = read(name, WRITTEN[name])
    assert calls(events) == [("weather", ROME)] and len(events) == 1


@pytest.mark.parametrize("name", WRITTEN)
def test_a_thought_and_words_before_a_call(name):
    words = "" if name == "llama" else "I look it up."
    events = read(name, "Hm. <tool_call>", "</think>\n\n", words, "\n\n", WRITTEN[name], "\n", within=True)
    assert calls(events) == [("weather", ROME)]
    assert (texts(events, "thought"), texts(events)) == ("Hm. <tool_call>", words and f"\n\n{words}")


@pytest.mark.parametrize("name", sorted(WRITTEN.keys() - {"pythonic"}))
def test_arguments_come_while_they_are_written(name):
    parser, seen = Tags(False, BY_NAME[name], TOOLS), ""
    at = WRITTEN[name].index("Rome") + 3
    for letter in WRITTEN[name][:at]:
        seen += "".join(event.text for event in parser.next(letter) if event.kind == "call")
    assert seen.endswith("Rom")


@pytest.mark.parametrize("name", WRITTEN)
def test_the_message_of_a_call(name):
    parser = Tags(False, BY_NAME[name], TOOLS)
    parser.next(WRITTEN[name])
    parser.end()
    call = {"type": "function", "function": {"name": "weather", "arguments": ROME}}
    assert parser.message() == {"role": "assistant", "content": "", "tool_calls": [call]}


SEVERAL = {
    "hermes": '<tool_call>{"name": "now"}</tool_call>\n<tool_call>\n'
    '{"arguments": "{\\"city\\": \\"Rome\\"}", '
    '"name": "weather"}</tool_call>',
    "llama": '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; '
    '{"name": "weather", "parameters": {"city": "Rome"}}',
    "mistral": '[TOOL_CALLS][{"name": "now", "arguments": {}}, '
    '{"name": "weather", "arguments": {"city": "Rome"}}]',
    "mistral-args": '[TOOL_CALLS]now[CALL_ID]Ab1Cd2Ef3[ARGS]{}[TOOL_CALLS]weather{"city": "Rome"}',
    "deepseek-v3.1": WRITTEN["deepseek-v3.1"].replace(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>",
    ),
    "deepseek-v3": WRITTEN["deepseek-v3"].replace(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>",
    ),
    "qwen-xml": "<tool_call>\n<function=now>\n</function>\n</tool_call>\n"
    + WRITTEN["qwen-xml"].removeprefix("<tool_call>\n"),
    "minimax": WRITTEN["minimax"].replace("<invoke", '<invoke name="now">\n</invoke>\n<invoke', 1),
    "deepseek-v3.2": WRITTEN["deepseek-v3.2"].replace(
        "<｜DSML｜invoke", '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n<｜DSML｜invoke', 1
    ),
    "glm": "<tool_call>now\n</tool_call>\n" + WRITTEN["glm"].replace("weather\n", "weather"),
    "granite": '<|tool_call|>[{"name": "now", "arguments": {}}, '
    '{"name": "weather", "arguments": {"city": "Rome"}}]',
    "nemotron": '<TOOLCALL>[{"name": "now", "arguments": {}},'
    '{"name": "weather", "arguments": {"city": "Rome"}}]</TOOLCALL>',
    "gemma": "<|tool_call>call:now{}<tool_call|>" + WRITTEN["gemma"],
    "apriel": WRITTEN["apriel"].replace("[", '[{"name": "now", "arguments": {}},'),
    "command": WRITTEN["command"].replace(
        "[", '[\n  {"tool_call_id": "0", "tool_name": "now", "parameters": {}}, ', 1
    ),
    "pythonic": "<|tool_call_start|>[now(), weather(city='Rome')]<|tool_call_end|>",
    "functionary": "<function=now>{}</function>" + WRITTEN["functionary"],
}
SEVERAL["seed"] = SEVERAL["qwen-xml"].replace("tool_call>", "seed:tool_call>")


@pytest.mark.parametrize("name", SEVERAL)
def test_several_calls(name):
    events = read(name, SEVERAL[name])
    assert calls(events) == [("now", {}), ("weather", ROME)] and len(events) == 2
    after = read(name, SEVERAL[name], "\nDone.")
    assert calls(after) == calls(events) and texts(after) == "\nDone."


def test_values_of_tags_follow_the_schema():
    text = (
        WRITTEN["qwen-xml"]
        .replace("Rome", 'a "b"\n\\ é')
        .replace(
            "</function>",
            "<parameter=days>\n3\n</parameter>\n<parameter=fine>\nNone\n</parameter>\n"
            '<parameter=tags>\n["x", "y"]\n</parameter>\n</function>',
        )
    )
    assert calls(read("qwen-xml", text)) == [("weather", ANY)]
    python = "<|tool_call_start|>[note(a=[1, -2.5, True, {'b': \"x\"}], c=None, d=false)]<|tool_call_end|>"
    assert calls(read("pythonic", python)) == [
        ("note", {"a": [1, -2.5, True, {"b": "x"}], "c": None, "d": False})
    ]
    value = '<|"|>'
    assert calls(
        read("gemma", f"<|tool_call>call:note{{a:[1,-2.5,true,{{b:{value}x,}}{value}}}],c:null}}<tool_call|>")
    ) == [("note", {"a": [1, -2.5, True, {"b": "x,}"}], "c": None})]


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("3", {"type": "integer"}, "3"),
        ("3.0", {"type": "integer"}, "3"),
        ("3", {"type": "number"}, "3"),
        ("three", {"type": "integer"}, '"three"'),
        ("3", {"type": "string"}, '"3"'),
        ('"3"', {"type": ["string", "null"]}, '"\\"3\\""'),
        ("null", {"type": ["string", "null"]}, "null"),
        ("True", {"type": "boolean"}, "true"),
        ("true", {"type": "string"}, '"true"'),
        ("NaN", {"type": "number"}, '"NaN"'),
        ('{"a": 1}', {"$ref": "#/$defs/place"}, '{"a": 1}'),
        ("2", {"enum": [1, 2]}, "2"),
        ("2", {"enum": ["1", "2"]}, '"2"'),
        ("[1]", {}, "[1]"),
        ("a\nb", {}, '"a\\nb"'),
        ("5", {"allOf": [{"type": ["integer", "string"]}, {"type": "string"}]}, '"5"'),
        ("['a', {'b': True}]", {"type": "array"}, '["a", {"b": true}]'),
        ("['a']", {"type": "string"}, "\"['a']\""),
        ("{1, 2}", {}, '"{1, 2}"'),
        ("[a]", {"type": "array"}, '"[a]"'),
        ("[" * 100_000, {}, json.dumps("[" * 100_000)),
    ],
)
def test_text_as_json(text, schema, expected):
    assert as_json(text, types(schema, WEATHER)) == expected


def test_schemas_that_refer_to_themselves_allow_all():
    root = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    assert types(root) == ALL and types({"$ref": "#/nowhere"}) == ALL and types(True) == ALL


BROKEN = {
    "hermes": [
        "<tool_call>\nhm</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"na',
        "<tool_call>",
    ],
    "llama": ['{"name": "other", "parameters": {}}', '{"a": 1}', "{", "<|python_tag|>print(1)"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] [3]", '[TOOL_CALLS] [{"arguments": {}}]'],
    "mistral-args": ["[TOOL_CALLS]weather", "[TOOL_CALLS]weather[ARGS]3", "[TOOL_CALLS]a b[ARGS]{}"],
    "deepseek-v3.1": ["<｜tool▁calls▁begin｜>hm", "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>3"],
    "qwen-xml": ["<tool_call>hm</tool_call>", "<function=other>", "<tool_call>\n<function=" + "x" * 300],
    "minimax": ["<minimax:tool_call>hm", '<minimax:tool_call><invoke name="'],
    "glm": ["<tool_call>a b</tool_call>", "<tool_call>weather", "<tool_call></tool_call>"],
    "granite": ["<|tool_call|>hm", "<|tool_call|>[]"],
    "pythonic": [
        "<|tool_call_start|>[]<|tool_call_end|>",
        "<|tool_call_start|>[f(1)]<|tool_call_end|>",
        "<|tool_call_start|>[f(x=g)]<|tool_call_end|>",
        "<|tool_call_start|>[f(x=1e999)]<|tool_call_end|>",
        f"<|tool_call_start|>{'[' * 5000}<|tool_call_end|>",
        "<|tool_call_start|>[f(",
    ],
    "functionary": ["<function=weather>hm</function>", "<function=a b>{}"],
    "command": ["<|START_ACTION|>[{}]<|END_ACTION|>"],
    "gemma": ["<|tool_call>hm", "<|tool_call>call:weather", "<|tool_call>call:{}"],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, all in BROKEN.items() for text in all])
def test_what_is_no_call_stays_text(name, text):
    assert read(name, text) == read(name, *text) == [Event("answer", text)]
    if name != "llama":
        after = read(name, text, " ", WRITTEN[name])
        assert calls(after)[-1:] == [("weather", ROME)] or texts(after).startswith(text)


def test_arguments_that_break_are_passed_on_and_what_follows_is_text():
    events = read("hermes", '<tool_call>{"name": "weather", "arguments": {"city": Rome</tool_call> So.')
    assert events == [Event("call", '{"city": Rome', "weather"), Event("answer", " So.")]
    events = read("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}</tool_call>')
    assert events == [Event("call", '{"city": "Rome"}', "weather")]  # one bracket is missing
    events = read("hermes", '[<tool_call>[{"name": "now", "arguments": {}}, oh]</tool_call>')
    assert events == [Event("answer", "["), Event("call", "{}", "now"), Event("answer", ", oh]</tool_call>")]


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_cut_off_is_no_json(name):
    """A client must not run half a call."""
    for end in range(1, len(WRITTEN[name])):
        for kind, text, _ in read(name, WRITTEN[name][:end]):
            if kind == "call" and text != '{"city": "Rome"}':
                with pytest.raises(ValueError):
                    json.loads(text)


def test_without_tools_nothing_is_a_call():
    parser = Tags()
    assert joined(parser.next(WRITTEN["hermes"]) + parser.end()) == [Event("answer", WRITTEN["hermes"])]


def test_beginnings_of_calls_without_end_take_little_time():
    text = '<tool_call>{"a": [' * 5000
    parser = Tags(False, BY_NAME["hermes"], TOOLS)
    events = [
        event for at in range(0, len(text), 7) for event in parser.next(text[at : at + 7])
    ] + parser.end()
    assert texts(events) == text and text.count("<tool_call>") > MOST_BROKEN


PARTS = [*WRITTEN.values(), *SEVERAL.values(), *(text for all in BROKEN.values() for text in all)]
PIECES = [
    " ",
    "\n",
    "Well.",
    "<think>",
    "</think>",
    "<",
    "{",
    "}",
    '"',
    "\\",
    "<tool_call>",
    "</tool_call>",
    "é",
]


def untagged(text: str) -> str:
    return text.replace("<think>", "").replace("</think>", "")


@hypothesis.settings(max_examples=400, deadline=None, derandomize=True)
@hypothesis.given(
    name=st.sampled_from(sorted(BY_NAME)),
    own=st.booleans(),
    parts=st.lists(st.sampled_from(PARTS + PIECES * 3), max_size=5),
    damage=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 4)), max_size=2),
    cuts=st.lists(st.integers(0, 600), max_size=12),
    within=st.booleans(),
)
def test_events_do_not_depend_on_how_the_text_is_cut(name, own, parts, damage, cuts, within):
    text = "".join(parts) + (SEVERAL[name] if own else "") + " end"
    for at, count in damage:
        text = text[:at] + text[at + count :]
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    whole = read(name, text, within=within)
    assert read(name, *pieces, within=within) == whole == read(name, *text, within=within)
    if not any(event.kind == "call" for event in whole):  # then nothing is lost but the tags of thoughts
        assert untagged("".join(event.text for event in whole)) == untagged(text)


def test_no_trigger_contains_another():
    for format in FORMATS:
        marks = ("<think>", *format.triggers)
        assert not any(a != b and a in b for a in marks for b in marks), format.name


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>\\n{\"name\": ' }}", "hermes"),
        ("<tool_call>\n<function=f>\n<parameter=x>", "qwen-xml"),
        ("<tool_call>{function-name}\n<arg_key>", "glm"),
        ("'<｜tool▁call▁begin｜>' + tool['type'] + '```json'", "deepseek-v3"),
        ("'<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'", "deepseek-v3.1"),
        ("[TOOL_CALLS]' + name + '[ARGS]'", "mistral-args"),
        ("[TOOL_CALLS] [", "mistral"),
        ('Respond in the format {"name": function name, "parameters": dictionary', "llama"),
        ("<function=example>{json}</function>", "functionary"),
        ("{%- set dsml_token = '｜DSML｜' %}<{{ dsml_token }}function_calls>", "deepseek-v3.2"),
        ("<seed:tool_call>\n<function=f>\n<parameter=x>", "seed"),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_the_template_shows_the_format(template, name):
    format = call_format(template)
    assert (format and format.name) == name


def test_the_vocabulary_shows_a_format_that_no_template_does():
    assert call_format("{{ tools }}", {"<|tool_call_start|>"}).name == "pythonic"
    assert call_format("<tool_call>", {"<|tool_call_start|>"}).name == "hermes"
