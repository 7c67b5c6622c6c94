"""What is held against another implementation, once more by XLA without any setting of the tests'."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ASKED = 'usefixtures("optimized")'  # as files ask for XLA's optimizations


@pytest.mark.slow
def test_with_the_emitters_that_users_have():
    """Everyday tests are compiled by XLA's older emitters, most without optimizations (conftest.py)."""
    files = [path for path in sorted(HERE.rglob("test_*.py")) if f"= pytest.mark.{ASKED}" in path.read_text()]
    assert len(files) >= 5
    files += [HERE / "bonsai_jax" / f"test_oracle_{of}.py" for of in ("tiny", "lengths")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, files)]
    env = os.environ | {"XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
