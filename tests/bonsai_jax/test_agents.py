"""What an agent's turns read: requests of one conversation in the shape of Claude Code's, with calls of
tools, thoughts that the template drops from the history, and a system prompt whose beginning and end change
each time.

A turn reads the tokens with which no earlier prompt or answer begins, and at most one page: with layers of
attention alone, with a recurrent state, and with windows. Twenty turns on the device of
test_scheduler_tokens.py, which also checks that each state is that of the tokens before it; a few, and slowly
twenty, through a server.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

import bonsai_jax as bj
from bonsai_jax.engine.scheduler import Request, Scheduler
from bonsai_jax.protocols import anthropic_messages
from bonsai_jax.tokens import departures
from bonsai_jax.tokens.tokenizer import Tokenizer
from tests.bonsai_jax.scripted import limit, scripts, with_template
from tests.bonsai_jax.serving import serving
from tests.bonsai_jax.test_scheduler_tokens import STOP, Device, assert_all_is_back, limits, run
from tests.bonsai_jax.test_tools import tokenizer
from tests.bonsai_jax.tool_templates import FORGETFUL

CALLS, TELLS = range(2)
ARGUMENTS = {"city": "Rome"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TEXTS = (f"<think>\nHm.\n</think>\n\n{CALL}", "<think>\nSo.\n</think>\n\nYes.")
TOOL = {"name": "weather", "description": "The weather of a city.", "input_schema": {"type": "object"}}
PAGE = 16


def body(messages: list, turn: int, **more) -> dict:
    system = [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={turn:05x};"},
        {"type": "text", "text": f"You help.\n<total_tokens>{200_000 - turn} tokens left</total_tokens>"},
    ]
    return {"model": "claude", "system": system, "messages": messages, "tools": [TOOL], **more}


class Conversation:
    """An agent. answer(body, script) has the model write this script, and returns the answer's content and
    the tokens that it has read. known: prompts with their answers, as token ids."""

    def __init__(self, own: Tokenizer, answer: Callable[[dict, int], tuple[list, int]], thoughts: bool):
        self.tokenizer, self.answer, self.thoughts = own, answer, thoughts
        self.messages: list[dict[str, Any]] = []
        self.turn, self.known = 0, list[list[int]]()

    def ask(self, script: int) -> tuple[int, int]:
        """Send the conversation. Returns the tokens read, and those that are new."""
        own = body(self.messages, self.turn, max_tokens=limit(script), temperature=0)
        content, read = self.answer(own, script)
        ids, _ = prompt(self.tokenizer, own)
        new = len(ids) - max((common(ids, other) for other in self.known), default=0)
        self.known.append([*ids, *self.tokenizer.encode(TEXTS[script], add_special=False)])
        self.turn += 1
        kept = [block for block in content if self.thoughts or block["type"] != "thinking"]
        self.messages.append({"role": "assistant", "content": kept})
        return read, new

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def tell(self, text: str) -> None:
        (call,) = [block for block in self.messages[-1]["content"] if block["type"] == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": text}
        self.messages.append({"role": "user", "content": [result]})


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def prompt(own: Tokenizer, body: dict) -> tuple[list[int], tuple[int, ...]]:
    """The tokens of a body's prompt, and where later ones will part ways with it."""
    request = anthropic_messages.request(body)
    return departures.encode_chat(own, request.prompts[0], tools=request.tools)


def turns(agent: Conversation, questions: int, calls: int = 3) -> list[tuple[int, int]]:
    """What `ask` returns for each turn: questions, each with calls and an answer."""
    read = []
    for number in range(questions):
        agent.say(f"Is day {number} fine?")
        for script in (*[CALLS] * calls, TELLS):
            read.append(agent.ask(script))
            if script == CALLS:
                agent.tell(json.dumps({"sun": number}))
    return read


class Scripted(Device):
    """Draws the tokens of `script`, then STOP, after a prompt of `asked` tokens."""

    script: list[int]
    asked: int

    def draw(self, row, table):
        stored, _, left = self.rows[row]
        token = ([*self.script, STOP])[stored - self.asked]
        self.rows[row] = [stored, token, 0 if token == STOP else left - 1]
        return token


@pytest.mark.parametrize("thoughts", [True, False])
@pytest.mark.parametrize("checkpoints", [None, 4, 8])
def test_each_of_twenty_turns_reads_its_new_tokens_and_a_page(checkpoints, thoughts):
    """checkpoints: of states; None: the model has only pages. thoughts: the client sends them back, as Claude
    Code does, or not."""
    device = Scripted(1000, recurrent=checkpoints is not None)
    scheduler, own = Scheduler(limits(pages=1000, checkpoints=checkpoints)), tokenizer(FORGETFUL)

    def answer(own_body: dict, script: int) -> tuple[list, int]:
        ids, places = prompt(own, own_body)
        device.script, device.asked = own.encode(TEXTS[script], add_special=False), len(ids)
        before = device.tokens_read
        run(scheduler, device, [Request(ids, 200, places=places)])
        text = {"type": "text", "text": "Yes."}
        call = {"type": "tool_use", "id": "call_1", "name": TOOL["name"], "input": ARGUMENTS}
        thought = {"type": "thinking", "thinking": "So." if script else "Hm.", "signature": ""}
        return [thought, text if script else call], device.tokens_read - before

    read = turns(Conversation(own, answer, thoughts), 5)
    assert len(read) == 20 and all(tokens <= new + PAGE for tokens, new in read[1:]), read
    assert_all_is_back(scheduler)


@pytest.fixture(
    scope="module",
    params=[
        "tiny-qwen35",
        *(pytest.param(f"tiny-{name}", marks=pytest.mark.slow) for name in ("gemma3", "llama")),
    ],
)
def server(request):
    run = bj.RunConfig(context=2048, batch_size=1, page_size=PAGE)
    model = with_template(bj.load(f"synth:{request.param}:q8_0", run), FORGETFUL)
    how = {"logits_processor": scripts(model, TEXTS), "prefill_tokens": 32}
    with serving(model, rows=1, engine=how) as served:
        yield served
        served.idle()


@pytest.mark.parametrize(("questions", "calls"), [(1, 1), pytest.param(3, 3, marks=pytest.mark.slow)])
def test_a_turn_through_a_server_reads_its_new_tokens_and_a_page(server, questions, calls):
    with server.http() as client:

        def answer(own_body: dict, script: int) -> tuple[list, int]:
            got = client.post("/v1/messages", json=own_body).json()
            return got["content"], got["usage"]["input_tokens"]

        agent = Conversation(server.model.tokenizer, answer, thoughts=True)
        read = turns(agent, questions, calls)
        agent.say("Thank you.")
        read.append(agent.ask(TELLS))
    assert all(tokens <= new + PAGE for tokens, new in read[1:]), read
