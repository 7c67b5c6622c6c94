"""The commands that print figures: inspect, bench and its profile, perplexity."""

import dataclasses
import json
from unittest import mock

import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax import card
from bonsai_jax.measure import bench, profile
from bonsai_jax.network import params
from bonsai_jax.network.kinds.attention import PREFILL_CHUNK
from bonsai_jax.network.schedules import StepPlan
from bonsai_jax.weights import memory
from checkpoints import open_checkpoint
from pallas_kernels import Products, QTensor, device
from tests.bonsai_jax.command_line import TINY, run, tiny
from tests.bonsai_jax.vocabularies import byte_level_metadata, write_model


def test_rows_say_when_a_step_is_one_launch():
    params, config = tiny().params, tiny().config
    assert card.step_names(params, config) == "cpu"
    one_launch = params.replace(step=StepPlan(((2, "one_launch"),)))
    assert card.step_names(one_launch, config, rows=2) == "one_launch"
    assert card.step_names(one_launch, config, rows=3) == "cpu"


def test_rows_say_when_kernels_had_16_bits():
    w, exact = (
        QTensor({}, "q1_0", (16, 256), products=Products(((3, name), (None, "cublas")), bits))
        for name, bits in (("bit_decode_b1", 16), ("reference", 8))
    )
    assert card.kernel_names([w, exact], rows=3) == "bit_decode_b1:16+reference"
    assert card.kernel_names([w, exact], rows=4) == "cublas"


def test_inspect_reads_no_weights(monkeypatch):
    monkeypatch.setattr("bonsai_jax.weights.drawing._fields", None)
    done = run("inspect", "synth:bonsai-8b:q1_0", "--weights", "packed")
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["all", "399", "8188548096", "1152704128", "1.126"] in lines  # FACTS: tensor bytes of the 8B
    assert ["KV", "bytes", "per", "token", "294,912"] in lines  # float32: twice FACTS' bfloat16
    assert ["qwen3.block_count", "36"] in lines
    assert ["q", "k", "v", "matmul", "q1_0", "6144", "x", "4096", "on", "cpu", "x", "36", "cpu"] in lines
    refused = "matmul not by bit_decode_s8, bit_decode_b1, int_decode: "
    refused += "needs an NVIDIA GPU of compute capability 8.0"
    assert refused in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 140


def test_inspect_names_the_kernels_of_experts_and_why_a_step_of_more_rows_is_not_one_launch(monkeypatch):
    monkeypatch.setattr(device, "default", lambda: device.GPUS["sm_90"])
    done = run("inspect", "synth:tiny-qwen3moe:q4_k", "--weights", "packed")
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if " on sm_90 " in line}
    assert lines["gate"].endswith("1 row, 8 rows: int_experts; 64 rows: grouped_decode; prefill: grouped")
    assert lines["embed"].endswith("look-up of rows")
    assert lines["decode"].endswith("to 8 rows: one_launch; more: launches")
    refused = "decode step not by one_launch: with experts it is for 8 rows at most; 64 were asked for"
    assert refused in done.stdout.splitlines()


def test_inspect_says_that_a_cache_of_bytes_is_half_of_float16s():
    def said(dtype):
        args = ("inspect", "synth:bonsai-8b:q1_0", "--weights", "packed", "--cache-dtype", dtype, "--json")
        out = json.loads(run(*args).stdout)
        kernels = {entry["problem"].split(" on ")[0]: entry["kernels"] for entry in out["kernels"]}
        return out["figures"], kernels

    (float16, _), (int8, kernels) = said("float16"), said("int8")
    assert float16["KV bytes per token"] == 36 * 2 * 8 * 2 * 128
    assert int8["KV bytes per token"] == 36 * 2 * 8 * (128 + 2)  # a scale for each head and token
    assert kernels["decode attention 32 x 8 x 128, int8 cache"] == {"decode": "cpu"}


def test_inspect_json_has_the_same_figures():
    out = json.loads(run("inspect", "-m", "synth:bonsai-8b:q1_0", "--weights", "packed", "--json").stdout)
    assert out["figures"]["weight bytes"] == 1_152_704_128
    assert out["figures"]["bytes per decoded token"] == pytest.approx(1.065e9, rel=2e-3)  # FACTS section 3
    assert [v["kernel"] for v in out["weights"] if v["taken"]] == ["packed"]
    kernels = {entry["problem"].split(" on ")[0]: entry["kernels"] for entry in out["kernels"]}
    by_rows = dict.fromkeys(("1 row", "8 rows", "64 rows", "prefill"), "cpu")
    assert kernels["matmul q1_0 12288 x 4096"] == by_rows
    assert kernels["decode attention 32 x 8 x 128, float32 cache"] == {"decode": "cpu"}
    assert kernels["prefill attention 32 x 8 x 128, float32 cache"] == {"prefill": "cpu"}
    assert kernels["decode step, rows: 1, 4096 wide, feed-forward 12288"] == {"any": "launches"}


