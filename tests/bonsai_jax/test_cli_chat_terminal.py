"""The command `chat` at a terminal: keys, pasted text, the window's size, and how answers look."""

import io
import json
import re
import time

import pyte
import pytest
from prompt_toolkit.history import InMemoryHistory
from rich.console import Console

from bonsai_jax.cli.chat import render, terminal
from bonsai_jax.cli.chat.notes import Notes
from bonsai_jax.progress import lines_shown_by, said_after
from bonsai_jax.tokens.answer_parser import Tags
from tests.bonsai_jax.command_line import TINY
from tests.bonsai_jax.pseudo_terminal import ALT_ENTER, CTRL_C, CTRL_D, CTRL_L, CTRL_U, UP, Terminal, Tmux

AT_PROMPT = r"^> a message, or /help\Z"


def talk(path, turns):
    """A conversation in a file."""
    said = [("user", "What do trees know of time? " * 8), ("assistant", "More than the wind. " * 8)] * turns
    path.write_text(json.dumps([{"role": role, "content": text} for role, text in said]))


def messages(path):
    return [message["content"] for message in json.loads(path.read_text())["messages"]]


def clear(window):
    """An empty screen, so that what a test waits for is not an older line."""
    window.wait(AT_PROMPT)
    window.type(CTRL_L)
    window.wait(r"\A" + AT_PROMPT)


def send(window, text, expected):
    """Type a line at an empty screen and wait for what it shows."""
    clear(window)
    window.type(f"{text}\r")
    window.wait(expected)


@pytest.mark.parametrize("kind", [Terminal, pytest.param(Tmux, marks=pytest.mark.slow)])
def test_a_chat_in_a_terminal(kind, tmp_path):
    """One process for all of it, because starting takes most of the time."""
    talk(tmp_path / "long.json", 5), talk(tmp_path / "too_long.json", 12)
    flags = ("--ignore-eos", "--temp", 0, "-n", 8, "-c", 2048)
    with kind(
        "chat", "-m", TINY, *flags, folder=tmp_path, pauses=True, XDG_STATE_HOME=str(tmp_path)
    ) as window:
        window.wait(AT_PROMPT)
        assert "tiny-llama:q8_0, context 2,048; /help lists the commands" in window.text
        pasted_lines_are_one_message(window)
        ctrl_c_while_the_prompt_is_read(window)
        messages_typed_during_an_answer_come_next(window)
        ctrl_c_in_an_answer_in_a_narrower_window(window)
        a_full_context_drops_the_oldest_turns(window)
        a_message_is_changed_and_sent_again(window)
        earlier_messages_come_back_with_the_arrow_key(window)
        ctrl_c_at_the_prompt(window)
        assert window.exit_status() == 0 and "Traceback" not in window.text


def pasted_lines_are_one_message(window):
    clear(window)
    window.paste("one\ntwo\nthree")
    window.wait(r"\A> one\n  two\n  three\Z")
    window.type("\r")
    window.wait(r"^cut off by max_new_tokens, .*8 tokens, context \d+ of 2,048$")
    # Alt+Enter and a backslash begin a new line.
    send(window, f"four{ALT_ENTER}five\\\rsix", r"\A> four\n  five\n  six\n(.*\n)+cut off")
    send(window, "/save pasted.json", "^pasted.json: 4 messages$")
    said = messages(window.folder / "pasted.json")
    assert said[0::2] == ["one\ntwo\nthree", "four\nfive\nsix"]


def ctrl_c_while_the_prompt_is_read(window):
    send(window, "/load long.json", "^long.json: 10 messages$")
    window.pause(tokens=0)
    send(window, "Hi", r"\A> Hi\nreading \d,\d+ tokens \.\.\.\Z")
    window.type(CTRL_C)
    window.wait(r"\A> Hi\nstopped; the conversation stays as it was\n\n> ")
    window.go_on()
    send(window, "/save read.json", "^read.json: 10 messages$")


def messages_typed_during_an_answer_come_next(window):
    window.pause(tokens=0)
    send(window, "seven", r"\A> seven\nreading \d,\d+ tokens \.\.\.\Z")
    window.type("/tokens\reight")
    window.go_on()
    window.wait(r"^cut off by max_new_tokens, .*\n\n> /tokens\n.* tokens are used, .*\n> eight\Z")
    window.type(CTRL_C)


def ctrl_c_in_an_answer_in_a_narrower_window(window):
    """The text so far stays."""
    send(window, "/reset", "^a new conversation$")
    send(window, "/set max_new_tokens -1", "^max_new_tokens -1$")
    window.pause(tokens=40)
    send(window, "Hi", r"\A> Hi\n.*\S")
    window.resize(50)
    window.type(CTRL_C)
    window.wait(r"^stopped, .*\d\s+tokens?,\s+context")
    window.go_on()
    send(window, "/save stopped.json", "^stopped.json: 2 messages$")
    question, answer = messages(window.folder / "stopped.json")
    assert question == "Hi" and len(answer) > 0
    window.resize(80)


