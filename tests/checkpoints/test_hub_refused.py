"""A load from the Hub: refused, offline, by several at once. The Hub is on this machine (hub_server.py)."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from concurrent import futures
from pathlib import Path

import pytest

from checkpoints.hub import cache, download, fetch
from tests.bonsai_jax.command_line import ROOT
from tests.checkpoints.hub_server import BYTES, MODEL, SHA256, SPLIT, Fault, blobs, failure

# ---- refused ---------------------------------------------------------------------------------------------

REFUSALS = {
    "gated": (
        MODEL,
        Fault(401, {"X-Error-Code": "GatedRepo"}),
        "gated; ask for access on HUB/user/repo, then",
    ),
    "not granted": (
        MODEL,
        Fault(403, {"X-Error-Code": "GatedRepo"}),
        "gated; ask for access on HUB/user/repo",
    ),
    "no repository": (
        "listing",
        Fault(404, {"X-Error-Code": "RepoNotFound"}),
        "no such repository on the Hub",
    ),
    "private": (
        "listing",
        Fault(401),
        "no such repository on the Hub (or a private one: set HF_TOKEN or run",
    ),
    "forbidden": ("listing", Fault(403), "the token may not read user/repo (403); give it that right"),
    "no file": (MODEL, Fault(404, {"X-Error-Code": "EntryNotFound"}), "answers 404 for /user/repo/resolve/"),
    "too many": ("listing", Fault(429, {"Retry-After": "7"}), "too many requests (429); try again in 7 s"),
    "too many files": (
        MODEL,
        Fault(429, {"Retry-After": "300"}),
        "(429); try again in 300 s, a token raises",
    ),
    "broken": ("listing", Fault(500), "the Hub answers 500 for /api/models/user/repo; try again later"),
    "broken CDN": (MODEL, Fault(503), "the Hub answers 503 for /user/repo/resolve/"),
    "login page": (
        "listing",
        Fault(content=b"<html>"),
        "is not a list of files with sizes and hashes; look at HF",
    ),
    "no hashes": (
        "listing",
        Fault(content=b'{"sha": "", "siblings": []}'),
        "is not a list of files with sizes",
    ),
    "no answer": ("listing", Fault(pause_s=1.0), "HUB cannot be reached: timed out; try again later"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_are_one_line_with_a_remedy(hub, name, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT_S", 0.3)
    at, fault, message = REFUSALS[name]
    hub.faults[at] = fault
    line = failure()
    assert message.replace("HUB", hub.url) in line and line.startswith("user/repo:")


def test_a_refused_token_is_not_a_missing_repository(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    hub.faults["listing"] = Fault(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
    assert "the Hub refuses the token; set HF_TOKEN or run `hf auth login` again" in failure()


def test_a_hub_that_is_not_there_and_a_model_that_is(hub, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        fetch("user/repo:Q8_0")
        monkeypatch.setenv("HF_ENDPOINT", url)
        assert failure() == (
            f"user/repo:Q8_0: {url} cannot be reached: [Errno 111] Connection refused; "
            "the cache has it: --offline (in Python offline=True) opens that"
        )
        assert failure("user/other").endswith("Connection refused; try again later")


def test_a_fault_that_passes_is_waited_for(hub, monkeypatch):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.setattr(download, "WAITS_S", (1.0, 2.0))
    hub.faults[MODEL] = Fault(429, {"Retry-After": "7"}, times=2)
    fetch("user/repo:Q8_0")
    assert [wait for wait in waits if wait] == [7.0, 7.0]  # the server's own sleeps are of 0 s


@pytest.mark.parametrize(
    "fault", [Fault(429, {"Retry-After": "300"}), Fault(404, {"X-Error-Code": "EntryNotFound"})]
)
def test_a_fault_that_stays_is_not_waited_for(hub, monkeypatch, fault):
    monkeypatch.setattr(download, "WAITS_S", (0.0,))
    hub.faults[MODEL] = fault
    assert f"{fault.status}" in failure()
    assert [request.path.split("/")[-1] for request in hub.requests].count(MODEL) == 1


def test_a_full_disk_is_seen_before_the_first_byte(hub, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, len(BYTES) - 1))
    assert "0.30 MB are to come, 0.30 MB are free in" in failure() and hub.fetched(MODEL) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, len(BYTES)))
    fetch("user/repo:Q8_0")


def test_a_cache_that_cannot_be_written_is_named(hub, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    assert "Not a directory; HF_HOME sets another folder" in failure()


def test_a_disk_that_fills_up_is_no_fault_of_the_network(hub, monkeypatch):
    def replace(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    assert (
        failure() == f"user/repo:Q8_0: {cache.folder()}: No space left on device; HF_HOME sets another folder"
    )


def test_without_the_package_its_name_is_said(hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "takes the package huggingface_hub; install it" in failure()


# ---- offline ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("switch", ["argument", "HF_HUB_OFFLINE"])
def test_offline_looks_into_the_cache_alone(hub, monkeypatch, switch):
    hub.files |= {"m-Q4_K_M.gguf": b"four"}
    offline = switch == "argument"
    path = fetch("user/repo:Q8_0")
    hub.requests.clear()
    if not offline:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch("user/repo:q8_0", offline=offline) == path
    assert fetch("user/repo", offline=offline) == path
    remedy = "fetch it once with a connection: bonsai-jax pull user/other"
    assert failure("user/other", offline=offline) == f"user/other: not in the cache, and offline; {remedy}"
    assert "no file matches 'Q4_K_M'; there are: Q8_0" in failure("user/repo:Q4_K_M", offline=offline)
    assert hub.requests == []


def test_offline_says_what_a_folder_lacks(hub):
    hub.files = {"config.json": b"{}"}
    folder = fetch("user/repo")
    assert "holds no GGUF file of it, and offline" in failure(offline=True)
    (folder / "config.json").unlink()
    assert "neither a GGUF file nor config.json" in failure("user/repo", offline=True)


def test_offline_opens_a_file_of_an_older_version(hub):
    path = fetch("user/repo:Q8_0")
    hub.commit = "d" + hub.commit[1:]
    hub.files["m-Q4_0.gguf"] = b"four"
    fetch("user/repo:Q4_0")
    assert fetch("user/repo:Q8_0", offline=True) == path


def test_offline_opens_what_was_the_newest_when_last_asked(hub):
    first = fetch("user/repo:Q8_0")
    commit, hub.commit = hub.commit, "d" + hub.commit[1:]
    hub.files[MODEL] = b"worse"
    fetch("user/repo:Q8_0")
    hub.commit, hub.files[MODEL] = commit, BYTES  # the author takes it back
    assert fetch("user/repo:Q8_0") == first == fetch("user/repo:Q8_0", offline=True)


# ---- side by side ----------------------------------------------------------------------------------------


def test_two_processes_fetch_a_file_once(hub):
    hub.faults[MODEL] = Fault(pause_at=150_000, pause_s=1.5)
    code = "from checkpoints.hub import fetch; print(fetch('user/repo:Q8_0'))"
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)]
    paths = {process.communicate()[0].strip() for process in both}
    assert len(paths) == 1 and Path(paths.pop()).read_bytes() == BYTES
    assert hub.fetched(MODEL) == [None]


def test_where_locks_do_not_hold_the_file_is_right(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils.WeakFileLock", lambda path: contextlib.nullcontext())
    hub.faults[MODEL] = Fault(pause_at=150_000, pause_s=0.3)
    with futures.ThreadPoolExecutor(3) as pool:
        first = pool.submit(fetch, "user/repo:Q8_0")
        while not blobs().get("partial"):
            time.sleep(0.01)
        others = [pool.submit(fetch, "user/repo:Q8_0") for _ in range(2)]
        paths = {job.result() for job in (first, *others)}
    assert len(paths) == 1 and paths.pop().read_bytes() == BYTES and blobs() == {SHA256: len(BYTES)}
    assert len(hub.fetched(MODEL)) > 1


def test_the_bar_is_one_line_and_goes_away(hub, monkeypatch):
    """On a terminal, which is a pair of files here."""
    hub.files |= {name: name.encode() * 10_000 for name in SPLIT}
    main, terminal = os.openpty()
    code = "from checkpoints.hub import fetch; fetch('user/repo:Q4_0')"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(terminal)
    written = b""
    with contextlib.suppress(OSError):  # the terminal's end
        while piece := os.read(main, 65536):
            written += piece
    os.close(main)
    assert process.wait() == 0
    text = written.decode()
    assert "m-Q4_0-00001-of-00002.gguf" in text and "600.0/600.0 kB" in text and "Warning" not in text
    # Each picture of the bar is drawn over the last; at the end the line is erased.
    assert text.count("\n") <= 1 and text.rstrip().endswith("\x1b[2K")
