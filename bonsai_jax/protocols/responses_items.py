"""Items of the output of OpenAI's responses: thoughts, a message, a call of a function.

An item is written whole, or as events: begin(), delta(text) again and again, end(status). Each event is its
name and its data, without the item's place in the output.
"""

import abc
import dataclasses
import secrets
from typing import Any

from bonsai_jax.tokens.answer_parser import Event

Data = dict[str, Any]


@dataclasses.dataclass
class Item(abc.ABC):
    """text: so far"""

    kind: str
    id: str
    text: str

    def begin(self) -> list[tuple[str, Data]]:
        return [("response.output_item.added", {"item": self._item("in_progress")})]

    def delta(self, text: str) -> tuple[str, Data]:
        """The event of more text, which is not in `text` yet."""
        return f"{self._event}.delta", self._place() | self._delta(text)

    def end(self, status: str) -> list[tuple[str, Data]]:
        return [
            (f"{self._event}.done", self._place() | self._done()),
            ("response.output_item.done", {"item": self.whole(status)}),
        ]

    def whole(self, status: str) -> Data:
        """The item in a response of this status."""
        return self._item("incomplete" if status in ("incomplete", "failed") else "completed")

    _event = ""

    @abc.abstractmethod
    def _item(self, status: str) -> Data:
        """The item as the API has it."""

    def _place(self) -> Data:
        return {"item_id": self.id}

    def _delta(self, text: str) -> Data:
        return {"delta": text}

    def _done(self) -> Data:
        return {"text": self.text}


@dataclasses.dataclass
class Thoughts(Item):
    _event = "response.reasoning_text"

    def _item(self, status: str) -> Data:
        content = [{"type": "reasoning_text", "text": self.text}] if self.text else []
        return {"type": "reasoning", "id": self.id, "summary": [], "content": content, "status": status}

    def _place(self) -> Data:
        return {"item_id": self.id, "content_index": 0}


@dataclasses.dataclass
class Answered(Item):
    """A message. Its text is a part of its content, which has events of its own."""

    _event = "response.output_text"

    def begin(self) -> list[tuple[str, Data]]:
        part = {"part": self._part()}
        return [*super().begin(), ("response.content_part.added", self._place() | part)]

    def end(self, status: str) -> list[tuple[str, Data]]:
        done, last = super().end(status)
        return [done, ("response.content_part.done", self._place() | {"part": self._part()}), last]

    def _item(self, status: str) -> Data:
        content = [self._part()] if self.text else []
        return {"type": "message", "id": self.id, "status": status, "role": "assistant", "content": content}

    def _part(self) -> Data:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def _place(self) -> Data:
        return {"item_id": self.id, "content_index": 0}

    def _delta(self, text: str) -> Data:
        return {"delta": text, "logprobs": []}

    def _done(self) -> Data:
        return {"text": self.text, "logprobs": []}


@dataclasses.dataclass
class Call(Item):
    """text: the arguments"""

    name: str = ""
    call_id: str = dataclasses.field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    _event = "response.function_call_arguments"

    def _item(self, status: str) -> Data:
        names = {"id": self.id, "call_id": self.call_id, "name": self.name}
        arguments = self.text or ("" if status == "in_progress" else "{}")
        return {"type": "function_call", **names, "arguments": arguments, "status": status}

    def _done(self) -> Data:
        return {"name": self.name, "arguments": self.text or "{}"}


def item(event: Event) -> Item:
    """The item that an event begins, or is."""
    key = secrets.token_hex(12)
    if event.kind == "thought":
        return Thoughts("thought", f"rs_{key}", event.text)
    if event.kind == "call":
        return Call("call", f"fc_{key}", event.text, event.name or "")
    return Answered("answer", f"msg_{key}", event.text)
