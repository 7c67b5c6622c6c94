"""The command line: what it prints where, how it ends, and what it says when something is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import bonsai_jax as bj
from bonsai_jax import bench, card, params
from bonsai_jax.cli import app, options
from bonsai_jax.cli.chat import Conversation
from pallas_kernels import QTensor

ROOT = Path(__file__).parent.parent
TINY = "synth:tiny-llama:q8_0"
GREEDY = bj.SamplingParams(temperature=0.0)


@pytest.fixture(autouse=True)
def no_compile_cache(monkeypatch):
    """The command line's cache is a setting of the whole process: not of this one."""
    monkeypatch.setattr(options, "use_compile_cache", lambda *_: None)


@pytest.fixture(scope="module")
def tiny():
    return bj.load(TINY, bj.RunConfig(context=256, rows=1))


def run(*arguments, stdin=None):
    return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)


def command(*arguments, stdin="", **environment):
    """The command in a process of its own."""
    code = "import sys; from bonsai_jax.cli import main; sys.argv[0] = 'bonsai-jax'; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=120,
    )


# ---- generate ----


def test_generate_prints_text_to_stdout_and_figures_to_stderr(tiny):
    expected = bj.generate(tiny, ["Once upon"], max_new_tokens=8, sampling=GREEDY, ignore_eos=True)[0]
    done = run("generate", "Once upon", "-m", TINY, "-n", 8, "--temp", 0, "--ignore-eos")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == expected.text + "\n"
    (figures,) = done.stderr.splitlines()
    for part in ("prefill ", "decode ", "that memory allows", "first token after", "peak memory"):
        assert part in figures


def test_generate_prints_pieces_as_they_come(monkeypatch, capsys):
    seen = []

    def stream(*_, **__):
        for text in ("one ", "two"):
            yield bj.Piece(text, [1], None if text == "one " else "length")
            seen.append(capsys.readouterr().out)

    monkeypatch.setattr(bj, "stream", stream)
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
    }
    assert len(texts) == 1


def test_json_is_one_object_on_stdout(tiny):
    done = run("generate", "Once upon", "-m", TINY, "-n", 8, "--temp", 0, "--ignore-eos", "--json")
    answer = json.loads(done.stdout)
    assert list(answer) == ["prompt_tokens", "tokens", "text", "finish_reason", "timings", "device", "impl"]
    assert list(answer["timings"]) == ["load_s", "ttft_s", "prefill_tok_s", "decode_tok_s"]
    assert all(seconds > 0 for seconds in answer["timings"].values())
    assert answer["prompt_tokens"] == len(tiny.tokenizer.encode("Once upon"))
    assert len(answer["tokens"]) == 8 and answer["finish_reason"] == "length" and answer["impl"] == "xla"
    assert answer["text"] == tiny.tokenizer.decode(answer["tokens"], at_start=False)


def test_chat_option_wraps_the_prompt(tiny):
    ids = tiny.tokenizer.encode_chat(
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    )
    done = run("generate", "Hi", "-m", TINY, "-n", 1, "--chat", "--system", "Be kind.", "--json")
    assert json.loads(done.stdout)["prompt_tokens"] == len(ids)


def test_minus_one_generates_to_the_end_of_the_context():
    done = run("generate", "Hi", "-m", TINY, "-n", -1, "-c", 32, "--ignore-eos", "--json")
    answer = json.loads(done.stdout)
    assert answer["prompt_tokens"] + len(answer["tokens"]) == 32


def test_interrupt_ends_with_130(monkeypatch):
    def stream(*_, **__):
        yield bj.Piece("begun", [1])
        raise KeyboardInterrupt

    monkeypatch.setattr(bj, "stream", stream)
    done = run("generate", "x", "-m", TINY)
    assert (done.exit_code, done.stdout) == (130, "begun")


