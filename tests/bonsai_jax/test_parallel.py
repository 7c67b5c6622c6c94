"""Many devices and several processes, on a CPU: how many devices a process has is fixed when JAX starts, so
processes of their own run them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bonsai_jax.weights.read import blocks
from checkpoints import Tensor, open_checkpoint, write_gguf
from tests.bonsai_jax.tokens import assert_same

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = ("on_eight_devices.py", "every_architecture_on_two_devices.py")


@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_eight_devices(marked):
    """FILES; one alone: XLA_FLAGS=--xla_force_host_platform_device_count=8 pytest
    tests/bonsai_jax/on_eight_devices.py"""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", marked]
    command += [str(HERE / name) for name in FILES]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


def test_two_processes(tmp_path):
    """The command line and the library over two processes: the tokens of one, and each process reads only its
    share of the file."""
    checkpoint = open_checkpoint("synth:tiny-llama:q8_0")
    path = tmp_path / "model.gguf"
    tensors = [Tensor(t.name, t.format, t.shape, blocks(t)) for t in checkpoint.tensors.values()]
    write_gguf(path, checkpoint.metadata, tensors)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{s.getsockname()[1]}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(HERE / "on_two_processes.py"), str(path), coordinator]
    both = [
        subprocess.Popen([*command, i], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        for i in "01"
    ]
    reports = []
    for process in both:
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, out + err
        lines = [line.removeprefix("told ") for line in out.splitlines() if line.startswith("told ")]
        reports.append([json.loads(line) for line in lines])

    *_, hello, want, total = reports[0]
    for process, (stdout, read, where, tensor_parallel, data_parallel, scores, *_) in enumerate(reports):
        if process == 0:
            assert_same([json.loads(stdout)["tokens"]], [hello])
        else:
            assert stdout == ""
        assert read == [0.5] * len(read) and len(read) == 2 + 7 * 3
        assert where == [[process], process, 2]
        assert_same(tensor_parallel, want)
        assert_same(data_parallel, want)
        assert abs(scores - total) < 1e-2
