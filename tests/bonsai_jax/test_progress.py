"""Progress bars in notebooks, whose stderr is no terminal. Those of terminals: test_cli."""

import sys
import types

import pytest

from bonsai_jax import progress


@pytest.fixture
def lines(monkeypatch):
    """What a notebook shows, one entry for each change; a Jupyter kernel without a browser."""
    drawn = []

    class Line:
        def update(self, data, raw):
            drawn.append(data["text/plain"])

    def display(data, raw, display_id):
        drawn.append(data["text/plain"])
        return Line()

    shell = type("ZMQInteractiveShell", (), {})()
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: shell
    ipython.display = types.ModuleType("IPython.display")
    ipython.display.display = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    return drawn


def test_a_notebook_has_a_line_that_changes(lines, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.shown(True, "scoring") as update:
        update(0, 2000)
        update(1, 2000)  # too soon
        now[0] += 1
        update(1000, 2000, "300 tok/s")
        update(2000, 2000)  # the last one always shows
    assert lines == [
        "scoring",
        f"scoring [{30 * '-'}] 0 of 2,000",
        f"scoring 300 tok/s [{15 * '#'}{15 * '-'}] 1,000 of 2,000",
        f"scoring [{30 * '#'}] 2,000 of 2,000",
    ]


def test_a_number_that_is_not_known_is_not_shown(lines):
    with progress.bar("reading") as update:
        update(3000, 0)
    assert lines[1:] == ["reading 3,000"]


def test_elsewhere_there_is_no_bar(lines, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: None)
    with progress.shown(True, "scoring") as update:
        update(1, 2)
    assert lines == [] and capsys.readouterr() == ("", "")
