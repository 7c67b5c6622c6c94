"""Answers cut into thoughts, text and calls: written examples, the same events however the text is cut, and
the messages that go back through a chat template."""

import dataclasses
import re
from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.cli import thoughts
from bonsai_jax.cli.chat.conversation import Conversation
from bonsai_jax.cli.chat.local import Local
from bonsai_jax.engine.answers import Reader
from bonsai_jax.protocols import openai_chat
from bonsai_jax.protocols.answers import Head, Usage, answer
from bonsai_jax.tokens.answer_parser import MARKS, Event, Harmony, Tags, answer_parser
from bonsai_jax.tokens.tokenizer import Tokenizer
from bonsai_jax.tokens.vocabulary import CONTROL
from checkpoints import open_checkpoint

HI = [Event("thought", "They greet."), Event("answer", "Hello!")]
CALL = [Event("thought", "Look it up."), Event("call", "", "weather"), Event("call", '{"in": "Rome"}')]
WRITTEN = {  # as the model writes them behind "<|start|>assistant"
    "answer": (
        "<|channel|>analysis<|message|>They greet.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hello!<|return|>",
        HI,
    ),
    "call": (
        "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.weather <|constrain|>json<|message|>{"in": "Rome"}<|call|>',
        CALL,
    ),
    "recipient before the channel": (
        "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant to=functions.weather"
        '<|channel|>commentary json<|message|>{"in": "Rome"}<|call|><|start|>assistant',
        CALL,
    ),
    "recipient at once": (
        ' to=functions.weather<|channel|>commentary json<|message|>{"in": "Rome"}',
        CALL[1:],
    ),
    "built in": (
        "<|channel|>analysis to=python code<|message|>1 + 1<|call|>",
        [Event("call", "", "python"), Event("call", "1 + 1")],
    ),
    "preamble": ("<|channel|>commentary<|message|>I look it up.<|end|>", [Event("answer", "I look it up.")]),
    "nothing ends a thought": (
        "<|channel|>analysis<|message|>They greet.<|channel|>final<|message|>Hello!",
        HI,
    ),
    "another role": (
        "<|channel|>final<|message|>Hello!<|end|><|start|>user<|message|>Hi<|end|>",
        [Event("answer", "Hello!")],
    ),
    "cut in a header": (
        "<|channel|>analysis<|message|>They greet.<|end|><|start|>assistant<|channel|>fi",
        HI[:1],
    ),
    "no harmony": ("Hello! 1 <| 2", [Event("answer", "Hello! 1 <| 2")]),
    "much of it": ("Hello! " * 60, [Event("answer", "Hello! " * 60)]),
    "signs": ("<|channel|>final<|message|>a <|b|> <|end", [Event("answer", "a <|b|> <|end")]),
}
TAGGED = "<think>hm </thin\n</think>\n\nHello <b> <thi"


def joined(events: list[Event]) -> list[Event]:
    """Neighbours of a kind as one. An event with a name begins a call."""
    out: list[Event] = []
    for event in events:
        if out and event.name is None and (out[-1].kind, out[-1].name) == (event.kind, None):
            out[-1] = Event(event.kind, out[-1].text + event.text)
        else:
            out.append(event)
    return out


def parsed(parser, pieces) -> list[Event]:
    return joined([event for piece in pieces for event in parser.next(piece)] + parser.end())


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_harmony(name, size):
    text, events = WRITTEN[name]
    assert parsed(Harmony(), [text[at : at + size] for at in range(0, len(text), size)]) == events


def test_return_and_call_end_the_answer():
    for name in ("answer", "call"):
        parser = Harmony()
        parser.next(WRITTEN[name][0])
        assert parser.ended and parser.next("<|start|>assistant<|message|>more") == parser.end() == []


def test_what_is_certain_comes_at_once():
    parser = Harmony()
    assert parser.next("<|channel|>final<|message|>Hel") == [Event("answer", "Hel")]
    assert parser.next("lo <|e") == [Event("answer", "lo ")]
    assert Tags().next("Hello <th") == [Event("answer", "Hello ")]


