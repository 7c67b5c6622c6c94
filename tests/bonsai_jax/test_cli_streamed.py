"""`generate` at a terminal: what it says about itself does not land within the answer's lines."""

import io
import sys

import pyte
import pytest

import bonsai_jax as bj
from bonsai_jax import progress
from bonsai_jax.cli import app, options
from tests.bonsai_jax.command_line import TINY

COMPILES = "compiling decode of 1 row ..."
LINE = f"bonsai-jax: {COMPILES}"


class OneScreen(io.StringIO):
    """stdout and stderr of a process in a terminal."""

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.setattr(options, "turn_off_compile_cache", lambda: None)


def answer_with(monkeypatch, *events):
    """`generate` gets these pieces of text, and (a line,) is said between them."""

    def stream(model, ids, **options):
        for event in events:
            if isinstance(event, str):
                yield bj.Piece(event, [1])
            else:
                progress.say(*event)

    monkeypatch.setattr(bj, "stream", stream)
    app(["generate", "x", "-m", TINY], standalone_mode=False)


def screen_with(monkeypatch, *events):
    """The lines of a terminal."""
    written, drawn = OneScreen(), pyte.Screen(80, 40)
    drawn.set_mode(pyte.modes.LNM)  # as a terminal's driver: a new line begins at the left
    monkeypatch.setattr(sys, "stdout", written)
    monkeypatch.setattr(sys, "stderr", written)
    answer_with(monkeypatch, *events)
    pyte.Stream(drawn).feed(written.getvalue())
    return [line.rstrip() for line in drawn.display if line.strip()]


def test_a_line_waits_for_the_end_of_a_line_of_text(monkeypatch):
    lines = screen_with(monkeypatch, (COMPILES,), "Once", (COMPILES,), " upon\n", (None,), "a time")
    assert lines[:4] == [LINE, "Once upon", LINE, "a time"]


def test_what_is_done_before_is_not_said(monkeypatch):
    lines = screen_with(monkeypatch, "Once", (COMPILES,), (None,), " upon\na time", (COMPILES,))
    assert lines[:3] == ["Once upon", "a time", LINE]


def test_thoughts_end_a_line_too(monkeypatch):
    """A line break within colors."""
    lines = screen_with(monkeypatch, "<think>One\n", (COMPILES,), "two\n</think>", "three")
    assert lines[:3] == ["One", LINE, "two"]


def test_elsewhere_lines_are_printed_at_once(monkeypatch, capsys):
    answer_with(monkeypatch, "Once", (COMPILES,), (None,), " upon")
    out, err = capsys.readouterr()
    assert out == "Once upon\n" and err.startswith(f"{LINE}\n")
