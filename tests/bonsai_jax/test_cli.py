"""The command line: what it prints where, how it ends, and what it says when something is wrong."""

import gc
import importlib.metadata
import io
import json
import os
import re
import signal
import subprocess
import sys
from unittest import mock

import jax
import pytest

import bonsai_jax as bj
from bonsai_jax import cli, compile_cache, machine
from bonsai_jax.cli import app, main, options
from bonsai_jax.measure import bench
from checkpoints import demo
from tests.bonsai_jax.command_line import COMMAND, GREEDY, ROOT, TINY, command, complaints, run, tiny

# ---- generate ----


def test_generate_prints_text_to_stdout_and_figures_to_stderr():
    expected = bj.generate(tiny(), ["Once upon"], max_new_tokens=8, sampling=GREEDY, ignore_eos=True)[0]
    done = run("generate", "Once upon", "-m", TINY, "-n", 8, "--temp", 0, "--ignore-eos")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == expected.text + "\n"
    (figures,) = complaints(done.stderr)
    for part in ("prefill ", "decode ", "that memory allows", "first token after", "peak memory"):
        assert part in figures


def test_generate_prints_pieces_as_they_come(monkeypatch, capsys):
    seen = []

    def stream(*_, **__):
        for text in ("one ", "two"):
            yield bj.Piece(text, [1], None if text == "one " else "length")
            seen.append(capsys.readouterr().out)

    monkeypatch.setattr(bj, "stream", stream)
    monkeypatch.setattr(options, "turn_off_compile_cache", lambda: None)
    app(["generate", "x", "-m", TINY], standalone_mode=False)
    assert seen == ["one ", "two"]


def test_prompts_come_from_everywhere(tmp_path):
    (tmp_path / "prompt.txt").write_text("Once upon\n")
    common = ("-m", TINY, "-n", 4, "--seed", 3)
    texts = {
        run("generate", "Once upon", *common).stdout,
        run("generate", "-p", "Once upon", *common).stdout,
        run("generate", "-f", tmp_path / "prompt.txt", *common).stdout,
        run("generate", *common, stdin="Once upon\n").stdout,
        run("generate", "-", *common, stdin="Once upon\n").stdout,
        run("generate", "-f", "-", *common, stdin="Once upon\n").stdout,
    }
    assert len(texts) == 1
    assert run("generate", "-p", "-", *common).stdout not in texts  # a prompt that is a dash


def test_a_prompt_on_each_line(tmp_path):
    prompts = ["Once upon", "The\u2028 sea\f", "Rain"]  # which end no line of a file
    (tmp_path / "prompts.txt").write_text("Once upon\n\nThe\u2028 sea\f\nRain\n", encoding="utf-8")
    done = run("generate", "-f", tmp_path / "prompts.txt", "--lines", "-m", TINY, "-n", 8, "--temp", 0)
    assert done.exit_code == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    outputs = bj.generate(tiny(), prompts, max_new_tokens=8, sampling=GREEDY)
    for answer, output in zip(answers, outputs, strict=True):
        for name in ("prompt_tokens", "tokens", "text", "finish_reason"):
            assert answer[name] == getattr(output, name)


@pytest.mark.parametrize("arguments", [(), ("-",), ("-f", "-")])
def test_empty_input_is_an_error_before_anything_is_loaded(arguments):
    done = run("generate", *arguments, "-m", "missing.gguf", stdin="")
    (line,) = done.stderr.splitlines()
    assert done.exit_code == 1 and line.startswith("error: standard input is empty; give a text")


def test_json_is_one_object_on_stdout():
    done = run("generate", "Once upon", "-m", TINY, "-n", 8, "--temp", 0, "--ignore-eos", "--json")
    answer = json.loads(done.stdout)
    assert list(answer) == ["prompt_tokens", "tokens", "text", "finish_reason", "timings", "device", "impl"]
    assert list(answer["timings"]) == ["load_s", "ttft_s", "prefill_tok_s", "decode_tok_s"]
    assert all(seconds > 0 for seconds in answer["timings"].values())
    assert answer["prompt_tokens"] == len(tiny().tokenizer.encode("Once upon"))
    assert len(answer["tokens"]) == 8 and answer["finish_reason"] == "length"
    assert answer["impl"] == "cpu"
    assert answer["text"] == tiny().tokenizer.decode(answer["tokens"], at_start=False)