def a_full_context_drops_the_oldest_turns(window):
    send(window, "/load too_long.json", "^too_long.json: 24 messages$")
    send(window, "/set max_new_tokens 4", "^max_new_tokens 4$")
    send(
        window,
        "And now?",
        r"\A> And now\?\n\(the context is full: the model no longer (.*\n)+cut off .*4 tokens,",
    )


def a_message_is_changed_and_sent_again(window):
    send(window, "/edit", r"\A> /edit\n> And now\?\Z")
    window.type(f"{CTRL_U}And then?\r")
    window.wait(r"^> And then\?\n(.*\n)+cut off")
    send(window, "/save edited.json", "^edited.json: 26 messages$")
    assert messages(window.folder / "edited.json")[24] == "And then?"


def earlier_messages_come_back_with_the_arrow_key(window):
    clear(window)
    window.type(UP)
    window.wait(r"\A> /save edited.json\Z")
    window.type(UP)
    window.wait(r"\A> And then\?\Z")
    window.type(CTRL_C)


def ctrl_c_at_the_prompt(window):
    """It clears what is typed, then leaves when it is pressed twice."""
    clear(window)
    window.type("never sent")
    window.wait(r"\A> never sent\Z")
    window.type(CTRL_C)
    window.wait(r"\A" + AT_PROMPT)
    window.type(CTRL_C)
    window.wait(r"^\(Ctrl-C again, .*\n> a message, or /help\Z")
    window.type(CTRL_C)


def test_the_next_run_has_the_messages_of_the_last(tmp_path):
    """And Ctrl-C while the model loads ends it, as a shell reports it."""
    options = {"XDG_STATE_HOME": str(tmp_path)}
    terminal.MessageHistory(tmp_path / "bonsai-jax" / "chat_history")  # as written by the run before
    (tmp_path / "bonsai-jax").mkdir()
    terminal.MessageHistory(tmp_path / "bonsai-jax" / "chat_history").store_string("first line\nsecond line")
    with Terminal("chat", "-m", TINY, "-n", 4, **options) as window:
        window.wait(AT_PROMPT)
        window.type(UP)
        window.wait(r"^> first line\n  second line$")
        window.type("!\r")
        window.wait("4 tokens, context")
        window.wait(AT_PROMPT)
        window.type(CTRL_D)
        assert window.exit_status() == 0
    assert [*terminal.MessageHistory(tmp_path / "bonsai-jax" / "chat_history").load_history_strings()] == [
        "first line\nsecond line!",
        "first line\nsecond line",
    ]


def test_ctrl_c_while_the_model_loads_ends_the_chat():
    with Terminal("chat", "-m", TINY) as window:
        window.wait("^loading synth:tiny-llama")
        window.type(CTRL_C)
        assert window.exit_status() == 130
    assert "Traceback" not in window.text


