"""bonsai-jax chat: a conversation through an engine, whose prefix cache keeps what the model has read."""

import contextlib
import dataclasses
import signal
import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

from bonsai_jax.cli import options, thoughts
from bonsai_jax.cli.figures import CompileClock, Figures, line_of

if TYPE_CHECKING:
    from bonsai_jax import Engine, Piece, SamplingParams

HELP = """\
/reset         begin a new conversation
/system TEXT   set the system message; without TEXT, remove it
/stats         figures of the last answer
/help          this list
/quit, /exit   leave, as does Ctrl-D; Ctrl-C stops an answer"""


@dataclasses.dataclass
class Conversation:
    """Messages so far, and the engine that answers.

    messages  [{"role": ..., "content": ...}, ...], without the system message
    think     the template's enable_thinking; None: as it has it
    figures   of the last answer; `reused` is how many of its prompt's tokens were in the cache, and `thinks`
              whether it begins within a thought
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
        """Forget the messages; what the engine's pages hold may still be of use."""
        self.messages = []

    def ask(self, text: str) -> Generator["Piece"]:
        """Stream the answer to a message. Close the generator to stop it: what was said stays.

        Raises ValueError, and forgets the message, when it does not fit the context.
        """
        model = self.engine.model
        messages = [*self.messages, {"role": "user", "content": text}]
        first = [{"role": "system", "content": self.system}] if self.system else []
        thinking = {} if self.think is None else {"enable_thinking": self.think}
        ids = model.tokenizer.encode_chat([*first, *messages], **thinking)
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
    """Ctrl-C fills the yielded list instead of raising; a second one raises."""
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
    seen = conversation.figures
    if seen and seen.finish_reason == "length" and conversation.max_new_tokens < 0:
        say("the context is full: /reset begins a new conversation")


def obey(conversation: Conversation, line: str) -> bool:
    """Carry out a /command. Returns whether the program goes on."""
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
    seen = conversation.figures
    if seen is None:
        return "no answer yet"
    depth = conversation.reused + seen.prompt_tokens
    return (
        f"{line_of(conversation.engine.model, seen, depth)}; "
        f"{conversation.reused} tokens of the prompt were in the cache; "
        f"context {depth + len(seen.tokens)} of {conversation.engine.model.run.context}"
    )


def say(text: str) -> None:
    """What the program itself says: stdout is the model's."""
    print(text, file=sys.stderr, flush=True)


def lines() -> Iterator[str]:
    """What the user types, or the lines of piped input, without any decoration then."""
    if not sys.stdin.isatty():
        try:
            yield from (line.rstrip("\n") for line in sys.stdin)
        except UnicodeDecodeError:
            raise ValueError("standard input: what follows is not UTF-8 text") from None
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input() then edits lines and remembers them
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            say("\n(/quit or Ctrl-D leaves)")
        except EOFError:
            say("")
            return


def command(
    model: options.ModelName = None,
    max_new_tokens: options.NewTokens = -1,
    system: options.System = None,
    think: options.Think = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    temperature: options.Temperature = 0.8,
    top_k: options.TopK = 40,
    top_p: options.TopP = 0.95,
    min_p: options.MinP = 0.05,
    temperature_first: options.TemperatureFirst = False,
    repetition_penalty: options.RepeatPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.Seed = -1,
    speculate: options.Speculate = None,
    context: options.Context = 0,
    impl: options.Impl = "auto",
    schedule: options.Schedule = "auto",
    weights: options.Weights = "auto",
    cache_dtype: options.CacheType = None,
    activation_bits: options.ActivationBits = "8",
    tensor_parallel: options.TensorParallel = 1,
    all_reduce: options.AllReduce = "auto",
    offline: options.Offline = False,
    no_compile_cache: options.NoCompileCache = False,
) -> None:
    """Talk with a model, one message a line, typed or piped.

    /help lists the commands, /quit or Ctrl-D leaves, Ctrl-C stops an answer.
    """
    params = options.sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        temperature_first=temperature_first,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
    )
    run = options.run_config(
        impl=impl,
        schedule=schedule,
        context=context,
        weights=weights,
        cache_dtype=cache_dtype,
        activation_bits=activation_bits,
        all_reduce=all_reduce,
        speculate=speculate,
    )
    mesh = options.mesh(tensor=tensor_parallel)
    loaded = options.load(model, run, on=mesh, offline=offline, no_compile_cache=no_compile_cache)
    if loaded.tokenizer.chat_template is None:
        raise ValueError(f"{loaded.source} has no chat template: `bonsai-jax generate` continues plain text")
    from bonsai_jax import Engine

    with Engine(loaded, max_batch_size=1, speculate=speculate) as engine:
        talk(
            Conversation(
                engine,
                params,
                max_new_tokens,
                system=system,
                think=think,
                stop=tuple(stop or ()),
                ignore_eos=ignore_eos,
            )
        )


def talk(conversation: Conversation) -> None:
    """Answer what is typed or piped in, until its end."""
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
