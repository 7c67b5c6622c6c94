"""A batch: every line once, whatever stops it, with the answers of `generate` in OpenAI's format."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax import batch
from bonsai_jax.batch import lines
from bonsai_jax.batch.results import Results
from bonsai_jax.engine.calls import Calls
from bonsai_jax.protocols.errors import FieldError
from tests.bonsai_jax.command_line import COMMAND, ROOT, TINY, run

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JOB = batch.Job(batch_size=4)


@pytest.fixture(scope="module")
def model():
    return bj.load(
        TINY, bj.RunConfig(context=128, batch_size=4, impl="reference")
    )  # as the command line's below


def asked(custom_id: str, url: str = TEXT, **body) -> dict:
    if url == TEXT:
        body = {"prompt": f"Line {custom_id}", "max_tokens": 4, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path: Path, lines: list) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def read(path: Path) -> dict[str, dict]:
    """Lines of an output by custom_id, each of which is there once."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {line["custom_id"]: line for line in found}
    assert len(by_id) == len(found)
    return by_id


# Long enough that `generate` needs the batch's context, and so its programs.
MESSAGES = [
    {"role": "system", "content": "Be brief, say no more, and be kind to everyone."},
    {"role": "user", "content": "Who?"},
]
ONCE = "Once upon a time"
DRAWN = bj.SamplingParams(temperature=0.7, top_p=0.9, seed=3)
BENT = {"frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 1.1}
ALIKE = {"max_tokens": 8, "temperature": 0.7, "top_p": 0.9, "seed": 3}
LINES = [
    asked("text", **ALIKE, prompt=ONCE, n=2, logprobs=2),
    asked("stop", **ALIKE | {"temperature": 0}, prompt=ONCE),
    asked("two", **ALIKE, prompt=["Once", [5, 6, 7]], n=2, user="me", metadata={"a": "b"}, stream=False),
    asked("chat", CHAT, **ALIKE, messages=MESSAGES, logprobs=True, top_logprobs=1, top_k=5, stop=None),
    asked(
        "parts",
        CHAT,
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
        ],
        **BENT,
        max_completion_tokens=8,
        temperature=0,
        logit_bias={"7": 3.5},
    ),
    asked("field", tools=[]),
    asked("room", max_tokens=500),
    asked("bias", logit_bias={"99999": 1}),
    asked("half", CHAT, messages=[{"role": "user", "content": "\ud800"}]),
]


@pytest.fixture(scope="module")
def expected(model) -> dict[str, bj.Output]:
    """By `generate`, in one call."""
    chat = model.tokenizer.encode_chat
    greedy, second = bj.SamplingParams(0.0), dataclasses.replace(DRAWN, seed=4)
    asked = {
        "once": (ONCE, DRAWN),
        "once, again": (ONCE, second),
        "greedy": (ONCE, greedy),
        "two": ("Once", DRAWN),
        "two, again": ("Once", second),
        "ids": ([5, 6, 7], dataclasses.replace(DRAWN, seed=5)),
        "ids, again": ([5, 6, 7], dataclasses.replace(DRAWN, seed=6)),
        "chat": (chat(MESSAGES), dataclasses.replace(DRAWN, top_k=5)),
        "parts": (
            chat([{"role": "user", "content": "a\nb"}]),
            dataclasses.replace(greedy, **BENT, logit_bias={7: 3.5}),
        ),
    }
    prompts, params = zip(*asked.values(), strict=True)
    outputs = bj.generate(model, prompts, max_new_tokens=8, sampling=params, logprobs=2)
    return dict(zip(asked, outputs, strict=True))


@pytest.fixture(scope="module")
def answers(model, expected, tmp_path_factory):
    """Of LINES, and the report."""
    folder = tmp_path_factory.mktemp("batch")
    LINES[1]["body"]["stop"] = [expected["greedy"].text[2:4]]
    report = batch.run(model, write(folder / "in.jsonl", LINES), folder / "out.jsonl", JOB)
    return read(folder / "out.jsonl"), report


