"""What strangers send, and what goes wrong: clear errors, other requests undisturbed, every page back."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import time
import urllib.parse

import httpx
import openai
import pytest

import bonsai_jax as bj
from bonsai_jax.engine.calls import Calls
from bonsai_jax.protocols import openai_chat
from bonsai_jax.protocols.answers import ServerEvent
from bonsai_jax.server import responses
from bonsai_jax.server import running as running_server
from bonsai_jax.server.bodies import MOST_DEPTH
from bonsai_jax.server.run import bound, warm
from tests.bonsai_jax.command_line import COMMAND, ROOT, TINY
from tests.bonsai_jax.serving import HI, Served, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = {"prompt": "Once", "max_tokens": 240, "ignore_eos": True}


@pytest.fixture(scope="module")
def model() -> bj.Model:
    return bj.load(TINY, bj.RunConfig(context=256, batch_size=4, impl="reference"))


@pytest.fixture(scope="module")
def server(model):
    with serving(model, rows=2, max_body=10**6, max_queue=4, max_answers=8, body_s=1.0) as served:
        served.post(TEXT, prompt="Once", max_tokens=2)  # compiles
        yield served
        served.idle()


def send(served: Served, path: str, data: bytes, **headers: str) -> httpx.Response:
    return httpx.post(served.url + path, content=data, headers=headers, timeout=60)


# Wrong bodies. Of each: the path, the body, and the field that the error names.

NESTED = {"type": "x"}
for _ in range(40):
    NESTED = {"a": [NESTED]}
VALUES = [
    None,
    True,
    -1,
    0,
    1e999,
    10**400,
    1.5,
    "",
    "x" * 3000,
    "\ud800",
    [],
    [[]],
    [None],
    {},
    {"": None},
    NESTED,
]
FIELDS = {
    CHAT: (
        *(
            "messages",
            "max_tokens",
            "max_completion_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "n",
            "seed",
        ),
        *("stop", "stream", "stream_options", "logprobs", "top_logprobs", "logit_bias", "presence_penalty"),
        *(
            "frequency_penalty",
            "repetition_penalty",
            "reasoning_effort",
            "chat_template_kwargs",
            "response_format",
        ),
        *("structured_outputs", "json_schema", "regex", "choice", "grammar", "ebnf", "guided_json"),
        *("guided_choice", "guided_json_object", "repeat_penalty", "functions", "stop_token_ids"),
    ),
    TEXT: (
        "prompt",
        "max_tokens",
        "n",
        "logprobs",
        "echo",
        "suffix",
        "best_of",
        "stop",
        "stream",
        "logit_bias",
    ),
    "/v1/embeddings": ("input", "encoding_format", "dimensions", "pooling"),
    "/tokenize": ("content", "add_special", "parse_special", "with_pieces"),
    "/detokenize": ("tokens",),
    "/apply-template": ("messages", "chat_template_kwargs"),
}
GOOD = {
    CHAT: {"messages": HI, "max_tokens": 1},
    TEXT: {"prompt": "Once", "max_tokens": 1},
    "/v1/embeddings": {"input": "Once"},
    "/tokenize": {"content": "Once"},
    "/detokenize": {"tokens": [5]},
    "/apply-template": {"messages": HI},
}


def test_wrong_values_are_400s_that_name_the_field(server):
    """Every field with every value: about 650 bodies, a part of which are right."""
    refused = 0
    with server.http() as http:
        for path, names in FIELDS.items():
            for name in names:
                for value in VALUES:
                    body = json.dumps(GOOD[path] | {name: value})
                    if "Infinity" in body:
                        body = body.replace("Infinity", "1e999")
                    answer = http.post(path, content=body)
                    assert answer.status_code in (200, 400), (path, name, value, answer.text)
                    if answer.status_code == 400:
                        error = answer.json()["error"]
                        refused += 1
                        assert error["param"].startswith(name) or name in error["message"], (
                            name,
                            value,
                            error,
                        )
                        assert "Traceback" not in error["message"] and len(error["message"]) < 600
    assert refused > 350
    server.idle()


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON: Expecting property name"),
        (b"[1]", 400, "not a JSON object but a list"),
        (b"null", 400, "not a JSON object"),
        (b'{"prompt": "\xff"}', 400, "not UTF-8, at byte 12"),
        (b'{"prompt": NaN}', 400, "NaN is no number"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", 400, "a number that cannot be read"),
        (b'{"prompt": ' + b"[" * 200 + b"]" * 200 + b"}", 400, f"more than {MOST_DEPTH} deep"),
        (b'{"prompt": ' + b"[" * 200_000, 400, f"more than {MOST_DEPTH} deep"),
        (b'{"prompt": "' + b"x" * 1_000_000 + b'"}', 413, "more than 1000000 bytes"),
        (b"x" * 10_000_000, 413, "more than 1000000 bytes"),
        (b'{"prompt": "' + b"x" * 900_000 + b'"}', 400, "characters of prompt are more than 256 tokens"),
        (json.dumps({"prompt": [[5]] * 9}).encode(), 400, "9 answers are asked for"),
        (json.dumps({"prompt": "a", "n": 9}).encode(), 400, "9 answers are asked for"),
        (json.dumps({"prompt": [10**9]}).encode(), 400, "beyond the vocabulary"),
    ],
)
def test_bodies_that_are_no_requests(server, data, status, message):
    with contextlib.suppress(httpx.WriteError):  # far too large: the server does not read it all
        answer = send(server, TEXT, data)
        assert answer.status_code == status and message in answer.json()["error"]["message"], answer.text
    assert server.post(TEXT, prompt="Once", max_tokens=1).status_code == 200


def test_a_hundred_senders_that_break_off_or_take_their_time(server):
    """Others are answered meanwhile."""
    address = urllib.parse.urlsplit(server.url)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
    sockets = []
    for i in range(100):
        own = socket.create_connection((address.hostname, address.port))
        own.sendall(head[: 20 + 3 * i % len(head)] if i % 2 else head)
        sockets.append(own)
    began = time.monotonic()
    assert server.post(TEXT, prompt="Once", max_tokens=1).status_code == 200
    assert time.monotonic() - began < 5
    for own in sockets[:50]:
        own.close()
    slow = sockets[50]
    slow.settimeout(20)
    with slow, slow.makefile("rb") as file:
        answer = file.read()  # until the server closes the connection
    assert answer.startswith(b"HTTP/1.1 408") and b"did not arrive within 1 s" in answer
    for own in sockets[51:]:
        own.close()
    server.idle()


def test_a_body_whose_end_is_no_http_leaves_no_traceback(server, caplog):
    address = urllib.parse.urlsplit(server.url)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n"
    with socket.create_connection((address.hostname, address.port)) as own, own.makefile("rb") as answer:
        own.sendall(head + b'{"pro')
        time.sleep(0.1)  # the request has begun
        own.sendall(b"no chunk")
        assert answer.readline() == b"HTTP/1.1 400 Bad Request\r\n"
    server.idle()
    assert "Traceback" not in caplog.text and all(record.exc_info is None for record in caplog.records)


def test_a_client_that_leaves_frees_its_row(server):
    """Of whole answers and streamed ones, of one prompt and several, running and waiting."""
    for body in (
        LONG,
        LONG | {"stream": True},
        LONG | {"n": 3},
        LONG | {"prompt": ["a", "b"], "stream": True},
    ):
        with pytest.raises(httpx.TimeoutException), httpx.Client(timeout=0.3) as http:
            if body.get("stream"):
                with http.stream("POST", server.url + TEXT, json=body) as answer:
                    for _ in answer.iter_lines():
                        raise httpx.ReadTimeout("the test has seen enough")
            http.post(server.url + TEXT, json=body)
        new = server.service.metrics._new._value.get()
        server.idle(5)
        assert server.service.metrics._new._value.get() - new < 200  # it did not run to its end


def test_a_full_queue_is_a_429_with_retry_after(server):
    async def all_statuses() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            return await asyncio.gather(
                *(http.post(TEXT, json=LONG | {"max_tokens": 100}) for _ in range(12))
            )

    answers = asyncio.run(all_statuses())
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(200) == 6 and statuses.count(429) == 6  # two rows, and four wait
    full = next(answer for answer in answers if answer.status_code == 429)
    assert full.headers["retry-after"] == "1" and full.json()["error"]["code"] == "queue_full"
    server.idle()


def test_an_answer_ends_at_its_deadline(model, monkeypatch):
    """With the text so far; without any, as a 503."""
    with serving(model, rows=1) as served:
        served.post(TEXT, **LONG)  # compiles
        served.service.settings = dataclasses.replace(served.service.settings, timeout_s=1.0)
        decode = Calls.decode

        def slowly(self, *arguments):
            time.sleep(0.05)
            return decode(self, *arguments)

        monkeypatch.setattr(Calls, "decode", slowly)

        async def both() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
                return await asyncio.gather(*(http.post(TEXT, json=LONG) for _ in range(2)))

        cut, waiting = sorted(asyncio.run(both()), key=lambda answer: answer.status_code)
        assert cut.status_code == 200 and cut.json()["choices"][0]["finish_reason"] == "length"
        assert 0 < cut.json()["usage"]["completion_tokens"] < 240
        assert waiting.status_code == 503 and waiting.json()["error"]["code"] == "timeout"
        served.idle()


KEYS = ("first-key", "second-key")


@pytest.mark.parametrize("share", [False, True])
def test_keys_share_cached_prompts_where_they_are_told_to(model, share):
    body = {"prompt": list(range(5, 85)), "max_tokens": 2}
    with serving(model, keys=KEYS, share_prefixes=share) as served, served.http() as http:
        cached = []
        for key in (KEYS[0], KEYS[1], KEYS[0], KEYS[1]):
            answer = http.post("/v1/completions", json=body, headers={"x-api-key": key}).json()
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 < cached[2] == cached[3]
    assert cached[1] == (cached[2] if share else 0)


def test_keys_pages_and_names(model):
    with serving(model, keys=KEYS, origins=("https://chat.example",)) as served, served.http() as http:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "first-key"},
            {"x-api-key": ""},
        ):
            answer = http.get("/v1/models", headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
        assert http.get("/metrics").status_code == 401
        assert (
            http.get("/health").status_code
            == http.get("/health", headers={"host": "x.example"}).status_code
            == 200
        )
        for key in KEYS:
            assert http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
            assert http.get("/v1/models", headers={"x-api-key": key}).status_code == 200
        with served.openai(api_key="second-key") as client:
            assert client.models.list().data[0].id == "tiny"
        with served.openai(api_key="third") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        own = {"authorization": f"Bearer {KEYS[0]}"}
        allowed = http.get("/v1/models", headers=own | {"origin": "https://chat.example"})
        assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
        other = http.get("/v1/models", headers=own | {"origin": "https://evil.example"})
        assert other.status_code == 403 and "access-control-allow-origin" not in other.headers
        asks = {"origin": "https://chat.example", "access-control-request-method": "POST"}
        assert http.options(CHAT, headers=asks).status_code == 200


def test_without_a_key_only_this_machines_names_are_answered(server):
    with server.http() as http:
        assert http.get("/v1/models", headers={"host": "rebound.example:80"}).status_code == 403
        for name in ("localhost", "127.0.0.1:8000", "[::1]:8000"):
            assert http.get("/v1/models", headers={"host": name}).status_code == 200
        page = http.get("/v1/models", headers={"origin": "https://evil.example"})
        assert page.status_code == 403 and "access-control-allow-origin" not in page.headers
        assert http.get("/v1/models", headers={"origin": server.url}).status_code == 200


def test_a_dispatch_that_fails_is_a_500_and_the_next_request_runs(model, monkeypatch):
    with serving(model) as served:
        served.post(TEXT, prompt="Once", max_tokens=2)

        def failing(self, *arguments):
            raise RuntimeError("no device")

        with monkeypatch.context() as patch:
            patch.setattr(Calls, "prefill", failing)
            failed = served.post(TEXT, prompt="Two", max_tokens=2, stream=True)
        assert failed.status_code == 500 and "no device" in failed.json()["error"]["message"]
        assert served.post(TEXT, prompt="Two", max_tokens=2).status_code == 200
        served.idle()
        with monkeypatch.context() as patch:
            patch.setattr(Calls, "prefill", failing)
            for _ in range(2):
                assert served.post(TEXT, prompt="Two", max_tokens=2).status_code == 500
            assert httpx.get(f"{served.url}/health").status_code == 503
        assert served.post(TEXT, prompt="Two", max_tokens=2).status_code == 500


def test_a_stream_that_fails_ends_with_an_error_event(model, monkeypatch):
    with serving(model) as served:
        served.post(TEXT, prompt="Once", max_tokens=2)
        real, calls = Calls.decode, []

        def failing(self, *arguments):
            calls.append(1)
            if len(calls) > 2:
                raise RuntimeError("no device")
            return real(self, *arguments)

        monkeypatch.setattr(Calls, "decode", failing)
        text = served.post(TEXT, **LONG | {"stream": True}).text
        *_, last = [line.removeprefix("data: ") for line in text.splitlines() if line]
        assert json.loads(last)["error"]["type"] == "server_error"


def test_no_token_can_be_drawn(server):
    """All of the vocabulary is banned that the table of biases holds: the rest can be drawn."""
    bias = {str(token): -100 for token in range(17)}
    answer = server.post(TEXT, prompt="Once", max_tokens=1, logit_bias=bias)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "logit_bias"


def test_more_biases_than_the_server_takes(server):
    answer = server.post(TEXT, prompt="Once", max_tokens=1, logit_bias={str(i): 1 for i in range(17)})
    assert answer.status_code == 400 and answer.json()["error"]["message"] == (
        "logit_bias: names 17 tokens, and the engine has room for 16; name fewer, or give "
        "Engine(logit_biases=), which is --logit-biases of a server"
    )
    answer = server.post(TEXT, prompt="Once", max_tokens=1, logit_bias={"999999": 1})
    assert answer.json()["error"]["message"].startswith("logit_bias: names token 999999; the vocabulary has")


def test_a_request_may_have_as_many_answers_as_the_server_says(model):
    with serving(model, rows=4, max_answers=200) as served:
        answer = served.post(TEXT, prompt="Once", max_tokens=1, n=200)
        assert len(answer.json()["choices"]) == 200
        assert served.post(TEXT, prompt="Once", max_tokens=1, n=201).json()["error"]["param"] == "n"


def test_beside_speculation_a_sampler_is_refused_as_the_body_names_it(model):
    with serving(model, rows=1, engine={"speculate": "ngram"}) as served:
        for name in ("typ_p", "typical_p", "xtc_probability"):
            error = served.post(TEXT, prompt="Once", max_tokens=1, **{name: 0.5}).json()["error"]
            assert error["param"] == name and error["message"].startswith(f"{name}: min_tokens, DRY, ")


def test_large_bodies_that_arrive_at_once_are_limited(server):
    """16 times the largest body. The others wait for their end, which does not come within a second."""
    address = urllib.parse.urlsplit(server.url)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 950000\r\n\r\n"
    answers = []
    with contextlib.ExitStack() as sockets:
        for _ in range(18):
            own = sockets.enter_context(socket.create_connection((address.hostname, address.port)))
            own.settimeout(20)
            with contextlib.suppress(ConnectionError):
                own.sendall(head + b"x" * 940_000)
            answers.append(own)
        lines = [own.makefile("rb").readline() for own in answers]
    assert {line.split()[1] for line in lines} == {b"408", b"429"}
    server.idle()
    assert server.service.body_bytes == 0


def slow_prefill(monkeypatch, seconds: float, error: str | None = None) -> None:
    prefill = Calls.prefill

    def slowly(self, *arguments):
        time.sleep(seconds)
        if error is not None:
            raise RuntimeError(error)
        return prefill(self, *arguments)

    monkeypatch.setattr(Calls, "prefill", slowly)


def test_a_stream_that_waits_is_kept_open(server, monkeypatch):
    monkeypatch.setattr(responses, "STILL_WORKING_S", 0.05)
    slow_prefill(monkeypatch, 0.4)
    lines = server.post(TEXT, prompt="Once", max_tokens=2, stream=True).text.splitlines()
    assert lines.count(": still working") >= 3 and lines[-2] == "data: [DONE]"


def test_a_client_that_does_not_read_is_given_up(monkeypatch):
    monkeypatch.setattr(responses, "STALLED_S", 0.05)
    sent = []

    async def send(message):
        sent.append(message["type"])
        if len(sent) > 2:  # the socket's buffer is full
            await asyncio.Event().wait()

    async def events():
        while True:
            yield [ServerEvent("more")]

    async def receive():
        await asyncio.Event().wait()

    stream = responses.EventStream(events(), openai_chat)
    with pytest.raises(responses.ClientLeft):
        asyncio.run(stream({"type": "http"}, receive, send))
    assert sent == ["http.response.start", "http.response.body", "http.response.body"]


def test_an_error_after_a_comment_is_an_event(model, monkeypatch):
    with serving(model) as served:
        monkeypatch.setattr(responses, "STILL_WORKING_S", 0.05)
        slow_prefill(monkeypatch, 0.4, "no device")
        answer = served.post(TEXT, prompt="Once", max_tokens=2, stream=True)
    *_, last = [line for line in answer.text.splitlines() if line]
    assert (
        answer.status_code == 200
        and "no device" in json.loads(last.removeprefix("data: "))["error"]["message"]
    )


def test_small_answers_do_not_wait_for_an_acknowledgement(server):
    """Which took 40 ms: Nagle's algorithm was on, and the head and the body are two packets."""
    times = []
    with server.http() as http:
        for _ in range(20):
            began = time.perf_counter()
            http.get("/health")
            times.append(time.perf_counter() - began)
    assert min(times) < 0.03
    with bound("127.0.0.1", 0) as own:
        assert own.proto == socket.IPPROTO_TCP


