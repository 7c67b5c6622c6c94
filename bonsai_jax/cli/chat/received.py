"""What a server has sent of an answer."""

import re
import time
from collections.abc import Iterator
from typing import Any

from bonsai_jax.cli.chat.backend import Message, Part
from bonsai_jax.tokens.answer_parser import CLOSE, OPEN, Event, Tags

HALF = re.compile("[\ud800-\udfff]")  # of a character: no server takes it back


class Received:
    """An answer, made of the chunks of a stream of /v1/chat/completions.

    text       as a model writes it, with marks around its thoughts
    thoughts   what came as reasoning_content, which some servers call reasoning
    usage      what the server counted
    timings    what it measured, where it is llama.cpp's or ours
    """

    def __init__(self):
        self.text = self.thoughts = ""
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] = {}
        self.timings: dict[str, Any] = {}
        self._tags, self._within = Tags(), False  # a server may leave thoughts in the content
        self._began, self._first, self._last = time.perf_counter(), 0.0, 0.0

    def next(self, chunk: dict[str, Any]) -> Iterator[Part]:
        """The parts of one more chunk."""
        self.usage = chunk.get("usage") or self.usage
        self.timings = chunk.get("timings") or self.timings
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            content = delta.get("content") or ""
            if (part := self._part(HALF.sub("\ufffd", thought), HALF.sub("\ufffd", content))).text:
                yield part
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _part(self, thought: str, content: str) -> Part:
        text, events = "", []
        if thought:
            text += thought if self._within else OPEN + thought
            events.append(Event("thought", thought))
            self.thoughts += thought
            self._within = True
        if content:
            text += CLOSE + content if self._within else content
            events += self._tags.next(content)
            self._within = False
        if text:
            self._last = time.perf_counter()
            self._first = self._first or self._last
        self.text += text
        return Part(text, events)

    def end(self) -> Iterator[Part]:
        """What still waits, at the end."""
        mark, self._within = CLOSE if self._within else "", False
        if (events := self._tags.end()) or mark:
            yield Part(mark, events)

    def message(self) -> Message:
        """The answer so far, as a message of the conversation."""
        self._tags.end()
        return self._tags.message() | ({"reasoning_content": self.thoughts} if self.thoughts else {})

    @property
    def decode_tok_s(self) -> float | None:
        """As the server measured it, or by when text came."""
        tokens, seconds = self.usage.get("completion_tokens"), self._last - self._first
        ours = (tokens - 1) / seconds if tokens is not None and tokens > 1 and seconds > 0 else None
        return self.timings.get("predicted_per_second") or ours

    def stats(self) -> str:
        details = self.usage.get("prompt_tokens_details") or {}
        counts = [
            (self.usage.get("prompt_tokens"), "{:,} tokens of the prompt"),
            (details.get("cached_tokens"), "{:,} of them in the cache"),
            (self.usage.get("completion_tokens"), "{:,} tokens of the answer"),
            (self.decode_tok_s, "{:.1f} tok/s"),
            (self._first - self._began if self._first else None, "first token after {:.2f} s"),
        ]
        shown = [text.format(number) for number, text in counts if number is not None]
        return ", ".join(shown) or "the server counted nothing"
