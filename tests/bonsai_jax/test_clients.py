"""Requests in the shapes of programs that people use (data/clients/), and that each reads its answer: streams
as these programs put them together, in few lines of our own. A logits processor has the model write a call of
the program's tool, or a text."""

import json
from pathlib import Path

import pytest

import bonsai_jax as bj
from tests.bonsai_jax.command_line import TINY
from tests.bonsai_jax.scripted import limit, scripts, with_template
from tests.bonsai_jax.serving import serving
from tests.bonsai_jax.tool_templates import HERMES

CLIENTS = {path.stem: json.loads(path.read_text()) for path in Path("tests/data/clients").glob("*.json")}
CALLS = {
    "shell": {"command": ["ls"]},
    "Read": {"file_path": "/a"},
    "read": {"filePath": "a.ts"},
    "read_file": {"path": "a"},
}
TEXT = "Hello there."
CALL = "<think>\nHm.\n</think>\n\n<tool_call>\n{}\n</tool_call>"
SCRIPTS = ["text", *CALLS]
TEXTS = [CALL.format(json.dumps({"name": name, "arguments": own})) for name, own in CALLS.items()]


@pytest.fixture(scope="module")
def server():
    model = with_template(bj.load(TINY, bj.RunConfig(context=1280, batch_size=1)), HERMES)
    how = {"logits_processor": scripts(model, [TEXT, *TEXTS]), "prefill_tokens": 512}
    with serving(model, rows=1, engine=how, max_new_tokens=limit(0)) as served:
        yield served
        served.idle()


def events(lines) -> list[tuple[str, dict]]:
    """Server-sent events: their names, and their data until [DONE]."""
    known, name = [], ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: ") and line != "data: [DONE]":
            known.append((name, json.loads(line.removeprefix("data: "))))
            name = ""
    return known


def asked(request: dict) -> dict:
    """A request's body, with the limit of new tokens that has the model write the request's script."""
    body, script = dict(request["body"]), request["script"]
    names = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    usual = "max_output_tokens" if "input" in body else "max_tokens"
    if script:
        body[next((name for name in names if name in body), usual)] = limit(SCRIPTS.index(script))
    return body


def chat(known: list[tuple[str, dict]]) -> tuple[str, str, list[tuple[str, dict]], dict]:
    """Text, thoughts, calls and usage of a streamed chat, as the AI SDK and Cline put them together."""
    text, thought, calls, usage = "", "", {}, {}
    for _, chunk in known:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            text += delta.get("content") or ""
            thought += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or []:
                own = calls.setdefault(call["index"], {"arguments": ""})
                own.update({key: value for key, value in call["function"].items() if key == "name"})
                own["arguments"] += call["function"].get("arguments") or ""
                own["id"] = call.get("id") or own["id"]
    assert known[-1][1]["choices"] == [] or "usage" not in known[-1][1]
    return text, thought, [(own["name"], json.loads(own["arguments"])) for own in calls.values()], usage


def read_chat(answer, request: dict) -> None:
    script = request["script"]
    if not request["body"].get("stream"):
        (choice,) = answer.json()["choices"]
        assert choice["message"]["content"] == TEXT and choice["finish_reason"] == "stop"
        return
    known = events(answer.iter_lines())
    text, thought, calls, usage = chat(known)
    reasons = [choice["finish_reason"] for _, chunk in known for choice in chunk["choices"]]
    if script == "text":
        assert (text, calls, reasons[-1]) == (TEXT, [], "stop")
    else:
        assert (thought, calls, reasons[-1]) == ("Hm.", [(script, CALLS[script])], "tool_calls")
    assert usage["prompt_tokens"] > usage["prompt_tokens_details"]["cached_tokens"] >= 0
    assert usage["completion_tokens"] > 0 and reasons.count(None) == len(reasons) - 1