def test_a_server_is_ready_when_its_programs_are_compiled(model, monkeypatch):
    with serving(model) as served:
        service, said = served.service, []
        service.ready = False
        assert httpx.get(f"{served.url}/ready").status_code == 503
        monkeypatch.setattr(bj.Engine, "warmup", lambda self, **how: pytest.fail("cannot"))
        asyncio.run(warm(service, False, said.append))
        assert said == ["ready"] and httpx.get(f"{served.url}/ready").status_code == 200
        service.ready = False
        monkeypatch.setattr(bj.Engine, "warmup", lambda self, **how: None)
        monkeypatch.setattr(bj.Engine, "compile_constrained", lambda self: said.append("constraints"))
        asyncio.run(warm(service, True, said.append))
        assert said[1].startswith("ready after ") and said[2:] == ["constraints"]
        assert httpx.get(f"{served.url}/ready").status_code == 200
        service.draining = True
        assert httpx.get(f"{served.url}/ready").status_code == 503
        refused = served.post(TEXT, prompt="Once", max_tokens=2)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "10"


def test_what_does_not_end_in_its_time_of_grace_is_broken_off(model, monkeypatch):
    decode = Calls.decode

    def slowly(self, *arguments):
        time.sleep(0.2)
        return decode(self, *arguments)

    engine = bj.Engine(model, max_batch_size=2, max_wait_s=0.02)
    with contextlib.ExitStack() as client, running_server(engine, grace_s=0.5) as served:
        httpx.post(f"{served.url}{TEXT}", json=LONG | {"max_tokens": 2}, timeout=60)  # compiles
        monkeypatch.setattr(Calls, "decode", slowly)
        stream = httpx.stream("POST", f"{served.url}{TEXT}", json=LONG | {"stream": True})
        lines = client.enter_context(stream).iter_lines()
        next(lines)
        ending = time.monotonic()
    assert time.monotonic() - ending < 15


