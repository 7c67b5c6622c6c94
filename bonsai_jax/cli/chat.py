"""bonsai-jax chat: a conversation through an engine, whose prefix cache stores the turns so far."""

import contextlib
import dataclasses
import signal
import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

from bonsai_jax.cli import options, thoughts
from bonsai_jax.cli.figures import CompileClock, Figures, summary
from bonsai_jax.cli.spread import spread

if TYPE_CHECKING:
    from bonsai_jax import Engine, Piece, SamplingParams

HELP = """\
/reset         begin a new conversation
/system TEXT   set the system message; without TEXT, remove it
/stats         show the figures of the last answer
/help          show this list
/quit, /exit   leave, as Ctrl-D does; Ctrl-C stops an answer"""


@dataclasses.dataclass
class Conversation:
    """The messages so far, and the engine that answers.

    messages  [{"role": ..., "content": ...}, ...], without the system message
    think     the chat template's enable_thinking; None: the template's default
    figures   those of the last answer
    reused    tokens of the last prompt that were already in the cache
    thinks    whether the last answer begins within a thought
    """

    engine: "Engine"
    sampling: "SamplingParams"
    max_new_tokens: int = -1
    system: str | None = None
    think: bool | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    messages: list[dict[str, str]] = dataclasses.field(default_factory=list)
    figures: Figures | None = None
    reused: int = 0
    thinks: bool = False
    clock: CompileClock = dataclasses.field(default_factory=CompileClock)

    def reset(self) -> None:
        """Forget the messages. The engine's prefix cache stays as it is."""
        self.messages = []

    def ask(self, text: str) -> Generator["Piece"]:
        """Stream the answer to a message. Closing the generator stops the answer; the text so far becomes
        part of the conversation.

        Raises ValueError, and forgets the message, if it does not fit the context.
        """
        model = self.engine.model
        messages = [*self.messages, {"role": "user", "content": text}]
        first = [{"role": "system", "content": self.system}] if self.system else []
        variables = options.template_variables(self.think)
        ids = model.tokenizer.encode_chat([*first, *messages], **variables)
        room = model.run.context - len(ids)
        if room < 1:
            raise ValueError(
                f"the conversation has {len(ids)} tokens and the context holds {model.run.context}: "
                "/reset begins a new one, and --ctx sets a larger context"
            )
        limit = min(self.max_new_tokens, room) if self.max_new_tokens >= 0 else room
        self.figures = Figures(len(ids), self.clock, speculates=self.engine.options.speculate is not None)
        self.reused, self.thinks = 0, thoughts.begun(model.tokenizer, ids)
        how = {"max_new_tokens": limit, "stop": self.stop, "ignore_eos": self.ignore_eos}
        handle = self.engine.submit(ids, self.sampling, **how)
        try:
            for piece in self.figures.watch(handle):
                self.reused += piece.cached_tokens
                self.figures.prompt_tokens = len(ids) - self.reused
                yield piece
        finally:
            handle.cancel()
            self.messages = [*messages, {"role": "assistant", "content": self.figures.text}]


@contextlib.contextmanager
def stop_on_interrupt() -> Iterator[list[int]]:
    """The first Ctrl-C appends to the yielded list instead of raising; the second one raises."""
    pressed: list[int] = []

    def note(number, frame):
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def answer(conversation: Conversation, text: str) -> None:
    """Print the answer as it comes, until it ends or Ctrl-C is pressed."""
    pieces, shown = conversation.ask(text), None
    try:
        with stop_on_interrupt() as interrupted, contextlib.closing(pieces):
            for piece in pieces:
                shown = shown or thoughts.Shown(conversation.thinks)
                print(shown.next(piece.text), end="", flush=True)
                if interrupted:
                    break
    except KeyboardInterrupt:
        pass
    print(shown.end() if shown else "", flush=True)
    figures = conversation.figures
    if figures and figures.finish_reason == "length" and conversation.max_new_tokens < 0:
        say("the context is full: /reset begins a new conversation")


def obey(conversation: Conversation, line: str) -> bool:
    """Carry out a /command. Returns whether the chat goes on."""
    name, _, argument = line.partition(" ")
    if name in ("/quit", "/exit"):
        return False
    if name == "/reset":
        conversation.reset()
    elif name == "/system":
        conversation.system = argument.strip() or None
    elif name == "/stats":
        say(stats(conversation))
    else:
        say(HELP if name == "/help" else f"{name} is no command\n{HELP}")
    return True


def stats(conversation: Conversation) -> str:
    figures = conversation.figures
    if figures is None:
        return "no answer yet"
    depth = conversation.reused + figures.prompt_tokens
    return (
        f"{summary(conversation.engine.model, figures, depth)}; "
        f"{conversation.reused} tokens of the prompt were in the cache; "
        f"context {depth + len(figures.tokens)} of {conversation.engine.model.run.context}"
    )


def say(text: str) -> None:
    """Print a message of the program to stderr; stdout is for the model's text."""
    print(text, file=sys.stderr, flush=True)


def lines() -> Iterator[str]:
    """Lines that the user types after a prompt, or piped lines, without a prompt."""
    if not sys.stdin.isatty():
        try:
            yield from (line.rstrip("\n") for line in sys.stdin)
        except UnicodeDecodeError:
            raise ValueError("standard input: the next line is not UTF-8 text") from None
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - lets input() edit lines and recall earlier ones
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            say("\n(/quit or Ctrl-D leaves)")
        except EOFError:
            say("")
            return


@spread
def command(
    *,
    model: options.LoadOptions,
    max_new_tokens: options.NewTokens = -1,
    context: options.Context = 0,
    speculate: options.Speculate = None,
    answers: options.AnswerOptions,
    sampling: options.SamplingOptions,
    run: options.RunOptions,
    devices: options.DeviceOptions,
) -> None:
    """Talk with a model, one message per line, typed or piped.

    /help lists the commands, /quit or Ctrl-D leaves, Ctrl-C stops an answer.
    """
    params = sampling.params()
    config = run.config(context=context, all_reduce=devices.all_reduce, speculate=speculate)
    loaded = model.load(config, devices.mesh())
    if loaded.tokenizer.chat_template is None:
        raise ValueError(f"{loaded.source} has no chat template: `bonsai-jax generate` continues plain text")
    from bonsai_jax import Engine

    with Engine(loaded, max_batch_size=1, speculate=speculate) as engine:
        talk(
            Conversation(
                engine,
                params,
                max_new_tokens,
                system=answers.system,
                think=answers.think,
                stop=tuple(answers.stop or ()),
                ignore_eos=answers.ignore_eos,
            )
        )


def talk(conversation: Conversation) -> None:
    """Answer each message that is typed or piped, until the input ends."""
    model = conversation.engine.model
    if sys.stdin.isatty():
        say(f"{model.source}, context {model.run.context}; /help lists the commands; /quit or Ctrl-D leaves")
    for line in lines():
        if line.startswith("/"):
            if not obey(conversation, line):
                break
        elif line.strip():
            try:
                answer(conversation, line)
            except ValueError as error:
                say(f"error: {error}")
