"""bonsai-jax chat: a conversation.

    conversation.py  messages, and what answers them: knows no terminal
    backend.py       what answers: a Backend and its Replies
    local.py         a model in this process
    remote.py        a server that speaks OpenAI's API; server_options.py: its options; received.py: what it
                     has sent; remote_errors.py: what goes wrong with it
    commands.py      the /commands
    terminal.py      what is typed
    render.py        answers as they come
    notes.py         what the program is doing meanwhile

remote.py, terminal.py and render.py are imported when a chat begins.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from bonsai_jax.cli import errors, options
from bonsai_jax.cli.chat import commands
from bonsai_jax.cli.chat.backend import Backend, OnFull, ServerError
from bonsai_jax.cli.chat.commands import Outcome, Session
from bonsai_jax.cli.chat.conversation import Conversation
from bonsai_jax.cli.chat.local import Models
from bonsai_jax.cli.chat.server_options import ServerOptions
from bonsai_jax.cli.sampling_options import SamplingOptions
from bonsai_jax.cli.spread import spread
from bonsai_jax.progress import lines_shown_by, notice

CLOSE_S = 0.5  # seconds after which nobody waits for an engine that is still compiling


@spread
def command(
    *,
    ctx: typer.Context,
    model: options.LoadOptions,
    server: ServerOptions,
    max_new_tokens: options.NewTokens = -1,
    context: Annotated[
        int,
        typer.Option(
            "-c",
            "--ctx",
            min=0,
            metavar="N",
            help="Most tokens of the conversation that the model sees; 0: the model's own limit, or as many "
            "as a quarter of the free memory holds.",
        ),
    ] = 0,
    on_full: Annotated[
        OnFull,
        typer.Option(help="When the context is full: drop the oldest turns, or stop and say so."),
    ] = "drop",
    plain: Annotated[
        bool,
        typer.Option("--plain", help="Show answers as the model writes them, without rendering markdown."),
    ] = False,
    speculation: options.SpeculationOptions,
    answers: options.AnswerOptions,
    sampling: SamplingOptions,
    run: options.RunOptions,
    devices: options.DeviceOptions,
) -> None:
    """Talk with a model, in this process or at a server. Piped text is answered line by line.

    Enter sends a message; Alt+Enter, or a backslash at the end of a line, begins a new line. /help lists the
    commands, Ctrl-C stops an answer, /quit or Ctrl-D leaves.
    """
    typed = sys.stdin.isatty()
    loading = f"asking {server.url}" if server.url else f"loading {model.name or 'demo'}"
    with notice(f"{loading} ..."), _ended_by_interrupt():  # imports take seconds
        params = sampling.params()
        quiet = _no_echo() if typed else contextlib.nullcontext()
        models = Models(model, run, devices, context=context, speculation=speculation, typed=typed)
        opened = server.opened(ctx)
    open_: Callable[[str | None], Backend] = models.open if opened is None else opened.open
    with quiet:
        conversation = Conversation(
            open_(model.name),
            params,
            max_new_tokens,
            system=answers.system,
            think=answers.think,
            stop_texts=tuple(answers.stop or ()),
            ignore_eos=answers.ignore_eos,
            on_full=on_full,
        )
        session = Session(conversation, open_)
        try:
            with lines_shown_by(session.notes.show) if typed else contextlib.nullcontext():
                talk(session, typed=typed, plain=plain)
        finally:
            if not typed:
                models.close()
    if typed:
        _leave(models)


@contextlib.contextmanager
def _ended_by_interrupt() -> Iterator[None]:
    """Ctrl-C ends the process at once. An exception in the middle of an import would leave packages half
    initialized, and some of them then abort with a traceback."""

    def leave(*_: object) -> None:
        print(file=sys.stderr, flush=True)
        os._exit(128 + signal.SIGINT)

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _no_echo() -> contextlib.AbstractContextManager:
    from bonsai_jax.cli.chat import terminal

    return terminal.no_echo()


def _leave(models: Models) -> None:
    """Close the engine and end the process, without waiting for threads that still compile."""
    thread = threading.Thread(target=models.close, daemon=True)
    thread.start()
    thread.join(CLOSE_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def talk(session: Session, *, typed: bool, plain: bool) -> None:
    """Answer each message that is typed or piped, until the input ends.

    typed  whether a user types at a terminal
    plain  whether markdown is shown as it is
    """
    if typed:
        from bonsai_jax.cli.chat import terminal

        say(f"{session.conversation.backend.title}; /help lists the commands\n")
        read = terminal.Messages(name for command in commands.COMMANDS for name in command.names).ask
        session.conversation.warm_up()
    else:
        lines = piped()
        read = lambda _: next(lines, None)  # noqa: E731
    outcome = Outcome()
    while not outcome.leave:
        try:
            line = read(outcome.edit or "")
            if line is None:
                return
            outcome = respond(session, line, replaces=outcome.edit is not None, typed=typed, plain=plain)
        except KeyboardInterrupt:  # between an answer and the prompt, or while a model loads
            if not typed:
                raise
            outcome = Outcome()


def respond(session: Session, line: str, *, replaces: bool = False, typed: bool, plain: bool) -> Outcome:
    """Carry out a command, or answer a message. Errors become a line on stderr.

    replaces  whether a message takes the place of the last one
    """
    try:
        is_command = line.startswith("/") and not line.startswith("//")
        outcome = session.obey(line) if is_command else Outcome(ask=line.removeprefix("/"), replaces=replaces)
    except (ValueError, NotImplementedError, MemoryError, OSError, ImportError) as error:
        say(f"error: {errors.one_line(error, ())}")
        return Outcome()
    if outcome.say is not None:
        say(outcome.say)
    if outcome.ask is not None and outcome.ask.strip():
        try:
            how = {"replaces": outcome.replaces, "retry": outcome.retry}
            answer(session, outcome.ask, **how, typed=typed, plain=plain)
        except ValueError as error:
            say(f"error: {errors.one_line(error, ())}")
        except (RuntimeError, ServerError) as error:  # the conversation can still be saved
            if not typed:
                raise
            say(f"error: {errors.one_line(error, ())}")
    return outcome


def piped() -> Iterator[str]:
    """The lines of standard input."""
    try:
        yield from (line.rstrip("\n") for line in sys.stdin)
    except UnicodeDecodeError:
        raise ValueError("standard input: the next line is not UTF-8 text") from None


def answer(
    session: Session,
    text: str,
    *,
    replaces: bool = False,
    retry: int = 0,
    typed: bool,
    plain: bool,
) -> None:
    """Show the answer as it comes, until it ends or Ctrl-C is pressed.

    The arguments are those of `Conversation.ask` and `talk`.
    """
    from bonsai_jax.cli.chat import render

    conversation = session.conversation
    dropped, first = conversation.dropped, conversation.reply is None
    output = render.output(plain=plain)
    with contextlib.ExitStack() as stack:
        stack.enter_context(stopped_by_interrupt(conversation))
        pieces = conversation.ask(text, replaces=replaces, retry=retry)
        stack.enter_context(contextlib.closing(pieces))
        reply = conversation.reply
        assert reply is not None
        if conversation.dropped > dropped:
            count = conversation.dropped - dropped
            say(f"(the context is full: the model no longer sees the oldest {count} messages)")
        unread = reply.unread
        if typed and unread is None:
            output.wait("waiting for the server ...")
        elif typed and unread is not None and (first or unread > 200):
            output.wait(f"reading {unread:,} tokens ...")
        try:
            with session.notes.below(output):
                for piece in pieces:
                    output.add(piece.text, piece.events)
        finally:
            output.end()
    if typed:
        say(commands.status(conversation) + "\n", dim=True)
    elif reply.finish_reason == "length" and conversation.max_new_tokens < 0:
        say(commands.status(conversation))


@contextlib.contextmanager
def stopped_by_interrupt(conversation: Conversation) -> Iterator[None]:
    """Ctrl-C stops the answer at once, while the model reads or writes, and raises nothing."""
    before = signal.signal(signal.SIGINT, conversation.interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        conversation.resume()


def say(text: str, *, dim: bool = False) -> None:
    """Print a message of the program to stderr; stdout is for the model's text."""
    if sys.stderr.isatty():  # words wrap at the edge of the window
        from rich.console import Console
        from rich.text import Text

        Console(stderr=True).print(Text(text, "dim" if dim else ""))
    else:
        print(text, file=sys.stderr, flush=True)
