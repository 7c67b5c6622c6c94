"""Anthropic's messages and OpenAI's responses without a server: what they become, and that a stream says what
the whole answer says, however it is cut."""

import dataclasses
import json

import anthropic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bonsai_jax.engine.answers import Output
from bonsai_jax.protocols import anthropic_messages, openai_chat, openai_responses
from bonsai_jax.protocols.answers import Head, Parser, Usage, answer
from bonsai_jax.protocols.errors import FieldError, RequestError
from tests.bonsai_jax.test_calls import SEVERAL
from tests.bonsai_jax.test_protocols import TOKENIZER, pieces
from tests.bonsai_jax.tool_templates import HERMES

HEAD = Head("tiny", dataclasses.replace(TOKENIZER, chat_template=HERMES), 3)
NAMES = ("now", "weather")
CLAUDE = {
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"name": name, "input_schema": {"type": "object"}} for name in NAMES],
}
CODEX = {"input": "Hi", "tools": [{"type": "function", "name": name} for name in NAMES]}
TEXTS = (
    "Hello!",
    "<think>\nHm.\n</think>\n\nI look.\n\n" + SEVERAL["hermes"],
    "<think>\nHm.",
    SEVERAL["hermes"][:-30],
    "\n",
)


def messages(body: dict) -> list[dict]:
    return anthropic_messages.request({"max_tokens": 1, **body}).prompts[0]


def test_blocks_become_messages():
    said = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "redacted_thinking", "data": "y"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "t1", "name": "now", "input": {"a": [1]}, "cache_control": {}},
    ]
    results = [
        {"type": "text", "text": "Well?"},
        {
            "type": "tool_result",
            "tool_use_id": "t1",
            "content": [{"type": "text", "text": "noon"}],
            "is_error": False,
        },
        {"type": "tool_result", "tool_use_id": "t2"},
    ]
    call = {"id": "t1", "type": "function", "function": {"name": "now", "arguments": '{"a": [1]}'}}
    assert messages(
        {"messages": [{"role": "assistant", "content": said}, {"role": "user", "content": results}]}
    ) == [
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "noon"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": "Well?"},
    ]


def test_the_system_speaks_first_and_once():
    """Many templates refuse it anywhere else."""
    said = [{"role": "system", "content": "B"}, *HI, {"role": "system", "content": "Look!"}]
    system = {"role": "system", "content": "A\n\nB"}
    assert messages({"system": "A", "messages": said}) == [system, *HI, {"role": "user", "content": "Look!"}]


HI = [{"role": "user", "content": "Hi"}]


def test_tokens_left_are_no_message():
    """Claude Code says after each of the user's messages how many are left."""
    left = "<total_tokens>9 tokens left</total_tokens>"
    only, more = (
        {"role": "system", "content": [{"type": "text", "text": t}]} for t in (left, f"Look!\n{left}")
    )
    assert messages({"messages": [*HI, only, *HI, more]}) == [*HI, *HI, {"role": "user", "content": "Look!"}]


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("Be brief.", "Be brief."),
        ("Be brief.\n<total_tokens>9 tokens left</total_tokens>\n", "Be brief."),
        (
            [
                "x-anthropic-billing-header: cc_version=1;",
                "A",
                "B",
                "<total_tokens>9 tokens left</total_tokens>",
            ],
            "A\n\nB",
        ),
        (["The x-anthropic-billing-header: stays", "<total_tokens>1</total_tokens> too"], None),
        ("x-anthropic-billing-header: cch=1;", ""),
        ([], ""),
    ],
)
def test_what_changes_in_the_system_prompt_is_left_out(system, expected):
    blocks = system if isinstance(system, str) else [{"type": "text", "text": text} for text in system]
    own = messages({"messages": HI, "system": blocks})
    expected = "\n\n".join(system) if expected is None else expected
    assert own == ([{"role": "system", "content": expected}] if expected else []) + HI


def test_thinking_and_tool_choices():
    request = anthropic_messages.request(CLAUDE | {"thinking": {"type": "enabled", "budget_tokens": 1024}})
    assert request.template == {"enable_thinking": True} and len(request.tools) == 2
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert not anthropic_messages.request(CLAUDE | {"tool_choice": choice}).parallel_calls
    assert anthropic_messages.request(CLAUDE | {"tool_choice": {"type": "none"}}).tools == []
    assert anthropic_messages.request(CLAUDE | {"tool_choice": {"type": "any"}}).tool_choice == "required"
    named = anthropic_messages.request(CLAUDE | {"tool_choice": {"type": "tool", "name": "now"}})
    assert named.tool_choice == "now" and named.is_constrained and not request.is_constrained