# ---- errors ----


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("generate", "x", "-m", "missing.gguf"), 1, "error: missing.gguf: no such file"),
        (("generate", "x", "-m", "BROKEN"), 1, "broken.gguf"),
        (("generate", "-f", "missing.txt", "-m", TINY), 1, "error: missing.txt: No such file or directory"),
        (("generate", "-f", "BINARY", "-m", TINY), 1, "byte 0 is not UTF-8"),
        (("generate", "x", "-m", TINY, "--impl", "triton"), 1, "impl='triton' cannot run"),
        (("generate", "x", "-m", TINY, "--impl", "cuda"), 2, "'cuda' is not one of"),
        (("generate", "x", "-m", TINY, "--activation-bits", 4), 2, "'4' is not one of"),
        (("generate", "x", "-m", TINY, "-n", 9999), 1, "exceed the context of"),
        (("generate", "x", "-m", TINY, "-c", 99999), 1, "context is 99999"),
        (("generate", "", "-m", TINY), 1, "the prompt is empty"),
        (("generate", "x", "-p", "y"), 2, "give one prompt"),
        (("generate", "x", "--system", "y"), 2, "--system needs --chat"),
        (("generate", "x", "-m", TINY, "--repeat-penalty", 0), 1, "repetition_penalty is 0.0"),
        (("generate", "x", "--frobnicate"), 2, "No such option: --frobnicate"),
        (("bench", "-m", TINY, "-p", "many"), 2, "'many' is no list of sizes"),
        (("bench", "-m", TINY, "-p", 0, "-n", 0), 2, "nothing to measure"),
        (("inspect", "missing.gguf"), 1, "error: missing.gguf: no such file"),
        (("perplexity", "-m", TINY), 2, "Missing option '-f'"),
        (("perplexity", "-m", TINY, "-f", "SHORT"), 1, "need at least 1024"),
    ],
)
def test_errors_are_one_clear_line(arguments, code, message, tmp_path):
    files = {"BROKEN": tmp_path / "broken.gguf", "BINARY": tmp_path / "binary", "SHORT": tmp_path / "short"}
    files["BROKEN"].write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 40)
    files["BINARY"].write_bytes(b"\xff\xfe")
    files["SHORT"].write_text("too short")
    done = run(*(files.get(a, a) for a in arguments))
    assert done.exit_code == code, done.output
    assert message in done.stderr
    assert "Traceback" not in done.stderr and not done.stdout
    if code == 1:
        assert done.stderr.splitlines()[-1].startswith("error: ") and done.stderr.count("error: ") == 1


def test_debug_shows_where_it_happened():
    done = run("--debug", "generate", "x", "-m", "missing.gguf")
    assert isinstance(done.exception, bj.CheckpointError)


def test_only_a_checkout_offers_the_demo(monkeypatch, tmp_path):
    monkeypatch.setattr(options.importlib.util, "find_spec", lambda name: None)
    done = run("generate", "x")
    assert done.exit_code == 1
    assert "uv run --extra demo" in done.stderr and "-m" in done.stderr
    monkeypatch.setattr(
        options, "__file__", str(tmp_path / "site-packages" / "bonsai_jax" / "cli" / "options.py")
    )
    done = run("generate", "x")
    assert "demo" not in done.stderr and "give one with -m" in done.stderr


# ---- chat ----


def answer(conversation, text):
    return "".join(piece.text for piece in conversation.ask(text))


def test_a_conversation_reuses_its_cache_and_answers_as_without(tiny):
    kept = Conversation(tiny, GREEDY, max_new_tokens=6, ignore_eos=True)
    before = 0
    for turn in ("Hi there", "And then?", "Why?"):
        asked = [*kept.messages, {"role": "user", "content": turn}]
        got = answer(kept, turn)
        ids = tiny.tokenizer.encode_chat(asked)
        fresh = bj.generate(tiny, [ids], max_new_tokens=6, sampling=GREEDY, ignore_eos=True)[0]
        assert got == fresh.text
        assert kept.messages == [*asked, {"role": "assistant", "content": got}]
        assert kept.reused >= before  # at least the prompt of the turn before
        assert kept.figures.prompt_tokens == len(ids) - kept.reused
        before = len(ids)


def test_the_same_message_again_after_a_reset_reads_one_token(tiny):
    conversation = Conversation(tiny, GREEDY, max_new_tokens=4, ignore_eos=True)
    first = answer(conversation, "Hi there")
    conversation.reset()
    assert answer(conversation, "Hi there") == first
    assert conversation.figures.prompt_tokens == 1


