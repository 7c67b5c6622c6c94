"""What answers a conversation: a model in this process (local.py), or a server (remote.py)."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from bonsai_jax.tokens.answer_parser import Event

if TYPE_CHECKING:
    from bonsai_jax import SamplingParams

OnFull = Literal["drop", "stop"]
Message = dict[str, Any]


class ServerError(OSError):
    """A server that cannot be asked now, or not by us."""


class Part(NamedTuple):
    """A part of an answer.

    text    as the model writes it
    events  what it is made of
    """

    text: str
    events: list[Event]


@dataclasses.dataclass(frozen=True)
class Question:
    """What a backend is asked.

    messages   all of the conversation; the last one is the user's
    dropped    how many of the oldest the model did not see at the last answer
    The others are those of `Conversation`.
    """

    messages: list[Message]
    dropped: int
    sampling: "SamplingParams"
    max_new_tokens: int
    system: str | None
    think: bool | None
    stop_texts: tuple[str, ...]
    ignore_eos: bool
    on_full: OnFull

    def with_system(self, first: int = 0) -> list[Message]:
        """The system message, and the messages from this one on."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages[first:]]


class Reply(Protocol):
    """An answer that is being written. A number is None where nobody knows it.

    dropped        how many of the oldest messages the model does not see
    unread         tokens of the prompt that are read before the answer begins
    text           so far, as the model writes it
    finish_reason  "stop", "length" or "cancelled"; None before the end
    new_tokens     of the answer
    depth          tokens of the prompt and the answer
    decode_tok_s   new tokens a second, without the first
    """

    dropped: int

    @property
    def unread(self) -> int | None: ...
    @property
    def text(self) -> str: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def new_tokens(self) -> int | None: ...
    @property
    def depth(self) -> int | None: ...
    @property
    def decode_tok_s(self) -> float | None: ...

    def parts(self) -> Iterator[Part]:
        """The answer as it comes. Raises ValueError, RuntimeError or OSError if it cannot be had."""
        ...

    def cancel(self) -> None:
        """End it with the text so far. A signal handler may call this, also when it has ended."""
        ...

    def message(self) -> Message:
        """The answer so far, as a message of the conversation."""
        ...

    def stats(self) -> str:
        """Its figures, in a line."""
        ...


class Backend(Protocol):
    """What answers.

    name      of the model; `Session.open` takes it
    title     what the chat says it is talking with
    context   most tokens that the model sees; None: nobody knows
    fixed     settings of SamplingParams that it does not take from the chat
    """

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def context(self) -> int | None: ...
    @property
    def fixed(self) -> frozenset[str]: ...

    def answer(self, question: Question) -> Reply:
        """Begin an answer. Raises ValueError if the messages do not fit."""
        ...

    def used(self, question: Question) -> int:
        """Tokens of the conversation that the model sees. Raises ValueError where nobody knows."""
        ...

    def warm_up(self, question: Question) -> None:
        """Prepare the first answer while the user types. The next `answer` ends it."""
        ...
