"""Calls of functions through a server: OpenAI's chat completions and responses, Anthropic's messages, each
with its own client, whole and streamed. A logits processor has the model write what it should."""

import asyncio
import json

import anthropic
import openai
import pytest

import bonsai_jax as bj
from bonsai_jax.protocols import openai_responses
from bonsai_jax.protocols.answers import Head
from tests.bonsai_jax.command_line import TINY
from tests.bonsai_jax.scripted import limit, scripts, with_template
from tests.bonsai_jax.serving import serving
from tests.bonsai_jax.test_calls import ROME, SEVERAL
from tests.bonsai_jax.test_tools import ASKED, CALLED
from tests.bonsai_jax.tool_templates import HERMES

CUT, HELLO, TWO, BROKEN = range(4)
TEXTS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "' + "Rome and " * 50,
    "Hello there.",
    "<think>\nHm.\n</think>\n\nI look it up.\n\n" + SEVERAL["hermes"],
    "<tool_call>\nWell\n</tool_call>",
)
PLACE = {"type": "object", "properties": {"city": {"type": "string"}}}
OFFERED = [
    {"type": "function", "function": {"name": "weather", "description": "Its weather.", "parameters": PLACE}},
    {"type": "function", "function": {"name": "now"}},
]
CALLS = [("now", {}), ("weather", ROME)]


@pytest.fixture(scope="module")
def server():
    model = with_template(bj.load(TINY, bj.RunConfig(context=1024, batch_size=2)), HERMES)
    how = {"logits_processor": scripts(model, TEXTS)}
    with serving(model, rows=2, engine=how, max_new_tokens=limit(TWO)) as served:
        yield served
        served.idle()


def both(server, kind: str, ask):
    """What `ask` returns for a client, and for an asynchronous one."""
    if kind == "openai":
        clients = server.openai(), server.async_openai()
    else:
        how = {"base_url": server.url, "api_key": "none", "max_retries": 0}
        clients = anthropic.Anthropic(**how), anthropic.AsyncAnthropic(**how)

    async def wait():
        async with clients[1] as client:
            return await ask(client)

    with clients[0] as client:
        return ask(client), asyncio.run(wait())


# ---- Chat completions ----

CHAT = {"model": "any", "messages": [ASKED], "tools": OFFERED}


def called(calls) -> list:
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def test_chat_calls_functions(server):
    for got in both(server, "openai", lambda c: c.chat.completions.create(**CHAT, max_tokens=limit(TWO))):
        (choice,) = got.choices
        assert choice.finish_reason == "tool_calls" and called(choice.message.tool_calls) == CALLS
        assert choice.message.content == "I look it up." and choice.message.reasoning_content == "Hm."
        assert len({call.id for call in choice.message.tool_calls}) == 2


def test_chat_streams_calls_as_deltas(server):
    with server.openai() as client:
        chunks = list(client.chat.completions.create(**CHAT, max_tokens=limit(TWO), stream=True, n=2))
        deltas = [
            call for c in chunks if c.choices[0].index == 1 for call in c.choices[0].delta.tool_calls or []
        ]
        assert [delta.index for delta in deltas] == sorted(delta.index for delta in deltas)
        assert [(d.index, d.function.name) for d in deltas if d.id] == [(0, "now"), (1, "weather")]
        assert "".join(d.function.arguments for d in deltas if d.index == 1) == '{"city": "Rome"}'
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        with client.chat.completions.stream(**CHAT, max_tokens=limit(TWO)) as stream:  # puts them together
            assert called(stream.get_final_completion().choices[0].message.tool_calls) == CALLS


