"""Every notebook runs from top to bottom, on its tiny model; its own assertions say whether it is right."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WARNINGS = ("-W", "error::UserWarning", "-W", "ignore:FigureCanvasAgg is non-interactive:UserWarning")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(notebook):
    assert notebook.read_text().startswith("# %% [markdown]\n# # ")  # jupytext's percent form, with a title
    # Unoptimized code: compiling is most of the time. Pictures go nowhere.
    env = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0", "MPLBACKEND": "agg"}
    env["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([sys.executable, *WARNINGS, str(notebook)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
