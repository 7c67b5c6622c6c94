"""What a protocol writes: answers, whole or in parts, and what surrounds them."""

import dataclasses
import json
import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from bonsai_jax.decoding.sampling import Logprobs
from bonsai_jax.engine.answers import FinishReason, Output, Piece
from bonsai_jax.protocols.request import Request
from bonsai_jax.tokens.answer_parser import Event, Harmony, Tags, answer_parser
from bonsai_jax.tokens.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Echo:
    """A prompt at the beginning of its answer.

    text      without control tokens, which `tokens` have
    logprobs  of all tokens but the first, as numpy arrays [tokens - 1]; None unless asked for
    """

    text: str
    tokens: list[int]
    logprobs: Logprobs | None = None


@dataclasses.dataclass(frozen=True)
class Part:
    """More of one answer.

    index     of the answer: n for each prompt, prompt by prompt
    text      as the model writes it
    events    what the text says, of chats: thoughts, the answer, calls. They may come later than their text
    tokens, logprobs, finish_reason, stop   as in engine.answers.Piece
    echo      in the first part, if asked for
    """

    index: int
    text: str
    events: list[Event]
    tokens: list[int]
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    echo: Echo | None = None
    stop: str | None = None


@dataclasses.dataclass(frozen=True)
class Answer:
    """One whole answer. events: as in Part, without two of a kind in a row."""

    output: Output
    events: list[Event]
    echo: Echo | None = None

    def said(self, kind: str) -> str:
        """The text of all events of a kind."""
        return "".join(event.text for event in self.events if event.kind == kind)

    @property
    def calls(self) -> list[Event]:
        """A named event for each call, with all its arguments; {} where the model wrote none."""
        calls = [event for event in self.events if event.kind == "call"]
        return [event._replace(text=event.text or "{}") for event in calls]


@dataclasses.dataclass(frozen=True)
class Timings:
    """Seconds, on the host's clock.

    prompt_s   from the request's arrival at the engine to its first token, so with the wait for a row
    new_s      from the first token to the last
    """

    prompt_s: float
    new_s: float


@dataclasses.dataclass(frozen=True)
class Usage:
    """Tokens of a request. cached_tokens: of the prompt, which were not read again."""

    prompt_tokens: int
    new_tokens: int
    cached_tokens: int = 0
    timings: Timings | None = None


@dataclasses.dataclass(frozen=True)
class Head:
    """What all bodies of one answer say.

    key            part of its id
    created        in seconds since 1970
    model          its name
    prompt_tokens  of all prompts
    cached_tokens  of these, as far as it is known: all of one prompt's
    """

    model: str
    tokenizer: Tokenizer
    prompt_tokens: int
    cached_tokens: int = 0
    key: str = dataclasses.field(default_factory=lambda: secrets.token_hex(12))
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))


class ServerEvent(NamedTuple):
    """A server-sent event. data: a body, or its JSON. name: None where the protocol names none."""

    data: dict[str, Any] | str
    name: str | None = None

    def encode(self) -> bytes:
        """As it is sent. JSON escapes line breaks, so the data is one line."""
        text = self.data if isinstance(self.data, str) else json.dumps(self.data)
        name = "" if self.name is None else f"event: {self.name}\n"
        return f"{name}data: {text}\n\n".encode()


class Template:
    """JSON of bodies that differ in one text, which is HOLE here and not followed by texts of others, and in
    numbers at their ends. Most events of a stream are such: to write a whole body takes ten times as long."""

    HOLE = "\0"

    def __init__(self, body: dict[str, Any], name: str | None = None):
        self._before, _, after = json.dumps(body).rpartition(json.dumps(self.HOLE))
        self._after, self._name = after.removesuffix("}"), name

    def event(self, text: str, **numbers: int) -> ServerEvent:
        """numbers: further fields of the body"""
        fields = "".join([f', "{name}": {number}' for name, number in numbers.items()])
        return ServerEvent(f"{self._before}{json.dumps(text)}{self._after}{fields}}}", self._name)


class Parser:
    """Pieces of one answer in, Parts out."""

    def __init__(self, request: Request, tokenizer: Tokenizer, ids: Sequence[int], index: int):
        self.index, self._events = index, None
        if request.chat:
            self._events = _Spaced(answer_parser(tokenizer, ids, request.tools), request.parallel_calls)

    def next(self, piece: Piece, echo: Echo | None = None) -> Part:
        last = piece.finish_reason is not None
        events = [] if self._events is None else self._events.next(piece.text, last)
        end = piece.finish_reason
        return Part(self.index, piece.text, events, piece.tokens, piece.logprobs, end, echo, piece.stop)


class _Spaced:
    """Events without the blank lines that models write around their thoughts.

    parallel  False: what comes after the first call is left out
    """

    def __init__(self, parser: Tags | Harmony, parallel: bool):
        self._parser, self._last, self._spaces = parser, "", ""
        self._trim = False  # the next text begins after a mark
        self._parallel, self._over = parallel, False

    def next(self, text: str, last: bool) -> list[Event]:
        events = self._parser.next(text) + (self._parser.end() if last else [])
        out = []
        for event in events:
            if self._is_over(event):
                break
            event = self._trimmed(event)
            if event.text or event.name is not None:
                out.append(event)
        return out

    def _is_over(self, event: Event) -> bool:
        after_call = self._last == "call" and (event.name is not None or event.kind != "call")
        self._over = self._over or (after_call and not self._parallel)
        return self._over

    def _trimmed(self, event: Event) -> Event:
        kind, text, name = event
        if name is not None:
            self._last, self._trim = kind, False
            return event
        if kind != self._last:
            self._trim = kind == "thought" or self._last == "thought"
            self._last, self._spaces = kind, ""
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        if kind == "thought":  # spaces at its end wait for more of it
            text = self._spaces + text
            self._spaces = text[len(text.rstrip()) :]
            text = text.rstrip()
        return Event(kind, text, name)


def joined(events: Sequence[Event]) -> list[Event]:
    """Events, neighbours of a kind as one. The name of a call begins another."""
    out: list[Event] = []
    for event in events:
        if out and out[-1].kind == event.kind and event.name is None:
            out[-1] = out[-1]._replace(text=out[-1].text + event.text)
        else:
            out.append(event)
    return out


def answer(
    request: Request, tokenizer: Tokenizer, ids: Sequence[int], whole: Output, echo: Echo | None = None
) -> Answer:
    """An Output as a protocol writes it. ids: of its prompt."""
    part = Parser(request, tokenizer, ids, 0).next(Piece(whole.text, whole.tokens, whole.finish_reason))
    return Answer(whole, joined(part.events), echo)
