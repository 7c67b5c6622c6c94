"""A model that writes at random, and requests that force what it writes: calls, arguments that keep to their
schemas, JSON. Whatever it writes is valid."""

import json
import re

import anthropic
import jsonschema
import openai
import pytest

import bonsai_jax as bj
from tests.bonsai_jax.command_line import TINY
from tests.bonsai_jax.scripted import with_template
from tests.bonsai_jax.serving import serving
from tests.bonsai_jax.tool_templates import HERMES, QWEN

TRIP = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "by": {"type": "array", "items": {"enum": ["train", "foot"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["city", "days", "by"],
    "additionalProperties": False,
}
NOW = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"trip": TRIP, "now": NOW}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
ASKED = [{"role": "user", "content": "Plan it."}]
CHAT = {"model": "any", "messages": ASKED, "tools": TOOLS, "max_tokens": 200}


@pytest.fixture(scope="module", params=[HERMES, QWEN], ids=["hermes", "qwen-xml"])
def server(request):
    template = request.param.replace("think>", "thought>")  # a model at random thinks without end
    model = with_template(bj.load(TINY, bj.RunConfig(context=1024, batch_size=2)), template)
    with serving(model, rows=2) as served:
        yield served
        served.idle()


@pytest.fixture
def client(server):
    with server.openai() as client:
        yield client


def validated(message) -> list[str]:
    for call in message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [call.function.name for call in message.tool_calls]


@pytest.mark.parametrize("seed", range(3))
def test_a_call_that_is_required_is_made_and_keeps_to_its_schema(client, seed):
    how = {**CHAT, "seed": seed, "temperature": 1.0, "parallel_tool_calls": False}
    (choice,) = client.chat.completions.create(**how, tool_choice="required").choices
    assert len(validated(choice.message)) == 1 and choice.finish_reason == "tool_calls"
    named = {"type": "function", "function": {"name": "trip"}}
    (choice,) = client.chat.completions.create(**how, tool_choice=named).choices
    assert validated(choice.message) == ["trip"] and choice.message.content is None


@pytest.mark.parametrize("seed", range(3))
def test_a_function_without_parameters_gets_no_arguments(server, client, seed):
    """OpenAI's package: "Omitting parameters defines a function with an empty parameter list"."""
    bare = {"type": "function", "function": {"name": "ping"}}
    how = {"seed": seed, "temperature": 1.0, "max_tokens": 100}
    for tool in (bare, {**bare, "function": {"name": "ping", "parameters": None}}):
        asked = {"model": "any", "messages": ASKED, "tools": [tool], "parallel_tool_calls": False}
        got = client.chat.completions.create(**asked, **how, tool_choice="required").choices[0]
        assert [call.function.arguments for call in got.message.tool_calls] == ["{}"]
    body = {"messages": ASKED, "tools": [{"name": "ping"}], "tool_choice": {"type": "any"}, **how}
    body["tool_choice"]["disable_parallel_tool_use"] = True
    blocks = server.post("/v1/messages", **body).json()["content"]
    assert [block["input"] for block in blocks if block["type"] == "tool_use"] == [{}]


def test_streamed_and_by_the_other_apis(server, client):
    how = {**CHAT, "parallel_tool_calls": False, "tool_choice": "required"}
    with client.chat.completions.stream(**how) as stream:
        assert validated(stream.get_final_completion().choices[0].message)
    functions = [{"type": "function", **tool["function"]} for tool in TOOLS]
    got = client.responses.create(
        model="any", input="Plan it.", tools=functions, tool_choice={"type": "function", "name": "trip"}
    )
    (call,) = (item for item in got.output if item.type == "function_call")
    jsonschema.validate(json.loads(call.arguments), TRIP)
    tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as other:
        how = {"tools": tools, "tool_choice": {"type": "tool", "name": "trip"}}
        got = other.messages.create(model="any", max_tokens=200, messages=ASKED, **how)
    (block,) = (block for block in got.content if block.type == "tool_use")
    jsonschema.validate(block.input, TRIP)


def test_an_answer_that_must_be_json_is(client):
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": TRIP}}
    got = client.chat.completions.create(model="any", messages=ASKED, max_tokens=200, response_format=form)
    jsonschema.validate(json.loads(got.choices[0].message.content), TRIP)
    form = {"format": {"type": "json_schema", "name": "trip", "schema": TRIP}}
    jsonschema.validate(
        json.loads(client.responses.create(model="any", input="x", text=form).output_text), TRIP
    )


def test_the_cache_never_has_more_of_a_prompt_than_the_prompt(server, client):
    """Forced tokens are read with it: the name of a property, longer than what is new in the prompt."""
    name = "a property whose name is long, and of which no token is left to the model"
    schema = {"type": "object", "properties": {name: {"enum": [1, 2]}}, "required": [name]}
    schema["additionalProperties"] = False
    form = {"format": {"type": "json_schema", "schema": schema}}
    used = []
    for _ in range(2):
        body = {"messages": ASKED, "max_tokens": 200, "output_config": form}
        used.append(server.post("/v1/messages", **body).json()["usage"])
    assert all(usage["input_tokens"] >= 1 for usage in used) and used[1]["cache_read_input_tokens"] > 0
    whole = [usage["input_tokens"] + usage["cache_read_input_tokens"] for usage in used]
    how = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    got = client.chat.completions.create(model="any", messages=ASKED, max_tokens=200, response_format=how)
    assert whole == [got.usage.prompt_tokens] * 2
    assert 0 < got.usage.prompt_tokens_details.cached_tokens < got.usage.prompt_tokens
    assert got.model_extra["timings"]["prompt_n"] >= 1


DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])"
SUMS = 'start: NUMBER (" + " NUMBER)~1..3\nNUMBER: /[1-9][0-9]/'
GBNF = 'root ::= number " + " number\nnumber ::= [1-9] [0-9]'
WAYS = {
    "json_schema": ({"json_schema": TRIP}, None),
    "choice": ({"choice": ["yes", "no"]}, "yes|no"),
    "regex": ({"regex": DATE}, DATE),
    "lark": ({"grammar": SUMS}, r"[1-9]\d( \+ [1-9]\d){1,3}"),
    "gbnf": ({"grammar": GBNF}, r"[1-9]\d \+ [1-9]\d"),
    "json text": ({"json_schema": json.dumps(TRIP)}, None),
    "ebnf": ({"ebnf": GBNF}, r"[1-9]\d \+ [1-9]\d"),
    "json_object schema": ({"response_format": {"type": "json_object", "schema": TRIP}}, None),
    "json_schema schema": ({"response_format": {"type": "json_schema", "schema": TRIP}}, None),
    "guided json": ({"guided_json": TRIP, "guided_regex": None}, None),
    "guided json text": ({"guided_json": json.dumps(TRIP)}, None),
    "guided regex": ({"guided_regex": DATE}, DATE),
    "guided choice": ({"guided_choice": ["yes", "no"]}, "yes|no"),
    "guided grammar": ({"guided_grammar": GBNF}, r"[1-9]\d \+ [1-9]\d"),
    "vllm json text": ({"structured_outputs": {"json": json.dumps(TRIP)}}, None),
    "vllm white space": ({"structured_outputs": {"json": TRIP, "disable_any_whitespace": False}}, None),
    "vllm json": ({"structured_outputs": {"json": TRIP}}, None),
    "vllm choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    "vllm regex": ({"structured_outputs": {"regex": DATE, "choice": None}}, DATE),
    "vllm grammar": ({"structured_outputs": {"grammar": GBNF}}, r"[1-9]\d \+ [1-9]\d"),
}


