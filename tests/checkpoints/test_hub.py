"""A load from the Hub: whole, interrupted, damaged. The Hub is on this machine (hub_server.py)."""

import hashlib
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants

from checkpoints import Tensor, open_checkpoint, write_gguf
from checkpoints.hub import cache, download, fetch
from tests.bonsai_jax.command_line import ROOT
from tests.checkpoints.hub_server import BYTES, MODEL, SHA256, SPLIT, Fault, blobs, failure, wrong

# ---- as it should be -------------------------------------------------------------------------------------


def test_a_first_load_in_a_fresh_process(hub, tmp_path):
    """huggingface_hub imports its modules when first used: what another import brought in is no help here."""
    blocks = Tensor("t", "q8_0", (2, 64), np.arange(136, dtype=np.uint8).reshape(2, 68))
    write_gguf(tmp_path / "m.gguf", {"general.name": "fetched"}, [blocks])
    hub.files[MODEL] = (tmp_path / "m.gguf").read_bytes()
    code = "from checkpoints import open_checkpoint; print(open_checkpoint('user/repo:Q8_0').metadata)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "fetched" in done.stdout and done.stderr == ""


def test_a_file_is_fetched_once_and_without_a_word(hub, capfd):
    path = fetch("user/repo:q8_0")
    assert path.read_bytes() == BYTES and path.name == MODEL and blobs() == {SHA256: len(BYTES)}
    assert fetch("user/repo") == path and hub.fetched(MODEL) == [None]
    assert capfd.readouterr() == ("", "")  # the Hub sends a warning about tokens


def test_a_new_version_of_the_repository_keeps_the_bytes(hub):
    old = fetch("user/repo")
    hub.commit = "d" + hub.commit[1:]
    new = fetch("user/repo")
    assert old != new and new.read_bytes() == BYTES and blobs() == {SHA256: len(BYTES)}
    assert fetch("user/repo", offline=True) == new
    assert not any(request.path.startswith("/cdn/") for request in hub.requests[3:])


def test_all_parts_of_a_split_file_are_fetched(hub):
    hub.files |= {name: name.encode() for name in SPLIT}
    path = fetch("user/repo:Q4_0")
    assert [path.with_name(Path(name).name).read_text() for name in SPLIT] == SPLIT


def test_a_repository_without_gguf_is_a_folder(hub):
    expected = ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    expected += ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    others = ["pytorch_model.bin", "original/consolidated.safetensors", "consolidated.safetensors", "a.py"]
    hub.files = {name: name.encode() for name in (*expected, *others)}
    folder = fetch("user/repo")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {name: name for name in expected}
    assert fetch("user/repo", offline=True) == folder
    assert "has no GGUF file; leave out :Q8_0" in failure("user/repo:Q8_0")
    hub.files = {"README.md": b""}
    assert "no GGUF file and no config.json" in failure("user/repo")


def test_the_token_goes_to_the_hub_and_to_nobody_else(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch("user/repo:Q8_0")
    sent = {(request.host, request.token) for request in hub.requests}
    assert sent == {("127.0.0.1", "Bearer hf_secret"), ("localhost", None)}


def test_the_environment_is_read_at_each_call(hub, monkeypatch, tmp_path):
    first = fetch("user/repo")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "other"))
    second = fetch("user/repo")
    assert first.is_relative_to(tmp_path / "home" / "hub") and second.is_relative_to(
        tmp_path / "other" / "hub"
    )
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "third"))
    assert fetch("user/repo").is_relative_to(tmp_path / "third")


# ---- huggingface_hub itself, over the same cache and the same server ---------------------------------------


@pytest.fixture
def library(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)  # it would ask the true Hub
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)

    def hf_hub_download(hub, name, **options):
        return Path(
            huggingface_hub.hf_hub_download(
                "user/repo", name, endpoint=hub.url, cache_dir=cache.folder(), **options
            )
        )

    return hf_hub_download


def test_huggingface_hub_finds_what_we_fetched(hub, library):
    hub.files |= {"config.json": b"{}", "model.safetensors": b"weights"}
    del hub.files[MODEL]
    folder = fetch("user/repo")
    for name in ("config.json", "model.safetensors"):
        assert library(hub, name, local_files_only=True) == folder / name
        hub.requests.clear()
        assert library(hub, name) == folder / name and {r.method for r in hub.requests} == {"HEAD"}
    info = huggingface_hub.scan_cache_dir(cache.folder())
    assert not info.warnings and [repo.repo_id for repo in info.repos] == ["user/repo"]
    assert info.size_on_disk == len(b"{}weights")


