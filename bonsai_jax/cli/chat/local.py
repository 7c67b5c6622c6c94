"""A model in this process: an engine, whose prefix cache stores the turns so far."""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from bonsai_jax.cli import options
from bonsai_jax.cli.chat.backend import Message, Part, Question
from bonsai_jax.cli.figures import CompileClock, Figures, summary
from bonsai_jax.progress import notice
from bonsai_jax.tokens.answer_parser import Harmony, Tags, answer_parser

if TYPE_CHECKING:
    from bonsai_jax import Engine, Handle, RunConfig
    from checkpoints import Checkpoint


class Prompt(NamedTuple):
    """What the model reads: token ids, and the number of the first message that is in them."""

    ids: list[int]
    first: int


@dataclasses.dataclass
class LocalReply:
    """An answer by an engine.

    ids      of the prompt
    unread   tokens of it that the prompt and answer before do not begin with
    reused   tokens of it that were already in the cache
    """

    local: "Local"
    handle: "Handle"
    ids: list[int]
    dropped: int
    unread: int
    parser: Tags | Harmony
    figures: Figures
    reused: int = 0

    @property
    def text(self) -> str:
        return self.figures.text

    @property
    def finish_reason(self) -> str | None:
        return self.figures.finish_reason

    @property
    def new_tokens(self) -> int:
        return len(self.figures.tokens)

    @property
    def depth(self) -> int:
        return self.reused + self.figures.prompt_tokens + len(self.figures.tokens)

    @property
    def decode_tok_s(self) -> float | None:
        return self.figures.decode_tok_s

    def parts(self) -> Iterator[Part]:
        for piece in self.figures.watch(self.handle):
            self.reused += piece.cached_tokens
            self.figures.prompt_tokens = len(self.ids) - self.reused
            yield Part(piece.text, self.parser.next(piece.text))
        if events := self.parser.end():
            yield Part("", events)

    def cancel(self) -> None:
        self.handle.cancel()

    def message(self) -> Message:
        self.parser.end()
        return self.parser.message()

    def stats(self) -> str:
        model, read = self.local.engine.model, self.reused + self.figures.prompt_tokens
        return (
            f"{summary(model, self.figures, read)}; {self.reused} tokens of the prompt were in the cache; "
            f"context {self.depth} of {self.local.context}"
        )


