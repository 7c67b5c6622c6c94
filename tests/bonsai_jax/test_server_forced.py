"""A model that writes at random, and requests that force what it writes: calls, arguments that keep to their
schemas, JSON. Whatever it writes is valid."""

import json

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
    ],
)
def test_what_cannot_be_forced_is_refused(client, more, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**{**CHAT, **more})
    assert error.value.param == param
