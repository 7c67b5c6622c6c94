"""How many threads XLA gets on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bonsai_jax import threads

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("environment", "want"),
    [
        ({}, "2"),  # the physical cores
        ({"OMP_NUM_THREADS": "3"}, "3"),
        ({"OMP_NUM_THREADS": "5,2"}, "5"),  # those of the outermost loop
        ({"OMP_NUM_THREADS": "many"}, "2"),
        ({"OMP_NUM_THREADS": "3", "NPROC": "1"}, "1"),
    ],
)
def test_what_is_asked_for_counts_and_else_cores(environment, want, tmp_path, monkeypatch):
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):  # two cores of two threads
        place = tmp_path / f"cpu{cpu}" / "topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(siblings + "\n")
    monkeypatch.setattr(threads, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    for name in ("NPROC", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    threads.use()
    assert os.environ["NPROC"] == want


def test_where_nobody_tells_xla_decides(tmp_path, monkeypatch):
    monkeypatch.setattr(threads, "TOPOLOGY", tmp_path)
    for name in ("NPROC", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    threads.use()
    assert "NPROC" not in os.environ


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads have names under Linux")
def test_loading_a_model_limits_xla_s_threads():
    code = (
        "import bonsai_jax as bj, pathlib; bj.load('synth:tiny-llama:q8_0')\n"
        "names = [task.joinpath('comm').read_text() for task in pathlib.Path('/proc/self/task').iterdir()]\n"
        "print(sum('XLAEigen' in name for name in names))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "NPROC"}
    for asked in ("1", "3"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment | {"OMP_NUM_THREADS": asked, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=300,
        )
        assert done.stdout.strip() == asked, done.stderr
