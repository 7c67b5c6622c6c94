"""Every notebook runs from top to bottom, on a tiny model and on SmolLM2, by the documented command; its own
assertions say whether it is right. The rendered ones hold the same cells, and what SmolLM2 made of them."""

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
TINY = "synth:tiny-qwen3:q1_0"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]_*.py"))


def notebooks(*arguments, model=TINY):
    """`python notebooks ...`; model: what the environment names, or "demo", which they take by default."""
    env = {key: value for key, value in os.environ.items() if key != "NOTEBOOK_MODEL"}
    # With its optimizations XLA takes less time in all: SmolLM2 runs longer than it compiles.
    own = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"} if model == "demo" else {"NOTEBOOK_MODEL": model}
    env |= {"PYTHONPATH": str(ROOT)} | own
    command = [sys.executable, *WARNINGS, "notebooks", *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)


def test_there_are_seven():
    assert [path.name[0] for path in NOTEBOOKS] == ["1", "2", "3", "4", "5", "6", "7"]


# What the others compile under vmap, over meshes and under grad, test_recipes.py and on_eight_devices.py do
# too. The workflow `daily` runs all of them on SmolLM2. The second names no model.
EVERY_TIME = {("1_first_minutes", "demo"), ("2_inside_a_1_bit_matmul", TINY)}
RUN = [
    pytest.param(path, model, marks=[] if (path.stem, model) in EVERY_TIME else pytest.mark.slow)
    for path in NOTEBOOKS
    for model in ("demo", TINY)
    if (path.stem, model) != ("2_inside_a_1_bit_matmul", "demo")
]


@pytest.mark.parametrize(("notebook", "model"), RUN, ids=lambda part: getattr(part, "stem", part))
def test_it_runs_and_draws(notebook, model, tmp_path):
    assert notebook.read_text().startswith("# %% [markdown]\n# # ")  # jupytext's percent form, with a title
    done = notebooks(notebook.name[0], "--pictures", tmp_path / "drawn", model=model)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
    pictures = sorted((tmp_path / "drawn").iterdir())
    assert pictures and all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_a_number_that_there_is_not():
    done = notebooks(8)
    assert done.returncode == 2 and "there is no notebook 8; there are 1, 2, 3, 4, 5, 6, 7" in done.stderr


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
