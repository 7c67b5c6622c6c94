"""A conversation with whatever answers it (backend.py). It knows no terminal."""

import dataclasses
import json
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bonsai_jax.cli.chat.backend import Backend, Message, OnFull, Part, Question, Reply

if TYPE_CHECKING:
    from bonsai_jax import SamplingParams


@dataclasses.dataclass
class Conversation:
    """The messages so far, and what answers.

    messages  [{"role": ..., "content": ...}, ...], without the system message; answers as their parser's
              `message` has them
    dropped   how many of the oldest messages the model no longer sees, because the context was full
    on_full   whether a full context drops the oldest messages or ends the conversation
    think     the chat template's enable_thinking; None: the template's default
    reply     the last answer; None before the first
    """

    backend: Backend
    sampling: "SamplingParams"
    max_new_tokens: int = -1
    system: str | None = None
    think: bool | None = None
    stop_texts: tuple[str, ...] = ()
    ignore_eos: bool = False
    on_full: OnFull = "drop"
    messages: list[Message] = dataclasses.field(default_factory=list)
    dropped: int = 0
    reply: Reply | None = None
    _writing: Reply | None = None
    _interrupted: bool = False

    def ask(self, text: str, *, replaces: bool = False, retry: int = 0) -> Generator[Part]:
        """Stream the answer to a message. Closing the generator, or `interrupt`, stops the answer. The text
        so far becomes part of the conversation; if there is none yet, the conversation stays as it was.

        replaces  whether the message takes the place of the last one and its answer
        retry     added to the seed, so that another try at a message gives another answer
        Raises ValueError, and changes nothing, if the message does not fit the context.
        """
        earlier = self.messages[: self._last()] if replaces else self.messages
        messages = [*earlier, {"role": "user", "content": text}]
        sampling = self.sampling
        if sampling.seed is not None:
            sampling = dataclasses.replace(sampling, seed=sampling.seed + retry)
        reply = self.backend.answer(dataclasses.replace(self.question(messages), sampling=sampling))
        self.reply = self._writing = reply
        self.dropped = reply.dropped
        if self._interrupted:
            reply.cancel()
        return self._parts(reply, messages)

    def _parts(self, reply: Reply, messages: list[Message]) -> Generator[Part]:
        try:
            yield from reply.parts()
        finally:
            stopped = reply.finish_reason in (None, "cancelled")
            reply.cancel()
            self._writing = None
            if reply.text or not stopped:
                self.messages = [*messages, reply.message()]

    def question(self, messages: list[Message]) -> Question:
        """These messages, and how they are answered."""
        return Question(
            messages, self.dropped, self.sampling, self.max_new_tokens, self.system, self.think,
            self.stop_texts, self.ignore_eos, self.on_full,
        )  # fmt: skip

    def interrupt(self, *_: object) -> None:
        """Stop the answer that is being written, or the next one. A signal handler may call this."""
        self._interrupted = True
        if self._writing is not None:
            self._writing.cancel()

    def resume(self) -> None:
        """The next answer is not stopped by an earlier `interrupt`."""
        self._interrupted = False

    def warm_up(self) -> None:
        """Have the backend prepare the first answer. `ask` ends it."""
        self.backend.warm_up(self.question([]))

    def used(self) -> int:
        """Tokens of the conversation that the model sees. Raises ValueError where nobody knows."""
        return self.backend.used(self.question(self.messages))

    def reset(self) -> None:
        """Forget the messages. A prefix cache stays as it is."""
        self.messages, self.dropped = [], 0

    def undo(self) -> str:
        """Forget the last message and its answer. Returns the message. Raises ValueError if there is none."""
        text, last = self.last_message(), self._last()
        self.messages, self.dropped = self.messages[:last], min(self.dropped, last)
        return text

    def last_message(self) -> str:
        """The user's last message. Raises ValueError if there is none."""
        return self.messages[self._last()]["content"]

    def _last(self) -> int:
        """The index of the user's last message. Raises ValueError if there is none."""
        for at in range(len(self.messages) - 1, -1, -1):
            if self.messages[at]["role"] == "user":
                return at
        raise ValueError("there is no message yet")

    def switch(self, backend: Backend) -> None:
        """Go on with another model."""
        if backend is not self.backend:
            self.backend, self.dropped, self.reply = backend, 0, None

    def save(self, path: Path) -> None:
        """Write the conversation as JSON: the model's name, and all messages as OpenAI's API has them."""
        body = {"model": self.backend.name, "messages": self.question(self.messages).with_system()}
        path.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def load(self, path: Path) -> None:
        """Continue a conversation from a file that `save` wrote, or from any JSON with OpenAI's messages.
        Raises ValueError, and changes nothing, if the file has none."""
        messages = read_messages(path)
        is_system = bool(messages) and messages[0]["role"] in ("system", "developer")
        self.system = messages[0]["content"] if is_system else None
        self.messages, self.dropped = messages[is_system:], 0


def read_messages(path: Path) -> list[Message]:
    """The messages of a JSON file: a list of them, or an object with the list as "messages"."""
    try:
        body: Any = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not a conversation: {error}") from None
    messages = body.get("messages") if isinstance(body, dict) else body
    if not isinstance(messages, list):
        raise ValueError(f'{path}: not a conversation: expected "messages", a list')
    for at, message in enumerate(messages):
        roles = ("system", "developer") if at == 0 else ()
        match message:
            case {"role": str(role), "content": str()} if role in (*roles, "user", "assistant"):
                continue
        raise ValueError(
            f"{path}: message {at + 1} is {str(message)[:60]!r}; expected a role (user or assistant, "
            "first also system) and a text as content"
        )
    return [{"role": m["role"], "content": m["content"]} for m in messages]