def test_a_stopped_answer_stays_and_the_next_one_is_right(tiny):
    conversation = Conversation(tiny, GREEDY, max_new_tokens=40, ignore_eos=True)
    pieces = conversation.ask("Hi there")
    shown = next(pieces).text + next(pieces).text
    pieces.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": shown}
    got = answer(conversation, "Go on")
    ids = tiny.tokenizer.encode_chat(conversation.messages[:-1])
    assert got == bj.generate(tiny, [ids], max_new_tokens=40, sampling=GREEDY, ignore_eos=True)[0].text
    assert conversation.reused > 0


def test_a_lost_cache_is_made_anew(tiny):
    """An interrupt between two dispatches leaves the last state donated."""
    conversation = Conversation(tiny, GREEDY, max_new_tokens=4, ignore_eos=True)
    first = answer(conversation, "Hi there")
    conversation.cache.k.delete()
    conversation.reset()
    assert answer(conversation, "Hi there") == first
    assert conversation.reused == 0


def test_penalties_see_the_tokens_that_were_in_the_cache(tiny):
    params = bj.SamplingParams(temperature=0.0, repetition_penalty=1.5)
    conversation = Conversation(tiny, params, max_new_tokens=8, ignore_eos=True)
    answer(conversation, "Hi there")
    got = answer(conversation, "Go on")
    ids = tiny.tokenizer.encode_chat(conversation.messages[:-1])
    assert got == bj.generate(tiny, [ids], max_new_tokens=8, sampling=params, ignore_eos=True)[0].text


def test_a_full_context_is_said_and_the_message_forgotten(tiny):
    conversation = Conversation(tiny, GREEDY, max_new_tokens=4, ignore_eos=True)
    answer(conversation, "Hi")
    before = list(conversation.messages)
    with pytest.raises(ValueError, match=r"context holds 256: /reset begins a new one"):
        answer(conversation, "word " * 300)
    assert conversation.messages == before
    answer(conversation, "Hi")


def test_piped_chat(tiny):
    first = Conversation(tiny, GREEDY, max_new_tokens=4, ignore_eos=True)
    expected = answer(first, "Hi"), answer(first, "More")
    stdin = "/stats\nHi\nMore\n/stats\n/reset\n\n/what\nHi\n/system Be kind.\nHi\n/exit\nnever read\n"
    done = run("chat", "-m", TINY, "-n", 4, "--temp", 0, "--ignore-eos", "-c", 256, stdin=stdin)
    assert done.exit_code == 0, done.stderr
    kind = Conversation(tiny, GREEDY, max_new_tokens=4, ignore_eos=True, system="Be kind.")
    kind.messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": expected[0]}]
    assert done.stdout == "\n".join([*expected, expected[0], answer(kind, "Hi")]) + "\n"
    assert "no answer yet" in done.stderr and "/what is no command" in done.stderr
    assert "tokens of the prompt were in the cache" in done.stderr
    assert ">" not in done.stdout  # no prompt where nobody types


def test_chat_goes_on_after_a_message_that_does_not_fit():
    done = run("chat", "-m", TINY, "-n", 2, "-c", 64, stdin="word " * 100 + "\nHi\n")
    assert done.exit_code == 0
    assert "/reset begins a new one" in done.stderr
    assert len(done.stdout.splitlines()) >= 1


# ---- inspect, bench, perplexity, env ----


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
    if command == "inspect":
        assert "   one_launch: needs bulk copies to shared memory" in done.stdout
    else:
        assert done.exit_code == 1
        assert "error: schedule='one_launch' cannot run layers 1 x" in done.stderr
        assert "needs bulk copies" in done.stderr and "what can: launches" in done.stderr


def test_rows_say_when_a_step_is_one_launch(tiny):
    assert card.impl_names(tiny.params) == "xla"
    assert card.impl_names(tiny.params.replace(schedule="one_launch")) == "xla, one launch"


def test_rows_say_when_kernels_had_16_bits():
    w = QTensor({}, "q1_0", (16, 256), impl="mosaic")
    assert card.impl_names([w, w.replace(impl="xla")]) == "mosaic+xla"
    wide = [w.replace(activation_bits=16), w.replace(impl="xla", activation_bits=16)]
    assert card.impl_names(wide) == "mosaic:16+xla"