def test_we_find_what_huggingface_hub_fetched(hub, library):
    path = library(hub, MODEL)
    assert path.read_bytes() == BYTES
    hub.requests.clear()
    assert fetch("user/repo:Q8_0") == path and hub.fetched(MODEL) == []
    assert fetch("user/repo:Q8_0", offline=True) == path


def test_what_is_too_large_for_http_is_left_to_it(hub, library, monkeypatch):
    monkeypatch.setattr(download, "LARGEST_BYTES", 200_000)
    assert f"over HTTP; `hf download user/repo {MODEL}`, then run it again" in failure()
    path = library(hub, MODEL)
    assert fetch("user/repo:Q8_0", check=True) == path


# ---- interrupted -----------------------------------------------------------------------------------------


def test_a_cut_download_goes_on_at_its_byte(hub):
    hub.faults[MODEL] = Fault(cut=150_000, times=1)
    line = failure()
    assert (
        line.startswith(f"user/repo:Q8_0: {MODEL} stopped at 0.15 MB of 0.30 MB: ")
        and "run it again to continue there" in line
    )
    assert blobs() == {"partial": 150_000} and "offline; fetch it once" in failure(offline=True)
    assert fetch("user/repo:Q8_0").read_bytes() == BYTES
    assert hub.fetched(MODEL) == [None, "bytes=150000-"] and blobs() == {SHA256: len(BYTES)}


@pytest.mark.parametrize("lengths", [True, False])
def test_a_connection_that_keeps_ending_is_taken_up_again(hub, monkeypatch, lengths):
    """Also where the answer has no length, so that its end looks like the file's."""
    monkeypatch.setattr(download, "WAITS_S", (0.0,))  # one more try without a byte: each brings some
    hub.faults[MODEL] = Fault(cut=70_000, lengths=lengths)
    assert fetch("user/repo:Q8_0").read_bytes() == BYTES
    assert hub.fetched(MODEL) == [None, *(f"bytes={n}-" for n in range(70_000, 300_000, 70_000))]


def test_a_silent_connection_is_taken_up_again(hub, monkeypatch):
    monkeypatch.setattr(download, "WAITS_S", (0.0,))
    monkeypatch.setattr(download, "TIMEOUT_S", 0.3)
    hub.faults[MODEL] = Fault(pause_at=100_000, pause_s=1.0, times=1)
    assert fetch("user/repo:Q8_0").read_bytes() == BYTES
    assert hub.fetched(MODEL) == [None, "bytes=100000-"]


def test_a_server_without_ranges_sends_all_again(hub):
    hub.faults[MODEL] = Fault(cut=150_000, times=1)
    failure()
    hub.faults[MODEL] = Fault(ranges=False)
    assert fetch("user/repo:Q8_0").read_bytes() == BYTES


def test_a_split_file_goes_on_in_its_second_part(hub):
    hub.files |= {name: name.encode() * 100 for name in SPLIT}
    hub.faults[SPLIT[1]] = Fault(cut=1000, times=1)
    assert "m-Q4_0-00002-of-00002.gguf stopped" in failure("user/repo:Q4_0")
    assert "00002.gguf is not in the cache, and offline" in failure("user/repo:Q4_0", offline=True)
    fetch("user/repo:Q4_0")
    assert [hub.fetched(name) for name in SPLIT] == [[None], [None, "bytes=1000-"]]


# ---- damaged ---------------------------------------------------------------------------------------------


def test_a_wrong_byte_is_named_and_deleted(hub):
    hub.faults[MODEL] = Fault(content=wrong(BYTES), times=1)
    got = hashlib.sha256(wrong(BYTES)).hexdigest()
    line = f"{MODEL}: its hash is {got}, expected {SHA256}; it was deleted, fetch it again"
    assert failure() == line and blobs() == {} and "not in the cache" in failure(offline=True)
    assert fetch("user/repo:Q8_0").read_bytes() == BYTES


def test_a_wrong_byte_in_a_small_file_is_found_by_gits_hash(hub):
    hub.files = {"config.json": b"{}", "model.safetensors": b"weights"}
    hub.faults["config.json"] = Fault(content=b"{ ", times=1)
    expected = subprocess.run(["git", "hash-object", "--stdin"], input=b"{}", capture_output=True).stdout
    assert f"expected {expected.decode().strip()}" in failure("user/repo")
    assert (fetch("user/repo") / "config.json").read_bytes() == b"{}"