def test_speculation_says_how_many_tokens_a_step_draws():
    common = ("-m", TINY, "-n", 12, "--temp", 0, "--ignore-eos", "--json")
    plain, spec = (run("generate", "Once upon", *common, *more) for more in ((), ("--speculate", "ngram")))
    answer = json.loads(spec.stdout)
    assert answer["tokens"] == json.loads(plain.stdout)["tokens"] and answer["tokens_per_step"] >= 1
    assert f", {answer['tokens_per_step']:.2f} a step, " in spec.stderr and " a step" not in plain.stderr


def test_chat_option_wraps_the_prompt():
    ids = tiny().tokenizer.encode_chat(
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    )
    done = run("generate", "Hi", "-m", TINY, "-n", 1, "--chat", "--system", "Be kind.", "--json")
    assert json.loads(done.stdout)["prompt_tokens"] == len(ids)


def test_minus_one_generates_to_the_end_of_the_context():
    done = run("generate", "Hi", "-m", TINY, "-n", -1, "-c", 32, "--ignore-eos", "--json")
    answer = json.loads(done.stdout)
    assert answer["prompt_tokens"] + len(answer["tokens"]) == 32


def test_answers_match_a_constraint(tmp_path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "list.gbnf"
    schema.write_text('{"type": "array", "items": {"enum": [1, "é"]}, "minItems": 1, "maxItems": 3}')
    grammar.write_text('root ::= "a" ("b" | "c")\n')
    common = ("generate", "x", "-m", TINY, "-n", 40, "-s", 1, "--json")

    def text(*option):
        done = run(*common, *option)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)["text"]

    assert set(json.loads(text("--json-schema", schema))) <= {1, "é"}
    assert set(json.loads(text("--json-schema-file", schema))) <= {1, "é"}  # llama.cpp's name
    own = {"$id": "https://a.example//b", "type": "object", "required": ["a"], "additionalProperties": False}
    own["properties"] = {"a": {"enum": [1, 2]}}
    assert json.loads(text("--json-schema", f" {json.dumps(own)}"))["a"] in (1, 2)
    assert re.fullmatch("[0-9]{3}", text("--regex", "[0-9]{3}"))
    assert text("--grammar", grammar) in ("ab", "ac")
    assert text("--choice", "north", "--choice", "south") in ("north", "south")


def test_interrupt_ends_with_130(monkeypatch):
    def stream(*_, **__):
        yield bj.Piece("begun", [1])
        raise KeyboardInterrupt

    monkeypatch.setattr(bj, "stream", stream)
    done = run("generate", "x", "-m", TINY)
    assert (done.exit_code, done.stdout) == (130, "begun")


