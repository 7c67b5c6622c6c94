"""The command line for tests of it: in this process, and in one of its own."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

from typer.testing import CliRunner

import bonsai_jax as bj
from bonsai_jax.cli import app, options

ROOT = Path(__file__).parents[2]
TINY = "synth:tiny-llama:q8_0"
GREEDY = bj.SamplingParams(temperature=0.0)
COMMAND = [
    sys.executable,
    "-c",
    "import sys; from bonsai_jax.cli import main; sys.argv[0] = 'bonsai-jax'; main()",
]


@functools.cache
def tiny() -> bj.Model:
    return bj.load(TINY, bj.RunConfig(context=256, batch_size=1))


def run(*arguments, stdin=None):
    """In this process."""
    with mock.patch.object(options, "turn_off_compile_cache", lambda: None):  # a setting of the whole process
        return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)


def complaints(stderr: str) -> list[str]:
    """The lines of stderr without those that say what is compiled, as a busy machine takes over a second."""
    return [line for line in stderr.splitlines() if not line.startswith("bonsai-jax: compiling ")]


def command(*arguments, **environment):
    """In a process of its own, with a compile cache."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input="",
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=120,
    )
