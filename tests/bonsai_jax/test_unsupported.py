"""Architectures that do not run: the error says which is nearest and what it lacks, and inspect lists it."""

import dataclasses
import json
from collections import Counter
from unittest import mock

import pytest

import bonsai_jax as bj
from bonsai_jax.network import architectures
from bonsai_jax.network.unsupported import UnsupportedArchitecture, find, table
from checkpoints import Checkpoint, open_checkpoint
from tests.bonsai_jax.command_line import run


def named(architecture: str) -> Checkpoint:
    checkpoint = open_checkpoint("synth:tiny-llama:f32")
    metadata = {**checkpoint.metadata, "general.architecture": architecture}
    return dataclasses.replace(checkpoint, source="model.gguf", metadata=metadata)


def test_the_table_agrees_with_the_architectures_that_run():
    runs = {*architectures.names(), *architectures.ALIASES}
    names = [name for missing in table() for name in missing.names]
    assert len(names) > 60
    assert not runs & {*names}, "delete the lines of architectures that run from network/unsupported.txt"
    assert not [name for name, times in Counter(names).items() if times > 1]
    assert {missing.nearest for missing in table()} <= {*architectures.names()}
    assert all(missing.models and all(missing.lacks) for missing in table())


@pytest.mark.parametrize("missing", table(), ids=lambda missing: missing.names[0])
def test_the_error_is_one_line_with_the_nearest_and_what_it_lacks(missing):
    with pytest.raises(UnsupportedArchitecture) as error:
        architectures.describe(named(missing.names[-1]))
    message = str(error.value)
    assert error.value.missing == missing and "\n" not in message and len(message) < 500
    for part in ("model.gguf: ", repr(missing.names[-1]), missing.models, missing.nearest, *missing.lacks):
        assert part in message


def test_an_architecture_that_nobody_knows_lists_those_that_run():
    assert find("tomorrow") is None
    with pytest.raises(
        NotImplementedError, match=r"'tomorrow' is not supported; supported: .*llama, .*qwen3"
    ):
        bj.from_checkpoint(named("tomorrow"))
    with pytest.raises(NotImplementedError) as error:
        bj.from_checkpoint(named("x\n" * 5000))
    assert len(str(error.value)) < 200 + len(", ".join(architectures.names())) and "\n" not in str(
        error.value
    )


def test_inspect_shows_the_file_and_lists_what_is_lacking():
    missing = table()[0]
    with mock.patch("checkpoints.open_checkpoint", lambda *_, **__: named(missing.names[0])):
        done = run("inspect", "model.gguf")
        as_json = run("inspect", "model.gguf", "--json")
    assert done.exit_code == as_json.exit_code == 1
    lines = done.stdout.splitlines()
    assert any(line.split()[:1] == ["llama.block_count"] for line in lines)
    assert any(line.split()[:1] == ["f32"] for line in lines)
    assert lines[-len(missing.lacks) :] == [f"  - {lack}" for lack in missing.lacks]
    assert done.stderr.startswith(f"error: model.gguf: architecture '{missing.names[0]}'")
    out = json.loads(as_json.stdout)
    assert out["unsupported"]["nearest"] == missing.nearest
    assert out["unsupported"]["lacks"] == list(missing.lacks)
    with mock.patch("checkpoints.open_checkpoint", lambda *_, **__: named("tomorrow")):
        assert json.loads(run("inspect", "x", "--json").stdout)["unsupported"] is None
