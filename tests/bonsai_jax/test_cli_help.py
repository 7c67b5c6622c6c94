"""Help texts and completion: whole, and there before anything heavy is imported."""

import os
import subprocess
import sys

import pytest
import typer

from bonsai_jax.cli import COMMANDS, app
from bonsai_jax.decoding import proposers
from tests.bonsai_jax.command_line import COMMAND, ROOT, command, run


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_is_whole(name, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    done = run(*name.split(), "--help")
    assert done.exit_code == 0 and max(map(len, done.stdout.splitlines())) <= width
    assert "..." not in done.stdout.replace("COMMAND [ARGS]...", "").replace("...]}", "")
    shown = " ".join(done.stdout.split())
    root = typer.main.get_command(app)
    parameters = root.commands[name].params if name else []
    for text in [p.help for p in parameters] or [c.short_help for c in root.commands.values()]:
        assert text.endswith(".") and text in shown


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("bonsai-jax p", {"perplexity", "pull"}),
        ("bonsai-jax generate --impl ", {"auto", "reference", "pallas"}),
        ("bonsai-jax bench --activation-bits ", {"8", "16"}),
        ("bonsai-jax chat --speculate ", {*proposers.names()}),
        ("bonsai-jax bench --js", {"--json"}),
    ],
)
def test_completion(typed, offered):
    words = typed.split(" ")
    asked = {"_BONSAI_JAX_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    assert set(command(**asked).stdout.split()) == offered


NAMED_SHELL = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # else it is the one that runs us


def test_bash_accepts_the_completion():
    script = command("--show-completion", "bash", **NAMED_SHELL)
    assert script.returncode == 0, script.stderr
    done = subprocess.run(
        ["bash", "-c", f"{script.stdout}\ncomplete -p bonsai-jax"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "bonsai-jax" in done.stdout


def test_help_and_version_do_not_import_jax():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom bonsai_jax.cli import app\n"
        "completion = ['--show-completion', 'bash']\n"
        "for arguments in (['--help'], ['generate', '--help'], ['--version'], completion):\n"
        "    done = CliRunner().invoke(app, arguments)\n"
        "    assert done.exit_code == 0, done.output\n"
        "assert not {'jax', 'flax', 'numpy', 'prompt_toolkit', 'markdown_it'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env={**os.environ, **NAMED_SHELL})


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_a_full_disk_is_one_line(option):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, option], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=120
        )
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")