def choices(answers, custom_id: str) -> list[dict]:
    found = answers[0][custom_id]["response"]["body"]["choices"]
    assert [choice["index"] for choice in found] == list(range(len(found)))
    return found


def test_answers_are_those_of_generate(expected, answers):
    one, two = expected["once"], expected["once, again"]
    text = choices(answers, "text")
    assert [choice["text"] for choice in text] == [one.text, two.text]
    scores, known = text[0]["logprobs"], one.logprobs
    np.testing.assert_allclose(scores["token_logprobs"], known.token, atol=1e-4)
    np.testing.assert_allclose([max(t.values()) for t in scores["top_logprobs"]], known.top[:, 0], atol=1e-4)
    tokens, new = one.prompt_tokens, len(one.tokens) + len(two.tokens)
    usage = {"prompt_tokens": tokens, "completion_tokens": new, "total_tokens": tokens + new}
    got = answers[0]["text"]["response"]["body"]["usage"]
    assert got == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
    (stopped,), greedy = choices(answers, "stop"), expected["greedy"].text
    assert len(greedy) > 3 and stopped["text"] == greedy[: greedy.index(greedy[2:4])]
    assert stopped["finish_reason"] == "stop"
    several = [expected[name].text for name in ("two", "two, again", "ids", "ids, again")]
    assert [choice["text"] for choice in choices(answers, "two")] == several
    used = answers[0]["two"]["response"]["body"]["usage"]["prompt_tokens"]
    assert used == expected["two"].prompt_tokens + 3


def test_chats_are_encoded_by_the_template(expected, answers):
    (chat,), (parts,) = choices(answers, "chat"), choices(answers, "parts")
    message = {"role": "assistant", "content": expected["chat"].text, "refusal": None}
    assert chat["message"] == message and chat["finish_reason"] == expected["chat"].finish_reason
    scores = chat["logprobs"]["content"]
    assert b"".join(bytes(t["bytes"]) for t in scores).decode(errors="replace") == message["content"]
    assert all(len(token["top_logprobs"]) == 1 for token in scores)
    assert parts["message"]["content"] == expected["parts"].text and parts["logprobs"] is None


def test_a_line_that_cannot_be_met_says_which_field_and_the_others_go_on(answers):
    lines, report = answers
    params = {"field": "tools", "room": "max_tokens", "bias": "logit_bias", "half": "messages"}
    for custom_id, param in params.items():
        line = lines[custom_id]
        assert line["response"]["status_code"] == 400
        assert line["response"]["body"]["error"]["param"] == param
        assert line["error"]["message"].startswith(f"{param}: ")
    assert (report.lines, report.errors, report.done_before) == (5, 4, 0)
    assert report.new_tokens == sum(
        line["response"]["body"]["usage"]["completion_tokens"] for line in lines.values() if not line["error"]
    )


def test_answers_have_the_format_that_a_line_asks_for(model, tmp_path):
    schema = {"type": "array", "items": {"enum": ["yes", "no", 3]}, "minItems": 1, "maxItems": 3}
    formats = {
        "schema": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}},
        "object": {"type": "json_object"},
        "text": {"type": "text"},
        "broken": {"type": "json_schema", "json_schema": {"schema": {"type": "list"}}},
    }
    some = [
        asked(name, CHAT, messages=MESSAGES, max_tokens=40, seed=1, n=2, response_format=value)
        for name, value in formats.items()
    ]
    some.append(asked("choice", TEXT, prompt="x", max_tokens=40, choice=["yes", "no"]))
    report = batch.run(model, write(tmp_path / "in.jsonl", some), tmp_path / "out.jsonl", JOB)
    lines = read(tmp_path / "out.jsonl")
    assert (report.lines, report.errors) == (4, 1)
    assert choices((lines, report), "choice")[0]["text"] in ("yes", "no")
    for choice in choices((lines, report), "schema"):
        assert set(json.loads(choice["message"]["content"])) <= {"yes", "no", 3}
    for choice in choices((lines, report), "object"):
        assert choice["message"]["content"].startswith("{")
    error = lines["broken"]["response"]["body"]["error"]
    assert error["param"] == "response_format" and "Invalid type: list" in error["message"]


