"""Every notebook runs from top to bottom, on a tiny model, by the README's command; its own assertions say
whether it is right. The rendered ones hold the same cells, and what SmolLM2 made of them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jupytext
import pytest

ROOT = Path(__file__).parent.parent
WARNINGS = ("-W", "error::UserWarning")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]_*.py"))


def notebooks(*arguments):
    """`python notebooks ...` on a tiny model."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "NOTEBOOK_MODEL": "synth:tiny-qwen3:q1_0"}
    command = [sys.executable, *WARNINGS, "notebooks", *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)


def test_there_are_five():
    assert [path.name[0] for path in NOTEBOOKS] == ["1", "2", "3", "4", "5"]


# What these compile under vmap, over meshes and under grad, test_recipes.py and on_eight_devices.py do too.
LONG = ("3_a_thousand_samples", "4_many_gpus", "5_gradients")
RUN = [pytest.param(path, marks=[pytest.mark.slow] if path.stem in LONG else []) for path in NOTEBOOKS]


@pytest.mark.parametrize("notebook", RUN, ids=lambda path: path.stem)
def test_it_runs_and_draws(notebook, tmp_path):
    assert notebook.read_text().startswith("# %% [markdown]\n# # ")  # jupytext's percent form, with a title
    done = notebooks(notebook.name[0], "--pictures", tmp_path / "drawn")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
    pictures = sorted((tmp_path / "drawn").iterdir())
    assert pictures and all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_a_number_that_there_is_not():
    done = notebooks(6)
    assert done.returncode == 2 and "there is no notebook 6; there are 1, 2, 3, 4, 5" in done.stderr


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_rendered_notebook_is_the_text(notebook):
    """If not: uv run --group notebook python notebooks --render."""
    rendered = json.loads(notebook.with_suffix(".ipynb").read_text())
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in rendered["cells"]]
    assert cells == [(cell.cell_type, cell.source) for cell in jupytext.read(notebook).cells]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_rendered_notebook_can_be_shown(notebook):
    """Run to its end, with pictures; small enough for GitHub; nothing of the machine that ran it."""
    text = notebook.with_suffix(".ipynb").read_text()
    assert len(text) < 400_000
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in code)
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert not any(output.get("name") == "stderr" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    shown = json.dumps([{k: v for k, v in output.items() if k != "data"} for output in outputs])
    shown += json.dumps([output.get("data", {}).get("text/plain", "") for output in outputs])
    assert not re.search(r"/(home|root|work|tmp|usr|opt|Users|mnt)/|site-packages|https?://", shown)