def read_completion(answer, request: dict) -> None:
    if request["body"].get("stream"):
        chunks = [chunk for _, chunk in events(answer.iter_lines())]
        assert "".join(choice["text"] for c in chunks for choice in c["choices"]) == TEXT
        return
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    if not request["body"].get("echo"):
        assert [choice["text"] for choice in choices] == [TEXT]
        return
    for choice, prompt in zip(choices, request["body"]["prompt"], strict=True):
        scores = choice["logprobs"]
        assert len(scores["token_logprobs"]) == len(prompt) + 1 == len(scores["top_logprobs"])
        for own, top in list(zip(scores["token_logprobs"], scores["top_logprobs"], strict=True))[1:-1]:
            assert own <= 0 and own <= max(top.values()) + 1e-6


def read_codex(answer, request: dict) -> None:
    known = [event for _, event in events(answer.iter_lines())]
    kinds = [event["type"] for event in known]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    items = [event["item"] for event in known if event["type"] == "response.output_item.done"]
    response = known[-1]["response"]
    assert response["id"] and response["usage"]["input_tokens_details"]["cached_tokens"] >= 0
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] >= 0
    assert response["usage"]["total_tokens"] > response["usage"]["output_tokens"] > 0
    if request["script"] == "text":
        (item,) = items
        assert item["type"] == "message" and item["content"][0]["text"] == TEXT
        deltas = [event["delta"] for event in known if event["type"] == "response.output_text.delta"]
        assert "".join(deltas) == TEXT
    else:
        assert items[0]["type"] == "reasoning"
        assert (items[-1]["type"], items[-1]["name"]) == ("function_call", request["script"])
        assert items[-1]["call_id"] and json.loads(items[-1]["arguments"]) == CALLS[request["script"]]


def read_claude(answer, request: dict) -> None:
    if request["path"].endswith("count_tokens"):
        assert answer.json()["input_tokens"] > 0
        return
    known = events(answer.iter_lines())
    assert all(name == event["type"] for name, event in known)
    blocks, parts = (
        {},
        {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"},
    )
    for _, event in known:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = [event["content_block"], ""]
        elif event["type"] == "content_block_delta" and event["delta"]["type"] in parts:
            blocks[event["index"]][1] += event["delta"][parts[event["delta"]["type"]]]
    start, (last,) = known[0][1], [event for _, event in known if event["type"] == "message_delta"]
    assert start["type"] == "message_start" and start["message"]["usage"]["input_tokens"] > 0
    assert start["message"]["model"] == request["body"]["model"] and known[-1][0] == "message_stop"
    assert last["usage"]["output_tokens"] > 0
    *_, (block, text) = blocks.values()
    if request["script"] == "text":
        assert (block["type"], text, last["delta"]["stop_reason"]) == ("text", TEXT, "end_turn")
    else:
        assert blocks[0][0]["type"] == "thinking" and blocks[0][1] == "Hm."
        assert (block["type"], block["name"]) == ("tool_use", request["script"])
        assert json.loads(text) == CALLS[request["script"]] and last["delta"]["stop_reason"] == "tool_use"


READ = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_completion,
    "/v1/responses": read_codex,
    "/v1/messages": read_claude,
    "/v1/messages/count_tokens": read_claude,
}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_program_reads_its_answers(server, name):
    with server.http() as client:
        for request in CLIENTS[name]["requests"]:
            body, path = asked(request), request["path"]
            with client.stream("POST", path, json=body, headers=request["headers"]) as answer:
                if answer.status_code != 200 or not body.get("stream"):
                    answer.read()
                assert answer.status_code == 200, (path, answer.text)
                READ[path.partition("?")[0]](answer, request)


def test_claude_codes_changing_parts_do_not_change_its_prompt(server):
    """Billing and tokens left: the second turn's prompt begins with the first one's."""
    _, first, second, *_ = CLIENTS["claude-code"]["requests"]
    with server.http() as client:
        read = []
        for request in (first, second):
            body = asked(request) | {"stream": False}
            usage = client.post("/v1/messages", json=body).json()["usage"]
            read.append((usage["cache_read_input_tokens"], sum(usage.values()) - usage["output_tokens"]))
    page = server.model.run.page_size
    assert read[1][0] >= read[0][1] - page