def test_the_package_openai_reads_the_answers(answers):
    pytest.importorskip("openai")
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    for custom_id, line in answers[0].items():
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert set(line["response"]) == {"status_code", "request_id", "body"}
        if line["error"] is None:
            kind = ChatCompletion if custom_id in ("chat", "parts") else Completion
            read = kind.model_validate(line["response"]["body"], strict=True, extra="forbid")
            assert read.usage.total_tokens == read.usage.prompt_tokens + read.usage.completion_tokens


@pytest.mark.parametrize(
    ("url", "body", "message"),
    [
        (
            TEXT,
            {"promt": "x"},
            "promt: not a field that /v1/completions takes; it takes best_of, choice, dry_allowed_length,",
        ),
        (TEXT, {}, "prompt: missing"),
        (TEXT, {"prompt": []}, "prompt: [] is not a text, a list of token ids, or a list of these"),
        (TEXT, {"prompt": [1, "x"]}, "prompt: [1, 'x'] is not"),
        (TEXT, {"prompt": "x", "stream": True}, "stream: True is not supported; leave it out"),
        (TEXT, {"prompt": "x", "temperature": "hot"}, "temperature: 'hot' is not a number"),
        (TEXT, {"prompt": "x", "temperature": -1}, "temperature: is -1; it must lie in 0 to 1000"),
        (TEXT, {"prompt": "x", "top_p": 1.5}, "top_p: is 1.5; it must lie in 0 to 1"),
        (TEXT, {"prompt": "x", "max_tokens": 0}, "max_tokens: 0 does not lie in 1 to"),
        (TEXT, {"prompt": "x", "n": 5000}, "n: 5000 does not lie in 1 to 4096"),
        (TEXT, {"prompt": "x", "seed": 0.5}, "seed: 0.5 is not a whole number"),
        (TEXT, {"prompt": "x", "stop": ["a", ""]}, "stop: ['a', ''] is neither a text nor a list of texts"),
        (TEXT, {"prompt": "x", "logit_bias": {"1" * 5000: 1}}, "logit_bias: {'11111"),
        (TEXT, {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias: {'a': 1} is not an object such as"),
        (CHAT, {"messages": "hi"}, "messages: 'hi' is not a list of messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content: missing"),
        (
            CHAT,
            {"messages": [{"role": "a", "content": "b", "audio": {}}]},
            "messages[0].audio: not",
        ),
        (
            CHAT,
            {"messages": [{"role": "a", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}]},
            "messages[0].tool_calls[0].function.arguments: None is not a text",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]: {'type': 'image_url', 'image_url': {}} is not a part of type text",
        ),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, 'top_logprobs: needs "logprobs": true'),
        (TEXT, {"prompt": "x", "response_format": "json"}, "response_format: 'json' is not an object"),
        (
            CHAT,
            {"messages": MESSAGES, "response_format": {"type": "xml"}},
            "response_format.type: 'xml' is not supported, only text, json_object, json_schema",
        ),
        (
            CHAT,
            {"messages": MESSAGES, "response_format": {"type": "text", "schema": {}}},
            "response_format.schema: not a field of a format of type text",
        ),
        (
            CHAT,
            {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema: None is not an object",
        ),
        (
            CHAT,
            {
                "messages": MESSAGES,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"enum": ["x" * 70_000]}},
                },
            },
            "response_format.json_schema.schema: json_schema has 70,0",
        ),
    ],
)
def test_what_is_wrong_with_a_body_names_the_field(url, body, message):
    with pytest.raises(FieldError) as caught:
        lines.PROTOCOLS[url].request(body, strict=True)
    assert str(caught.value).startswith(message)
    assert caught.value.param == message.partition(":")[0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"method": "GET"}, "method: 'GET' is not supported, only 'POST'"),
        (
            {"url": "/v1/embeddings"},
            "url: '/v1/embeddings' is not supported, only '/v1/chat/completions' and",
        ),
        ({"body": None}, "body: not an object"),
        ({"header": {}}, "header: not a field of a line"),
    ],
)
def test_what_is_wrong_with_a_line_names_the_field(changed, message, tmp_path):
    (line,) = lines.read(write(tmp_path / "in.jsonl", [asked("a") | changed]))
    assert str(line.request).startswith(message)


