"""What an answer is made of, while it is written: thoughts, the answer itself, and calls of functions.

Most models think between two tags and answer behind them (`Tags`):

    <think>The user greets me.</think>Hello!

Calls are written in one of several formats, each of which is a file in calls/:

    <think>I look it up.</think><tool_call>{"name": "weather", "arguments": {"in": "Rome"}}</tool_call>

gpt-oss writes messages, each with a header that says what it is; OpenAI calls the format harmony (`Harmony`):

    <|start|>assistant<|channel|>analysis<|message|>The user greets me.<|end|>
    <|start|>assistant<|channel|>final<|message|>Hello!<|return|>

    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"in": 1}<|call|>

The channel "analysis" has thoughts; "final", and "commentary" without a recipient, are for the user. If there
is a recipient, before the channel or after it, the message is a call, and its text the arguments.
<|end|> ends a message, <|return|> and <|call|> the answer. Prompts end with "<|start|>assistant", so answers
begin within a header. The marks are control tokens, which are text in the answers of these models
(Tokenizer.answer_detokenizer).
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from bonsai_jax.tokens import tools as offered
from bonsai_jax.tokens.calls.cursor import Broken, Cursor, Event, Steps, waiting
from bonsai_jax.tokens.calls.format import Format, Tools
from bonsai_jax.tokens.calls.grammar import CLOSE, OPEN

if TYPE_CHECKING:
    from bonsai_jax.tokens.tokenizer import Tokenizer

__all__ = ["Event", "Harmony", "Tags", "answer_parser"]

NAMES = ("start", "channel", "message", "end", "return", "call")
MARK = re.compile(rf"<\|({'|'.join(NAMES)})\|>")
MARKS = tuple(f"<|{name}|>" for name in NAMES)
MOST_HEADER = 256  # characters; a longer one is text of a model that does not write harmony
MOST_BROKEN = 32  # beginnings of calls that are none; later ones are not looked at, for they take time


def answer_parser(
    tokenizer: "Tokenizer", prompt_ids: Sequence[int], tools: Sequence[Mapping[str, Any]] | None = None
) -> "Tags | Harmony":
    """The parser for the answer to a prompt, in the model's format.

        parser = answer_parser(model.tokenizer, ids)
        for piece in bj.stream(model, ids):
            for event in parser.next(piece.text):
                ...
        events = parser.end()

    tools  those that the prompt offers, as OpenAI's API has them. Without them only gpt-oss calls functions,
           and what looks like a call in another model's answer is text
    The events of all calls are the same, joined, wherever the text is cut into pieces. Calls that are broken
    before their arguments begin are text; broken arguments are passed on as they are.
    Raises ValueError for tools that are none, and NotImplementedError if this model's calls are in no format
    that we know.
    """
    if not tokenizer.writes_harmony:
        within = tokenizer.decode(prompt_ids[-8:]).rstrip().endswith(OPEN)
        if not tools:
            return Tags(within)
        return Tags(within, tokenizer.known_call_format(), offered.schemas(tools))
    _, start, last = tokenizer.decode(prompt_ids[-64:], skip_special=False).rpartition("<|start|>")
    return Harmony(last if start and "<|end|>" not in last else None)


class Tags:
    """Thoughts between <think> and </think>, and calls in a format.

    within  whether the text begins within a thought, because the prompt opens it
    format  None: nothing is a call
    tools   the functions that may be called, {name: JSON schema of the arguments}
    """

    def __init__(self, within: bool = False, format: Format | None = None, tools: Tools | None = None):
        self._cursor = Cursor(keeps_spaces=format is None)
        self._format, self._tools, self._broken = format, tools or {}, 0
        self._content, self._calls = "", Calls()
        self._steps = self._read(within)

    def next(self, text: str) -> list[Event]:
        """The events of one more piece; what may be the beginning of a tag waits for the next piece."""
        self._cursor.text += text
        next(self._steps, None)
        return self._taken()

    def end(self) -> list[Event]:
        """The text that still waits, at the end."""
        self._cursor.closed = True
        next(self._steps, None)
        return self._taken()

    def message(self) -> dict[str, Any]:
        """The answer so far as chat templates read it: they look for the tags of thoughts themselves."""
        calls = self._calls.message()
        return {"role": "assistant", "content": self._content.rstrip() if calls else self._content} | calls

    def _read(self, within: bool) -> Steps[None]:
        """Read the whole answer."""
        cursor, format, fresh = self._cursor, self._format, True
        while True:
            if not within and fresh and format is not None and format.at_start:
                fresh = False
                self._answer((yield from cursor.spaces()))
                if (yield from cursor.literal(format.at_start)):
                    yield from self._call(format, format.at_start)
            triggers = () if format is None or self._broken >= MOST_BROKEN else format.triggers
            if within:
                mark = yield from cursor.flow(self._thought, CLOSE)
            else:
                mark = yield from cursor.flow(self._answer, OPEN, *triggers)
            if not mark:
                return cursor.finish()
            if mark in (OPEN, CLOSE):
                self._content += mark
                within = mark == OPEN
            elif format is not None:
                yield from self._call(format, mark)

    def _call(self, format: Format, trigger: str) -> Steps[None]:
        """Read calls behind a trigger. If there are none the trigger is text."""
        cursor = self._cursor
        cursor.accept()
        before = cursor.calls
        try:
            yield from format.read(cursor, self._tools, trigger)
        except Broken:
            cursor.at = cursor.good
            if cursor.calls == before:
                self._broken += 1
                self._answer(trigger)

    def _answer(self, text: str) -> None:
        self._content += text
        self._cursor.answer(text)

    def _thought(self, text: str) -> None:
        self._content += text
        self._cursor.thought(text)

    def _taken(self) -> list[Event]:
        events, self._cursor.events = self._cursor.events, []
        self._calls.add(events)
        return events


class Calls:
    """The calls among events."""

    def __init__(self) -> None:
        self._calls: list[dict[str, Any]] = []

    def add(self, events: Sequence[Event]) -> None:
        for kind, text, name in events:
            if kind != "call":
                continue
            if name is not None:
                self._calls.append({"name": name, "arguments": ""})
            self._calls[-1]["arguments"] += text

    def message(self) -> dict[str, Any]:
        """Their part of a message: "tool_calls", if there are any. Arguments are objects, which templates
        write as JSON, and text if they are no JSON."""
        calls = [{"type": "function", "function": _with_object(call)} for call in self._calls]
        return {"tool_calls": calls} if calls else {}


class Harmony:
    """Messages with headers.

    before  what the prompt has behind its last <|start|>: a part of the header, or all of it and a part of
            the text; None: the text begins within an answer
    """

    def __init__(self, before: str | None = "assistant"):
        self.ended = False  # by <|return|> or <|call|>
        self._kind: Literal["thought", "answer", "call"] = "answer"
        self._before, self._header = before or "", None if before is None else ""  # None: within a text
        self._pending, self._events, self._seen = "", [], []
        header, message, _ = self._before.partition("<|message|>")
        if message:
            self._begin(header)

    def next(self, text: str) -> list[Event]:
        """The events of one more piece; headers, and what may be the beginning of a mark, wait."""
        self._pending += text
        while not self.ended and (mark := MARK.search(self._pending)):
            self._put(self._pending[: mark.start()])
            self._pending = self._pending[mark.end() :]
            self._reach(mark[1])
        if self.ended:
            self._pending = ""
        certain = len(self._pending) - waiting(self._pending, MARKS)
        self._put(self._pending[:certain])
        self._pending = self._pending[certain:]
        return self._taken()

    def end(self) -> list[Event]:
        """The text that still waits, at the end. A header without a message is text if there is no other."""
        self._put(self._pending)
        if self._header and not self._seen and not self._events:
            self._read_as_text()
        self._pending, self._header = "", None
        return self._taken()

    def message(self) -> dict[str, Any]:
        """The answer so far as the chat template of gpt-oss reads it: "thinking" beside "content", and
        "tool_calls". Beside a call the template takes only one of the others."""
        texts = {"thought": "", "answer": ""}
        for event in self._seen:
            if event.kind != "call":
                texts[event.kind] += event.text
        calls = Calls()
        calls.add(self._seen)
        message: dict[str, Any] = {"role": "assistant", "content": texts["answer"]}
        if calls.message() and texts["thought"]:
            message["content"] = ""
        if texts["thought"]:
            message["thinking"] = texts["thought"]
        return message | calls.message()

    def _put(self, text: str) -> None:
        if self._header is not None:
            self._header += text
            if len(self._header) > MOST_HEADER:
                self._read_as_text()
        elif text:
            self._events.append(Event(self._kind, text))

    def _read_as_text(self) -> None:
        text, self._header, self._kind = self._header or "", None, "answer"
        self._put(text)

    def _reach(self, mark: str) -> None:
        if mark in ("return", "call"):
            self.ended = True
        elif mark in ("start", "end"):
            self._before, self._header = "", ""
        elif mark == "channel":
            if self._header is None:  # a message that nothing ended
                self._before, self._header = "", ""
            self._header += "<|channel|>"
        elif self._header is not None:
            self._begin(self._before + self._header)

    def _begin(self, header: str) -> None:
        """The message after a header. One of another role than the assistant's ends the answer."""
        role = header.partition("<|channel|>")[0].split()[:1]
        recipient, channel = re.search(r"\bto=([^\s<]+)", header), re.search(r"<\|channel\|>\s*(\w*)", header)
        self._before, self._header = "", None
        if role and role[0] != "assistant" and not role[0].startswith("to="):
            self.ended = True
        elif recipient is not None:
            self._kind = "call"
            self._events.append(Event("call", "", recipient[1].removeprefix("functions.")))
        else:
            self._kind = "thought" if channel is not None and channel[1] == "analysis" else "answer"

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        self._seen += events
        return events


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """The call with its arguments as an object, which templates write as JSON; as text if it is no JSON."""
    try:
        return call | {"arguments": json.loads(call["arguments"])}
    except (json.JSONDecodeError, RecursionError):
        return call
