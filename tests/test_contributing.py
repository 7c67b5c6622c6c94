"""What contributors meet first: pre-commit, the workflow, issue forms."""

import re
import tomllib
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")  # not on every machine with a GPU

ROOT = Path(__file__).parent.parent
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")


def workflow(name):
    return yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())


def runs(job):
    """Its commands."""
    return [step["run"] for step in job["steps"] if "run" in step]


def test_pre_commit_has_the_ruff_that_ci_has():
    with open(ROOT / "pyproject.toml", "rb") as file:
        constraints = tomllib.load(file)["tool"]["uv"]["constraint-dependencies"]
    (pinned,) = (line.removeprefix("ruff==") for line in constraints if line.startswith("ruff=="))
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["rev"] == f"v{pinned}"
    assert [hook["id"] for hook in repo["hooks"]] == ["ruff-check", "ruff-format"]


def test_the_workflow_runs_all_of_ci():
    jobs = workflow("ci")["jobs"]
    assert runs(jobs["all"]) == ["bash .ci/run"]
    assert jobs["wheel"]["strategy"]["matrix"]["python"] == ["3.12", "3.13", "3.14"]
    assert runs(jobs["wheel"])[-1] == "bash .ci/wheel ${{ matrix.python }}"
    with open(ROOT / "pyproject.toml", "rb") as file:
        oldest = tomllib.load(file)["project"]["requires-python"].removeprefix(">=")
    assert jobs["all"]["strategy"]["matrix"]["python"][0] == oldest
    assert jobs["all"]["timeout-minutes"] <= 90


def test_a_release_is_tested_and_published_without_a_password():
    jobs = workflow("release")["jobs"]
    assert "bash .ci/run" in runs(jobs["build"])
    publish = jobs["publish"]
    assert publish["needs"] == "build" and publish["permissions"] == {"id-token": "write"}
    assert not any("password" in step.get("with", {}) for step in publish["steps"])


def test_the_site_is_published_as_ci_builds_it():
    """Strictly, and with the packages that pyproject.toml pins."""
    jobs = workflow("docs")["jobs"]
    command = "--only-group docs mkdocs build"
    assert any(
        command in step.get("run", "") and "--strict" in step["run"] for step in jobs["build"]["steps"]
    )
    assert jobs["publish"]["if"] == "github.event_name == 'push'"
    assert command in (ROOT / ".ci/run").read_text()
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)
    pinned = {line.split("==")[0] for line in project["tool"]["uv"]["constraint-dependencies"]}
    assert {re.match(r"[\w-]+", line)[0] for line in project["dependency-groups"]["docs"]} <= pinned


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_what_github_asks_of_one(path):
    form = yaml.safe_load(path.read_text())
    assert form["name"] and form["description"] and form["labels"]
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids)) and all(re.fullmatch(r"[\w-]+", id) for id in ids)
    for field in form["body"]:
        assert (
            field["type"] in ("textarea", "input", "checkboxes", "dropdown") and field["attributes"]["label"]
        )
    assert any(field.get("validations", {}).get("required") for field in form["body"])


def test_there_is_a_form_for_bugs_features_and_models():
    assert [path.stem for path in FORMS] == ["bug", "feature", "model"]
