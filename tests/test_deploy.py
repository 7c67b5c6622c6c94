"""The files of deploy/ name options, extras and metrics that exist."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import prometheus_client.parser
import typer.main

import bonsai_jax as bj
from bonsai_jax.cli import app
from bonsai_jax.server.metrics import Metrics

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "bonsai-jax.service"


def assert_options(words: list[str]) -> None:
    """The words of a command line of serve, whose flags must exist."""
    serve = typer.main.get_command(app).commands["serve"]
    flags = {flag for option in serve.params for flag in (*option.opts, *option.secondary_opts)} | {"--help"}
    named = [word for word in words if word.startswith("-")]
    assert named and set(named) <= flags, set(named) - flags


def test_the_dashboard_shows_metrics_that_the_server_has():
    model = bj.load("synth:tiny-llama:q8_0", bj.RunConfig(context=64, impl="reference"))
    with bj.Engine(model, max_batch_size=1) as engine:
        text = Metrics(engine).text().decode()
    types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    parts = {f"{name}_bucket" for name, kind in types.items() if kind == "histogram"}
    board = json.loads((DEPLOY / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [str(variable["query"]) for variable in board["templating"]["list"]]
    named = {name for query in queries for name in re.findall(r"\bbonsai_\w+", query)}
    assert named <= types.keys() | parts, named - types.keys() - parts
    shown = {name for name in types if not name.endswith("_created")}
    assert shown <= named | {name.removesuffix("_bucket") for name in named}
    page = (ROOT / "docs" / "deploy.md").read_text()
    assert shown == set(re.findall(r"`(bonsai_\w+)`", page))
    assert list(prometheus_client.parser.text_string_to_metric_families(text))
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_unit_names_options_that_serve_has(tmp_path):
    text = UNIT.read_text()
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    program, command, *words = shlex.split(line)
    assert program == "/opt/bonsai-jax/bin/bonsai-jax" and command == "serve"
    assert_options(words)
    grace, stop = words[words.index("--grace") + 1], re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert stop is not None and int(stop[1]) > int(grace)  # else systemd kills what still drains
    if (systemd := shutil.which("systemd-analyze")) is not None:
        unit = tmp_path / UNIT.name
        unit.write_text(text.replace(program, sys.executable))
        done = subprocess.run([systemd, "verify", unit], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


def test_the_image_names_options_and_extras_that_exist():
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", "")
    steps = [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line and line[0] != "#"]
    entry, command = (
        json.loads(next(rest for own, rest in steps if own == name)) for name in ("ENTRYPOINT", "CMD")
    )
    assert entry[:2] == ["bonsai-jax", "serve"]
    assert_options([*entry[2:], *command])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = ",".join(re.findall(r"EXTRAS=([\w,]+)", (DEPLOY / "Dockerfile").read_text())).split(",")
    assert set(named) <= extras.keys() and "serve" in named
    for name, rest in steps:
        if name == "COPY" and "--from" not in rest:
            assert all((ROOT / source).exists() for source in rest.split()[:-1])
    names = [name for name, _ in steps]
    assert names.index("USER") < names.index("ENTRYPOINT") and ("USER", "10001") in steps
    port = entry[entry.index("--port") + 1]
    health = next(rest for name, rest in steps if name == "HEALTHCHECK")
    assert f"http://127.0.0.1:{port}/health" in health and ("EXPOSE", port) in steps
    if (hadolint := shutil.which("hadolint")) is not None:
        done = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, "")