def test_items_become_messages():
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
        {"type": "web_search_call", "id": "w"},
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "night"}],
        },
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "Aha."}],
            "encrypted_content": "z",
        },
        {"type": "message", "role": "assistant", "content": "Noon."},
        {"type": "message", "role": "assistant", "content": "Or night."},
    ]
    calls = [
        {"id": id, "type": "function", "function": {"name": "now", "arguments": "{}"}} for id in ("c1", "c2")
    ]
    request = openai_responses.request({"input": items, "instructions": "You are Codex."})
    assert request.prompts[0] == [
        {"role": "system", "content": "You are Codex.\n\nBe brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        {"role": "tool", "tool_call_id": "c2", "content": "night"},
        {"role": "assistant", "content": "Noon.", "reasoning_content": "Aha."},
        {"role": "assistant", "content": "Or night."},
    ]
    assert openai_responses.request({"input": []}).prompts == [[{"role": "user", "content": ""}]]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": [{"type": "message", "role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": "x", "previous_response_id": "r"}, "previous_response_id"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"input": "x", "text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"input": "x", "tools": [{"type": "function", "name": ""}]}, "tools[0].function.name"),
        ({"input": "x", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ],
)
def test_responses_name_the_field_at_fault(body, field):
    with pytest.raises(FieldError) as error:
        openai_responses.request(body)
    assert error.value.param == field


def parts(request, text: str, cuts: list[int], reason: str):
    parser = Parser(request, HEAD.tokenizer, [1], 0)
    for piece in pieces(text, cuts):
        last = piece.finish_reason is not None
        yield parser.next(dataclasses.replace(piece, finish_reason=reason if last else None))


def streamed(protocol, request, text: str, cuts: list[int], reason: str) -> list[dict]:
    stream = protocol.Stream(request, HEAD)
    events = [*stream.begin()]
    for part in parts(request, text, cuts, reason):
        events += stream.next(part)
    every = [*events, *stream.end(Usage(3, 1, 2))]
    return [json.loads(event.data) if isinstance(event.data, str) else event.data for event in every]


def bare(value):
    """Without ids, which are drawn."""
    if isinstance(value, dict):
        return {k: bare(v) for k, v in value.items() if k not in ("id", "call_id", "item_id", "created_at")}
    return [bare(one) for one in value] if isinstance(value, list) else value


CUTS = st.lists(st.integers(0, 300), max_size=20)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=st.sampled_from(TEXTS), cuts=CUTS, reason=st.sampled_from(["stop", "length"]))
def test_a_response_is_the_same_whole_and_in_any_parts(text, cuts, reason):
    request = openai_responses.request(CODEX)
    whole = answer(request, HEAD.tokenizer, [1], Output(text, [1], reason, 3))
    body = openai_responses.whole(request, [whole], HEAD, Usage(3, 1, 2))
    events = streamed(openai_responses, request, text, cuts, reason)
    assert bare(events[-1]["response"]) == bare(body)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    for index, item in enumerate(done):
        deltas = [e["delta"] for e in events if e["type"].endswith(".delta") and e["output_index"] == index]
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(deltas) == text or (text, deltas) == ("{}", [])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=st.sampled_from(TEXTS), cuts=CUTS, reason=st.sampled_from(["stop", "length"]))
def test_a_message_is_the_same_whole_and_in_any_parts(text, cuts, reason):
    request = anthropic_messages.request(CLAUDE)
    whole = answer(request, HEAD.tokenizer, [1], Output(text, [1], reason, 3))
    body = anthropic_messages.whole(request, [whole], HEAD, Usage(3, 1, 2))
    anthropic.types.Message.model_validate(body)
    events = streamed(anthropic_messages, request, text, cuts, reason)
    built: list[dict] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(built)
            built.append(dict(event["content_block"], json=""))
        elif event["type"] == "content_block_delta":
            (key,) = event["delta"].keys() - {"type"}
            name = "json" if key == "partial_json" else key
            built[event["index"]][name] += event["delta"][key]
    for block in built:
        text = block.pop("json")
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(text or "{}")
            except ValueError:
                block["input"] = {"INVALID_JSON": text}
    assert bare(built) == bare(body["content"])
    (last,) = (event for event in events if event["type"] == "message_delta")
    assert last["delta"]["stop_reason"] == body["stop_reason"] and last["usage"] == body["usage"]
    assert body["usage"]["input_tokens"] == 1 and body["usage"]["cache_read_input_tokens"] == 2
    starts = [event["type"] for event in events if event["type"].startswith("content_block_st")]
    assert starts == ["content_block_start", "content_block_stop"] * len(built)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (401, "authentication_error"), (503, "overloaded_error")],
)
def test_errors_in_anthropics_form(status, kind):
    body = anthropic_messages.error(RequestError(status, "no"))
    assert body == {"type": "error", "error": {"type": kind, "message": "no"}}
    (event,) = anthropic_messages.Stream(anthropic_messages.request(CLAUDE), HEAD).failed(
        RequestError(status, "no")
    )
    assert event.name == "error" and event.data == body


def test_a_response_that_fails_says_so():
    request = openai_responses.request(CODEX)
    stream = openai_responses.Stream(request, HEAD)
    stream.begin()
    (event,) = stream.failed(RequestError(500, "no"))
    assert event.name == "response.failed" and event.data["response"]["error"]["message"] == "no"


def test_a_batch_takes_tools():
    tools = [{"type": "function", "function": {"name": "now"}}]
    body = {"messages": HI, "tools": tools, "tool_choice": "auto", "parallel_tool_calls": False}
    request = openai_chat.request(body, strict=True)
    assert [tool["function"]["name"] for tool in request.tools] == ["now"] and not request.parallel_calls
    whole = answer(request, HEAD.tokenizer, [1], Output(SEVERAL["hermes"], [1], "stop", 3))
    (choice,) = openai_chat.whole(request, [whole], HEAD, Usage(3, 1))["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