GOOD = json.dumps(asked("a"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{GOOD}\n\n{GOOD}\n", "in.jsonl: lines 1 and 3 have the same custom_id, 'a'; give each its own"),
        (f'{GOOD}\n{{"custom_id": b}}\n', "in.jsonl:2:15: not JSON: Expecting value"),
        (f"{GOOD}\n[1]\n", 'in.jsonl:2:1: not a JSON object, such as {"custom_id": "1", ...}'),
        (f"{GOOD}\n{{}}\n", "in.jsonl:2: custom_id is None; each line needs a text of its own"),
        (
            "".join(f"{json.dumps(asked(m, model=m))}\n" for m in "bc"),
            "in.jsonl: lines 1 and 2 name two models, 'b' and 'c'; say which one answers all",
        ),
    ],
)
def test_a_file_that_is_wrong_is_refused_before_anything_begins(text, message, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        batch.run(lambda name: pytest.fail(f"{name} is loaded"), source, output)
    assert not output.exists()


def done(custom_id: str, error=None) -> str:
    response = {"status_code": 200} if error is None else None
    line = {"id": "batch_req_1", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(line) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (done("a") + done("a"), "out.jsonl: lines 1 and 2 both answer 'a'; delete one"),
        (done("z"), "in.jsonl has no line 'z', which the output answers; give another output"),
        (f"{GOOD}\n", "out.jsonl:1: not a line of a batch's output; give another file"),
        ("{oops\n" + done("b"), "out.jsonl:1:2: not JSON: "),
        ("my notes", "out.jsonl:1:1: not JSON: "),
    ],
)
def test_an_output_that_is_of_something_else_is_refused_and_left_as_it_is(text, message, tmp_path):
    source, output = write(tmp_path / "in.jsonl", [asked("a"), asked("b")]), tmp_path / "out.jsonl"
    output.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        batch.run(lambda name: pytest.fail(f"{name} is loaded"), source, output)
    assert output.read_text() == text


def test_two_jobs_do_not_write_one_output(tmp_path):
    with (
        Results(tmp_path / "out.jsonl"),
        pytest.raises(ValueError, match=r"out\.jsonl: another job writes it"),
    ):
        Results(tmp_path / "out.jsonl")


def test_an_output_is_a_file():
    with pytest.raises(ValueError, match="/dev/full: not a file that a job could go on with"):
        Results(Path("/dev/full"))  # which could be read for ever


def test_a_line_without_a_response_is_not_answered(tmp_path):
    output = tmp_path / "out.jsonl"
    empty = {"id": "batch_req_1", "custom_id": "b", "response": None, "error": None}
    output.write_text(done("a") + json.dumps(empty) + "\n")
    with Results(output) as results:
        assert results.done == {"a"}