def test_chat_without_calls_and_with_one(server):
    with server.openai() as client:
        create = client.chat.completions.create
        message = create(**CHAT, max_tokens=limit(HELLO)).choices[0].message
        assert (message.content, message.tool_calls) == (TEXTS[HELLO], None)
        broken = create(**CHAT, max_tokens=limit(BROKEN)).choices[0]
        assert (broken.message.content, broken.finish_reason) == (TEXTS[BROKEN], "stop")
        none = create(**CHAT, max_tokens=limit(TWO), tool_choice="none").choices[0]
        assert none.message.tool_calls is None and none.message.content.endswith(SEVERAL["hermes"])
        one = create(**CHAT, max_tokens=limit(TWO), parallel_tool_calls=False).choices[0]
        assert called(one.message.tool_calls) == CALLS[:1] and one.message.content == "I look it up."
        cut = create(**CHAT, max_tokens=limit(CUT)).choices[0]
        assert cut.finish_reason == "length"
        with pytest.raises(ValueError):  # nobody runs half a call
            json.loads(cut.message.tool_calls[0].function.arguments)


@pytest.mark.parametrize(
    ("script", "stop", "reason", "count"),
    [
        (CUT, "Rome", "stop", 1),  # within its arguments
        (CUT, "{", "stop", 0),
        (TWO, "</tool_call>", "tool_calls", 1),  # after them
        (TWO, "Rome", "tool_calls", 1),  # the second is no call without its name, which comes later
        (TWO, "I look", "stop", 0),
        (TWO, "zzz", "tool_calls", 2),
    ],
)
def test_a_call_that_a_stop_text_cuts_off_is_not_to_be_run(server, script, stop, reason, count):
    how = {**CHAT, "max_tokens": limit(script), "stop": stop}
    with server.openai() as client:
        (whole,) = client.chat.completions.create(**how).choices
        chunks = list(client.chat.completions.create(**how, stream=True))
        assert whole.finish_reason == chunks[-1].choices[0].finish_reason == reason
        assert len(whole.message.tool_calls or []) == count


def test_chat_goes_on_with_results_and_finds_the_turn_before_in_the_cache(server):
    with server.openai() as client:
        first = client.chat.completions.create(**CHAT, max_tokens=limit(TWO))
        message = first.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "fine"} for call in message.tool_calls
        ]
        own = {**CHAT, "messages": [ASKED, message, *results]}
        second = client.chat.completions.create(**own, max_tokens=limit(HELLO))
        assert second.choices[0].message.content == TEXTS[HELLO]
        assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 64
        expected = server.model.tokenizer.encode_chat(CALLED, tools=OFFERED)
        again = client.chat.completions.create(**{**CHAT, "messages": CALLED}, max_tokens=limit(HELLO))
        assert again.usage.prompt_tokens == len(expected)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [OFFERED[0], OFFERED[0]]}, "tools"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0].function",
        ),
    ],
)
def test_chat_names_the_field_at_fault(server, more, param):
    with server.openai() as client, pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**{**CHAT, **more}, max_tokens=4)
    assert error.value.param == param


# ---- Responses, as Codex CLI asks for them ----

