"""Thoughts before constrained answers, and forced calls of gpt-oss: masks against a look at every token, and
models that think what a test says and then write at random."""

import dataclasses
import functools
import json
import random
import re

import anthropic
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

import bonsai_jax as bj
from bonsai_jax import constraints
from bonsai_jax.protocols import openai_chat
from bonsai_jax.protocols.submit import Defaults, submissions
from bonsai_jax.tokens.answer_parser import MARKS, Harmony
from bonsai_jax.tokens.calls import tool_grammar
from bonsai_jax.tokens.thoughts import first_thought
from bonsai_jax.tokens.tokenizer import Tokenizer
from bonsai_jax.tokens.vocabulary import CONTROL
from checkpoints import open_checkpoint
from tests.bonsai_jax.command_line import TINY, run
from tests.bonsai_jax.scripted import STRIDE, limit
from tests.bonsai_jax.serving import serving
from tests.bonsai_jax.test_answer_parser import TEMPLATE as HARMONY
from tests.bonsai_jax.test_answer_parser import WRITTEN
from tests.bonsai_jax.test_call_grammars import TOOLS, drawn
from tests.bonsai_jax.test_server_forced import ASKED, SCHEMAS, TRIP
from tests.bonsai_jax.test_server_forced import TOOLS as OFFERED
from tests.bonsai_jax.tool_templates import HERMES

TAGS = HERMES.replace(
    "{% endif -%}", "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif -%}"
)
CHANNELS = HARMONY + "{# tools #}"
THOUGHT = {"tags": "<think>\nIs it {3}?\n</think>\n\n", "harmony": WRITTEN["answer"][0].partition("Hello")[0]}
SAID = {"tags": "Is it {3}?", "harmony": "They greet."}
FORM = {"type": "json_schema", "json_schema": {"name": "trip", "schema": TRIP}}
FREE, THINKS = range(2)  # scripts


@functools.cache
def tokenizer(form: str) -> Tokenizer:
    """Of the tiny model; harmony's marks are in place of some of its tokens."""
    metadata = dict(open_checkpoint(TINY).metadata)
    names, kinds = list(metadata["tokenizer.ggml.tokens"]), list(metadata["tokenizer.ggml.token_type"])
    for id, mark in enumerate((*MARKS, "<|constrain|>") if form == "harmony" else (), 309):
        names[id], kinds[id] = mark, CONTROL
    metadata |= {"tokenizer.ggml.tokens": names, "tokenizer.ggml.token_type": kinds}
    own = Tokenizer.from_gguf(metadata)
    return dataclasses.replace(own, chat_template=CHANNELS if form == "harmony" else TAGS)


def ids(form: str, more: str = "", **variables) -> list[int]:
    """A chat's prompt, and the beginning of its answer."""
    own = tokenizer(form)
    return own.encode_chat(ASKED, **variables) + own.encode(more, add_special=False)


@pytest.mark.parametrize(
    ("form", "more", "on", "off"),
    [
        ("tags", "", "possible", "none"),
        ("tags", "<think>\n", "begun", "begun"),
        ("tags", "<think>\n\n</think>\n\n", "none", "none"),
        ("tags", "{", "none", "none"),
        ("harmony", "", "possible", "header"),
        ("harmony", "<|channel|>analysis<|message|>They", "begun", "begun"),
        ("harmony", "<|channel|>final<|message|>", "none", "none"),
    ],
)
def test_the_prompt_says_whether_a_thought_comes_first(form, more, on, off):
    prompt = ids(form, more)
    assert [first_thought(tokenizer(form), prompt, thinks) for thinks in (True, False)] == [on, off]


def test_a_prompt_that_is_no_chat_has_no_thoughts():
    for form in SAID:
        assert first_thought(tokenizer(form), tokenizer(form).encode("A person in JSON:")) == "none"
    plain = dataclasses.replace(tokenizer("tags"), chat_template=None)
    assert first_thought(plain, ids("tags")) == "none"
    assert first_thought(tokenizer("tags"), ids("tags", enable_thinking=False)) == "none"


# ---- Masks ----

BODIES = {"ab", "a\nb", "<think", "no"}
EXPRESSION = "ab|a\nb|<think|no"
SPACE = r"[\r\n]{0,4}"
WHOLE = {  # regular expressions for answers
    ("tags", "none"): EXPRESSION,
    ("tags", "begun"): rf"(?:(?!</think>).)*</think>{SPACE}(?:{EXPRESSION})",
    ("tags", "possible"): rf"(?:<think>(?:(?!</think>).)*</think>{SPACE})?(?:{EXPRESSION})",
    ("harmony", "header"): rf"<\|channel\|>final<\|message\|>(?:{EXPRESSION})",
}


