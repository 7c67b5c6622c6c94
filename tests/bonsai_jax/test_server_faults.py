"""What must hold when things break: a killed process, a full cache, a device that fails. What was answered is
right, nobody hangs, and what comes next works."""

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import httpx
import jax
import pytest

import bonsai_jax as bj
from bonsai_jax.engine.calls import Calls
from bonsai_jax.network import parallel
from tests.bonsai_jax.command_line import COMMAND, GREEDY, ROOT, TINY
from tests.bonsai_jax.serving import Served, serving

TEXT = "/v1/completions"
BODY = {"ignore_eos": True, "temperature": 0}
NEW = 110  # tokens of an answer: with its prompt, three pages
WAIT_S = 60.0  # the longest that anything here may take
PROMPTS = [f"Once upon a time, number {number}" for number in range(8)]


@pytest.fixture(scope="module")
def model() -> bj.Model:
    return bj.load(TINY, bj.RunConfig(context=256, batch_size=2, impl="reference"))


@pytest.fixture(scope="module")
def right(model) -> dict[str, str]:
    """The whole answers."""
    outputs = bj.generate(model, PROMPTS, max_new_tokens=NEW, sampling=GREEDY, ignore_eos=True)
    return {prompt: output.text for prompt, output in zip(PROMPTS, outputs, strict=True)}


def whole(url: str, prompt: str) -> str:
    answer = httpx.post(url + TEXT, json=BODY | {"prompt": prompt, "max_tokens": NEW}, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def streamed(url: str, prompt: str, so_far: list[str]) -> None:
    body = BODY | {"prompt": prompt, "max_tokens": NEW, "stream": True}
    with httpx.stream("POST", url + TEXT, json=body, timeout=WAIT_S) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                so_far += [choice["text"] for choice in choices]


@contextlib.contextmanager
def command(port: int) -> Iterator[subprocess.Popen]:
    """The command `serve`, once it is ready."""
    arguments = ["serve", "-m", TINY, "--impl", "reference", "-c", "256", "-b", "2", "--no-warmup"]
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--port", str(port)], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout.readline().startswith("serving "), process.communicate()
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_killed_under_load(right):
    """Nobody waits for a dead server, what came was right, and the next start is at the same port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url, parts = f"http://127.0.0.1:{port}", {prompt: [] for prompt in PROMPTS[:4]}
    with concurrent.futures.ThreadPoolExecutor(12) as threads, command(port) as process:
        answers = {prompt: threads.submit(whole, url, prompt) for prompt in PROMPTS[4:]}
        streams = [threads.submit(streamed, url, prompt, own) for prompt, own in parts.items()]
        done, _ = concurrent.futures.wait(
            [*answers.values(), *streams], WAIT_S, concurrent.futures.FIRST_COMPLETED
        )
        assert done
        os.kill(process.pid, signal.SIGKILL)
        killed = time.monotonic()
        concurrent.futures.wait([*answers.values(), *streams], WAIT_S)
        assert time.monotonic() - killed < 10
    broken = 0
    for prompt, answer in answers.items():
        if isinstance(answer.exception(), httpx.TransportError):
            broken += 1
        else:
            assert answer.result() == right[prompt]
    for prompt, own in parts.items():
        assert right[prompt].startswith("".join(own))
    broken += sum(isinstance(stream.exception(), httpx.TransportError) for stream in streams)
    assert broken
    with command(port):
        assert whole(url, PROMPTS[0]) == right[PROMPTS[0]]


def test_pages_run_out(model, right):
    """Each answer takes three pages, and there are five for all: two at once do not fit. A request that could
    never fit is refused at once."""
    with serving(model, rows=2, engine={"pages": 5}) as served:
        engine, together = served.service.engine, threading.Event()
        engine._send(lambda: together.wait(WAIT_S))  # the engine's thread, until several requests are there
        with concurrent.futures.ThreadPoolExecutor(12) as threads:
            answers = {prompt: threads.submit(whole, served.url, prompt) for prompt in PROMPTS}
            ends = time.monotonic() + WAIT_S
            while len(engine._inbox) < 4 and time.monotonic() < ends:
                time.sleep(0.01)
            together.set()
            large = served.post(TEXT, **BODY, prompt=[5] * 300, max_tokens=50)
            got = {prompt: answer.result(WAIT_S) for prompt, answer in answers.items()}
        assert got == right
        assert large.status_code == 400
        assert large.json()["error"]["code"] == "context_length_exceeded"
        assert served.load().preempted > 0
        served.idle()


REQUESTS = {
    TEXT: {"prompt": "Hi", "max_tokens": 8},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 8},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8},
}


def failing(monkeypatch, owner: object = Calls, name: str = "decode") -> list[int]:
    """This function fails once, as XLA does. Returns a list that grows with each failure."""
    function, failures = getattr(owner, name), []

    def once(*arguments):
        if not failures:
            failures.append(1)
            raise jax.errors.JaxRuntimeError("INTERNAL: the device has failed\n0x7f00 the rest of a trace")
        return function(*arguments)

    monkeypatch.setattr(owner, name, once)
    return failures


@pytest.fixture(scope="module")
def server(model):
    with serving(model, rows=2) as served:
        yield served


@pytest.mark.parametrize("path", REQUESTS)
def test_a_device_error_is_a_500_in_the_apis_form(server: Served, monkeypatch, path):
    body = BODY | REQUESTS[path]
    with monkeypatch.context() as patch:
        failures = failing(patch)
        failed = server.post(path, **body)
    assert failures and failed.status_code == 500
    error = failed.json()["error"]
    assert error["type"] == ("api_error" if path == "/v1/messages" else "server_error")
    assert error["message"].endswith("the device has failed") and "0x7f00" not in error["message"]
    assert server.post(path, **body).status_code == 200
    assert httpx.get(f"{server.url}/health").status_code == 200
    server.idle()


@pytest.mark.parametrize(("owner", "name"), [(Calls, "decode"), (parallel, "fetch")])
def test_who_waits_when_a_device_fails_is_answered(server, right, monkeypatch, owner, name):
    """When a step is dispatched, or its tokens are read. Two rows run and are lost; the others run on a new
    cache, and so does everything afterwards."""
    with monkeypatch.context() as patch, concurrent.futures.ThreadPoolExecutor(6) as threads:
        failures = failing(patch, owner, name)
        answers = {prompt: threads.submit(whole, server.url, prompt) for prompt in PROMPTS[:4]}
        concurrent.futures.wait(answers.values(), WAIT_S)
    lost = [prompt for prompt, answer in answers.items() if answer.exception() is not None]
    assert failures and 1 <= len(lost) <= 2
    for prompt, answer in answers.items():
        if prompt in lost:
            assert "the device has failed" in str(answer.exception())
        else:
            assert answer.result() == right[prompt]
    assert [whole(server.url, prompt) for prompt in lost] == [right[prompt] for prompt in lost]
    server.idle()
