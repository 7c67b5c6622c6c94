"""Every Python snippet of the README and of docs/ runs as it is written, page by page, top to bottom; every
day with a tiny model in place of "demo"."""

import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

import bonsai_jax as bj
import pallas_kernels
from bonsai_jax import training
from bonsai_jax.cli import app
from bonsai_jax.network import architectures

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def code_of(page):
    return "\n".join(FENCED.findall(page.read_text()))


def name(page):
    return str(page.relative_to(ROOT).with_suffix("")).removeprefix("docs/")


WITH_SNIPPETS = [page for page in PAGES if code_of(page)]
RUN = [pytest.param(page, "synth:tiny-llama:q8_0", id=name(page)) for page in WITH_SNIPPETS]
RUN += [
    pytest.param(page, "demo", id=f"{name(page)}, demo", marks=pytest.mark.slow)
    for page in WITH_SNIPPETS
    if '"demo"' in code_of(page)
]


@pytest.mark.parametrize(("page", "demo"), RUN)
def test_snippets_run_as_written(page, demo, tmp_path, monkeypatch):
    script, load = tmp_path / f"{page.stem}.py", bj.load
    script.write_text(code_of(page))
    if "jax.config" not in code_of(page):
        monkeypatch.chdir(tmp_path)
        named = lambda source, *rest, **options: load(source.replace("demo", demo), *rest, **options)  # noqa: E731
        monkeypatch.setattr(bj, "load", named)
        runpy.run_path(str(script))
        return
    # What sets up jax has a process of its own.
    assert '"demo"' not in code_of(page)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name)
def test_links_lead_somewhere(page):
    for target, _ in LINK.findall(page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_snippets_that_fail_are_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nimport bonsai_jax\n```\ntext\n```python\nraise SystemExit(3)\n```\n")
    assert FENCED.findall(page.read_text()) == ["import bonsai_jax\n", "raise SystemExit(3)\n"]


# Pages that have no snippet of Python to open with: words, a map of the files, and shell commands.
WITHOUT_SNIPPET = {"glossary", "architecture", "command-line", "chat", "deploy", "recipes/README", "README"}


@pytest.mark.parametrize("page", [page for page in PAGES if name(page) not in WITHOUT_SNIPPET], ids=name)
def test_a_page_opens_with_a_snippet(page):
    text = page.read_text()
    first = FENCED.search(text)
    assert first and len(text[: first.start()].split()) <= 100, page


COMMAND = re.compile(r"(?:^    .*?|`)\bbonsai-jax ([^`\n]*)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_and_their_flags_exist(page):
    commands = typer.main.get_command(app).commands
    for line in COMMAND.findall(page.read_text()):
        words = shlex.split(line, comments=True)
        if words[0].startswith("-"):  # a flag of bonsai-jax itself
            continue
        flags = {
            flag for option in commands[words[0]].params for flag in (*option.opts, *option.secondary_opts)
        }
        named = [word for word in words[1:] if re.match(r"--?[a-z]", word)]
        assert set(named) <= flags | {"-h", "--help"}, line


# What the API reference shows: "::: pallas_kernels.matmul.matmul", with an example below.
ENTRY = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))


@pytest.mark.parametrize("package", [bj, training, pallas_kernels], ids=lambda package: package.__name__)
def test_the_reference_has_every_public_name_and_an_example_of_it(package):
    shown = {}
    for page in REFERENCE:
        for path in ENTRY.findall(page.read_text()):
            home, attribute = path.rsplit(".", 1)
            if path.startswith(package.__name__):
                shown[attribute] = getattr(importlib.import_module(home), attribute), code_of(page)
    for public in package.__all__:
        assert public in shown, f"docs/reference has no ::: {package.__name__}.{public}"
        value, examples = shown[public]
        assert value is getattr(package, public)
        assert re.search(rf"\b{public}\b", examples), f"no example in docs/reference uses {public}"
        # A constant has its text in the source, where only griffe reads it.
        assert value.__doc__ or not callable(value), f"{public} has no docstring"


def test_the_site_names_every_page():
    """mkdocs itself says which pages of its list are missing (.ci/run)."""
    listed = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES[1:]:
        assert f": {page.relative_to(ROOT / 'docs')}" in listed, page


def test_the_table_of_models_is_that_of_the_architectures():
    """One row for each, also with others; it has the names in the module's MODELS, and may say more. The
    README has their number."""
    page = "docs/formats.md"
    assert f" of {len(architectures.names())} architectures" in (ROOT / "README.md").read_text()
    table = (ROOT / page).read_text().split("| architecture | models |\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|", 1)] for line in table.splitlines()[1:]]
    models = [(name, text) for names, text in rows for name in names.split(", ")]
    models = [(architectures.ALIASES.get(name, name), text) for name, text in models]
    assert sorted(name for name, _ in models) == architectures.names()
    for name, text in models:
        missing = [m for m in re.split("[,;] ", architectures.get(name).MODELS) if m not in text]
        assert not missing, f"{page}: the row of {name} lacks {missing}, models of {name}.MODELS"