def test_without_a_folder_for_it_there_is_a_history_of_this_run(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert isinstance(terminal.history(), InMemoryHistory)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    terminal.history().store_string("kept")
    assert terminal.history_file().stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(terminal.FileHistory, "store_string", lambda *_: (_ for _ in ()).throw(OSError))
    terminal.history().store_string("the disk is full")


class Window:
    """A Screen, and what a terminal shows of it."""

    def __init__(self, columns=40, rows=60, markdown=True):
        self.terminal, self.output = pyte.Screen(columns, rows), io.StringIO()
        self.terminal.set_mode(pyte.modes.LNM)  # "\n" returns too, as a terminal's driver has it
        self._stream = pyte.Stream(self.terminal)
        self.screen = render.Screen(markdown=markdown)
        self.resize(columns, rows)

    def resize(self, columns, rows):
        self.terminal.resize(rows, columns)
        console = Console(file=self.output, force_terminal=True, width=columns, height=rows)
        self.screen.region.console = console

    def add(self, text, size=1000, parser=None):
        parser = parser or Tags()
        for at in range(0, len(text), size):
            self.screen.add(text[at : at + size], parser.next(text[at : at + size]))
        self.screen.add("", parser.end())

    @property
    def lines(self):
        self._stream.feed(self.output.getvalue())
        self.output.seek(0)
        self.output.truncate()
        return "\n".join(line.rstrip() for line in self.terminal.display).rstrip().split("\n")


ANSWER = """<think>
Which trees does the user mean?
</think>

# Trees

An **oak** is not a bonsai, though a bonsai can be an oak; see [a page](https://example.org).
Line breaks stay, and <b>tags</b> too.

1. Water
   - rain
2. Light

```python
print("trees")
```

| tree | age |
|---|---|
| oak | 300 |

Last words."""
SHOWN = """\
Which trees does the user mean?

Trees

An oak is not a bonsai, though a bonsai
can be an oak; see a page
(https://example.org).
Line breaks stay, and <b>tags</b> too.

 1 Water
    • rain
 2 Light

print("trees")

 tree  age
 ─────────
 oak   300

Last words."""


@pytest.fixture
def at_once(monkeypatch):
    """Every piece is drawn."""
    monkeypatch.setattr(render, "DRAW_EVERY_S", 0)
    monkeypatch.setattr(render, "DRAW_SHARE", float("inf"))


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_is_rendered_as_it_comes(at_once, size):
    window = Window()
    window.screen.wait("reading 12 tokens ...")
    assert window.lines == ["reading 12 tokens ..."]
    window.add(ANSWER, size)
    window.screen.end()
    assert "\n".join(window.lines).replace("━", "─") == SHOWN


def test_a_block_longer_than_the_window_shows_its_end_until_it_is_finished(at_once):
    window = Window(20, 6)
    code = "".join(f"line {i}\n" for i in range(12))
    window.add(f"```\n{code}")
    assert window.lines == [f"line {i}" for i in range(7, 12)]
    window.add("```\n\nEnd.")
    window.screen.end()
    assert window.lines == ["line 9", "line 10", "line 11", "", "End."]


@pytest.mark.parametrize("markdown", [True, False])
def test_words_wrap_at_the_edge_of_a_window_that_changes(at_once, markdown):
    window = Window(30, 20, markdown)
    window.add("Words wrap at the edge of the window and are never broken, ")
    assert window.lines == ["Words wrap at the edge of the", "window and are never broken,"]
    window.resize(60, 20)
    window.add("whatever its width.")
    window.screen.end()
    assert window.lines == [
        "Words wrap at the edge of the window and are never broken,",
        "whatever its width.",
    ]


def test_without_markdown_an_answer_is_shown_as_it_is():
    window = Window(markdown=False)
    window.add("# Title\n\n* a **b**\n    code\x1b[31m\n", 3)
    window.screen.end()
    assert window.lines == ["# Title", "", "* a **b**", "    code[31m"]


def test_only_what_changes_is_written_again(at_once):
    window = Window(20)
    window.add("The first line here and the second")
    window.lines  # noqa: B018 - reads the output
    window.add(" grows")
    assert "first" not in window.output.getvalue() and "grows" in window.output.getvalue()


def test_what_the_program_does_is_a_line_below_the_answer(at_once):
    window, notes = Window(30, 4), Notes()
    notes.show("compiling decode of 1 row ...")  # at the prompt it is not shown
    window.screen.wait("reading 12 tokens ...")
    with notes.below(window.screen):
        assert window.lines == ["reading 12 tokens ...", "compiling decode of 1 row ..."]
        window.add("one two three four five\n" * 4)
        assert window.lines == ["one two three four five"] * 2 + ["compiling decode of 1 row ..."]
        notes.show(None)
        assert window.lines == ["one two three four five"] * 3
        notes.show("compiling something with a name that is too long ...")
        assert window.lines[-1] == "compiling something with a na…"
    window.screen.end()
    notes.show("compiling decode of 2 rows ...")
    assert window.lines == ["one two three four five"] * 3


def test_a_chat_shows_what_is_compiled(at_once):
    window, notes = Window(), Notes()
    with lines_shown_by(notes.show), notes.below(window.screen):
        with said_after(0.01, "compiling decode"):
            while window.screen.region.note == []:
                time.sleep(0.01)
            assert window.lines == ["compiling decode ..."]
        while window.screen.region.note:
            time.sleep(0.01)
    assert window.lines == [""]


def test_no_answer_leaves_no_line():
    window = Window()
    window.screen.wait("reading 12 tokens ...")
    window.screen.end()
    assert window.lines == [""]


def test_thoughts_are_dim_and_without_tags():
    window = Window()
    window.add("A thought.\n</think>\n\nAn answer.", 4, parser=Tags(True))
    window.screen.end()
    dimmed = re.findall(r"\x1b\[2m(.*?)\x1b", window.output.getvalue())
    assert dimmed[-1] == "A thought." and window.lines == ["A thought.", "", "An answer."]


def test_a_pipe_gets_the_text_as_it_is(capsys):
    output = render.output(plain=False)
    output.wait("reading")
    for piece in ("# Ti", "tle\n", "<think>x</think>"):
        output.add(piece, [])
    output.end()
    assert capsys.readouterr().out == "# Title\n<think>x</think>\n"


def test_tab_completes_a_command():
    commands = terminal.Commands(["/save", "/set", "/system"])
    document = terminal.Document("/se")
    assert [c.text for c in commands.get_completions(document, None)] == ["/set "]
    assert not list(commands.get_completions(terminal.Document("se"), None))
