"""What an answer is made of, while it is written: thoughts, the answer itself, and calls of functions.

Most models think between two tags and answer behind them (`Tags`):

    <think>The user greets me.</think>Hello!

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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from bonsai_jax.tokens.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"
NAMES = ("start", "channel", "message", "end", "return", "call")
MARK = re.compile(rf"<\|({'|'.join(NAMES)})\|>")
MARKS = tuple(f"<|{name}|>" for name in NAMES)
MOST_HEADER = 256  # characters; a longer one is text of a model that does not write harmony


class Event(NamedTuple):
    """More of an answer.

    kind  "thought", "answer" or "call"
    text  of a call: more of its arguments, as the model writes them, in JSON
    name  of the function, in the first event of a call; else None
    """

    kind: Literal["thought", "answer", "call"]
    text: str
    name: str | None = None


def answer_parser(tokenizer: "Tokenizer", prompt_ids: Sequence[int]) -> "Tags | Harmony":
    """The parser for the answer to a prompt, in the model's format.

        parser = answer_parser(model.tokenizer, ids)
        for piece in bj.stream(model, ids):
            for event in parser.next(piece.text):
                ...
        events = parser.end()

    The events of all calls are the same, joined, wherever the text is cut into pieces.
    """
    if not tokenizer.writes_harmony:
        return Tags(tokenizer.decode(prompt_ids[-8:]).rstrip().endswith(OPEN))
    _, start, last = tokenizer.decode(prompt_ids[-64:], skip_special=False).rpartition("<|start|>")
    return Harmony(last if start and "<|end|>" not in last else None)


class Tags:
    """Thoughts between <think> and </think>.

    within  whether the text begins within a thought, because the prompt opens it
    """

    def __init__(self, within: bool = False):
        self._within, self._pending, self._text = within, "", ""

    def next(self, text: str) -> list[Event]:
        """The events of one more piece; what may be the beginning of a tag waits for the next piece."""
        self._text, self._pending, events = self._text + text, self._pending + text, []
        while (at := self._pending.find(self._tag)) >= 0:
            events += self._take(at)
            self._pending = self._pending[len(self._tag) :]
            self._within = not self._within
        return events + self._take(len(self._pending) - _waiting(self._pending, (self._tag,)))

    def end(self) -> list[Event]:
        """The text that still waits, at the end."""
        return self._take(len(self._pending))

    def message(self) -> dict[str, Any]:
        """The answer so far as chat templates read it: they look for the tags themselves."""
        return {"role": "assistant", "content": self._text}

    @property
    def _tag(self) -> str:
        return CLOSE if self._within else OPEN

    def _take(self, count: int) -> list[Event]:
        text, self._pending = self._pending[:count], self._pending[count:]
        return [Event("thought" if self._within else "answer", text)] if text else []


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
        certain = len(self._pending) - _waiting(self._pending, MARKS)
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
        calls: list[dict[str, Any]] = []
        for kind, text, name in self._seen:
            if kind != "call":
                texts[kind] += text
            elif name is not None:
                calls.append({"name": name, "arguments": text})
            else:
                calls[-1]["arguments"] += text
        message: dict[str, Any] = {"role": "assistant", "content": texts["answer"]}
        if calls and texts["thought"]:
            message["content"] = ""
        if texts["thought"]:
            message["thinking"] = texts["thought"]
        if calls:
            message["tool_calls"] = [{"type": "function", "function": _with_object(call)} for call in calls]
        return message

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


def _waiting(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    most = min(len(text), max(map(len, marks)) - 1)
    return next((n for n in range(most, 0, -1) if any(m.startswith(text[-n:]) for m in marks)), 0)


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """The call with its arguments as an object, which templates write as JSON; as text if it is no JSON."""
    try:
        return call | {"arguments": json.loads(call["arguments"])}
    except (json.JSONDecodeError, RecursionError):
        return call
