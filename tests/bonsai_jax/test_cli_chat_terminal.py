"""The command `chat` at a terminal: keys, pasted text, the window's size, and how answers look."""

import io
import json
import re

import pyte
import pytest
from prompt_toolkit.history import InMemoryHistory
from rich.console import Console

from bonsai_jax.cli.chat import render, terminal
from tests.bonsai_jax.command_line import TINY
from tests.bonsai_jax.pseudo_terminal import ALT_ENTER, CTRL_C, CTRL_D, UP, Terminal

AT_PROMPT = r"^> a message, or /help$"


def talk(path, turns):
    """A conversation in a file."""
    said = [("user", "What do trees know of time? " * 8), ("assistant", "More than the wind. " * 8)] * turns
    path.write_text(json.dumps([{"role": role, "content": text} for role, text in said]))
    return path


def messages(path):
    return [message["content"] for message in json.loads(path.read_text())["messages"]]


@pytest.mark.slow  # it leans on timing: not for a machine that is busy with other tests
def test_a_chat_in_a_terminal(tmp_path):
    """One process for all of it, because starting takes most of the time."""
    long, too_long = talk(tmp_path / "long.json", 5), talk(tmp_path / "too_long.json", 12)
    with Terminal(
        "chat", "-m", TINY, "--ignore-eos", "-n", 8, "-c", 2048, XDG_STATE_HOME=str(tmp_path)
    ) as window:
        window.wait(AT_PROMPT)
        assert "tiny-llama:q8_0, context 2,048; /help lists the commands" in window.text

        # Pasted lines are one message; Alt+Enter and a backslash begin a new line.
        window.paste("one\ntwo\nthree")
        window.wait(r"^> one\n  two\n  three$")
        window.type("\r")
        window.wait(r"^cut off by max_new_tokens, .*8 tokens, context \d+ of 2,048$")
        window.wait(AT_PROMPT)
        window.type(f"four{ALT_ENTER}five\\\rsix\r")
        window.wait(r"^> four\n  five\n  six\n(.*\n)+cut off")
        window.wait(AT_PROMPT)
        window.type(f"/save {tmp_path / 'pasted.json'}\r")
        window.wait(r"4\s+messages")
        said = messages(tmp_path / "pasted.json")
        assert said[0::2] == ["one\ntwo\nthree", "four\nfive\nsix"]

        # Ctrl-C while the prompt is read.
        window.type(f"/load {long}\r/set max_new_tokens -1\r")
        window.wait("^max_new_tokens -1$")
        window.type("Hi\r")
        window.wait(r"^reading \d,\d+ tokens")
        window.type(CTRL_C)
        window.wait(r"^stopped; the conversation stays as it was, \d tokens?")

        # Ctrl-C in the middle of an answer, after the window has become narrower. What came stays.
        window.wait(AT_PROMPT)
        window.type("/reset\rHi\r")
        window.wait(r"^a new conversation\n> Hi\n.*\S.*\n(.*\n)?.*\S")
        window.resize(50)
        window.type(CTRL_C)
        window.wait(r"^stopped, .*[\d,]+ tokens?, context")
        window.wait(AT_PROMPT)
        window.type(f"/save {tmp_path / 'stopped.json'}\r")
        window.wait(r"2\s+messages")
        question, answer = messages(tmp_path / "stopped.json")
        assert question == "Hi" and len(answer) > 0

        # A full context drops the oldest turns.
        window.type(f"/load {too_long}\r/set max_new_tokens 4\rAnd now?\r")
        window.wait(r"^\(the context is full: the model no longer")
        window.wait(r"^cut off by max_new_tokens, .*4 tokens,\n")

        # A message is changed and sent again.
        window.wait(AT_PROMPT)
        window.type("/edit\r")
        window.wait("^> /edit\n> And now[?]$")  # not where it was typed
        window.type("\x15And then?\r")  # Ctrl-U deletes the line
        window.wait(r"^> And then\?\n(.*\n)+cut off")
        window.type(f"/save {tmp_path / 'edited.json'}\r")
        window.wait(r"26\s+messages")
        assert messages(tmp_path / "edited.json")[24] == "And then?"

        # Ctrl-C at the prompt: first it clears what is typed.
        window.wait(AT_PROMPT)
        window.type("never sent")
        window.wait("^> never sent")
        window.type(CTRL_C)
        window.wait(AT_PROMPT)
        window.type(CTRL_C)
        window.wait(rf"^\(Ctrl-C again, .*\n{AT_PROMPT[1:]}")
        window.type(CTRL_C)
        assert window.exit_status() == 0 and "Traceback" not in window.text


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

    def add(self, text, size=1000, thinks=False):
        for at in range(0, len(text), size):
            self.screen.add(text[at : at + size], thinks)

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


def test_no_answer_leaves_no_line():
    window = Window()
    window.screen.wait("reading 12 tokens ...")
    window.screen.end()
    assert window.lines == [""]


def test_thoughts_are_dim_and_without_tags():
    window = Window()
    window.add("A thought.\n</think>\n\nAn answer.", 4, thinks=True)
    window.screen.end()
    dimmed = re.findall(r"\x1b\[2m(.*?)\x1b", window.output.getvalue())
    assert dimmed[-1] == "A thought." and window.lines == ["A thought.", "", "An answer."]


def test_a_pipe_gets_the_text_as_it_is(capsys):
    output = render.output(plain=False)
    output.wait("reading")
    for piece in ("# Ti", "tle\n", "<think>x</think>"):
        output.add(piece, False)
    output.end()
    assert capsys.readouterr().out == "# Title\n<think>x</think>\n"


def test_tab_completes_a_command():
    commands = terminal.Commands(["/save", "/set", "/system"])
    document = terminal.Document("/se")
    assert [c.text for c in commands.get_completions(document, None)] == ["/set "]
    assert not list(commands.get_completions(terminal.Document("se"), None))