def viable(form: str, thought: str, text: str) -> bool:
    """Whether some answer begins with this text: one of a few ends completes it."""
    ends = ["", *(body[at:] for body in BODIES for at in range(len(body)))]
    middles = ["", *("<think>"[at:] for at in range(7)), *("</think>"[at:] for at in range(9))]
    if form == "harmony":
        whole = "<|channel|>final<|message|>"
        return any(re.fullmatch(WHOLE[form, thought], text + m + end) for m in ("", *(
            whole[at:] for at in range(len(whole)))) for end in ends)  # fmt: skip
    return any(
        re.fullmatch(WHOLE[form, thought], text + middle + tail + end, re.DOTALL)
        for middle in middles
        for tail in ("", "</think>")
        for end in ends
    )


@pytest.mark.parametrize(("form", "thought"), WHOLE)
def test_masks_are_those_of_a_look_at_every_token(form, thought):
    own = tokenizer(form)
    constraint = dataclasses.replace(bj.regex(EXPRESSION), thought=thought)
    texts = {id: own.token_bytes(id) for id in range(own.vocab_size)}
    for seed in range(3):
        rng, said = random.Random(seed), ""
        matcher = constraints.compile(constraint, own, own.vocab_size).matcher()
        while not matcher.complete and len(said) < 60:
            matcher.find()
            mask = {id for id in texts if matcher.allowed[id // 32] >> np.uint32(id % 32) & 1}
            for id, data in texts.items():
                if not data.isascii() or not data or (own.kinds[id] == CONTROL and form == "tags"):
                    continue  # half characters; marks that a text cannot spell
                if not matcher.forced:
                    assert (id in mask) == viable(form, thought, said + data.decode()), (said, data)
            hurry = [id for id in mask if texts[id].isascii() and set(texts[id]) <= set(b"<>/think")]
            id = rng.choice(sorted(hurry or mask - own.eos_ids))
            matcher.consume([id])
            said += texts[id].decode(errors="replace")


@pytest.mark.parametrize("thought", ["possible", "header"])
@pytest.mark.parametrize("choice", ["auto", "required", "weather", "now"])
def test_every_call_of_gpt_oss_that_a_grammar_allows_keeps_to_its_schema(choice, thought):
    for seed in range(3):
        own = LLMatcher(LLTokenizer("byte"), tool_grammar(None, TOOLS, choice, thought=thought))
        assert not own.is_error(), own.get_error()
        text, parser = drawn(own, random.Random(seed), 1500), Harmony()
        events = parser.next(text) + parser.end()
        calls = [event for event in events if event.name is not None]
        if len(text.encode()) >= 1500 or not (calls or choice != "auto"):
            continue
        (call,) = calls
        assert call.name in (TOOLS if choice in ("auto", "required") else {choice})
        body = "".join(event.text for event in events if event.kind == "call")
        jsonschema.validate(json.loads(body), TOOLS[call.name])


CALL = '{"city": "Rome", "unit": "C", "where": {"name": "x"}}'


@pytest.mark.parametrize("name", ["call", "recipient before the channel", "recipient at once"])
def test_what_gpt_oss_writes_is_allowed(name):
    written = WRITTEN[name][0].partition("<|call|>")[0].replace('{"in": "Rome"}', CALL)
    written = re.sub("commentary(.*?) json", r"commentary\1 <|constrain|>json", written)
    for choice in ("auto", "required", "weather", "now"):
        own = LLMatcher(LLTokenizer("byte"), tool_grammar(None, TOOLS, choice, thought="possible"))
        data = list(written.encode())
        assert (own.try_consume_tokens(data) == len(data) and own.is_accepting()) == (choice != "now")
    own = LLMatcher(LLTokenizer("byte"), tool_grammar(None, TOOLS, "auto", thought="possible"))
    for answer in (WRITTEN["preamble"][0] + "<|start|>assistant" + written, WRITTEN["answer"][0][:-10]):
        data = list(answer.encode())
        own.reset()
        assert own.try_consume_tokens(data) == len(data) and own.is_accepting()


# ---- Models that think ----


def thinks(form: str):
    """A logits processor: with limit(THINKS) new tokens answers begin with a thought."""
    said = tokenizer(form).encode(THOUGHT[form], add_special=False)
    script = jnp.asarray([*said, *[-1] * (STRIDE - len(said))])

    def processor(logits, state):
        begins = (state.remaining > STRIDE) & (state.remaining <= limit(THINKS))
        token = jnp.where(begins, script[jnp.clip(limit(THINKS) - state.remaining, 0, STRIDE - 1)], -1)[
            :, None
        ]
        return jnp.where((token < 0) | (jnp.arange(logits.shape[-1]) == token), logits, -jnp.inf)

    return processor


@pytest.fixture(scope="module", params=SAID)
def served(request):
    form = request.param
    model = dataclasses.replace(
        bj.load(TINY, bj.RunConfig(context=1024, batch_size=1)), tokenizer=tokenizer(form)
    )
    with serving(model, rows=1, engine={"logits_processor": thinks(form)}) as server:
        server.form = form
        yield server
        server.idle()


@pytest.fixture
def client(served):
    with served.openai() as client:
        yield client


def test_a_thought_is_free_and_the_answer_keeps_to_its_schema(served, client):
    how = {"model": "any", "messages": ASKED, "response_format": FORM, "max_tokens": limit(THINKS)}
    (choice,) = client.chat.completions.create(**how).choices
    assert choice.message.reasoning_content == SAID[served.form] and choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), TRIP)
    with client.chat.completions.stream(**how) as stream:
        jsonschema.validate(json.loads(stream.get_final_completion().choices[0].message.content), TRIP)
    form = {"format": {"type": "json_schema", "name": "trip", "schema": TRIP}}
    got = client.responses.create(model="any", input="Plan it.", text=form, max_output_tokens=limit(THINKS))
    jsonschema.validate(json.loads(got.output_text), TRIP)
    assert [item.type for item in got.output] == ["reasoning", "message"]
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as other:
        config = {"format": {"type": "json_schema", "schema": TRIP}}
        answer = other.messages.create(
            model="any", max_tokens=limit(THINKS), messages=ASKED, output_config=config
        )
    assert [block.type for block in answer.content] == ["thinking", "text"]
    jsonschema.validate(json.loads(answer.content[1].text), TRIP)