def test_standard_input_and_output_are_files(model, tmp_path):
    """- for either, for both; one made a file of that name, and with both nothing was left to do."""
    text = "".join(f"{json.dumps(asked(i))}\n" for i in "abc")
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(text)
    options = ("-m", TINY, "-c", 128, "-b", 4, "--impl", "reference", "--seed", 5)
    piped = run("batch", "-", output, *options, stdin=text)
    assert piped.exit_code == 0, piped.output
    want = {i: line["response"]["body"]["choices"] for i, line in read(output).items()}
    for place in (source, "-"):
        printed = run("batch", place, "-", *options, stdin=text)
        (tmp_path / "printed").write_text(printed.stdout)
        got = read(tmp_path / "printed")
        assert {i: line["response"]["body"]["choices"] for i, line in got.items()} == want
    assert not Path("-").exists() and set(want) == {*"abc"}
    assert "standard output" in run("batch", source, "-", "--json", *options).output


def test_a_prompt_that_cannot_fit_is_not_tokenized(model, tmp_path):
    """A line of 50 MB took 5.3 GB."""
    text, ids = "word " * 2_000_000, [5] * 1_000_000
    asked_for = [asked("a", prompt=text), asked("b", prompt=ids), asked("c")]
    asked_for.append(asked("d", CHAT, messages=[{"role": "user", "content": text}]))
    source, output = write(tmp_path / "in.jsonl", asked_for), tmp_path / "out.jsonl"
    lengths = []
    encode = bj.Tokenizer.encode

    def counted(self, text, **options):
        lengths.append(len(text))
        return encode(self, text, **options)

    with mock.patch.object(bj.Tokenizer, "encode", counted):
        report = batch.run(model, source, output, JOB)
    assert (report.lines, report.errors) == (1, 3) and max(lengths) < 1000
    errors = {i: line["error"]["message"] for i, line in read(output).items() if line["error"]}
    assert errors["a"].startswith("prompt: 10000000 characters of prompt are more than 128 tokens")
    assert errors["b"].startswith("prompt: 1000000 token ids of prompt are more than 128 tokens")
    assert errors["d"].startswith("messages: 10000000 characters")


def test_a_job_goes_on_where_it_was_stopped(model, tmp_path):
    """By Ctrl-C. Then the file gets an error, and half a line, as a kill leaves it."""
    ids = list(map(str, range(40)))
    source, output = write(tmp_path / "in.jsonl", [asked(i) for i in ids]), tmp_path / "out.jsonl"

    def stop(done, total):
        if done == 8:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        batch.run(model, source, output, JOB, progress=stop)
    before = read(output)
    assert 8 <= len(before) < 40
    failed, half, *_ = [i for i in ids if i not in before]
    with output.open("a") as file:
        file.write(done(failed, {"code": "server_error", "message": "gone"}) + done(half)[:-9])
    report = batch.run(model, source, output, JOB)
    after = read(output)
    assert set(after) == set(ids) and before.items() <= after.items()
    assert all(line["error"] is None for line in after.values())
    assert (report.done_before, report.lines, report.errors) == (len(before), 40 - len(before), 0)
    assert batch.run(model, source, output, JOB).done_before == 40
    assert read(output) == after


def test_a_dispatch_that_fails_is_an_error_of_its_lines_and_a_second_ends_the_job(
    model, tmp_path, monkeypatch
):
    source, output = write(tmp_path / "in.jsonl", [asked(str(i)) for i in range(20)]), tmp_path / "out.jsonl"

    def failing(self, *arguments):
        raise RuntimeError("no device")

    monkeypatch.setattr(Calls, "prefill", failing)
    with pytest.raises(RuntimeError, match="no device"):
        batch.run(model, source, output, batch.Job(batch_size=1))
    errors = read(output).values()
    assert errors and all(line["response"]["status_code"] == 500 for line in errors)
    monkeypatch.undo()
    report = batch.run(model, source, output, JOB)
    assert (report.done_before, report.lines) == (0, 20)


