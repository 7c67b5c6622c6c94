"""Every Python snippet of the README and of docs/ runs as it is written, page by page, top to bottom; every
day with a tiny model in place of "demo"."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import bonsai_jax as bj

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
