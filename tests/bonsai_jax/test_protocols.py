"""Protocols without a server: what a stream says is what the whole answer says, however it is cut."""

import itertools
import json
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import ReasoningEffort

import bonsai_jax as bj
from bonsai_jax.engine.answers import Output, Piece
from bonsai_jax.engine.engine import MOST_ANSWERS
from bonsai_jax.protocols import (
    anthropic_messages,
    fields,
    openai_chat,
    openai_completions,
    openai_responses,
)
from bonsai_jax.protocols.answers import Head, Parser, ServerEvent, Timings, Usage, answer
from bonsai_jax.protocols.errors import FieldError, RequestError
from bonsai_jax.server import openapi, schemas
from checkpoints import open_checkpoint
from tests.bonsai_jax.command_line import TINY, run

TOKENIZER = bj.Tokenizer.from_checkpoint(open_checkpoint(TINY))
HI = {"messages": [{"role": "user", "content": "Hi"}]}
HEAD = Head("tiny", TOKENIZER, 3)

WRITTEN = {  # what a model writes: its thoughts, and its answer
    "no thoughts": ("Hello!\n", "", "Hello!\n"),
    "thoughts": (
        "<think>\nThey greet.\n\nI greet.\n</think>\n\nHello!\n",
        "They greet.\n\nI greet.",
        "Hello!\n",
    ),
    "empty thoughts": ("<think>\n\n</think>\n\nHello <b>!", "", "Hello <b>!"),
    "only thoughts": ("<think>\nThey greet. ", "They greet.", ""),
    "leading spaces": ("  Hello", "", "  Hello"),
}


def pieces(text: str, cuts: list[int]) -> list[Piece]:
    places = sorted({0, *(cut % (len(text) + 1) for cut in cuts), len(text)})
    parts = [text[first:last] for first, last in itertools.pairwise(places)]
    return [Piece(part, [i], "stop" if i == len(parts) - 1 else None) for i, part in enumerate(parts)]


def chunks(events: list[ServerEvent]) -> list[dict]:
    return [json.loads(event.encode().removeprefix(b"data: ")) for event in events if event.data != "[DONE]"]


@pytest.mark.parametrize("name", WRITTEN)
@given(cuts=st.lists(st.integers(0, 60), max_size=20))
def test_a_chat_is_the_same_whole_and_in_any_parts(name, cuts):
    text, thoughts, said = WRITTEN[name]
    request = openai_chat.request(HI | {"stream": True})
    whole = answer(request, TOKENIZER, [1], Output(text, [1], "stop", 3))
    message = openai_chat.whole(request, [whole], HEAD, Usage(3, 1))["choices"][0]["message"]
    assert (message.get("reasoning_content", ""), message["content"]) == (thoughts, said)
    stream, parser = openai_chat.Stream(request, HEAD), Parser(request, TOKENIZER, [1], 0)
    events = stream.begin()
    for piece in pieces(text, cuts):
        events += stream.next(parser.next(piece))
    events += stream.end(Usage(3, 1))
    assert events[-1].encode() == b"data: [DONE]\n\n"
    choices = [chunk["choices"][0] for chunk in chunks(events)]
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("content", "") for delta in deltas) == said
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thoughts
    assert [choice["finish_reason"] for choice in choices][-1] == "stop"
    assert all(choice["finish_reason"] is None for choice in choices[:-1])


def test_a_server_ignores_fields_that_it_does_not_know_and_a_batch_does_not():
    body = HI | {"service_tier": "auto", "messages": [{"role": "user", "content": "Hi", "cache": 1}]}
    assert openai_chat.request(body).prompts == [[{"role": "user", "content": "Hi"}]]
    for unknown in (HI | {"service_tier": "auto"}, {"messages": body["messages"]}):
        with pytest.raises(FieldError, match=r"(service_tier|messages\[0\]\.cache): not "):
            openai_chat.request(unknown, strict=True)
    for name in ("echo", "stream"):
        with pytest.raises(FieldError, match=f"{name}: True is not supported"):
            openai_completions.request({"prompt": "a", name: True}, strict=True)