FUNCTIONS = [{"type": "function", "strict": False, **tool["function"]} for tool in OFFERED]
CODEX = {
    "model": "any",
    "instructions": "You are Codex.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": ASKED["content"]}]},
    ],
    "tools": [
        *FUNCTIONS,
        {"type": "web_search"},
        {"type": "namespace", "name": "x", "tools": []},
        {"type": "custom", "name": "y"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0",
    "client_metadata": {"a": "b"},
}


def items(output) -> list:
    return [
        (item.type, json.loads(item.arguments) if item.type == "function_call" else item.content[0].text)
        for item in output
    ]


ITEMS = [("reasoning", "Hm."), ("message", "I look it up."), ("function_call", {}), ("function_call", ROME)]


def test_codex_gets_its_events(server):
    events = [
        json.loads(line[6:])
        for line in server.post("/v1/responses", **CODEX).text.split("\n")
        if line[:6] == "data: "
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == "completed"
    added = [event["item"]["type"] for event in events if event["type"].endswith("item.added")]
    assert added == [kind for kind, _ in ITEMS]
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == "I look it up."
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    arguments = [e["arguments"] for e in events if e["type"] == "response.function_call_arguments.done"]
    assert arguments == ["{}", '{"city": "Rome"}']
    usage = events[-1]["response"]["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]


def test_responses_with_openais_client(server):
    asked = {key: value for key, value in CODEX.items() if key not in ("stream", "client_metadata")}
    for got in both(server, "openai", lambda client: client.responses.create(**asked)):
        assert got.status == "completed" and items(got.output) == ITEMS and got.output_text == "I look it up."
    with server.openai() as client, client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        assert items(stream.get_final_response().output) == ITEMS and "response.output_text.delta" in kinds


@pytest.mark.parametrize("choice", ["auto", "none", "required", {"type": "function", "name": "now"}])
def test_a_response_says_which_tool_choice_it_had(choice):
    request = openai_responses.request({"input": "Hi", "tools": FUNCTIONS, "tool_choice": choice})
    head = Head("any", None, 1)
    stream = openai_responses.Stream(request, head)
    assert [event.data["response"]["tool_choice"] for event in stream.begin()] == [choice] * 2


def test_responses_are_what_openais_types_say(server):
    from openai.types.responses import Response

    body = server.post("/v1/responses", **{**CODEX, "stream": False}).json()
    Response.model_validate(body)
    assert body["tools"][0]["name"] == "weather" and len(body["tools"]) == len(FUNCTIONS)


def test_responses_go_on_with_results(server):
    with server.openai() as client:
        asked = {key: value for key, value in CODEX.items() if key not in ("stream", "client_metadata")}
        first = client.responses.create(**asked)
        calls = [item for item in first.output if item.type == "function_call"]
        outputs = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "fine"} for call in calls
        ]
        own = {**asked, "input": [*CODEX["input"], *first.output, *outputs]}
        second = client.responses.create(**own, max_output_tokens=limit(HELLO))
        assert second.output_text == TEXTS[HELLO]
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 64
        cut = client.responses.create(**asked, max_output_tokens=limit(CUT))
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        probe = client.responses.create(model="any", input=[], max_output_tokens=1)
        assert probe.usage.output_tokens <= 1
        for more in ({"previous_response_id": "resp_1"}, {"input": [{"type": "item_reference", "id": "x"}]}):
            with pytest.raises(openai.BadRequestError, match=r"stores no(ne)?"):
                client.responses.create(**{**asked, **more})


# ---- Anthropic's messages, as Claude Code asks for them ----

CLAUDE = {
    "model": "claude-opus-5-5",
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.129.abc; cch=1a2b3;"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief.\n\n<total_tokens>150000 tokens left</total_tokens>"},
    ],
    "messages": [{"role": "user", "content": [{"type": "text", "text": ASKED["content"]}]}],
    "tools": [
        {"name": "weather", "description": "Its weather.", "input_schema": PLACE},
        {"name": "now", "input_schema": {"type": "object", "properties": {}}},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
    "metadata": {"user_id": "u"},
}
BLOCKS = [("thinking", "Hm."), ("text", "I look it up."), ("tool_use", {}), ("tool_use", ROME)]


def blocks(content) -> list:
    return [
        (block.type, {"thinking": "thinking", "text": "text", "tool_use": "input"}[block.type])
        for block in content
    ]


def said(content) -> list:
    return [
        (kind, getattr(block, name)) for block, (kind, name) in zip(content, blocks(content), strict=True)
    ]


def test_messages_with_anthropics_client(server):
    for got in both(server, "anthropic", lambda c: c.messages.create(**CLAUDE, max_tokens=limit(TWO))):
        assert said(got.content) == BLOCKS and got.stop_reason == "tool_use"
        assert got.model == "claude-opus-5-5" and got.usage.output_tokens > 0


