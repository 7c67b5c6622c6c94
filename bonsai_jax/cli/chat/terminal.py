"""What a user types: messages of several lines, pasted text, a history across runs."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import is_searching
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.shortcuts import CompleteStyle


def placeholder() -> HTML:
    """Stands at an empty prompt until it is left."""
    return HTML("" if get_app().is_done else "<ansibrightblack>a message, or /help</ansibrightblack>")


def history_file() -> Path:
    """In the user's state folder."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "bonsai-jax/chat_history"


class MessageHistory(FileHistory):
    """Messages in a file. A disk that is full loses the history, not the chat."""

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            super().store_string(string)


def history() -> History:
    """The messages of earlier runs; those of this one alone where no file can be written."""
    try:
        path = history_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.open("a").close()  # it may be there and not be ours
        return MessageHistory(path)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return InMemoryHistory()


class Commands(Completer):
    """Tab completes a /command."""

    def __init__(self, names: Iterable[str]):
        self.names = list(names)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        typed = document.text_before_cursor
        for name in self.names:
            if typed.startswith("/") and name.startswith(typed):
                yield Completion(f"{name} ", start_position=-len(typed), display=name)


def keys() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter", filter=~is_searching)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    @bindings.add("escape", "c-j")  # the same, typed while the program was busy
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @bindings.add("c-c", filter=~is_searching)
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return bindings


class Messages:
    """The messages that a user types at a prompt.

    commands  names that Tab completes
    """

    def __init__(self, commands: Iterable[str]):
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation="  ",
            history=history(),
            key_bindings=keys(),
            completer=Commands(commands),
            complete_style=CompleteStyle.READLINE_LIKE,
            complete_while_typing=False,
            enable_open_in_editor=True,
            tempfile_suffix=".md",
            placeholder=placeholder,
            output=create_output(always_prefer_tty=True),
        )

    def ask(self, text: str = "") -> str | None:
        """One message; None: the user leaves, with Ctrl-D, or Ctrl-C twice.

        text  what stands at the prompt for a start
        """
        interrupted = False
        while True:
            try:
                return self._session.prompt(default=text)
            except KeyboardInterrupt:
                if interrupted:
                    return None
                interrupted, text = True, ""
                print("(Ctrl-C again, Ctrl-D or /quit leaves)", file=sys.stderr, flush=True)
            except EOFError:
                return None


@contextlib.contextmanager
def no_echo() -> Iterator[None]:
    """Do not show keys that are typed while the program is busy. They appear at the next prompt."""
    try:
        import termios

        before = termios.tcgetattr(sys.stdin)
    except ImportError:  # not Unix
        yield
        return
    silent = [*before]
    silent[3] = before[3] & ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