def test_the_command_goes_on_after_a_kill(model, tmp_path):
    source = write(tmp_path / "in.jsonl", [asked(str(i), max_tokens=12, model=TINY) for i in range(30)])
    output = tmp_path / "out.jsonl"
    arguments = ["batch", source, output, "-c", 128, "--batch-size", 4, "--impl", "reference", "--seed", 5]
    process = subprocess.Popen([*COMMAND, *map(str, arguments)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    begun = time.monotonic()
    while process.poll() is None and (not output.exists() or output.read_bytes().count(b"\n") < 3):
        assert time.monotonic() < begun + 900
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    half = output.read_bytes()
    finished = run(*arguments, "--json")
    assert finished.exit_code == 0, finished.output
    report = json.loads(finished.stdout.splitlines()[0])
    assert 3 <= report["done_before"] < 30 and report["lines"] + report["done_before"] == 30
    assert output.read_bytes().startswith(half[: half.rindex(b"\n") + 1])
    assert set(read(output)) == {str(i) for i in range(30)}
    line = [line for line in finished.stderr.splitlines() if "lines answered" in line][-1]
    assert re.search(r"s for 1,000 lines; [\d,]+ tokens in, [\d,]+ out, [\d,]+ tok/s; .* CPU seconds", line)
    # A line's seed does not depend on what was done before.
    how = {"max_new_tokens": 60, "sampling": bj.SamplingParams(seed=5 + 29)}  # by the programs of the batch
    last = bj.generate(model, ["Line 29"] * 4, **how)[0].tokens[:12]
    detokenizer = model.tokenizer.detokenizer(at_start=False)
    text = "".join(map(detokenizer.push, last)) + detokenizer.flush()
    assert read(output)["29"]["response"]["body"]["choices"][0]["text"] == text


def test_without_ray_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    source = write(tmp_path / "in.jsonl", [asked("a")])
    done = run("batch", source, tmp_path / "out.jsonl", "--ray", "auto")
    assert done.exit_code == 1
    want = 'error: ray is not installed; pip install "bonsai-jax[ray]", or leave --ray out'
    assert done.stderr.splitlines()[-1] == want


@pytest.mark.slow
def test_an_actor_of_ray_that_is_killed_loses_no_line(model, tmp_path):
    pytest.importorskip("ray")
    ids = list(map(str, range(300)))
    body = {"max_tokens": 24, "model": TINY, "temperature": 0}
    source = write(tmp_path / "in.jsonl", [asked(i, **body) for i in ids])
    output, news = tmp_path / "out.jsonl", []
    arguments = ["batch", source, output, "-c", 128, "--batch-size", 2, "--impl", "reference"]
    arguments += ["--ray", "local", "--workers", 2, "--json"]
    slow_machine = {"RAY_raylet_start_wait_time_s": "300", "RAY_health_check_timeout_ms": "300000"}
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            **slow_machine,
            "RAY_AUTH_MODE": "disabled",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
    )
    assert process.stderr is not None and process.stdout is not None
    up = {}
    for line in process.stderr:
        news.append(line)
        if started := re.match(r"actor (\d): process (\d+) on .*, .*", line):
            up[started[1]] = int(started[2])
        if len(up) == 2:
            break
    while process.poll() is None and len(output.read_bytes().splitlines()) < 20:
        time.sleep(0.01)
    before = len(output.read_bytes().splitlines())
    os.kill(up["1"], signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=900)
    news = [*news, *stderr.splitlines()]
    assert process.returncode == 0 and 20 <= before < 300, news
    assert any(line.startswith("actor 1 died; its lines go to others") for line in news), news
    answers = read(output)
    assert set(answers) == set(ids) and all(line["error"] is None for line in answers.values())
    report = json.loads(stdout.splitlines()[-1])
    assert (report["lines"], report["errors"], report["devices"]) == (300, 0, 2)
    outputs = bj.generate(
        model, [f"Line {i}" for i in ids], max_new_tokens=24, sampling=bj.SamplingParams(0.0)
    )
    texts = [answers[i]["response"]["body"]["choices"][0]["text"] for i in ids]
    assert texts == [one.text for one in outputs]