def test_messages_streamed(server):
    how = {"base_url": server.url, "auth_token": "none", "max_retries": 0}
    with anthropic.Anthropic(**how) as client:
        with client.messages.stream(**CLAUDE, max_tokens=limit(TWO)) as stream:
            kinds = [event.type for event in stream]
            got = stream.get_final_message()
        assert said(got.content) == BLOCKS and got.stop_reason == "tool_use"
        assert got.usage.output_tokens > 0 and kinds[0] == "message_start" and kinds[-1] == "message_stop"
        raw = [e.type for e in client.messages.create(**CLAUDE, max_tokens=limit(HELLO), stream=True)]
        assert raw[:2] == ["message_start", "content_block_start"] and raw[-3:] == [
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]

    async def wait():
        asked = {**CLAUDE, "max_tokens": limit(TWO)}
        async with anthropic.AsyncAnthropic(**how) as client, client.messages.stream(**asked) as stream:
            return await stream.get_final_message()

    assert said(asyncio.run(wait()).content) == BLOCKS


def test_a_stream_says_at_its_start_what_was_cached(server):
    body = {**CLAUDE, "max_tokens": limit(HELLO), "stream": True}
    server.post("/v1/messages", **body)
    lines = server.post("/v1/messages", **body).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    (first,) = (event["message"]["usage"] for event in events if event["type"] == "message_start")
    (last,) = (event["usage"] for event in events if event["type"] == "message_delta")
    assert first["cache_read_input_tokens"] > 0 and first["output_tokens"] == 0
    assert first | {"output_tokens": last["output_tokens"]} == last


def test_messages_go_on_with_results_whatever_changes_in_the_head(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        first = client.messages.create(**CLAUDE, max_tokens=limit(TWO))
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "fine"}]}
            for block in first.content
            if block.type == "tool_use"
        ]
        messages = [*CLAUDE["messages"], {"role": "assistant", "content": first.content}]
        messages.append({"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]})
        system = [dict(block) for block in CLAUDE["system"]]
        system[0]["text"], system[2]["text"] = (
            system[0]["text"].replace("1a2b3", "fffff"),
            system[2]["text"].replace("15", "14"),
        )
        second = client.messages.create(
            **{**CLAUDE, "messages": messages, "system": system}, max_tokens=limit(HELLO)
        )
        assert said(second.content) == [("text", TEXTS[HELLO])] and second.stop_reason == "end_turn"
        read = first.usage.input_tokens + first.usage.cache_read_input_tokens
        assert second.usage.cache_read_input_tokens >= read - 64
        count = client.messages.count_tokens(**{k: v for k, v in CLAUDE.items() if k != "metadata"})
        assert count.input_tokens == read


def test_messages_end_for_their_reasons(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        stopped = client.messages.create(**CLAUDE, max_tokens=limit(HELLO), stop_sequences=["zzz", " th"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " th")
        assert said(stopped.content) == [("text", "Hello")]
        how = {"max_tokens": limit(HELLO), "stop_sequences": [" th"]}
        with client.messages.stream(**CLAUDE, **how) as stream:
            assert stream.get_final_message().stop_sequence == " th"
        cut = client.messages.create(**CLAUDE, max_tokens=limit(CUT))
        assert cut.stop_reason == "max_tokens" and list(cut.content[0].input) == ["INVALID_JSON"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: 0 does not lie in"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice: 'x' is none of the functions"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"messages\[0\].content\[0\]"),
        ({"messages": [ASKED, {"role": "assistant", "content": "The"}]}, "last message must be the user's"),
        (
            {"messages": [{"role": "system", "content": ""}]},
            "messages: only the system speaks, and says nothing",
        ),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, r"tools\[0\].function.name"),
    ],
)
def test_messages_say_what_is_at_fault(server, more, message):
    with (
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
        pytest.raises(anthropic.BadRequestError, match=message) as error,
    ):
        client.messages.create(**{**CLAUDE, "max_tokens": 4, **more})
    assert (
        error.value.body["type"] == "error" and error.value.body["error"]["type"] == "invalid_request_error"
    )
    counted = server.post("/v1/messages/count_tokens", messages=[])
    assert counted.status_code == 400 and counted.json()["type"] == "error"