def test_an_interrupted_command_does_not_wait_for_pythons_own_end(monkeypatch):
    """XLA's threads are in a step then, and now and then abort it: so what ends it is asked."""
    ended = []
    monkeypatch.setattr(bj, "stream", mock.Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(options, "turn_off_compile_cache", lambda: None)
    monkeypatch.setattr(gc, "set_threshold", lambda _: None)
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(sys, "argv", ["bonsai-jax", "generate", "x", "-m", TINY])
    main()
    assert ended == [130]


def test_ctrl_c_while_the_device_works_ends_with_130():
    process = subprocess.Popen(
        [*COMMAND, "generate", "Hi", "-m", TINY, "-n", "1000", "--ignore-eos"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    said = re.sub(rb"bonsai-jax: compiling .*\n", b"", stderr)  # on a machine that is busy
    assert (process.returncode, said) == (130, b"\n")


# ---- errors ----


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("generate", "x", "-m", "missing.gguf"), 1, "error: missing.gguf: no such file"),
        (("generate", "x", "-m", "BROKEN"), 1, "broken.gguf"),
        (("generate", "-f", "missing.txt", "-m", TINY), 1, "error: missing.txt: No such file or directory"),
        (("generate", "-f", "BINARY", "-m", TINY), 1, "byte 0 is not UTF-8"),
        (("generate", "x", "-m", TINY, "--impl", "pallas"), 1, "error: --impl pallas cannot run"),
        (("generate", "x", "-m", TINY, "--impl", "cuda"), 2, "'cuda' is not one of"),
        (("generate", "x", "-m", TINY, "--activation-bits", 4), 2, "'4' is not one of"),
        (("generate", "x", "-m", TINY, "-n", 9999), 1, "or load with a larger --ctx (this"),
        (
            ("generate", "x", "-m", TINY, "-c", 99999),
            1,
            "error: --ctx is 99999, but the model was made for at most 8192",
        ),
        (("generate", "", "-m", TINY), 1, "a prompt is empty"),
        (("generate", "x", "-p", "y"), 2, "give one prompt"),
        (("generate", "x", "-m", ""), 1, "error: the model's name is empty"),
        (("bench", "-m", ""), 1, "error: the model's name is empty"),
        (("inspect", ""), 1, "error: the model's name is empty"),
        (("generate", "x", "-m", TINY, "--batch-size", 4), 2, "--batch-size needs --lines"),
        (("generate", "x", "-m", TINY, "--seed", -7), 2, "'--seed'"),
        (("generate", "-f", "BLANK", "-m", TINY, "--lines", "-n", -1), 1, "no line of it has a prompt"),
        (("chat", "-m", "missing.gguf", "-n", 0), 1, "--max-new-tokens is 0"),  # before a model is sought
        (("generate", "x", "-m", "missing.gguf", "--stop", ""), 1, "--stop: an empty text"),
        (("generate", "x", "-m", TINY, "--tensor-parallel", 99), 1, "lower one of them"),
        (("generate", "x", "--system", "y"), 2, "--system needs --chat"),
        (
            ("generate", "x", "-m", TINY, "--repeat-penalty", 0),
            1,
            "error: --repeat-penalty is 0.0; it must be above 0",
        ),
        (
            ("generate", "x", "-m", TINY, "-n", 0),
            1,
            "error: --max-new-tokens is 0; it must be a whole number, 1 or more",
        ),
        (("generate", "x", "-m", TINY, "--stop", ""), 1, "error: --stop: an empty text would end"),
        (("bench", "-m", TINY, "-p", 99999), 2, "-d and -b ask for 99999 tokens per sequence"),
        (
            ("generate", "x", "-m", TINY, "--regex", "(a"),
            1,
            'error: regex: unclosed group, invalid regex "(a"',
        ),
        (("generate", "x", "--regex", "a", "--choice", "b"), 2, "--regex and --choice: give one of them"),
        (("generate", "x", "--json-schema", '{"type": '), 1, "error: json_schema: schema is not JSON"),
        (("generate", "x", "--json-schema", "BLANK"), 1, "error: json_schema: schema is not JSON"),
        (("generate", "x", "--frobnicate"), 2, "No such option: --frobnicate"),
        (("bench", "-m", TINY, "-p", "many"), 2, "'many' is not a list of sizes"),
        (("bench", "-m", TINY, "-p", 0, "-n", 0), 2, "nothing to measure"),
        (("inspect", "missing.gguf"), 1, "error: missing.gguf: no such file"),
        (("perplexity", "-m", TINY), 2, "Missing option '-f'"),
        (
            ("perplexity", "-m", TINY, "-f", "SHORT"),
            1,
            "need at least 1024: give a longer text or a smaller --ctx",
        ),
    ],
)
def test_errors_are_one_clear_line(arguments, code, message, tmp_path):
    files = {"BROKEN": tmp_path / "broken.gguf", "BINARY": tmp_path / "binary", "SHORT": tmp_path / "short"}
    files["BROKEN"].write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 40)
    files["BINARY"].write_bytes(b"\xff\xfe")
    files["SHORT"].write_text("too short")
    files["BLANK"] = tmp_path / "blank"
    files["BLANK"].write_text("\n \n")
    done = run(*(files.get(a, a) for a in arguments))
    assert done.exit_code == code, done.output
    assert message in done.stderr
    assert "Traceback" not in done.stderr and not done.stdout
    if code == 1:
        assert done.stderr.splitlines()[-1].startswith("error: ") and done.stderr.count("error: ") == 1