@pytest.mark.parametrize(
    ("protocol", "body", "message"),
    [
        (openai_completions, {"prompt": "a", "max_tokens": 0}, 'max_tokens: is 0, which needs "echo": true'),
        (openai_completions, {"prompt": "a", "suffix": "b"}, "suffix: 'b' is not supported"),
        (openai_completions, {"prompt": "a", "stop": ["x"] * 40}, "stop: at most 32 texts of 256 characters"),
        (openai_completions, {"prompt": "a", "stream_options": {}}, 'stream_options: needs "stream": true'),
        (
            openai_chat,
            HI | {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
        ),
        (
            openai_chat,
            HI | {"reasoning_effort": "huge"},
            "reasoning_effort: 'huge' is none of none, minimal,",
        ),
        (
            openai_chat,
            HI | {"chat_template_kwargs": {"self": 1}},
            "chat_template_kwargs.self: this variable is",
        ),
    ],
)
def test_impossible_values_name_the_field(protocol, body, message):
    with pytest.raises(FieldError) as caught:
        protocol.request(body)
    assert str(caught.value).startswith(message) and message.startswith(caught.value.param)


ANTHROPIC = HI | {"max_tokens": 9}
ASKS = {  # a request of each protocol
    "chat": (openai_chat, HI),
    "completions": (openai_completions, {"prompt": "a"}),
    "responses": (openai_responses, {"input": "Hi"}),
    "messages": (anthropic_messages, ANTHROPIC),
}


@pytest.mark.parametrize("name", ASKS)
def test_every_protocol_takes_all_of_sampling_and_other_names(name):
    protocol, body = ASKS[name]
    odd = {"logit_bias": {"7": 2}, "dry_sequence_breakers": ["x"], "mirostat": 2}
    own = {field: odd.get(field, 1) for field in (*fields.SAMPLING, *fields.SAMPLERS)}
    got = protocol.request(body | own).sampling
    assert set(got) == set(own) - set(fields.OTHER_NAMES) and got["logit_bias"] == {7: 2}
    for other, field in fields.OTHER_NAMES.items():
        assert protocol.request(body | {other: 0.5}).sampling == {field: 0.5}
        for both in ({other: 0.5, field: 0.25}, {field: 0.25, other: 0.5}):
            assert protocol.request(body | both).sampling == {field: 0.25}
        with pytest.raises(FieldError, match=f"^{other}: is -1") as caught:
            protocol.request(body | {other: -1})
        assert field not in str(caught.value)
    seeds = [protocol.request(body | {"seed": seed}).sampling["seed"] for seed in (-1, 0, -2)]
    assert seeds == [None, 0, -2]  # -1: a new one


def test_the_servers_description_has_all_of_sampling():
    assert schemas.SAMPLING.keys() == fields.SAMPLING.keys()
    assert schemas.SAMPLERS.keys() == fields.SAMPLERS.keys()
    for path, (_, body, _) in openapi.POSTS.items():
        if path in {protocol.PATH for protocol, _ in ASKS.values()}:
            assert fields.SAMPLING.keys() | fields.SAMPLERS.keys() <= body["properties"].keys(), path


def test_no_limit_of_new_tokens():
    """llama.cpp's -1."""
    for protocol, body, names in (
        (openai_chat, HI, ("max_tokens", "max_completion_tokens")),
        (openai_completions, {"prompt": "a"}, ("max_tokens",)),
        (openai_responses, {"input": "Hi"}, ("max_output_tokens",)),
    ):
        for name in names:
            assert protocol.request(body | {name: -1}).max_new_tokens is None
            for wrong in (-2, -1.0, True if name == "max_output_tokens" else 0.5):
                with pytest.raises(FieldError, match=f"^{name}: "):
                    protocol.request(body | {name: wrong})
    both = HI | {"max_completion_tokens": -1, "max_tokens": 5}
    assert openai_chat.request(both).max_new_tokens == 5


ASKED = (openai_chat, HI), (openai_completions, {"prompt": "a"})


@pytest.mark.parametrize(
    ("name", "value", "remedy", "fine"),
    [
        ("functions", [{"name": "f"}], "give tools", []),
        ("function_call", {"name": "f"}, "give tools and tool_choice", "auto"),
        ("stop_token_ids", [2], "give texts as stop", []),
        ("include_stop_str_in_output", True, "add the stop text", False),
        ("prompt_logprobs", 0, "ask /v1/completions with echo and logprobs", None),
        ("truncate_prompt_tokens", 5, "shorten the prompt", None),
        ("add_generation_prompt", False, "to continue an answer, send", True),
        ("continue_final_message", True, "to continue an answer, send", False),
    ],
)
def test_what_other_servers_can_do_is_refused_with_a_remedy(name, value, remedy, fine):
    for protocol, body in ASKED[: 1 if "continue an answer" in remedy else 2]:
        protocol.request(body | {name: fine})
        with pytest.raises(FieldError, match=rf"^{name}: .* is not supported; .*{remedy}") as caught:
            protocol.request(body | {name: value})
        assert caught.value.param == name


def test_an_assistant_may_only_have_thought():
    said = {"role": "assistant", "content": None, "reasoning_content": "Hm."}
    (messages,) = openai_chat.request({"messages": [*HI["messages"], said]}).prompts
    assert messages[1] == {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    with pytest.raises(FieldError, match=r"messages\[0\].content: missing"):
        openai_chat.request({"messages": [{"role": "assistant", "content": None}]})


def test_effort_is_a_variable_of_the_template():
    assert openai_chat.request(HI | {"reasoning_effort": "none"}).template == {"enable_thinking": False}
    own = openai_chat.request(HI | {"reasoning_effort": "low", "chat_template_kwargs": {"a": 1}}).template
    assert own == {"enable_thinking": True, "reasoning_effort": "low", "a": 1}


@pytest.mark.parametrize("effort", get_args(get_args(ReasoningEffort)[0]))
def test_every_effort_of_openais_package_is_taken(effort):
    assert openai_chat.request(HI | {"reasoning_effort": effort}).template["enable_thinking"] is (
        effort != "none"
    )
    openai_responses.request({"input": "Hi", "reasoning": {"effort": effort}})


def test_limits_of_fields_are_those_of_the_engine_and_the_command():
    assert fields.MOST_ANSWERS == MOST_ANSWERS
    got = run("serve", "--logit-biases", fields.MOST_BIASES + 1)
    assert got.exit_code == 2 and f"less than or equal to {fields.MOST_BIASES}" in got.stderr


def test_timings_count_tokens_that_were_read():
    request = openai_completions.request({"prompt": "a"})
    own = answer(request, TOKENIZER, [1], Output("b", [1, 2, 3], "length", 10))
    usage = Usage(10, 3, 4, Timings(0.5, 0.25))
    timings = openai_completions.whole(request, [own], HEAD, usage)["timings"]
    assert timings["cache_n"] == 4 and timings["prompt_n"] == 6 and timings["predicted_n"] == 3
    assert timings["prompt_per_second"] == pytest.approx(12)
    assert timings["predicted_per_second"] == pytest.approx(8)  # two tokens after the first


def test_an_error_has_openais_form():
    body = openai_chat.error(RequestError(429, "later", code="queue_full", retry_after_s=1))["error"]
    assert body == {"message": "later", "type": "rate_limit_error", "param": None, "code": "queue_full"}
    assert openai_chat.error(FieldError("n", "is odd"))["error"]["code"] == "invalid_request"
