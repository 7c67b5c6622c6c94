"""A conversation with an engine, whose prefix cache stores the turns so far. It knows no terminal."""

import bisect
import dataclasses
import itertools
import json
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from bonsai_jax.cli import options
from bonsai_jax.cli.figures import CompileClock, Figures
from bonsai_jax.tokens.answer_parser import Event, Harmony, Tags, answer_parser

if TYPE_CHECKING:
    from bonsai_jax import Engine, Handle, SamplingParams

OnFull = Literal["drop", "stop"]
Message = dict[str, Any]


class Part(NamedTuple):
    """A part of an answer.

    text    as the model writes it
    events  what it is made of
    """

    text: str
    events: list[Event]


class Prompt(NamedTuple):
    """What the model reads: token ids, and the number of the first message that is in them."""

    ids: list[int]
    first: int


@dataclasses.dataclass
class Conversation:
    """The messages so far, and the engine that answers.

    messages  [{"role": ..., "content": ...}, ...], without the system message; answers as their parser's
              `message` has them
    dropped   how many of the oldest messages the model no longer sees, because the context was full
    on_full   whether a full context drops the oldest messages or ends the conversation
    think     the chat template's enable_thinking; None: the template's default
    figures   those of the last answer
    reused    tokens of the last prompt that were already in the cache
    unread    tokens of the last prompt that the prompt and answer before do not begin with
    """

    engine: "Engine"
    sampling: "SamplingParams"
    max_new_tokens: int = -1
    system: str | None = None
    think: bool | None = None
    stop_texts: tuple[str, ...] = ()
    ignore_eos: bool = False
    on_full: OnFull = "drop"
    messages: list[Message] = dataclasses.field(default_factory=list)
    dropped: int = 0
    figures: Figures | None = None
    reused: int = 0
    unread: int = 0
    clock: CompileClock = dataclasses.field(default_factory=CompileClock)
    _handle: "Handle | None" = None  # of the answer that is being written, or of `warm_up`
    _interrupted: bool = False
    _read: list[int] = dataclasses.field(default_factory=list)  # the last prompt and its answer

    @property
    def context(self) -> int:
        return self.engine.model.run.context

    @property
    def depth(self) -> int:
        """Tokens of the last prompt and its answer; 0 before the first."""
        figures = self.figures
        return 0 if figures is None else self.reused + figures.prompt_tokens + len(figures.tokens)

    def ask(self, text: str, *, replaces: bool = False, retry: int = 0) -> Generator[Part]:
        """Stream the answer to a message. Closing the generator, or `interrupt`, stops the answer. The text
        so far becomes part of the conversation; if there is none yet, the conversation stays as it is.

        replaces  whether the message takes the place of the last one and its answer
        retry     added to the seed, so that another try at a message gives another answer
        Raises ValueError, and changes nothing, if the message does not fit the context.
        """
        earlier = self.messages[: self._last()] if replaces else self.messages
        messages = [*earlier, {"role": "user", "content": text}]
        ids, self.dropped = self.prompt(messages)
        room = self.context - len(ids)
        limit = min(self.max_new_tokens, room) if self.max_new_tokens >= 0 else room
        sampling = self.sampling
        if sampling.seed is not None:
            sampling = dataclasses.replace(sampling, seed=sampling.seed + retry)
        self._cancel()  # what warms up
        how = {"max_new_tokens": limit, "stop": self.stop_texts, "ignore_eos": self.ignore_eos}
        self._handle = handle = self.engine.submit(ids, sampling, **how)
        if self._interrupted:
            handle.cancel()
        speculates = self.engine.options.speculate is not None
        self.figures = Figures(len(ids), self.clock, speculates=speculates)
        self.reused, parser = 0, answer_parser(self.engine.model.tokenizer, ids)
        self.unread = len(ids) - sum(1 for _ in itertools.takewhile(same, zip(ids, self._read, strict=False)))
        return self._parts(handle, self.figures, parser, ids, messages)

    def _parts(
        self,
        handle: "Handle",
        figures: Figures,
        parser: Tags | Harmony,
        ids: list[int],
        messages: list[Message],
    ) -> Generator[Part]:
        try:
            for piece in figures.watch(handle):
                self.reused += piece.cached_tokens
                figures.prompt_tokens = len(ids) - self.reused
                yield Part(piece.text, parser.next(piece.text))
            if events := parser.end():
                yield Part("", events)
        finally:
            stopped = not handle.done or figures.finish_reason == "cancelled"
            self._cancel()
            if figures.tokens:
                self._read = [*ids, *figures.tokens]
            if figures.text or not stopped:
                parser.end()
                self.messages = [*messages, parser.message()]

    def interrupt(self, *_: object) -> None:
        """Stop the answer that is being written, or the next one. A signal handler may call this."""
        self._interrupted = True
        if self._handle is not None:
            self._handle.cancel()

    def resume(self) -> None:
        """The next answer is not stopped by an earlier `interrupt`."""
        self._interrupted = False

    def warm_up(self) -> None:
        """Have the engine compile what the first answer takes, in its own thread. `ask` ends it."""
        ids = self.encode([{"role": "user", "content": "Hello"}])
        if len(ids) + 2 <= self.context:
            how = {"max_new_tokens": min(64, self.context - len(ids)), "ignore_eos": True}
            self._handle = self.engine.submit(ids, self.sampling, **how)

    def encode(self, messages: list[Message]) -> list[int]:
        """Token ids of the system message and these messages, in the model's chat template."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        variables = options.template_variables(self.think)
        return self.engine.model.tokenizer.encode_chat([*first, *messages], **variables)

    def prompt(self, messages: list[Message]) -> Prompt:
        """The prompt for these messages. The last one is the user's.

        A quarter of the context, or max_new_tokens if that is less, stays free for the answer. If the context
        is full, the oldest turns are dropped until half of it is free: then the next turns find the rest in
        the cache. Raises ValueError if the last message does not fit, or by on_full.
        """
        dropped = min(self.dropped, len(messages) - 1)
        ids = self.encode(messages[dropped:])
        turns = [i for i, m in enumerate(messages) if m["role"] == "user" and i >= dropped]
        quarter = max(1, self.context // 4)
        room = self.context - (min(self.max_new_tokens, quarter) if self.max_new_tokens >= 0 else quarter)
        if self.on_full == "stop":
            if len(ids) < self.context:
                return Prompt(ids, dropped)
            if len(turns) > 1:
                raise ValueError(
                    f"the conversation has {len(ids)} tokens and the context holds {self.context}: /reset "
                    "begins a new one, --on-full drop forgets the oldest turns, --ctx sets a larger context"
                )
        elif len(ids) <= room:
            return Prompt(ids, dropped)
        for limit, starts in ((self.context // 2, turns[:-1]), (room, turns), (self.context - 1, turns)):
            if (first := self._first_that_fits(messages, starts, limit)) is not None:
                return Prompt(self.encode(messages[first:]), first)
        alone = len(self.encode(messages[turns[-1] :]))
        raise ValueError(
            f"the message has {alone} tokens, with the system message and the template, and the context "
            f"holds {self.context}: --ctx sets a larger context"
        )

    def _first_that_fits(self, messages: list[Message], starts: list[int], limit: int) -> int | None:
        """The first of `starts` from which on the messages have at most `limit` tokens."""
        at = bisect.bisect_left(starts, True, key=lambda i: len(self.encode(messages[i:])) <= limit)
        return starts[at] if at < len(starts) else None

    def used(self) -> int:
        """Tokens of the conversation that the model sees."""
        shown = self.messages[self.dropped :]
        return len(self.encode(shown)) if shown or self.system else 0

    def reset(self) -> None:
        """Forget the messages. The engine's prefix cache stays as it is."""
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

    def switch(self, engine: "Engine") -> None:
        """Go on with another model."""
        if engine is self.engine:
            return
        self.engine, self.dropped, self.figures, self._handle, self._read = engine, 0, None, None, []

    def save(self, path: Path) -> None:
        """Write the conversation as JSON: the model's name, and all messages as OpenAI's API has them."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.engine.model.source, "messages": [*first, *self.messages]}
        path.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def load(self, path: Path) -> None:
        """Continue a conversation from a file that `save` wrote, or from any JSON with OpenAI's messages.
        Raises ValueError, and changes nothing, if the file has none."""
        messages = read_messages(path)
        is_system = bool(messages) and messages[0]["role"] in ("system", "developer")
        self.system = messages[0]["content"] if is_system else None
        self.messages, self.dropped = messages[is_system:], 0

    def _cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


def same(pair: tuple[int, int]) -> bool:
    return pair[0] == pair[1]


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