def test_inspect_reads_no_weights(monkeypatch):
    monkeypatch.setattr("bonsai_jax.params.load", None)
    done = run("inspect", "synth:bonsai-8b:q1_0", "--weights", "packed")
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["all", "399", "8188548096", "1152704128", "1.126"] in lines  # FACTS: tensor bytes of the 8B
    assert ["KV", "bytes", "per", "token", "294,912"] in lines  # float32: twice FACTS' bfloat16
    assert ["qwen3.block_count", "36"] in lines
    assert "-> xla: the first that can run it" in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 140


def test_inspect_json_has_the_same_figures():
    out = json.loads(run("inspect", "-m", "synth:bonsai-8b:q1_0", "--weights", "packed", "--json").stdout)
    assert out["figures"]["weight bytes"] == 1_152_704_128
    assert out["figures"]["bytes per decoded token"] == pytest.approx(1.065e9, rel=2e-3)  # FACTS section 3
    assert {c["impl"] for c in out["choices"][0]["candidates"]} == {"mosaic", "triton", "xla"}
    taken = {
        c["problem"].split(" on ")[0]: [v["impl"] for v in c["candidates"] if v["taken"]]
        for c in out["choices"]
    }
    assert taken["gemm q1_0 12288 x 4096"] == taken["attention 32 x 8 x 128"] == ["xla"]
    assert taken["prefill attention float32 32 x 8 x 128 x 64"] == ["xla"]
    assert taken["layers 1 x 4096 x 12288 x 32 x 8 x 128"] == ["launches"]


@pytest.mark.parametrize("output", ["md", "jsonl", "csv"])
def test_bench(output):
    done = run("bench", "-m", TINY, "-p", 16, "-n", "4,8", "-d", "0,16", "-r", 1, "-o", output)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    tests = ["pp16", "tg4", "tg8", "pp16@d16", "tg4@d16", "tg8@d16"]
    if output == "md":
        assert "\n".join(lines[:2]) == bench.markdown_header()
        assert [line.split(" | ")[5] for line in lines[2:]] == tests
    elif output == "jsonl":
        assert [json.loads(line)["test"] for line in lines] == tests
    else:
        assert lines[0] == bench.csv_header() and len(lines) == 7


PHASES = ["qkv", "attention", "attention output", "gate and up", "down", "head", "sum of these", "whole step"]
MIXED = "synth:tiny-qwen3:q4_k_m"


@pytest.mark.parametrize("output", ["md", "jsonl", "csv"])
def test_profile(output):
    arguments = ("--profile", "-p", 24, "-n", 4, "-d", "0,16", "-r", 1, "-o", output)
    done = run("bench", "-m", MIXED, *arguments)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    if output == "md":
        assert [line.split(" | ")[3] for line in lines[2:]] == 4 * PHASES
        assert len({line.count("|") for line in lines}) == 1
    elif output == "csv":
        assert lines[0].startswith("date,commit,") and len(lines) == 33
    else:
        rows = [json.loads(line) for line in lines]
        assert [row["phase"] for row in rows] == 4 * PHASES
        assert [row["test"] for row in rows[::8]] == ["pp24@d0", "tg@d0", "pp24@d16", "tg@d16"]
        model = bj.load(MIXED, bj.RunConfig(rows=1))
        # Everything that a step reads is in some phase, but for norms and biases.
        held = sum(row["bytes"] for row in rows[24:30] if row["phase"] != "attention")
        assert 0.98 < held / params.decode_bytes(model.params) <= 1
        assert all(row["us"] > 0 and row["operations"] > 0 for row in rows)
        assert all(row["bound"] in ("memory", "compute") and row["ceiling_share"] > 0 for row in rows)


