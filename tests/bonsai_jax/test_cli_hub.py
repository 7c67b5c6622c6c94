"""pull, list and rm: what they print, what they leave, and a load from the Hub by the other commands."""

import json
import math
import os
import signal
import subprocess
import time
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.utils import _shared_blobs

from checkpoints import CheckpointError, Tensor, open_checkpoint, write_gguf
from checkpoints.hub import cache
from tests.bonsai_jax.command_line import COMMAND, ROOT, TINY, command, run
from tests.checkpoints.hub_server import BYTES, MODEL, SPLIT, Fault, blobs, wrong


@pytest.fixture
def tiny(hub, tmp_path):
    """The Hub has a model, if with weights of 0."""
    model = open_checkpoint(TINY)
    tensors = (
        Tensor(
            t.name,
            t.format,
            t.shape,
            np.zeros((*t.shape[:-1], t.nbytes // math.prod(t.shape[:-1])), np.uint8),
        )
        for t in model.tensors.values()
    )
    write_gguf(tmp_path / "tiny.gguf", model.metadata, tensors)
    hub.files[MODEL] = (tmp_path / "tiny.gguf").read_bytes()
    return hub


def lines(done):
    """The one line of an error."""
    assert done.exit_code == 1 and done.stdout == "", done.output
    (line,) = done.stderr.splitlines()
    return line


def test_a_first_load_interrupted_damaged_and_offline(tiny):
    """One line each time, by commands as users type them."""
    inspect = ("inspect", "-m", "user/repo:Q8_0")
    half = len(tiny.files[MODEL]) // 2
    tiny.faults[MODEL] = Fault(cut=half, times=1)
    assert " stopped at " in lines(run(*inspect))
    tiny.faults[MODEL] = Fault(content=wrong(tiny.files[MODEL], half + 1), times=1)
    assert "it was deleted, fetch it again" in lines(run(*inspect))
    assert lines(run(*inspect, "--offline")).endswith("connection: bonsai-jax pull user/repo:Q8_0")
    online = run(*inspect)
    offline = run(*inspect, "--offline")
    assert online.exit_code == offline.exit_code == 0
    assert MODEL in (line := online.stdout.splitlines()[0]) and offline.stdout.splitlines()[0] == line
    assert tiny.fetched(MODEL) == [None, f"bytes={half}-", None]


def test_interrupting_pull_leaves_what_came(hub):
    hub.faults[MODEL] = Fault(pause_at=150_000, pause_s=20, times=1)
    process = subprocess.Popen(
        [*COMMAND, "pull", "user/repo:Q8_0"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while blobs() != {"partial": 150_000}:
        time.sleep(0.02)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.communicate() == (b"", b"\n") and process.returncode == 130
    done = command("pull", "user/repo:Q8_0")
    assert done.returncode == 0 and done.stderr == "" and Path(done.stdout.strip()).read_bytes() == BYTES
    assert hub.fetched(MODEL) == [None, "bytes=150000-"]


def test_pull_repairs_what_is_damaged(hub):
    path = Path(run("pull", "user/repo:Q8_0").stdout.strip())
    path.write_bytes(wrong(BYTES))
    assert run("pull", "user/repo:Q8_0").stdout == f"{path}\n" and path.read_bytes() == BYTES
    out = json.loads(run("pull", "user/repo:Q8_0", "--json").stdout)
    assert out == {"name": "user/repo:Q8_0", "path": str(path)}
    assert lines(run("pull", "model.gguf")).startswith("error: model.gguf: not a name on the Hub; write")


@pytest.fixture
def full(hub):
    """A cache with three models of two repositories and a download that stopped."""
    hub.files |= {name: BYTES[:1000] + name.encode() for name in SPLIT}
    run("pull", "user/repo:Q4_0")
    run("pull", "user/repo:Q8_0")
    other = cache.repo_folder("other/model") / "snapshots" / "c"
    other.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "notes.txt"):
        (other / name).write_bytes(b"1234")
    (cache.repo_folder("an/old") / "blobs").mkdir(parents=True)
    with open(cache.repo_folder("an/old") / "blobs" / "ab.incomplete", "wb") as file:
        file.truncate(123_456_789)
    return hub


def test_list_names_what_the_cache_holds(full):
    assert run("list").stdout == (
        "an/old          unfinished download  0.12 GB\n"
        "other/model     2 files              0.00 MB\n"
        "user/repo:Q4_0  2 files              0.00 MB\n"
        "user/repo:Q8_0  m-Q8_0.gguf          0.30 MB\n"
    )
    out = json.loads(run("list", "--json").stdout)
    assert out["folder"] == str(cache.folder()) and [len(m["files"]) for m in out["models"]] == [0, 2, 2, 1]
    assert out["models"][3] == {"name": "user/repo:Q8_0", "files": [MODEL], "nbytes": len(BYTES)}
    sizes = {model.name: model.nbytes for model in cache.models()}
    assert sizes["user/repo:Q8_0"] == len(BYTES) and sizes["other/model"] == 8
    full.commit = "d" + full.commit[1:]
    run("pull", "user/repo:Q8_0")  # another version with the same file
    assert {model.name: model.nbytes for model in cache.models()} == sizes


def test_an_empty_cache_says_how_to_fill_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    done = run("list")
    assert json.loads(run("list", "--json").stdout) == {"folder": str(tmp_path / "none"), "models": []}
    assert done.exit_code == 0 and done.stdout == ""
    assert done.stderr == f"no models in {tmp_path / 'none'}; bonsai-jax pull user/repo:quant fetches one\n"


def test_rm_asks_and_removes_what_was_named(full):
    refused = run("rm", "user/repo:Q8_0", stdin="n\n")
    assert refused.exit_code == 1 and "m-Q8_0.gguf" in refused.stdout and len(blobs()) == 3
    assert run("rm", "user/repo:q8_0", stdin="y\n").exit_code == 0
    assert len(blobs()) == 2 and "Q8_0" not in run("list").stdout
    assert run("rm", "an/old", "--yes").exit_code == run("rm", "other/model", "-y").exit_code == 0
    assert run("list").stdout == "user/repo:Q4_0  2 files  0.00 MB\n"
    assert not run("rm", "user/repo:Q4_0", "-y").exit_code
    assert list(cache.folder().glob("models--*")) == list(cache.folder().glob(".locks/*")) == []
    assert "not in the cache" in lines(run("rm", "user/repo", "-y"))


def test_rm_of_a_repository_takes_all_versions(full):
    full.commit = "d" + full.commit[1:]
    run("pull", "user/repo:Q8_0")
    run("rm", "user/repo", "-y")
    assert not cache.repo_folder("user/repo").exists() and len(run("list").stdout.splitlines()) == 2


def test_rm_of_a_file_takes_all_its_versions_and_keeps_shared_bytes(full):
    full.files["same-Q5_0.gguf"] = BYTES
    full.commit = "d" + full.commit[1:]
    run("pull", "user/repo:Q5_0")
    run("rm", "user/repo:Q8_0", "-y")
    assert not list(cache.folder().rglob(MODEL)) and len(blobs()) == 3
    assert Path(run("pull", "user/repo:Q5_0").stdout.strip()).read_bytes() == BYTES


def test_rm_frees_what_huggingface_hub_shares_between_repositories(hub):
    """Of a file that came by Xet, its blob is a link into a store of the whole cache."""
    path = Path(run("pull", "user/repo:Q8_0").stdout.strip())
    assert _shared_blobs.publish_blob_to_shared_store(
        blob_path=str(path.parent / os.readlink(path)),
        xet_hash="f" * 64,
        cache_dir=str(cache.folder()),
        expected_size=len(BYTES),
    )
    assert huggingface_hub.scan_cache_dir(cache.folder()).size_on_disk == len(BYTES)
    assert [model.nbytes for model in cache.models()] == [len(BYTES)]
    run("rm", "user/repo", "-y")
    assert huggingface_hub.scan_cache_dir(cache.folder()).size_on_disk == 0
    assert not [p for p in cache.folder().rglob("f" * 64 + "*") if not p.name.endswith(".lock")]


def test_rm_takes_names_of_the_hub_only(full):
    with pytest.raises(CheckpointError, match="not a name on the Hub"):
        cache.remove("../other")
    assert "no file matches 'Q6_K'; there are: Q4_0" in lines(run("rm", "user/repo:Q6_K", "-y"))