def test_inspect_json_has_values_and_not_their_text(tmp_path):
    checkpoint = open_checkpoint("synth:tiny-qwen3:q8_0")
    out = json.loads(run("inspect", checkpoint.source, "--json").stdout)["metadata"]
    assert list(out) == list(checkpoint.metadata)
    for key, value in checkpoint.metadata.items():
        if isinstance(value, str | int | float):
            assert out[key] == value and type(out[key]) is type(value)
        else:
            assert out[key] == {"length": len(value), "first": list(value[:16])}
    odd = {"a": None, "b": [1, 2.5, "x"], "c": {"d": [True]}, "e": np.float32("nan"), "f": np.arange(3)}
    odd = dataclasses.replace(checkpoint, metadata={**checkpoint.metadata, **odd})
    with mock.patch("checkpoints.open_checkpoint", lambda *_, **__: odd):
        out = json.loads(run("inspect", "x", "--json").stdout, parse_constant=pytest.fail)["metadata"]
    assert [out[key] for key in "abcef"] == [None, [1, 2.5, "x"], {"d": [True]}, None, [0, 1, 2]]


@pytest.mark.parametrize("output", ["md", "jsonl", "csv", "--json"])
def test_bench(output):
    asked = [output] if output == "--json" else ["-o", output]
    done = run("bench", "-m", TINY, "-p", 16, "-n", "4,8", "-g", 4, "-d", "0,16", "-r", 1, *asked)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    tests = ["pp16", "tg4", "tg8", "gen4", "pp16@d16", "tg4@d16", "tg8@d16", "gen4@d16"]
    if output == "md":
        assert "\n".join(lines[:2]) == bench.markdown_header()
        assert [line.split(" | ")[5] for line in lines[2:]] == tests
    elif output != "csv":
        assert [json.loads(line)["test"] for line in lines] == tests
    else:
        assert lines[0] == bench.csv_header() and len(lines) == 9


PHASES = ["qkv", "attention", "attention output", "gate and up", "down", "head", "sum of these", "whole step"]
MIXED = "synth:tiny-qwen3:q4_k_m"


@pytest.fixture(scope="module")
def profiled():
    """Rows of a prefill of 3 tokens and of a decode step of 1 and of 3 rows, behind one token: products of 1
    and of 3 rows are all that is compiled, by XLA alone: LLVM takes longer over kernels of two formats."""
    model = bj.load(MIXED, bj.RunConfig(context=256, impl="reference"))
    steps = {"tokens": 3}, {"rows": 1}, {"rows": 3}
    return model, [row for step in steps for row in profile.measure(model, 1, 1, **step)]


def test_profile(profiled):
    model, rows = profiled
    assert [row.phase for row in rows] == 3 * PHASES
    assert [row.test for row in rows[::8]] == ["pp3@d1", "tg@d1", "batch3@d1"]
    # Everything that a step reads is in some phase, but for norms and biases.
    read_bytes = sum(row.bytes for row in rows[8:14] if row.phase != "attention")
    assert 0.98 < read_bytes / params.decode_bytes(model.params, model.config) <= 1
    assert all(row.us > 0 and row.operations > 0 for row in rows)
    assert all(row.bound in ("memory", "compute") and row.ceiling_share > 0 for row in rows)


@pytest.mark.parametrize("output", ["md", "jsonl", "csv"])
def test_profile_prints_a_prefill_and_steps_at_every_depth(output, profiled, monkeypatch):
    asked, by_rows = [], dict(zip((None, 1, 3), (profiled[1][i : i + 8] for i in (0, 8, 16)), strict=True))

    def measure(model, depth, repetitions, *, rows=None, tokens=1):
        asked.append((depth, repetitions, rows, tokens))
        return iter(by_rows[rows])

    monkeypatch.setattr(profile, "measure", measure)
    done = run("bench", "-m", MIXED, "--profile", "-p", 3, "-n", 4, "-d", "0,1", "-r", 2, "-o", output)
    assert done.exit_code == 0, done.output
    assert asked == [(0, 2, None, 3), (0, 2, 1, 1), (1, 2, None, 3), (1, 2, 1, 1)]
    printed = [row for step in (None, 1, None, 1) for row in by_rows[step]]
    lines = done.stdout.splitlines()
    if output == "md":
        assert [line.split(" | ")[3] for line in lines[2:]] == 4 * PHASES
        assert len({line.count("|") for line in lines}) == 1
    elif output == "csv":
        assert lines[0].startswith("date,commit,") and len(lines) == 33
    else:
        assert [json.loads(line) for line in lines] == [dataclasses.asdict(row) for row in printed]
    asked.clear()
    done = run("bench", "-m", MIXED, "--profile", "-p", 0, "-b", "1,3", "-r", 1, "-o", output)
    assert done.exit_code == 0 and asked == [(0, 1, 1, 1), (0, 1, 3, 1)]


