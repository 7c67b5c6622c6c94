"""deploy/ray_serve.py: two replicas on CPUs, one of which is killed under load. Needs ray[serve]:

uv run --with "ray[serve]==2.60.0" pytest -m slow tests/bonsai_jax/test_ray_serve.py
"""

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.bonsai_jax.command_line import ROOT, TINY

MARK = "BONSAI_JAX_TEST"  # environment variable that only processes of one test have
BODY = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}
PROMPTS = [f"Once upon a time, number {number}" for number in range(4)]


def replicas(mark: str) -> set[int]:
    """The processes of replicas that this test has started."""
    pids = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_replica = b"ServeReplica:default:Replica" in (folder / "cmdline").read_bytes()
            if is_replica and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                pids.add(int(folder.name))
    return pids


@contextlib.contextmanager
def served(folder: Path, **more: int) -> Iterator[tuple[str, str]]:
    """`serve run` with a file of settings: the address, and the mark of its processes. more: Arguments"""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = {"model": TINY, "replicas": 2, "context": 256, "batch_size": 2, "warmup": False}
    arguments |= more
    application = {"name": "default", "route_prefix": "/", "import_path": "deploy.ray_serve:build"}
    options = {"host": "127.0.0.1", "port": port}
    settings = {"http_options": options, "applications": [{**application, "args": arguments}]}
    (folder / "serve.yaml").write_text(json.dumps(settings))
    mark, log = uuid.uuid4().hex, folder / "log"
    environment = {
        **os.environ, MARK: mark, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path),
        "RAY_ADDRESS": "local", "RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": "300",
        "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    command = [sys.executable, "-m", "ray.serve.scripts", "run", str(folder / "serve.yaml")]
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
    url, ends = f"http://127.0.0.1:{port}", time.monotonic() + 300
    try:
        while not answers(url):
            assert process.poll() is None and time.monotonic() < ends, log.read_text()[-4000:]
            time.sleep(0.5)
        yield url, mark
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def numbers(url: str, prompt: str) -> dict[str, float]:
    """The metrics without labels of the replica that has read this prompt."""
    text = httpx.request("GET", f"{url}/metrics", json={"prompt": prompt}, timeout=60).text
    lines = [line.split() for line in text.splitlines() if line[0] != "#" and "{" not in line]
    return {name: float(value) for name, value in lines}


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/v1/models", timeout=30).status_code == 200
    return False


@pytest.mark.slow
def test_a_replica_that_is_killed_loses_no_request(tmp_path):
    pytest.importorskip("ray.serve", exc_type=ImportError)

    def ask(number: int) -> str:
        body = BODY | {"prompt": PROMPTS[number % len(PROMPTS)]}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    with served(tmp_path) as (url, mark):
        right = [ask(number) for number in range(len(PROMPTS))]
        assert len(set(right)) == len(PROMPTS) and len(replicas(mark)) == 2
        wrong = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "n": 0}, timeout=60)
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "n"
        with concurrent.futures.ThreadPoolExecutor(16) as threads:
            asked = [threads.submit(ask, number) for number in range(64)]
            while not sum(future.done() for future in asked) > 8:
                time.sleep(0.05)
            killed = min(replicas(mark))
            os.kill(killed, signal.SIGKILL)
            got = [future.result(300) for future in asked]
        assert got == [right[number % len(PROMPTS)] for number in range(64)]
        ends = time.monotonic() + 180
        while len(replicas(mark) - {killed}) < 2:  # Ray starts another one
            assert time.monotonic() < ends
            time.sleep(0.5)
        streamed = BODY | {"prompt": PROMPTS[0], "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=streamed, timeout=60) as stream:
            events = [line for line in stream.iter_lines() if line]
        assert events[-1] == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in events[:-1]]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == right[0]
        # A client that leaves frees its row. With the prompt Ray asks the same replica.
        before = numbers(url, PROMPTS[0])
        streamed["max_tokens"] = 240
        with httpx.stream("POST", f"{url}/v1/completions", json=streamed, timeout=60) as stream:
            next(stream.iter_lines())
        while (after := numbers(url, PROMPTS[0]))["bonsai_running"]:
            assert time.monotonic() < ends
        assert 0 < after["bonsai_new_tokens_total"] - before["bonsai_new_tokens_total"] < 200


@pytest.mark.slow
def test_errors_have_the_form_and_the_status_of_a_servers(tmp_path):
    pytest.importorskip("ray.serve", exc_type=ImportError)
    messages = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200}
    with served(tmp_path, replicas=1, max_queue=1, max_body=1) as (url, _):

        def ask(path: str, body: dict) -> httpx.Response:
            return httpx.post(f"{url}{path}", json=body, timeout=300)

        long = ask("/v1/messages", {"messages": "x" * 1_100_000})
        assert long.status_code == 413 and long.json()["error"]["type"] == "request_too_large"
        long = ask("/v1/completions", {"prompt": "x" * 1_100_000})
        assert long.status_code == 413 and long.json()["error"]["type"] == "invalid_request_error"
        asked = [("/v1/messages", messages), ("/v1/completions", BODY | {"prompt": "x", "max_tokens": 200})]
        with concurrent.futures.ThreadPoolExecutor(24) as threads:
            got = list(threads.map(ask, *zip(*(asked * 12), strict=True)))
        assert {answer.status_code for answer in got} == {200, 429}
        full = [answer for answer in got if answer.status_code == 429]
        assert len(full) > 4 and all(answer.headers["retry-after"] == "1" for answer in full)
        assert {answer.json().get("type") for answer in full} == {"error", None}  # Anthropic's form, OpenAI's