def test_profile_counts_rows_and_the_tokens_of_a_prefill():
    """Weights are read once whatever the rows; operations are those of every token, and of every key that a
    query sees."""
    counts = {}
    for arguments in (("-p", 0, "-b", "1,3"), ("-p", 3, "-n", 0)):
        done = run("bench", "-m", MIXED, "--profile", *arguments, "-d", 5, "-r", 1, "-o", "jsonl")
        assert done.exit_code == 0, done.output
        for row in map(json.loads, done.stdout.splitlines()):
            counts[row["test"], row["phase"]] = row["bytes"], row["operations"]
    for phase in PHASES[:6]:
        moved, operations = counts["tg@d5", phase]
        batch, prefill = counts["batch3@d5", phase], counts["pp3@d5", phase]
        if phase == "attention":
            assert batch == (3 * moved, 3 * operations)
            assert prefill == (moved // 6 * 8, operations // 6 * (6 + 7 + 8))
        else:
            assert batch == (moved, 3 * operations)
            assert prefill == (moved, operations if phase == "head" else 3 * operations)


def test_perplexity_and_its_base(tiny, tmp_path):
    text = bytes(np.random.default_rng(0).integers(97, 122, 400).tolist()).decode()
    (tmp_path / "text.txt").write_text(text)
    arguments = (
        "perplexity",
        "-m",
        TINY,
        "-f",
        tmp_path / "text.txt",
        "-c",
        64,
        "--kl-base",
        tmp_path / "base.npz",
    )
    first = run(*arguments)
    assert first.exit_code == 0, first.output
    (line,) = first.stdout.splitlines()
    assert line.startswith("PPL = ") and " +/- " in line
    second = run(*arguments).stdout.splitlines()
    assert second == [
        "KL = 0.000e+00 +/- 0.0e+00, largest 0.000e+00",
        "same top token = 100.00 +/- 0.00 %",
        line,
    ]


def test_env_names_what_a_bug_report_needs():
    done = run("env")
    assert done.exit_code == 0
    named = {line.split("  ")[0] for line in done.stdout.splitlines()}
    assert named >= {
        "python",
        "bonsai-jax",
        "jax",
        "jaxlib",
        "flax",
        "numpy",
        "devices",
        "driver",
        "CUDA",
        "memory",
    }
    assert "bandwidth" in named and "compile cache" in named


# ---- the process ----


def test_help_and_version_do_not_import_jax():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom bonsai_jax.cli import app\n"
        "for arguments in (['--help'], ['generate', '--help'], ['--version']):\n"
        "    done = CliRunner().invoke(app, arguments)\n"
        "    assert done.exit_code == 0, done.output\n"
        "assert not {'jax', 'flax', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_compile_cache_is_in_the_users_cache_folder(tmp_path):
    arguments = ("generate", "Hi", "-m", TINY, "-n", 4, "--temp", 0)
    first = command(*arguments, XDG_CACHE_HOME=str(tmp_path))
    assert first.returncode == 0, first.stderr
    assert len(first.stderr.splitlines()) == 1, first.stderr  # the figures, and no complaint of jax
    programs = {path.name for path in (tmp_path / "bonsai-jax" / "xla").iterdir()}
    assert any("prefill" in name for name in programs)
    second = command(*arguments, XDG_CACHE_HOME=str(tmp_path))
    assert second.stdout == first.stdout and len(second.stderr.splitlines()) == 1, second.stderr
    new = {path.name for path in (tmp_path / "bonsai-jax" / "xla").iterdir()} - programs
    assert not {name for name in new if not name.endswith("-atime")}


def test_a_cache_folder_that_cannot_be_breaks_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    done = command("generate", "Hi", "-m", TINY, "-n", 2, XDG_CACHE_HOME=str(tmp_path / "file"))
    assert done.returncode == 0 and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_closed_pipe_ends_quietly():
    code = "import sys; from bonsai_jax.cli import main; sys.argv[0] = 'bonsai-jax'; main()"
    arguments = ["generate", "Hi", "-m", TINY, "-n", "400", "--ignore-eos", "--no-compile-cache"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 0


def test_ctrl_c_stops_the_answer_and_not_the_chat(tmp_path):
    import signal

    code = "import sys; from bonsai_jax.cli import main; sys.argv[0] = 'bonsai-jax'; main()"
    arguments = ["chat", "-m", TINY, "-c", "2048", "--ignore-eos", "--temp", "0"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    process.stdin.write(b"Hi\n")
    process.stdin.flush()
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(b"/stats\n/exit\n", timeout=60)
    assert process.returncode == 0, stderr
    assert b"Traceback" not in stderr and b"the prompt were in the cache" in stderr
    assert int(stderr.split(b"context ")[-1].split()[0]) < 2048  # it had not come to its end