def test_profile_counts_rows_and_the_tokens_of_a_prefill(profiled):
    """Weights are read once whatever the rows; operations are those of every token, and of every key that a
    query sees."""
    counts = {(row.test, row.phase): (row.bytes, row.operations) for row in profiled[1]}
    for phase in PHASES[:6]:
        moved, operations = counts["tg@d1", phase]
        batch, prefill = counts["batch3@d1", phase], counts["pp3@d1", phase]
        if phase == "attention":
            assert batch == (3 * moved, 3 * operations)
            assert prefill == (moved // 2 * 4, operations // 2 * (2 + 3 + 4))
        else:
            assert batch == (moved, 3 * operations)
            assert prefill == (moved, operations if phase == "head" else 3 * operations)


def test_profile_of_experts_has_their_phases():
    """Of three experts of eight what they read; of many tokens nearly all."""
    model = bj.load("synth:tiny-qwen3moe:q8_0", bj.RunConfig(batch_size=1, weights="packed"))
    rows = list(profile.measure(model, 0, 1))
    assert [row.phase for row in rows[:6]] == [*PHASES[:3], "router", "experts", "head"]
    read_bytes = sum(row.bytes for row in rows[:6] if row.phase != "attention")
    assert 0.95 < read_bytes / params.decode_bytes(model.params, model.config) <= 1
    assert rows[4].operations == 2 * 3 * 3 * 3 * 256 * 256


def test_profile_of_a_delta_net_has_its_phases():
    """Every weight that a step reads is in some phase, but for norms and the like."""
    model = bj.load("synth:tiny-qwen35:q8_0", bj.RunConfig(batch_size=1, weights="packed"))
    rows = list(profile.measure(model, 0, 1))
    assert [row.phase for row in rows[:3]] == ["delta inputs", "delta net", "delta output"]
    assert [row.phase for row in rows[3:]] == PHASES
    read_bytes = sum(row.bytes for row in rows[:9] if row.phase not in ("attention", "delta net"))
    assert 0.95 < read_bytes / params.decode_bytes(model.params, model.config) <= 1
    assert rows[1].bytes == 2 * memory.bytes_per_row(model.config, model.run)


def test_inspect_says_what_is_folded_and_what_a_row_keeps():
    figures = json.loads(run("inspect", "synth:bonsai-2-27b:pq2_0", "--json").stdout)["figures"]
    assert figures["Hadamard-folded weights"] == 401 and figures["state bytes per sequence"] == 158_859_264
    assert "ignored tensors" not in figures


def test_inspect_says_the_type_of_the_states_of_delta_nets():
    def figures(name, *arguments):
        return json.loads(run("inspect", f"synth:{name}", "--json", *arguments).stdout)["figures"]

    assert "state dtype" not in figures("tiny-llama:q8_0")
    usual, half = figures("tiny-qwen35:f32"), figures("tiny-qwen35:f32", "--state-dtype", "float16")
    assert usual["state dtype"] == "float32" and half["state dtype"] == "float16"
    numbers = 3 * 4 * 64 * 64  # layers, heads, and S of each
    assert usual["state bytes per sequence"] - half["state bytes per sequence"] == 2 * numbers
    printed = run("inspect", "synth:tiny-qwen35:f32", "--state-dtype", "float16").stdout
    assert ["state", "dtype", "float16"] in [line.split() for line in printed.splitlines()]


def test_profile_of_a_long_prompt_is_of_one_chunk():
    model = bj.load(MIXED, bj.RunConfig(context=1024, impl="reference"))
    first = next(profile.measure(model, 0, 1, tokens=700))
    assert first.test == f"pp{PREFILL_CHUNK}@d0"
    with pytest.raises(NotImplementedError, match="more than one row"):
        next(profile.measure(model, 0, 1, tokens=16, rows=2))


def test_perplexity_and_its_base(tmp_path):
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
    out = json.loads(run(*arguments, "--json").stdout)
    assert f"PPL = {out.pop('ppl'):.4f} +/- {out.pop('ppl_error'):.4f}" == line
    sizes = {"tokens": len(tiny().tokenizer.encode(text)), "chunks": 6, "context": 64}
    exact = {"kl": 0, "kl_error": 0, "kl_largest": 0, "same_top": 1, "same_top_error": 0}
    assert out == sizes | exact


def test_perplexity_of_a_model_with_a_short_context(tmp_path):
    write_model(tmp_path / "model.gguf", byte_level_metadata("qwen2"))  # 64 tokens
    (tmp_path / "text.txt").write_text("words of a text, " * 50)
    asked = ("perplexity", "-m", tmp_path / "model.gguf", "-f", tmp_path / "text.txt", "--json")
    done = run(*asked)
    assert done.exit_code == 0, done.output
    out = json.loads(done.stdout)
    assert out["context"] == 64 and out["chunks"] == out["tokens"] // 64
    assert out["ppl"] == pytest.approx(len(byte_level_metadata("qwen2")["tokenizer.ggml.tokens"]))
    assert "error: --ctx is 65" in run(*asked, "-c", 65).stderr
    assert "at least 4 are needed" in run(*asked, "-c", 3).stderr
