"""The /commands of a chat."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bonsai_jax.cli import aliases
from bonsai_jax.cli.chat.backend import Backend
from bonsai_jax.cli.chat.conversation import Conversation
from bonsai_jax.cli.chat.notes import Notes


class Outcome(NamedTuple):
    """What a command asks for.

    say    text for the user
    ask    a message to be answered now
    replaces, retry   as for Conversation.ask
    edit   a message that the user changes; what is sent then replaces the last one
    leave  whether the chat ends
    """

    say: str | None = None
    ask: str | None = None
    replaces: bool = False
    retry: int = 0
    edit: str | None = None
    leave: bool = False


@dataclasses.dataclass
class Session:
    """A conversation, and what its commands remember.

    open     opens another model by its name, and closes the one before
    file     where the conversation was saved or loaded
    retries  how often the last message has been answered again
    notes    what the program is doing while an answer comes
    """

    conversation: Conversation
    open: Callable[[str], Backend]
    file: Path | None = None
    retries: int = 0
    notes: Notes = dataclasses.field(default_factory=Notes)

    def obey(self, line: str) -> Outcome:
        """Carry out a line that begins with a slash. Raises ValueError or OSError if that cannot be done."""
        name, *argument = line.split(maxsplit=1)
        command = next((command for command in COMMANDS if name in command.names), None)
        if command is None:
            shown = " ".join(command.names[0] for command in COMMANDS)
            return Outcome(f"{name} is no command; there are: {shown} (// begins a message with a slash)")
        if name != "/retry":
            self.retries = 0
        return command.carry_out(self, "".join(argument).strip())


def _undo(session: Session, _: str) -> Outcome:
    text = session.conversation.undo()
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return Outcome(f"forgotten: {' '.join(shown.split())}")


def _retry(session: Session, _: str) -> Outcome:
    session.retries += 1
    return Outcome(ask=session.conversation.last_message(), replaces=True, retry=session.retries)


def _edit(session: Session, _: str) -> Outcome:
    return Outcome(edit=session.conversation.last_message())


def _reset(session: Session, _: str) -> Outcome:
    session.conversation.reset()
    return Outcome("a new conversation")


def _system(session: Session, text: str) -> Outcome:
    session.conversation.system = text or None
    return Outcome("the system message is set" if text else "no system message")


def _set(session: Session, text: str) -> Outcome:
    conversation = session.conversation
    name, _, value = text.replace("=", " ").partition(" ")
    values = settings(conversation)
    if not name:
        return Outcome("\n".join(f"{key} {_shown(value)}" for key, value in values.items()))
    key = setting_name(name)
    if key in conversation.backend.fixed:
        raise ValueError(f"{key} is set where the model runs, by its server")
    if key not in values:
        raise ValueError(f"/set has no {name}; it sets {', '.join(values)}")
    if not value.strip():
        return Outcome(f"{key} {_shown(values[key])}")
    change(conversation, key, value.strip())
    return Outcome(f"{key} {_shown(settings(conversation)[key])}")


def settings(conversation: Conversation) -> dict[str, object]:
    """What /set changes, by name."""
    fields = dataclasses.asdict(conversation.sampling)
    unset = {"logit_bias", "dry_sequence_breakers", *conversation.backend.fixed}  # lists, and what others set
    values = {name: value for name, value in fields.items() if name not in unset}
    return {**values, "max_new_tokens": conversation.max_new_tokens, "think": conversation.think}


OUR_SETTINGS = {
    "temp": "temperature",
    "repeat_penalty": "repetition_penalty",
    "typical": "typical_p",
    "top_nsigma": "top_n_sigma",
    "dynatemp_exp": "dynatemp_exponent",
}


def setting_name(name: str) -> str:
    """A setting as our flags, the library or other programs name it, as `settings` has it."""
    flag = aliases.our_name(name.lstrip("-")).replace("-", "_")
    return OUR_SETTINGS.get(flag, flag)


WORDS = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}
UNSET = ("none", "default", "random")


def change(conversation: Conversation, key: str, text: str) -> None:
    """Set one of `settings`. Raises ValueError for a value that it cannot have."""
    word = text.lower()
    if key == "think":
        if word not in (*WORDS, *UNSET):
            raise ValueError(f"think is {text!r}; it must be on, off or default")
        conversation.think = WORDS.get(word)
    elif key == "max_new_tokens":
        number = _number(text)
        if not isinstance(number, int) or number < -1 or number == 0:
            raise ValueError(f"max_new_tokens is {text}; it must be a whole number, 1 or more, or -1")
        conversation.max_new_tokens = number
    elif key == "temperature_first":
        if word not in WORDS:
            raise ValueError(f"temperature_first is {text!r}; it must be on or off")
        conversation.sampling = dataclasses.replace(conversation.sampling, temperature_first=WORDS[word])
    else:
        unset = key == "seed" and word in (*UNSET, "-1")
        value = None if unset else _number(text)
        try:
            # pyrefly: ignore[bad-argument-type]
            conversation.sampling = dataclasses.replace(conversation.sampling, **{key: value})
        except ValueError as error:
            raise ValueError(str(error).removeprefix("SamplingParams: ")) from None


def _number(text: str) -> int | float | str:
    """A number if the text is one; else the text, which SamplingParams refuses by name."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _shown(value: object) -> str:
    if value is None:
        return "default"
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