def test_debug_shows_where_it_happened():
    done = run("--debug", "generate", "x", "-m", "missing.gguf")
    assert isinstance(done.exception, bj.CheckpointError)


def test_without_a_model_the_error_says_how_to_get_one(monkeypatch, tmp_path):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = run("generate", "x")
    assert done.exit_code == 1
    assert "`bonsai-jax pull demo` fetches it" in done.stderr and "user/repo:quant" in done.stderr


# ---- options ----


@pytest.mark.parametrize("command", ["generate", "chat", "bench", "perplexity"])
def test_activation_bits_reach_the_run_config(command, monkeypatch, tmp_path):
    seen = []

    def load(checkpoint, run, **_):
        seen.append(run.activation_bits)
        raise ValueError("far enough")

    monkeypatch.setattr(bj, "load", load)
    monkeypatch.setattr(bj, "from_checkpoint", load)
    (tmp_path / "text.txt").write_text("words")
    arguments = {"generate": ["x"], "perplexity": ["-f", tmp_path / "text.txt"]}.get(command, [])
    for bits in ([], ["--activation-bits", 16], ["--activation-bits", 8]):
        assert run(command, *arguments, "-m", TINY, *bits).exit_code == 1
    assert seen == [8, 16, 8]


@pytest.mark.parametrize("command", ["generate", "chat", "bench", "perplexity", "inspect"])
def test_a_schedule_that_cannot_run_is_an_error_with_the_reason(command, tmp_path):
    (tmp_path / "text.txt").write_text("words")
    arguments = {"generate": ["x"], "perplexity": ["-f", tmp_path / "text.txt"]}.get(command, [])
    assert run(command, *arguments, "-m", TINY, "--schedule", "all").exit_code == 2
    done = run(command, *arguments, "-m", TINY, "--schedule", "one_launch")
    assert done.exit_code == 1
    assert "error: --schedule one_launch cannot run decode step, rows: 1" in done.stderr
    assert "needs bulk copies" in done.stderr and "What can: launches" in done.stderr


# ---- env ----


def test_env_names_what_a_bug_report_needs():
    done = run("env")
    assert done.exit_code == 0
    named = {line.split("  ")[0] for line in done.stdout.splitlines()}
    packages = {"python", "bonsai-jax", "jax", "jaxlib", "flax", "numpy"}
    assert named >= packages | {"devices", "driver", "CUDA", "memory", "bandwidth", "compile cache"}


def test_env_as_json():
    report = json.loads(run("env", "--json").stdout)
    assert report["jax"] == importlib.metadata.version("jax") and report["commit"] == bench.commit()
    assert report["devices"] == ["cpu:0 cpu"] and report["driver"] == machine.driver()
    assert report["memory bytes"] == machine.device_memory() and report["memory bytes/s"] > 1e8


def no_nvidia_gpu():
    raise AssertionError  # what jax does for JAX_PLATFORMS=cuda where there is none


def no_such_backend():
    raise RuntimeError("Unable to initialize backend 'cuda':\nno plugin")


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        (no_nvidia_gpu, "JAX_PLATFORMS is 'cuda', and there is no such device; unset it, or set it to cpu"),
        (no_such_backend, "Unable to initialize backend 'cuda': no plugin"),
    ],
)
def test_without_its_backend_env_says_why_and_the_rest(monkeypatch, devices, reason):
    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    done = run("env")
    rows = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    assert done.exit_code == 0 and rows["no device"].strip() == reason and rows["jax"] and rows["models"]
    assert json.loads(run("env", "--json").stdout)["no device"] == reason


def test_without_its_backend_a_command_ends_in_one_line():
    done = command("generate", "x", "-m", TINY, JAX_PLATFORMS="nonsense")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("error: Unable to initialize backend 'nonsense'")