@contextlib.contextmanager
def started(*options: str, env: dict[str, str] | None = None):
    """The command, once it has said where it is: the process and the address."""
    command = [*COMMAND, "serve", "-m", TINY, "--impl", "reference", "-c", "128", "-b", "2", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--no-warmup", *options], cwd=ROOT, env={**os.environ, **(env or {})}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        line = process.stdout.readline()
        assert line.startswith(f"serving {TINY} at http://127.0.0.1:"), process.communicate()
        assert process.stdout.readline() == "ready\n"
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.communicate()


def test_the_command_drains_and_ends_well(tmp_path):
    """SIGTERM: what runs is answered, nothing more is taken, and the exit code is 0."""
    secret = "a secret prompt"
    (tmp_path / "keys").write_text("from-file\n\n")
    with started("--api-key-file", tmp_path / "keys", env={"BONSAI_JAX_API_KEYS": "from-env"}) as (
        process,
        url,
    ):
        for key in ("from-file", "from-env"):
            own = {"authorization": f"Bearer {key}"}
            assert httpx.get(f"{url}/v1/models", headers=own).status_code == 200
        assert httpx.get(f"{url}/v1/models").status_code == 401
        with openai.OpenAI(base_url=f"{url}/v1", api_key="from-env", timeout=60) as client:
            ask = {
                "model": "x",
                "prompt": secret,
                "max_tokens": 80,
                "extra_body": {"ignore_eos": True},
            }
            stream = iter(client.completions.create(**ask, stream=True))
            first = next(stream)
            process.send_signal(signal.SIGTERM)
            rest = list(stream)
        assert first.choices and rest[-1].choices[0].finish_reason == "length"
        assert process.wait(30) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        log = process.stderr.read()
    assert "POST /v1/completions 200" in log and "+ 80 tokens" in log
    assert secret not in log and "from-env" not in log and "Traceback" not in log


def test_the_command_ends_while_it_warms_up():
    """It went on until every program was compiled."""
    command = [*COMMAND, "serve", "-m", TINY, "--impl", "reference", "-c", "128", "-b", "16", "--port", "0"]
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": ""}  # so that there is something to compile
    options = {
        "cwd": ROOT,
        "env": environment,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    with subprocess.Popen([*command, "--no-compile-cache"], **options) as process:
        assert process.stdout.readline().startswith("serving ")
        process.send_signal(signal.SIGTERM)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "ready" not in rest and "Traceback" not in errors


def test_an_address_in_use_and_wrong_options_are_one_line():
    own = socket.create_server(("127.0.0.1", 0))
    port = str(own.getsockname()[1])
    with own:
        for options, message in (
            (
                ["--port", port],
                f"error: --host 127.0.0.1 --port {port}: Address already in use; give another",
            ),
            (["--host", "nowhere.invalid"], "error: --host nowhere.invalid: "),
            (["--api-key", ""], "error: --api-key, --api-key-file: no key was given, or only empty ones"),
        ):
            done = subprocess.run(
                [*COMMAND, "serve", "-m", TINY, *options], capture_output=True, text=True, cwd=ROOT
            )
            assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(message), done.stderr