@pytest.mark.parametrize("way", WAYS)
def test_answers_match_what_other_servers_fields_ask_for(client, way):
    more, expression = WAYS[way]
    how = {"model": "any", "max_tokens": 200, "n": 3, "extra_body": more}
    chat = client.chat.completions.create(messages=ASKED, **how)
    text = client.completions.create(prompt="x", **how)
    answers = [
        *(choice.message.content for choice in chat.choices),
        *(choice.text for choice in text.choices),
    ]
    assert len(answers) == 6
    for answer in answers:
        if expression is None:
            jsonschema.validate(json.loads(answer), TRIP)
        else:
            assert re.fullmatch(expression, answer)


OBJECTS = (
    {"structured_outputs": {"json_object": True}},
    {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
    {"guided_json_object": True},
    {"response_format": {"type": "json_object", "schema": {}}},
    {"response_format": {"type": "json_object", "schema": None}},
)


@pytest.mark.parametrize("how", OBJECTS)
def test_any_json_object_can_be_asked_for_in_several_ways(client, how):
    got = client.chat.completions.create(model="any", messages=ASKED, max_tokens=20, extra_body=how)
    assert got.choices[0].message.content.startswith("{")


def test_anthropics_older_field_of_a_format(server):
    form = {"type": "json_schema", "schema": TRIP}
    body = {"messages": ASKED, "max_tokens": 200}
    got = server.post("/v1/messages", **body, output_format=form).json()
    jsonschema.validate(json.loads(got["content"][0]["text"]), TRIP)
    two = server.post("/v1/messages", **body, output_format=form, output_config={"format": form})
    assert two.status_code == 400
    assert two.json()["error"]["message"] == "output_format: cannot be combined with output_config"
    wrong = server.post("/v1/messages", **body, output_format={**form, "schema": WRONG}).json()
    assert wrong["error"]["message"].startswith("output_format: ")
    wrong = server.post("/v1/messages", **body, output_format={"type": "json_object"}).json()
    assert wrong["error"]["message"] == "output_format.type: 'json_object' is none of json_schema"


def test_an_empty_grammar_is_none(client):
    """llama-server's default, which its clients send."""
    how = {"model": "any", "messages": ASKED, "max_tokens": 4, "temperature": 0}
    texts = [
        client.chat.completions.create(**how, extra_body=more).choices[0].message.content
        for more in ({}, {"grammar": ""}, {"structured_outputs": {"grammar": ""}})
    ]
    assert len(set(texts)) == 1


WRONG = {"type": "object", "properties": {"a": {"type": 3}}}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": WRONG}}]},
            "tools",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": WRONG}}},
            "response_format",
        ),
        ({"extra_body": {"tool_choice": "required", "regex": "a"}}, "regex"),
        ({"extra_body": {"regex": "a", "choice": ["b"]}}, "choice"),
        ({"extra_body": {"regex": "a", "response_format": {"type": "json_object"}}}, "regex"),
        ({"extra_body": {"regex": "(a"}}, "regex"),
        ({"extra_body": {"regex": "a" * 70_000}}, "regex"),
        ({"extra_body": {"regex": 3}}, "regex"),
        ({"extra_body": {"grammar": "start: nothing"}}, "grammar"),
        ({"extra_body": {"choice": []}}, "choice"),
        ({"extra_body": {"choice": ["a", ""]}}, "choice"),
        ({"extra_body": {"json_schema": WRONG}}, "json_schema"),
        ({"extra_body": {"structured_outputs": {}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"regex": "a", "json": {}}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"json_object": False}}}, "structured_outputs.json_object"),
        ({"extra_body": {"structured_outputs": {"json": []}}}, "structured_outputs.json"),
        ({"extra_body": {"structured_outputs": {"json": WRONG}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"json": "{"}}}, "structured_outputs.json"),
        ({"extra_body": {"structured_outputs": {"disable_any_whitespace": True}}}, "structured_outputs"),
        (
            {"extra_body": {"structured_outputs": {"regex": "a", "disable_any_whitespace": 1}}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"extra_body": {"ebnf": "root ::= nothing"}}, "ebnf"),
        ({"extra_body": {"ebnf": "root ::= 'a'", "grammar": "root ::= 'a'"}}, "ebnf"),
        ({"extra_body": {"guided_json": "[1]"}}, "guided_json"),
        ({"extra_body": {"guided_json": '{"a":' * 5000 + "1" + "}" * 5000}}, "guided_json"),
        ({"extra_body": {"guided_json": WRONG}}, "guided_json"),
        ({"extra_body": {"guided_regex": "(a"}}, "guided_regex"),
        ({"extra_body": {"guided_choice": "a"}}, "guided_choice"),
        ({"response_format": {"type": "json_object", "schema": WRONG}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": [1]}}, "response_format.schema"),
        (
            {"response_format": {"type": "json_schema", "schema": TRIP, "json_schema": {"schema": TRIP}}},
            "response_format.schema",
        ),
        (
            {"extra_body": {"structured_outputs": {"whitespace_pattern": " "}}},
            "structured_outputs.whitespace_pattern",
        ),
    ],
)
def test_what_cannot_be_forced_is_refused(client, more, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**{**CHAT, **more})
    assert error.value.param == param