def test_a_wrong_byte_before_the_interruption_is_found_after_it(hub):
    hub.faults[MODEL] = Fault(cut=150_000, times=1)
    failure()
    (partial,) = (cache.repo_folder("user/repo") / "blobs").glob("*")
    partial.write_bytes(wrong(BYTES[:150_000], 70_000))
    assert "it was deleted, fetch it again" in failure() and blobs() == {}
    assert fetch("user/repo:Q8_0").read_bytes() == BYTES


@pytest.mark.parametrize("content", [BYTES[:-1], BYTES + b"x"], ids=["short", "long"])
@pytest.mark.parametrize("cut", [None, 150_000], ids=["first", "resumed"])
def test_a_wrong_size_is_named_and_deleted(hub, content, cut):
    if cut:
        hub.faults[MODEL] = Fault(cut=cut, times=1)
        failure()
    hub.faults[MODEL] = Fault(content=content, times=1)
    line = f"{MODEL}: the server sends {len(content)} bytes, expected 300000; it was deleted, fetch it again"
    assert failure() == line and blobs() == {}
    assert fetch("user/repo:Q8_0").read_bytes() == BYTES


def test_more_bytes_than_listed_without_a_length_are_refused(hub):
    hub.faults[MODEL] = Fault(content=BYTES * 2, lengths=False)
    assert " or more bytes, expected 300000; it was deleted" in failure() and blobs() == {}


def test_a_partial_file_that_is_too_long_is_none(hub):
    hub.faults[MODEL] = Fault(cut=150_000, times=1)
    failure()
    (partial,) = (cache.repo_folder("user/repo") / "blobs").glob("*")
    partial.write_bytes(BYTES * 2)
    assert fetch("user/repo:Q8_0").read_bytes() == BYTES and hub.fetched(MODEL) == [None, None]


def test_damage_in_the_cache_is_repaired(hub):
    path = fetch("user/repo:Q8_0")
    path.write_bytes(BYTES[:-1])
    assert fetch("user/repo:Q8_0").read_bytes() == BYTES  # a wrong size is seen at every load
    path.write_bytes(wrong(BYTES))
    assert fetch("user/repo:Q8_0").read_bytes() == wrong(BYTES)  # a wrong byte costs reading all to see
    assert fetch("user/repo:Q8_0", check=True).read_bytes() == BYTES
    hub.requests.clear()
    fetch("user/repo:Q8_0", check=True)
    assert hub.fetched(MODEL) == []


def test_what_is_damaged_is_gone_before_it_is_repaired(hub):
    path = fetch("user/repo:Q8_0")
    path.write_bytes(wrong(BYTES))
    hub.faults[MODEL] = Fault(cut=150_000, times=1)
    assert "stopped" in failure(check=True) and blobs() == {"partial": 150_000}
    assert "and offline; fetch it once" in failure(offline=True)
    assert fetch("user/repo:Q8_0").read_bytes() == BYTES


def test_a_file_system_without_links_holds_the_file_itself(hub, monkeypatch):
    def symlink_to(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(Path, "symlink_to", symlink_to)
    path = fetch("user/repo:Q8_0")
    assert not path.is_symlink() and path.read_bytes() == BYTES and blobs() == {}
    path.write_bytes(wrong(BYTES))
    assert fetch("user/repo:Q8_0", check=True).read_bytes() == BYTES
    assert fetch("user/repo:Q8_0") == path and hub.fetched(MODEL) == [None, None]
    assert [(model.name, model.nbytes) for model in cache.models()] == [("user/repo:Q8_0", len(BYTES))]


def test_a_link_that_is_there_already_is_as_good(hub):
    path = fetch("user/repo:Q8_0")
    cache.link(path.resolve(), path)
    assert path.is_symlink() and path.read_bytes() == BYTES


@pytest.mark.parametrize("name", ["../../../m-Q8_0.gguf", "/m-Q8_0.gguf", "a\\..\\m-Q8_0.gguf", "a//m.gguf"])
def test_names_that_lead_out_of_the_cache_are_refused(hub, name, tmp_path):
    hub.files = {name: BYTES}
    assert "is not a list of files" in failure()
    assert not list(tmp_path.rglob("*.gguf"))


def test_open_checkpoint_takes_the_name_of_a_file(hub, monkeypatch):
    monkeypatch.setattr("checkpoints.open_gguf", lambda path: path)
    assert open_checkpoint(f"user/repo:{MODEL}").name == MODEL
