"""The command `chat --server`: a conversation with a server, here our own."""

import itertools
import re
import signal
import subprocess
import time

import httpx
import pytest

import bonsai_jax as bj
from bonsai_jax.cli import chat
from bonsai_jax.cli.chat import commands, remote, remote_errors
from bonsai_jax.cli.chat.backend import ServerError
from bonsai_jax.cli.chat.commands import Session
from bonsai_jax.cli.chat.conversation import Conversation
from bonsai_jax.cli.chat.local import Local
from bonsai_jax.cli.chat.received import Received
from bonsai_jax.engine.calls import Calls
from bonsai_jax.server import running as running_server
from bonsai_jax.server.settings import Settings
from tests.bonsai_jax.command_line import COMMAND, GREEDY, ROOT, run, tiny
from tests.bonsai_jax.serving import serving


@pytest.fixture(scope="module")
def server():
    with serving(tiny(), rows=2, max_answers=4) as served:
        served.post("/v1/completions", prompt="Once", max_tokens=2)  # compiles
        yield served
        served.idle()


def talking(served, **options) -> Conversation:
    options = {"max_new_tokens": 8, "ignore_eos": True, **options}
    return Conversation(remote.Server(served.url).open(None), GREEDY, **options)


def answer(conversation, text, **how) -> str:
    return "".join(part.text for part in conversation.ask(text, **how))


def test_the_answers_are_those_of_the_model_itself(server):
    far = talking(server, system="Be kind.")
    with bj.Engine(tiny(), max_batch_size=1) as engine:
        near = Conversation(Local(engine), GREEDY, max_new_tokens=8, ignore_eos=True, system="Be kind.")
        for turn in ("Hi there", "And then?"):
            assert answer(far, turn) == answer(near, turn)
        assert far.messages == near.messages and near.reply is not None
        assert far.reply.depth == near.reply.depth and far.reply.new_tokens == 8
    assert far.reply.received.usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert commands.status(far).startswith("cut off by max_new_tokens, ")
    assert " of them in the cache, 8 tokens of the answer, " in far.reply.stats()
    assert answer(far, "And then?", replaces=True) == far.messages[-1]["content"]
    assert len(far.messages) == 4


def test_piped_into_the_command(server):
    expected = answer(talking(server, max_new_tokens=4), "Hi")
    stdin = "/model\nHi\n/tokens\n/set temperature_first on\n/model other\n/stats\n"
    arguments = ["--server", f"{server.url}/v1/", "-n", 4, "--temp", 0, "--ignore-eos"]
    done = run("chat", *arguments, stdin=stdin)
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"{expected}\n"
    title, *errors, stats = done.stderr.splitlines()[-5:]
    assert title == f"tiny at {server.url}/v1"
    assert errors == [
        "error: /tokens needs a model in this process; /stats has what the server counted",
        "error: temperature_first is set where the model runs, by its server",
        f"error: {server.url}/v1 serves no model 'other', but tiny",
    ]
    assert "4 tokens of the answer" in stats


def test_a_stopped_answer_stays_and_its_row_is_free(server):
    conversation = talking(server, max_new_tokens=200)
    parts = conversation.ask("Hi there")
    shown = next(parts).text
    conversation.interrupt()
    assert list(parts) == [] and commands.status(conversation).startswith("stopped")
    assert conversation.messages[-1] == {"role": "assistant", "content": shown}
    server.idle(5)
    conversation.reset()
    assert answer(conversation, "Hi there") == "" and conversation.messages == []  # stopped beforehand
    conversation.resume()
    conversation.max_new_tokens = 8
    assert answer(conversation, "Hi there").startswith(shown)
    left = conversation.ask("More")  # who closes the generator leaves, too
    next(left)
    left.close()
    server.idle(5)
    assert len(conversation.messages) == 4


def test_ctrl_c_stops_the_answer_and_not_the_chat(server):
    arguments = ["chat", "--server", server.url, "--ignore-eos", "--temp", "0"]
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    process.stdin.write(b"Hi\n")
    process.stdin.flush()
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(b"/save /dev/null\n/exit\n", timeout=60)
    assert process.returncode == 0 and b"Traceback" not in stderr, stderr
    server.idle(5)