def _switch(session: Session, name: str) -> None:
    session.conversation.switch(session.open(name))


def _model(session: Session, name: str) -> Outcome:
    conversation = session.conversation
    if name:
        with contextlib.ExitStack() as undo:  # also after Ctrl-C
            undo.callback(_switch, session, conversation.backend.name)
            _switch(session, name)
            undo.pop_all()
    return Outcome(conversation.backend.title)


def _save(session: Session, name: str) -> Outcome:
    path = Path(name).expanduser() if name else session.file
    if path is None:
        raise ValueError("/save needs the name of a file")
    if path != session.file and path.exists():
        raise ValueError(f"{path}: there is such a file already; give another name")
    session.conversation.save(path)
    session.file = path
    return Outcome(f"{path}: {_count(len(session.conversation.messages), 'message')}")


def _load(session: Session, name: str) -> Outcome:
    if not name:
        raise ValueError("/load needs the name of a file")
    path = Path(name).expanduser()
    session.conversation.load(path)
    session.file = path
    return Outcome(f"{path}: {_count(len(session.conversation.messages), 'message')}")


def _tokens(session: Session, _: str) -> Outcome:
    conversation = session.conversation
    used, context = conversation.used(), conversation.backend.context or 0
    dropped = f"; the model no longer sees the oldest {_count(conversation.dropped, 'message')}"
    return Outcome(
        f"{used:,} of {context:,} tokens are used, {max(0, context - used):,} are free"
        + dropped * (conversation.dropped > 0)
    )


def _stats(session: Session, _: str) -> Outcome:
    reply = session.conversation.reply
    return Outcome("no answer yet" if reply is None else reply.stats())


def _help(session: Session, _: str) -> Outcome:
    return Outcome(HELP)


def _quit(session: Session, _: str) -> Outcome:
    return Outcome(leave=True)


class Command(NamedTuple):
    """A command. `names[0]` is the one that /help shows; the others are what other programs call it."""

    names: tuple[str, ...]
    argument: str
    summary: str
    carry_out: Callable[[Session, str], Outcome]


COMMANDS = (
    Command(("/undo",), "", "forget the last message and its answer", _undo),
    Command(("/retry", "/regen"), "", "answer the last message again", _retry),
    Command(("/edit",), "", "change the last message and send it again", _edit),
    Command(("/reset", "/clear", "/new"), "", "begin a new conversation", _reset),
    Command(("/system",), "TEXT", "set the system message; without TEXT, remove it", _system),
    Command(("/set",), "NAME VALUE", "set temperature, seed, think ...; without NAME, list them", _set),
    Command(("/model",), "MODEL", "go on with another model; without MODEL, name this one", _model),
    Command(("/save",), "FILE", "write the conversation to a JSON file", _save),
    Command(("/load",), "FILE", "continue a conversation from a file", _load),
    Command(("/tokens",), "", "show how much of the context is used", _tokens),
    Command(("/stats",), "", "show the figures of the last answer", _stats),
    Command(("/help", "/?"), "", "show this list", _help),
    Command(("/quit", "/exit", "/bye"), "", "leave, as /exit and Ctrl-D do", _quit),
)  # fmt: skip
KEYS = """\
//...                a message that begins with a slash
Enter                sends the message
Alt+Enter            begins a new line, as Enter after a \\ does
Up, Ctrl-R           earlier messages, also of other days
Ctrl-X Ctrl-E        opens the message in your editor
Ctrl-C               stops the answer, and keeps what came"""
HELP = "\n".join(f"{f'{c.names[0]} {c.argument}':21}{c.summary}" for c in COMMANDS) + "\n" + KEYS


def status(conversation: Conversation) -> str:
    """A line after an answer: how it ended, its length and speed, and how full the context is."""
    reply, context = conversation.reply, conversation.backend.context
    assert reply is not None
    parts = []
    if reply.finish_reason == "cancelled":
        if not reply.text:
            return "stopped; the conversation stays as it was"
        parts.append("stopped")
    elif reply.finish_reason == "length":
        is_full = context is not None and reply.depth is not None and reply.depth >= context
        limit = "the server" if conversation.max_new_tokens < 0 else "max_new_tokens"
        parts.append("the context is full" if is_full else f"cut off by {limit}")
    if reply.decode_tok_s is not None:
        parts.append(f"{reply.decode_tok_s:.1f} tok/s")
    if reply.new_tokens is not None:
        parts.append(_count(reply.new_tokens, "token"))
    if reply.depth is not None:
        parts.append(f"context {reply.depth:,}" + (f" of {context:,}" if context is not None else ""))
    return ", ".join(parts)


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" + "s" * (n != 1)