PARTS = [*MARKS, "<|constrain|>", "assistant", "user", " to=functions.f", "analysis", "final", " json", "{}"]
PARTS += ["<think>", "</think>", "a\n", "<|", "|>", "</", "x" * 100]


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(
    parts=st.lists(st.sampled_from(PARTS), max_size=14),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    form=st.sampled_from([Harmony, lambda: Harmony(None), Tags, lambda: Tags(True)]),
)
def test_events_do_not_depend_on_how_the_text_is_cut(parts, cuts, form):
    text = "".join(parts)
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    whole, cut = form(), form()
    assert parsed(cut, [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]) == parsed(whole, [text])
    assert cut.message() == whole.message()


@pytest.mark.parametrize("within", [False, True])
def test_tags(within):
    text = TAGGED.removeprefix("<think>") if within else "I <thin air>" + TAGGED
    events = [Event("thought", "hm </thin\n"), Event("answer", "\n\nHello <b> <thi")]
    first = [] if within else [Event("answer", "I <thin air>")]
    assert parsed(Tags(within), [text]) == first + events


# ---- With a tokenizer ----


def vocabulary(*controls: str) -> Tokenizer:
    """The tokenizer of a tiny model with more control tokens."""
    metadata = dict(open_checkpoint("synth:tiny-llama:f32").metadata)
    for key, more in (("tokens", [*controls]), ("token_type", [CONTROL] * len(controls))):
        metadata[f"tokenizer.ggml.{key}"] = [*metadata[f"tokenizer.ggml.{key}"], *more]
    return Tokenizer.from_gguf(metadata)


GPT_OSS = vocabulary(*MARKS, "<|constrain|>")


def encode(text: str) -> list[int]:
    return GPT_OSS.encode(text, add_special=False)


@pytest.mark.parametrize(
    ("prompt", "text", "events"),
    [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", *WRITTEN["answer"]),
        ("<|start|>assistant<|channel|>final", "<|message|>Hello!", HI[1:]),
        ("<|start|>assistant<|channel|>final<|message|>", "Hello!", HI[1:]),
        ("<|start|>assistant<|channel|>analysis", "<|message|>They greet.", HI[:1]),
        ("<|start|>assistant<|channel|>analysis<|message|>They", " greet.", [Event("thought", " greet.")]),
        ("<|start|>user<|message|>Hi<|end|>", "Hello!", HI[1:]),
        ("Once upon", " a time", [Event("answer", " a time")]),
    ],
)
def test_the_prompt_says_where_an_answer_begins(prompt, text, events):
    parser = answer_parser(GPT_OSS, encode(prompt))
    assert isinstance(parser, Harmony) and parsed(parser, [text]) == events


def test_other_models_think_between_tags():
    tokenizer = vocabulary()
    for prompt, first in (
        ("Hi\n<think>\n", "thought"),
        ("<think>\n\n</think>\n\n", "answer"),
        ("Hi", "answer"),
    ):
        parser = answer_parser(tokenizer, tokenizer.encode(prompt))
        assert isinstance(parser, Tags) and parsed(parser, ["Oh."]) == [Event(first, "Oh.")]


def drawn(text: str) -> list[bj.Piece]:
    """The pieces of an answer whose tokens are drawn one by one."""
    reader, ids = Reader(GPT_OSS, GPT_OSS.eos_ids), encode(text)
    return [reader.read(np.array([id]), number == len(ids)) for number, id in enumerate(ids, 1)]


def test_answers_have_their_marks_and_end_before_return():
    pieces = drawn(WRITTEN["answer"][0])
    assert "".join(piece.text for piece in pieces) == WRITTEN["answer"][0].removesuffix("<|return|>")
    assert pieces[-1].finish_reason == "stop"
    assert drawn("<|channel|>final<|message|>a<|end|>b")[-1].finish_reason == "length"