def test_thoughts_as_servers_send_them():
    """As reasoning_content (ours, llama.cpp), as reasoning (vLLM, Ollama), and with tags in the content."""
    deltas = [
        {"role": "assistant", "content": None},
        {"reasoning": "They "},
        {"reasoning_content": "greet."},
        {"content": "Hel"},
        {"content": "lo <think>or"},
        {"content": " not</think>!\ud83d"},  # half a character
    ]
    received, parts = Received(), []
    for delta in deltas:
        parts += received.next({"choices": [{"delta": delta, "finish_reason": None}], "usage": None})
    parts += received.next({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    parts += received.next({"choices": [], "usage": {"completion_tokens": 9, "total_tokens": 20}})
    parts += received.end()
    assert "".join(part.text for part in parts) == received.text
    assert received.text == "<think>They greet.</think>Hello <think>or not</think>!\ufffd"
    shown = [(event.kind, event.text) for part in parts for event in part.events]
    assert [kind for kind, _ in itertools.groupby(shown, lambda event: event[0])] == [
        *("thought", "answer", "thought", "answer"),
    ]
    assert "".join(text for kind, text in shown if kind == "answer") == "Hello !\ufffd"
    assert received.message() == {
        "role": "assistant",
        "content": "Hello <think>or not</think>!\ufffd",
        "reasoning_content": "They greet.",
    }
    assert received.finish_reason == "stop" and "9 tokens of the answer" in received.stats()


def test_what_is_asked():
    sampling = bj.SamplingParams(temperature=0.5, top_k=0, min_p=0, repetition_penalty=1.1, seed=3)
    talk = Conversation(None, sampling, 9, think=False, stop_texts=("x",))  # type: ignore[arg-type]
    asked = remote.body("m", talk.question([{"role": "user", "content": "Hi"}]))
    assert asked == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        **{"temperature": 0.5, "top_p": 0.95, "seed": 3},
        **{"repetition_penalty": 1.1, "repeat_penalty": 1.1},
        **{"max_tokens": 9, "stop": ["x"], "chat_template_kwargs": {"enable_thinking": False}},
    }


def test_keys_come_from_the_option_or_the_environment(monkeypatch):
    with serving(tiny(), keys=("secret",)) as served:
        arguments = ("chat", "--server", served.url, "-n", 2)
        refused = run(*arguments, stdin="Hi\n")
        assert refused.exit_code == 1 and refused.stderr.count("\n") == 1
        assert "/v1/models asks for a key (status 401)" in refused.stderr
        assert "give --api-key KEY, or set BONSAI_API_KEY" in refused.stderr
        wrong = run(*arguments, "--api-key", "other", stdin="Hi\n")
        assert wrong.exit_code == 1 and "refuses this key" in wrong.stderr
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert run(*arguments, stdin="/stats\n").exit_code == 0
        monkeypatch.setenv("BONSAI_API_KEY", "other")  # comes first
        assert run(*arguments, stdin="/stats\n").exit_code == 1
        assert run(*arguments, "--api-key", "secret", stdin="/stats\n").exit_code == 0


def test_errors_of_a_running_server(server, capsys):
    """The conversation stays as it was, and goes on."""
    conversation = talking(server)
    with pytest.raises(ValueError, match=r"refuses the request \(status 400\): .*; /reset begins a new"):
        answer(conversation, "word " * 300)
    server.service.answers += 1000
    try:
        with pytest.raises(ValueError, match=r"takes no more requests now: .*try again in 1 s"):
            answer(conversation, "Hi")
    finally:
        server.service.answers -= 1000
    server.service.draining = True
    try:
        chat.respond(Session(conversation, None), "Hi", typed=True, plain=True)
        assert "error: the server failed (status 503): the server is shutting down" in capsys.readouterr().err
    finally:
        server.service.draining = False
    with pytest.raises(ServerError, match="/api/v1/models is not of OpenAI's API: give --server"):
        remote.Server(f"{server.url}/api")
    assert conversation.messages == [] and answer(conversation, "Hi")


def test_what_a_terminal_would_obey_is_left_out():
    assert remote_errors.message({"error": {"message": "no\x1b[31m\n such."}}) == "no[31m such"
    assert remote_errors.message({"detail": ["a"]}) == '["a"]' and remote_errors.message([]) == ""
    assert len(remote_errors.message({"error": "x" * 1000})) < 310


def test_a_server_that_ends_leaves_the_text_so_far(monkeypatch):
    decode = Calls.decode

    def slowly(self, *arguments):
        time.sleep(0.1)
        return decode(self, *arguments)

    monkeypatch.setattr(Calls, "decode", slowly)
    engine = bj.Engine(tiny(), max_batch_size=1, max_wait_s=0.02)
    with running_server(engine, Settings(name="tiny"), grace_s=0.1) as served:
        conversation = talking(served, max_new_tokens=200)
        parts = conversation.ask("Hi")
        shown = next(parts).text
    with pytest.raises(ServerError, match=r"the text so far stays|ended before its answer did|broke"):
        for part in parts:
            shown += part.text
    assert conversation.messages[-1]["content"] == shown
    with pytest.raises(ServerError, match="no server answers at"):
        answer(conversation, "Hi")


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("localhost:1", "http://localhost:1/v1"),
        ("http://h/v1", "http://h/v1"),
        ("https://h/openai/v1/", "https://h/openai/v1"),
    ],
)
def test_addresses(monkeypatch, given, base):
    body = {"data": [{"id": "a"}, {"id": "b"}]}
    monkeypatch.setattr(httpx, "get", lambda url, **_: httpx.Response(200, json=body))
    server = remote.Server(given)
    assert server.base == base and server.open("b").name == "b"
    with pytest.raises(ValueError, match="serves a, b: choose with --model NAME"):
        server.open(None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--server", "127.0.0.1:1"), r"no server answers at http://127.0.0.1:1/v1 \(.*\): start one"),
        (("--server", "ftp://h"), "no address of a server; give http://HOST:PORT"),
        (("--server", "http://h:x"), "no address of a server"),
        (("--server", "h", "--ctx", 64), "--ctx: for a model in this process, not with --server"),
        (("--server", "h", "-tp", 2, "--offline"), "--offline, --tensor-parallel: for a model in this"),
        (("--api-key", "k"), "--api-key needs --server"),
        (("--server", "h", "--api-key", "k\ney"), "--api-key: a key is one line of ASCII"),
    ],
)
def test_wrong_options_are_one_line(arguments, message):
    done = run("chat", *arguments, stdin="Hi\n")
    assert done.exit_code in (1, 2) and done.stdout == ""
    assert re.search(message, " ".join(done.stderr.replace("│", " ").split())), done.stderr