def test_without_reasoning_the_schema_holds_from_the_first_token(served, client):
    how = {"model": "any", "messages": ASKED, "response_format": FORM, "max_tokens": limit(FREE)}
    (choice,) = client.chat.completions.create(**how, reasoning_effort="none").choices
    jsonschema.validate(json.loads(choice.message.content), TRIP)
    assert not hasattr(choice.message, "reasoning_content")


def test_a_call_that_is_forced_comes_after_a_thought(served, client):
    how = {"model": "any", "messages": ASKED, "tools": OFFERED, "max_tokens": limit(THINKS)}
    if served.form == "harmony":
        how["max_tokens"] = limit(FREE)  # the script has the header of an answer
        how["reasoning_effort"] = "none"
    named = {"type": "function", "function": {"name": "trip"}}
    for choice in ("required", named):
        (got,) = client.chat.completions.create(**how, tool_choice=choice, parallel_tool_calls=False).choices
        (call,) = got.message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
        assert got.finish_reason == "tool_calls" and call.function.name in (
            "trip",
            *["now"] * (choice != named),
        )
    if served.form == "tags":
        assert got.message.reasoning_content == SAID["tags"]
    tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as other:
        how = {
            "tools": tools,
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "thinking": {"type": "disabled"},
        }
        answer = other.messages.create(model="any", max_tokens=limit(FREE), messages=ASKED, **how)
    (block,) = (block for block in answer.content if block.type == "tool_use")
    jsonschema.validate(block.input, SCHEMAS[block.name])


def test_in_python_a_chat_may_begin_with_a_thought(served):
    engine, prompt = served.service.engine, ids(served.form)
    constraint = bj.regex("[a-c]{6}")
    for how in ({"max_new_tokens": limit(THINKS)}, {"max_new_tokens": limit(THINKS), "logprobs": 0}):
        output = engine.submit(prompt, bj.SamplingParams(), constraint=constraint, **how).result(60)
        assert output.text.startswith(THOUGHT[served.form]) and output.finish_reason == "stop"
        assert re.fullmatch("[a-c]{6}", output.text.removeprefix(THOUGHT[served.form]).lstrip())
    plain = engine.submit("Three letters:", constraint=constraint, max_new_tokens=limit(FREE)).result(60)
    assert re.fullmatch("[a-c]{6}", plain.text)


def test_batches_take_a_thought_first_unless_it_is_switched_off(served):
    request = openai_chat.request({"messages": ASKED, "response_format": FORM}, strict=True)
    for template, expected in ({}, "possible"), ({"enable_thinking": False}, ("none", "header")):
        (one,) = submissions(request, served.model, Defaults(900, template=template))
        assert one.options["constraint"].thought in expected


def test_the_command_line_switches_thinking_off_before_a_constraint():
    how = ("generate", "-m", TINY, "Well?", "--chat", "--no-think", "--choice", "yes", "--json")
    done = run(*how)
    assert done.exit_code == 0 and json.loads(done.stdout)["text"] == "yes"
