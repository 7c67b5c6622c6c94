"""Options of commands: groups of options become parameters, and values and defaults are the library's."""

import dataclasses
import re
from typing import Annotated, get_args

import pytest
import typer

from bonsai_jax import RunConfig, SamplingParams, choices
from bonsai_jax.cli import COMMANDS, aliases, app, options
from bonsai_jax.cli.sampling_options import SamplingOptions
from bonsai_jax.cli.spread import spread
from pallas_kernels import cache_layouts
from pallas_kernels.problems import Step
from pallas_kernels.selection import candidates
from tests.bonsai_jax.command_line import ROOT, run


@dataclasses.dataclass(frozen=True)
class Size:
    width: Annotated[int, typer.Option("-w", help="Width.")] = 3
    height: Annotated[int, typer.Option("--high", help="Height.")] = 4


def test_a_group_of_options_becomes_parameters_and_arrives_as_a_dataclass():
    received = []

    @spread
    def command(*, name: Annotated[str, typer.Argument()], size: Size, deep: bool = False):
        """Says so."""
        received.append((name, size, deep))

    click_command = typer.main.get_command(_app(command))
    assert [p.name for p in click_command.params][:4] == ["name", "width", "height", "deep"]
    assert click_command.help == "Says so."
    click_command(["box", "-w", "5", "--deep"], standalone_mode=False)
    command(name="bag", height=1)
    assert received == [("box", Size(5, 4), True), ("bag", Size(3, 1), False)]


def test_two_options_of_one_name_are_refused():
    with pytest.raises(TypeError, match="same name among size, width, height, width"):

        @spread
        def command(*, size: Annotated[int, typer.Option()] = 1, box: Size, width: int = 1): ...


def _app(command) -> typer.Typer:
    made = typer.Typer()
    made.command()(command)
    return made


def test_choices_are_those_of_kernels():
    assert get_args(choices.Schedule) == ("auto", *(candidate.name for candidate in candidates(Step)))
    assert sorted(get_args(choices.CacheDtype)) == sorted(cache_layouts.names())


NAMED = {
    "impl": choices.Impl,
    "schedule": choices.Schedule,
    "weights": choices.WeightStorage,
    "activation_bits": choices.ActivationBits,
    "all_reduce": choices.AllReduce,
    "cache_dtype": choices.CacheDtype,
    "state_dtype": choices.StateDtype,
}


@pytest.mark.parametrize("name", NAMED)
def test_a_run_config_takes_the_choices_and_no_other_value(name):
    for choice in get_args(NAMED[name]):
        assert getattr(RunConfig(**{name: choice}), name) == choice
    with pytest.raises(ValueError, match=f"RunConfig: {name} is 'other'; it must be one of"):
        RunConfig(**{name: "other"})


def test_defaults_are_those_of_the_library():
    assert options.RunOptions().config(context=0) == dataclasses.replace(RunConfig(), batch_size=1)
    assert SamplingOptions().params() == SamplingParams()
    assert SamplingOptions(seed=7).params() == SamplingParams(seed=7)


def test_what_a_proposer_needs_is_loaded():
    run = options.RunOptions()
    configs = [
        run.config(context=0, speculation=options.SpeculationOptions(name)) for name in (None, "ngram", "mtp")
    ]
    assert [config.draft for config in configs] == [False, False, True]
    both = run.config(context=0, speculation=options.SpeculationOptions(draft="small.gguf"))
    assert (both.draft, both.draft_model) == (False, "small.gguf")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_lists_the_values_that_flags_have(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    flags = dict(re.findall(r"(--[\w-]+) <(\w+(?:\|\w+)+)>", run(name, "--help").stdout))
    page = (ROOT / "docs" / "command-line.md").read_text()
    rows = dict(re.findall(r"^\| `(--[\w-]+)` \| ([\w, ]+) \|", page, re.MULTILINE))
    for flag, values in flags.items():
        assert rows[flag].split(", ") == values.split("|")


def test_aliases_lead_to_flags_and_the_page_lists_them():
    commands = typer.main.get_command(app).commands.values()
    ours = {flag for command in commands for p in command.params for flag in getattr(p, "opts", [])}
    page = (ROOT / "docs" / "command-line.md").read_text()
    listed = set(re.findall(r"`(-[\w-]+)`", page.split("## If you come from")[1].split("| you would run")[0]))
    for theirs, name in aliases.ALIASES.items():
        assert f"--{name.removeprefix('-')}" in ours
        assert {f"-{theirs}", f"--{theirs}"} & listed or "_" in theirs, theirs
    assert {aliases.our_name(flag.lstrip("-")).lstrip("-") for flag in listed} <= {
        flag.lstrip("-") for flag in ours
    }


@pytest.mark.parametrize(
    ("typed", "flag"),
    [
        ("--temperature x", "--temp"),
        ("--max_tokens=x", "--max-new-tokens"),
        ("--n-predict x", "--max-new-tokens"),
        ("--ctx-size x", "--ctx"),
        ("-sys text --repetition-penalty x", "--repeat-penalty"),
        ("-hf user/repo --num-ctx x", "--ctx"),
    ],
)
def test_flags_of_other_programs(typed, flag):
    done = run("chat", *typed.split())
    assert done.exit_code == 2 and re.search(rf"Invalid value for (.* / )?'{flag}'", done.stderr)