# ---- the process ----


@pytest.fixture
def as_at_home(monkeypatch):
    """Processes without the tests' own compile cache (conftest.py)."""
    for name in [name for name in os.environ if name.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("as_at_home")
def test_the_compile_cache_is_in_the_users_cache_folder(tmp_path):
    """Python finds what a command compiled, and keeps more there, even when jax was used before."""
    # Without a kernel, which test_cpu.py finds there.
    model, folder = TINY.replace("q8_0", "f32"), tmp_path / "bonsai-jax" / "xla"
    compiled = lambda: {path.name for path in folder.iterdir() if not path.name.endswith("-atime")}  # noqa: E731
    arguments = ("generate", "Hi", "-m", model, "-n", 4, "--temp", 0)
    first = command(*arguments, XDG_CACHE_HOME=str(tmp_path))
    assert first.returncode == 0, first.stderr
    assert len(complaints(first.stderr)) == 1, first.stderr  # the figures, and no complaint of jax
    programs = compiled()
    assert len(list((folder / "programs").iterdir())) == 2  # prefill and decode
    code = f"""
import sys, jax
jax.jit(lambda x: x + 1)(1.0)
from bonsai_jax import compile_cache
from bonsai_jax.cli import app
compile_cache.use_programs()  # as the command does
app({[*map(str, arguments)]}, standalone_mode=False)
jax.jit(lambda x: x * 2)(1.0)
"""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    second = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=env
    )
    assert second.stdout == first.stdout and len(complaints(second.stderr)) == 1, second.stderr
    # Beside it what draws random weights, which the first compiled while it compiled the prefill (stored.py).
    assert any("_lambda" in name for name in compiled() - programs)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_cache_folder_that_cannot_be_breaks_nothing(enabled, tmp_path, monkeypatch):
    """Nor one that could be, where jax is to keep nothing."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" if enabled else tmp_path))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", enabled)
    try:
        compile_cache.use()
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        jax.config.update("jax_enable_compilation_cache", True)


def test_a_closed_pipe_ends_quietly():
    """As `| head -c 1` closes it: XLA's threads are in a step, and could abort the process."""
    arguments = ["generate", "Hi", "-m", TINY, "-n", "1000", "--ignore-eos"]
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 0


def test_streams_that_were_closed_before_we_began(monkeypatch):
    """`<&- >&-`: Python has None in their place."""
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(sys, name, None)
    said = []
    monkeypatch.setattr(
        cli, "app", lambda: (said.append(sys.stdin.read()), print("text"), sys.stdout.flush())
    )
    cli.main()
    assert said == [""]
    sys.stdin.close()
    sys.stdout.close()


@pytest.mark.parametrize("code, status", [(1, 1), (130, 130), (141, 0)])
def test_an_error_ends_without_pythons_own_end(code, status, monkeypatch):
    """Which aborted `batch` on a full disk: it ended with 134."""
    monkeypatch.setattr(cli, "app", mock.Mock(side_effect=SystemExit(code)))
    monkeypatch.setattr(cli.os, "_exit", mock.Mock(side_effect=InterruptedError))
    with pytest.raises(InterruptedError):
        cli.main()
    assert cli.os._exit.call_args.args == (status,)


def test_a_character_that_a_locale_cannot_write(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    monkeypatch.setattr(cli, "app", lambda: print("caf\u00e9", flush=True))
    cli.main()
    assert written.getvalue() == b"caf?\n"


@pytest.mark.parametrize("flag, thinks", [("--think", True), ("--no-think", False)])
def test_think_is_the_templates_variable(flag, thinks):
    with mock.patch.object(bj.Tokenizer, "encode_chat", return_value=[1, 2, 3]) as encode:
        done = run("generate", "hello", "--chat", flag, "-m", TINY, "-n", 1, "--ignore-eos")
    assert done.exit_code == 0 and encode.call_args.kwargs == {"enable_thinking": thinks}
    refused = run("generate", "hello", flag, "-m", TINY)
    assert refused.exit_code == 2 and "need --chat" in " ".join(refused.stderr.split())