class Local:
    """An engine that answers one conversation."""

    fixed = frozenset[str]()

    def __init__(self, engine: "Engine"):
        self.engine = engine
        self._clock = CompileClock()
        self._warming: Handle | None = None
        self._last: LocalReply | None = None
        self._read: list[int] = []  # the last prompt and its answer

    @property
    def name(self) -> str:
        return self.engine.model.source

    @property
    def title(self) -> str:
        return f"{self.engine.model.name}, context {self.context:,}"

    @property
    def context(self) -> int:
        return self.engine.model.run.context

    def answer(self, question: Question) -> LocalReply:
        ids, dropped = self.prompt(question)
        room, most = self.context - len(ids), question.max_new_tokens
        how: dict[str, Any] = {"stop": question.stop_texts, "ignore_eos": question.ignore_eos}
        if self.engine.saves_states:
            how["checkpoints_at"] = self.places(question, dropped)
        self._cool()
        handle = self.engine.submit(
            ids, question.sampling, max_new_tokens=min(most, room) if most >= 0 else room, **how
        )
        figures = Figures(len(ids), self._clock, speculates=self.engine.options.speculate is not None)
        if self._last is not None and self._last.figures.tokens:  # else it was stopped while it read
            self._read = [*self._last.ids, *self._last.figures.tokens]
        unread = len(ids) - sum(1 for _ in itertools.takewhile(same, zip(ids, self._read, strict=False)))
        parser = answer_parser(self.engine.model.tokenizer, ids)
        self._last = LocalReply(self, handle, ids, dropped, unread, parser, figures)
        return self._last

    def used(self, question: Question) -> int:
        shown = question.with_system(question.dropped)
        return len(self.encode(question, question.dropped)) if shown else 0

    def warm_up(self, question: Question) -> None:
        """Have the engine compile what the first answer takes, in its own thread."""
        ids = self.encode(dataclasses.replace(question, messages=[{"role": "user", "content": "Hello"}]))
        if len(ids) + 2 <= self.context:
            how = {"max_new_tokens": min(64, self.context - len(ids)), "ignore_eos": True}
            self._warming = self.engine.submit(ids, question.sampling, **how)

    def _cool(self) -> None:
        if self._warming is not None:
            self._warming.cancel()
            self._warming = None

    def encode(self, question: Question, first: int = 0) -> list[int]:
        """Token ids of the system message and the messages from this one on, in the model's template."""
        variables = options.template_variables(question.think)
        return self.engine.model.tokenizer.encode_chat(question.with_system(first), **variables)

    def places(self, question: Question, first: int) -> tuple[int, ...]:
        """Where later prompts will part ways with that of the messages from this one on, in tokens
        (tokens/departures.py)."""
        from bonsai_jax.tokens import departures  # here: `--help` waits for no tokenizer

        variables = options.template_variables(question.think)
        shown, tokenizer = question.with_system(first), self.engine.model.tokenizer
        _, places = departures.encode_chat(tokenizer, shown, **variables)
        return places

    def prompt(self, question: Question) -> Prompt:
        """The prompt for these messages.

        A quarter of the context, or max_new_tokens if that is less, stays free for the answer. If the context
        is full, the oldest turns are dropped until half of it is free: then the next turns find the rest in
        the cache. Raises ValueError if the last message does not fit, or by on_full.
        """
        messages, most = question.messages, question.max_new_tokens
        dropped = min(question.dropped, len(messages) - 1)
        ids = self.encode(question, dropped)
        turns = [i for i, m in enumerate(messages) if m["role"] == "user" and i >= dropped]
        quarter = max(1, self.context // 4)
        room = self.context - (min(most, quarter) if most >= 0 else quarter)
        if question.on_full == "stop":
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
            if (first := self._first_that_fits(question, starts, limit)) is not None:
                return Prompt(self.encode(question, first), first)
        alone = len(self.encode(question, turns[-1]))
        raise ValueError(
            f"the message has {alone} tokens, with the system message and the template, and the context "
            f"holds {self.context}: --ctx sets a larger context"
        )

    def _first_that_fits(self, question: Question, starts: list[int], limit: int) -> int | None:
        """The first of `starts` from which on the messages have at most `limit` tokens."""
        at = bisect.bisect_left(starts, True, key=lambda i: len(self.encode(question, i)) <= limit)
        return starts[at] if at < len(starts) else None


def same(pair: tuple[int, int]) -> bool:
    return pair[0] == pair[1]


class Models:
    """Opens models by their names, one at a time: there may be no room for two.

    typed  whether a user types at a terminal: the first message takes a while
    """

    def __init__(
        self,
        model: options.LoadOptions,
        run: options.RunOptions,
        devices: options.DeviceOptions,
        *,
        context: int,
        speculation: options.SpeculationOptions,
        typed: bool,
    ):
        self._model, self._run, self._devices = model, run, devices
        self._context, self._speculation, self._typed = context, speculation, typed
        self._open: Local | None = None

    def open(self, name: str | None) -> Local:
        """The model of this name, which may be open already. Raises what loading it raises."""
        from bonsai_jax import Engine
        from pallas_kernels import device

        if self._open is not None and self._open.name == name:
            return self._open
        how: dict[str, Any] = {"max_batch_size": 1, "speculate": self._speculation.proposer}
        compile_ahead = functools.partial(Engine.compile_ahead, **how)
        named, devices = dataclasses.replace(self._model, name=name), self._devices
        with notice(f"loading {name or 'demo'} ..."):
            checkpoint = named.checkpoint()
            self.close()
            mesh = devices.mesh()
            config = self._run.config(
                context=self._context, all_reduce=devices.all_reduce, speculation=self._speculation
            )
            config = whole_context(checkpoint, config, devices.tensor_parallel, offline=named.offline)
        # Two cores of a CPU make a first answer sooner if they compile nothing else until then.
        first = compile_ahead if self._typed or device.platform() != "cpu" else None
        loaded = named.load(config, mesh, checkpoint, on_shapes=first)
        if loaded.tokenizer.chat_template is None:
            raise ValueError(
                f"{loaded.source} has no chat template: `bonsai-jax generate` continues plain text"
            )
        if self._typed:
            compile_ahead(loaded)
        self._open = Local(Engine(loaded, **how))
        return self._open

    def close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.engine.close()


def whole_context(
    checkpoint: "Checkpoint", config: "RunConfig", parts: int, *, offline: bool = False
) -> "RunConfig":
    """The RunConfig with the model's own context, or as much of it as memory holds, unless it names one."""
    from bonsai_jax.model import opened_draft_model
    from bonsai_jax.network import architectures
    from bonsai_jax.weights import memory, plan

    if config.context:
        return config
    draft_checkpoint = opened_draft_model(config, offline=offline)
    description = architectures.describe(checkpoint, draft=config.draft, draft_model=draft_checkpoint)
    resolved = plan.resolve(description, config, parts)
    longest = memory.longest_context(description, resolved, parts)
    return dataclasses.replace(config, context=longest, weights=resolved.weights)