TEMPLATE = """{%- for m in messages -%}
{%- if m.role == 'assistant' and 'tool_calls' in m -%}
{%- if m.content and m.thinking %}{{ raise_exception('both') }}{% endif -%}
{%- set call = m.tool_calls[0].function -%}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
{{- call.arguments|tojson }}<|call|>
{%- elif m.role == 'assistant' -%}
{%- if '<|channel|>' in m.content %}{{ raise_exception('marks') }}{% endif -%}
<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- else -%}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{%- endif -%}
{%- endfor -%}<|start|>assistant"""


def talk(*answers: str) -> Conversation:
    """A conversation whose engine gives these answers."""
    tokenizer, left = dataclasses.replace(GPT_OSS, chat_template=TEMPLATE), list(answers)

    class Answer(list):
        done = True

        def cancel(self):
            pass

    model = SimpleNamespace(tokenizer=tokenizer, run=SimpleNamespace(context=4096))
    engine = SimpleNamespace(
        model=model,
        options=SimpleNamespace(speculate=None),
        saves_states=False,
        submit=lambda *_, **__: Answer(drawn(left.pop(0))),
    )
    return Conversation(Local(engine), bj.SamplingParams())  # type: ignore[arg-type]


def test_a_conversation_goes_on_without_earlier_thoughts():
    conversation = talk(WRITTEN["answer"][0], WRITTEN["call"][0])
    events = [event for part in conversation.ask("Hi") for event in part.events]
    assert joined(events) == HI
    assert conversation.messages[-1] == {"role": "assistant", "content": "Hello!", "thinking": "They greet."}
    list(conversation.ask("In Rome?"))
    call = {"name": "weather", "arguments": {"in": "Rome"}}
    assert conversation.messages[-1]["tool_calls"] == [{"type": "function", "function": call}]
    text = conversation.backend.engine.model.tokenizer.apply_chat_template(conversation.messages)
    assert text == (
        "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|end|>"
        "<|start|>user<|message|>In Rome?<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant "
        'to=functions.weather<|channel|>commentary json<|message|>{"in": "Rome"}<|call|><|start|>assistant'
    )


def test_a_call_in_no_json_stays_text():
    parser = Harmony()
    parser.next("<|channel|>commentary to=functions.f<|message|>{no")
    assert parser.message()["tool_calls"][0]["function"] == {"name": "f", "arguments": "{no"}


@pytest.mark.parametrize("name", ["answer", "call"])
def test_generate_dims_thoughts_on_a_terminal(monkeypatch, name):
    def shown(text, parser):
        printed = thoughts.Shown(parser)
        return "".join(map(printed.next, text)) + printed.end()

    text, last = WRITTEN[name][0], {"answer": "Hello!", "call": 'weather {"in": "Rome"}'}[name]
    assert shown(text, Harmony()) == text
    monkeypatch.setenv("FORCE_COLOR", "1")
    thought = "".join(re.findall("\x1b\\[2m(.*?)\x1b\\[0m", shown(text, Harmony()), re.DOTALL))
    assert thought == WRITTEN[name][1][0].text
    assert re.sub("\x1b\\[[02]m", "", shown(text, Harmony())) == f"{thought}\n\n{last}"
    tagged = shown(TAGGED, Tags())
    assert re.sub("\x1b\\[[02]m", "", tagged) == TAGGED.replace("<think>", "").replace("</think>", "")


def test_batches_have_thoughts_beside_the_answer():
    output = bj.Output(WRITTEN["answer"][0], [1], "stop", 1)
    request = openai_chat.request({"messages": [{"role": "user", "content": "Hi"}]})
    start = [GPT_OSS.texts.index("<|start|>")]
    whole = answer(request, GPT_OSS, start, output)
    body = openai_chat.whole(request, [whole], Head("gpt-oss", GPT_OSS, 1), Usage(1, 1))
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hello!", "They greet.")
