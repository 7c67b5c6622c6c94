"""The benchmarks run anywhere, at a tiny size: their rows are complete and their checks hold."""

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.measure import bench
from bonsai_jax.network import architectures
from bonsai_jax.network import cache as kv
from checkpoints import open_checkpoint
from pallas_kernels import Products, dequantize, formats

ROOT = Path(__file__).parent.parent
TINY = ["-r", "1", "--calls", "1", "--rotate-mb", "1", "--most-layers", "2"]
KEYS = [
    *("date", "commit", "device", "driver", "jax", "impl", "op", "model", "shape", "rows", "layers", "bytes"),
    *("us", "us_min", "us_max", "gb_s", "ceiling_share", "light_us", "empty_us", "error"),
]


def script(name, *arguments):
    """Standard output of a benchmark in a process of its own, as it is called by hand."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, f"benchmarks/{name}.py", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def main(name, *arguments, **constants):
    """Standard output of its main, in this process, which has imported jax; with other constants."""
    out, path = io.StringIO(), [str(ROOT / "benchmarks"), *sys.path]
    argv = [f"{name}.py", *map(str, arguments)]
    with mock.patch.multiple(sys, argv=argv, path=path), contextlib.redirect_stdout(out):
        benchmark = module(name)
        vars(benchmark).update(constants)
        try:
            benchmark.main()
        except SystemExit as ended:
            assert not ended.code, ended
    return out.getvalue()


def module(name):
    """A benchmark as a module, for what is inside it."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", [str(ROOT / "benchmarks"), *sys.path]):  # they import each other
        spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.parametrize(
    ("name", "arguments", "ops", "impl"),
    [
        ("matvec", ["-m", "tiny-qwen3", "--rows", "1,3"], 10, "cpu"),
        (
            "decode_attention",
            ["-m", "tiny-qwen3,tiny-llama", "--keys", "64", "--cache-dtype", "bfloat16,int8"],
            4,
            "cpu",
        ),
        ("delta_net", ["-m", "tiny-qwen35", "--tokens", "1,70"], 2, "reference"),
    ],
)
def test_a_benchmark_of_an_op_runs_and_checks_itself(name, arguments, ops, impl):
    rows = [json.loads(line) for line in main(name, *TINY, *arguments, "-o", "jsonl").splitlines()]
    assert len(rows) == ops
    for row in rows:
        assert list(row) == KEYS
        assert row["bytes"] > 0 and row["light_us"] > 0 and row["error"] < 1e-5 and row["impl"] == impl
        assert row["empty_us"] is None  # there is no launch to time


@pytest.fixture
def matvec(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return module("matvec")


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("format", formats.names())
def test_activations_of_a_matvec_are_codes_of_the_groups_that_are_rounded_together(matvec, format, bits):
    """q = round(x top / absmax) of each group gives x back: columns that share a scale, whatever the format,
    also those of a norm's weights times x."""
    kernel = formats.family(format)
    group = formats.get(format).LANES.activation_group if kernel == "int" else 128
    top = {8: 127, 16: 127 * 257 if kernel == "int" else 32767}[bits]
    x = np.asarray(matvec.exact_activations(np.random.default_rng(0), 3, 1024, format, bits), np.float64)
    gamma = np.repeat(2.0 ** np.arange(-4, 4), 128)
    for values in (x, gamma * x):
        values = values.reshape(3, -1, group)
        largest = np.abs(values).max(-1, keepdims=True)
        np.testing.assert_array_equal(np.rint(values * (top / largest)) * (largest / top), values)
    assert len(np.unique(np.abs(x))) > 100


def test_layers_beyond_the_distinct_ones_have_their_weights_again(matvec, monkeypatch):
    monkeypatch.setattr(matvec, "DISTINCT_MB", 0)
    stacked, blocks = matvec.stack("q4_k", (32, 256), 5, 0, 8)
    read = jax.jit(dequantize)
    dense, blockwise = np.asarray(read(stacked.parts[0])), [np.asarray(read(part)) for part in blocks.parts]
    assert dense.shape == (5, 32, 256) and stacked.where[-1] == (0, 4)
    for layer, (part, index) in enumerate(blocks.where):
        np.testing.assert_array_equal(dense[layer], blockwise[part][index])
    assert not np.array_equal(dense[0], dense[1])


def test_gemms_stand_beside_dense_ones():
    arguments = ["-m", "tiny-qwen3", "--rows", "20", "--layers", "2", "--most-layers", "2", "-r", "1"]
    arguments += ["--calls", "1"]
    rows = [json.loads(line) for line in main("gemm", *arguments, "-o", "jsonl").splitlines()]
    assert [row["op"] for row in rows] == ["qkv", "attention output", "feed-forward"]
    for row in rows:
        assert (
            row["tflops"] > 0 and row["share"] == row["tflops"] / row["bf16_tflops"] and row["error"] < 2e-2
        )
        assert row["layers"] == 2 and row["gemm_us"] is None  # on a CPU it is not apart from the op


@pytest.mark.slow  # matvec's table is everyday's
def test_a_table_of_gemms():
    arguments = ["-m", "tiny-qwen3", "--rows", "20", "--layers", "2", "--most-layers", "2", "-r", "1"]
    table = script("gemm", *arguments, "--calls", "1").splitlines()
    assert len(table) == 2 + 3 and len({line.count("|") for line in table}) == 1


@pytest.mark.parametrize("op", ["qkv", "attention output", "feed-forward"])
def test_a_gemm_alone_is_the_op_but_for_the_rounding_of_its_activations(op, monkeypatch):
    """As it runs on a GPU, by the candidate that a CPU has too."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = module("gemm")
    by_cublas = lambda w, **_: w.replace(products=Products(((None, "cublas"),)))  # noqa: E731
    monkeypatch.setattr(benchmark.matvec, "for_device", by_cublas)
    arguments = argparse.Namespace(
        format="q4_k", layers=2, most_layers=3, repetitions=1, calls=1, commit=None
    )
    config = architectures.config_of(open_checkpoint("synth:tiny-qwen3:q4_k"))
    weights = benchmark.Weights(arguments, config, op, [20, 24])
    product = benchmark.Product(arguments, "tiny-qwen3", weights, 20)
    programs = {name: (lowered.compile(), given) for name, (lowered, given, _) in product.programs().items()}
    row = product.row(programs)
    assert 0 < row.error < 1e-3 and row.layers == 3
    assert row.gemm_us > 0 and row.gemm_share == row.gemm_tflops / row.bf16_tflops
    program, (given, start, ours) = programs["gemm"]
    worse = program([(1.01 * a, scale) for a, scale in given], start, ours)[0]
    assert benchmark.matvec.difference(worse, product.definition()["gemm"]) > 5e-3  # the check can fail


def test_steps_of_fewer_layers_are_timed(monkeypatch):
    benchmark = module("steps")
    monkeypatch.setattr(benchmark.synth, "MODELS", dict(benchmark.synth.MODELS))  # which --layers changes
    arguments = ["-m", "synth:tiny-llama:q8_0", "-b", "3,1", "-n", "2", "-r", "3", "-d", "4", "--layers", "1"]
    rows = [json.loads(line) for line in main("steps", *arguments).splitlines()]
    assert [(row["rows"], row["layers"], row["depth"]) for row in rows] == [(3, 1, 4), (1, 1, 4)]
    assert all(row["us_max"] >= row["us"] >= row["us_min"] > 0 and row["kernels"] is None for row in rows)
    with pytest.raises(
        SystemExit, match=r"--layers: model.gguf is a file; only synth: models can have fewer"
    ):
        benchmark.with_layers("model.gguf", 1)
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # which --kernels changes
    with pytest.raises(AssertionError, match="--kernels: this is a CPU; kernels are timed on a GPU"):
        main("steps", *arguments, "--kernels")


def test_draws_are_timed_beside_the_definition(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = module("sampling")
    arguments = ["--rows", "2", "--vocabulary", "300", "-r", "2", "--calls", "1", "--only", "defaults,bias"]
    monkeypatch.setattr(benchmark, "CHAIN", 2)
    monkeypatch.setattr(benchmark, "SETTINGS", {**benchmark.SETTINGS, "bias": {"logit_bias": {7: 99.0}}})
    monkeypatch.setattr(sys, "argv", ["", *arguments])
    drawn, chain = [], benchmark.chain
    monkeypatch.setattr(benchmark, "chain", lambda *given: drawn.append(chain(*given)) or drawn[-1])
    benchmark.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["setting"], row["impl"]) for row in rows] == [
        ("defaults", "cpu"),
        ("defaults", "reference"),
        ("bias", "cpu"),
        ("bias", "reference"),
    ]
    assert all(row["us_max"] >= row["us"] > 0 and row["draws"] == 4 and row["other"] == 0 for row in rows)
    assert any((tokens == 7).all() for _, tokens in drawn)  # the bias
    assert any(len(np.unique(tokens)) > 2 for _, tokens in drawn)  # of logits that change


@pytest.mark.parametrize(
    ("name", "arguments"), [("score", ["--items", "3", "--choices", "2"]), ("harvest", ["--texts", "3"])]
)
def test_many_texts_are_read_beside_prefill(name, arguments):
    (line,) = main(name, "-m", "synth:tiny-llama:q8_0", "-r", "1", *arguments, PREFILL=64).splitlines()
    row = json.loads(line)
    assert row["share"] == row["tok_s"] / row["prefill_tok_s"] > 0 and row["tokens"] > 3 * 30


def test_constrained_rows_are_beside_others():
    how = ("--rows", "2", "-n", "8", "-r", "2")
    rows = [json.loads(line) for line in main("constrained", *how, PROMPT=8).splitlines()]
    assert [row["kind"] for row in rows] == ["free", "words", "people"] and rows[0]["share"] == 1
    assert all(row["tok_s"] > 0 and row["share"] > 0 and row["rows"] == 2 for row in rows)
    assert rows[1]["steps"] >= 1 > rows[0]["steps"]  # one plan for each token, and for many


def test_a_table_is_for_people():
    # What the test above has compiled.
    lines = script("matvec", *TINY, "-m", "tiny-qwen3", "--rows", "1,3").splitlines()
    assert lines[0].startswith("| op | model | shape |") and len(lines) == 2 + 10
    assert len({line.count("|") for line in lines}) == 1


def test_the_plot_takes_the_fastest_row_of_each_model_and_its_own_ceiling():
    plot_ceiling = module("plot_ceiling")
    row = {
        "model": "large",
        "test": "tg128",
        "tok_s": 100.0,
        "gb_s": 50.0,
        "ceiling_share": 0.25,
        "commit": "a",
    }
    rows = [
        *(row, row | {"tok_s": 200.0, "gb_s": 100.0, "ceiling_share": 0.5, "commit": "b"}),
        row | {"test": "pp512", "ceiling_share": None},
        row | {"model": "small", "gb_s": 10.0, "ceiling_share": 0.05},
    ]
    small, large = plot_ceiling.points(rows)
    assert (small.model, small.bytes, small.ceiling) == ("small", 1e8, 2000.0)
    assert (large.model, large.bytes, large.ceiling, large.commit) == ("large", 5e8, 400.0, "b")


def test_the_picture_of_speed_is_that_of_the_readmes_table():
    """If not: uv run python benchmarks/plot_readme.py."""
    plot_readme = module("plot_readme")
    readme = (ROOT / "README.md").read_text()
    assert list(plot_readme.pairs(readme)) == [
        *("Q1_0", "Q4_K_M", "27B, Q1_0", "30B-A3B, Q4_K_M", "gpt-oss 20B, MXFP4", "Qwen3.6 35B-A3B, Q4_K_M")
    ]
    assert plot_readme.draw(readme) == (ROOT / "docs/speed.svg").read_text()


def test_requantized_weights_run_in_llama_cpp_and_here_and_the_answers_can_be_kept(tmp_path):
    source = "synth:tiny-qwen2:f32"
    arguments = ("--prompts", 2, "-n", 6)
    # Prompts of one length are one program.
    made = main("requantized_vs_llamacpp", source, *arguments, "--keep", tmp_path, MOST=16)
    assert "2 prompts, 12 tokens" in made
    kept = "--against", tmp_path / "oracle.json", tmp_path / "q1_0.gguf"
    again = main("requantized_vs_llamacpp", *kept, "--activation-bits", 16).splitlines()
    exact = [line for line in again if line.startswith("| F32 | ")]
    assert len(exact) == 2  # all at once, and step by step
    assert all(float(line.split(" | ")[2]) < 1e-7 for line in exact)


def test_the_rounding_of_activations_is_measured_beside_llama_cpps(tmp_path):
    """Two formats: one for every matrix, one for those of a layer, beside F32."""
    from tests.bonsai_jax.test_oracle import as_file

    path = as_file("synth:tiny-llama:f32", tmp_path / "tiny.gguf")
    sizes = {"PROMPT": 3, "SCORED": 4}
    arguments = ("-m", path, "--texts", 2, "--rows", 2)
    for more in (("q4_0",), ("q1_0", "--rest", "f32", "--only", "blk[.]1[.]")):
        *_, (format, share, theirs, *ours) = (
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in main("activation_rounding", *more, *arguments, **sizes).splitlines()
            if line.startswith("|")
        )
        assert format == more[0] and (share == "100%") == (len(more) == 1)
        assert 0 < float(theirs) < 1 and len(ours) == 4
        assert all(0 < float(kl) < 1 for kl in ours[::2])


def test_a_state_in_float16_has_an_error_between_those_of_float32_and_bfloat16():
    """By about as much as their numbers have more bits, 13 and 3; and heads that forget less keep more."""
    lines = main("delta_state_rounding", "--tokens", 64, "--heads", 2).splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][2:]
    (exact, half, coarse), (slow_exact, slow_half, slow_coarse) = zip(
        *((float(usual), float(slow)) for _, usual, slow in rows), strict=True
    )
    assert [name for name, *_ in rows] == ["float32", "float16", "bfloat16"]
    for low, middle, high in ((exact, half, coarse), (slow_exact, slow_half, slow_coarse)):
        assert 0 < 2**12 * low < middle < 2**14 * low and 4 * middle < high < 16 * middle
    assert half < slow_half
    assert 0.006 < float(lines[-1].removeprefix("8-bit activations: ")) < 0.007
    assert not jax.config.jax_enable_x64


def test_whole_calls_of_generate():
    arguments = ["-m", "synth:tiny-llama:q8_0", "-b", "1,3", "-p", 9, "-n", 5, "-r", 2]
    one, three = (json.loads(line) for line in main("generate", *arguments).splitlines())
    assert (one["prompts"], three["prompts"]) == (1, 3)
    assert one["first_piece_ms"] > 0 and three["first_piece_ms"] is None
    for row in (one, three):
        assert 0 < row["tok_s_min"] <= row["tok_s"] <= row["tok_s_max"]
        assert (row["prompt_tokens"], row["new_tokens"]) == (9, 5)


def test_llama_cpp_reads_the_tokens_that_are_timed_here_and_both_have_rows(tmp_path, monkeypatch, capsys):
    from tests.bonsai_jax.test_oracle import as_file

    path = as_file("synth:tiny-llama:f32", tmp_path / "tiny.gguf")
    benchmark = module("cpu_vs_llamacpp")
    asked = benchmark.Required(pp=1e9, peak=2e9)
    monkeypatch.setattr(benchmark, "REQUIRED", {str(path): asked})
    monkeypatch.setattr(benchmark, "__file__", str(tmp_path / "script.py"))  # results lie beside it
    monkeypatch.setattr(sys, "argv", ["", "-m", str(path), "-r", "2", "-p", "24", "-n", "6", "--record"])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == "a required number was missed"
    size = path.stat().st_size
    assert benchmark.most_bytes(str(path), 100, asked) == 1.25 * size + 0.4e9 + 100  # stricter than 2 GB
    assert benchmark.most_bytes(str(path), 100, benchmark.Required(peak=1e6)) == 1e6
    table = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [(cells[0], cells[-1]) for cells in table[2:]] == [("| pp24", "1000000000.0 |"), ("| tg6", "- |")]
    (path,) = (tmp_path / "results").iterdir()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["test"] for row in rows] == ["pp24", "pp24", "tg6", "tg6"]
    assert [row["impl"].split()[0] for row in rows] == 2 * ["reference", "llama.cpp"]
    assert all(row["tok_s"] > 0 for row in rows)


def test_the_plot_of_several_devices_takes_what_was_measured_on_one_too():
    plot_devices = module("plot_devices")
    rows = [
        {"model": model, "test": "tg64", "tok_s": tok_s, "data_parallel": data, "tensor_parallel": tensor}
        for model, tok_s, data, tensor in (
            *(("a", 10.0, 1, 1), ("a", 12.0, 1, 1), ("a", 30.0, 1, 4), ("a", 20.0, 1, 2), ("a", 24.0, 2, 1)),
            ("b", 5.0, 4, 1),  # not measured on one
        )
    ]
    assert plot_devices.series(rows) == {
        ("a", "tg64", "data parallel"): {1: 12.0, 2: 24.0},
        ("a", "tg64", "tensor parallel"): {1: 12.0, 2: 20.0, 4: 30.0},
    }


@pytest.fixture
def step_row():
    """(model, rows, us) -> what benchmarks/steps.py prints, but for the fields of --kernels and --layers."""
    row_class = module("steps").Row
    origin = {"date": "", "commit": "c", "device": "GPU", "driver": None, "jax": ""}
    fixed = {**origin, "layers": 2, "depth": 128, "us_min": 0.0, "us_max": 0.0, "kernels": None}
    return lambda model, rows, us: dataclasses.asdict(row_class(model=model, rows=rows, us=us, **fixed))


def test_the_plot_of_batch_sizes_takes_the_median_and_leaves_out_what_is_no_plain_step(step_row):
    plot_rows = module("plot_rows")
    rows = [step_row("synth:a", n, us) for n, us in ((4, 50.0), (1, 30.0), (1, 20.0), (1, 90.0), (65, 1.0))]
    rows += [step_row("a", 4, 1.0) | {"kernels": {"matvec": [1.0, 1.0]}}]
    rows += [step_row("a", 1, 10.0) | {"layers": 1}, step_row("a", 1, 40.0) | {"depth": 0}]
    assert plot_rows.series(rows) == {
        "a, 1 layers, after 128 tokens": {1: 1e5},
        "a, 2 layers, after 0 tokens": {1: 25e3},
        "a, 2 layers, after 128 tokens": {1: 1e6 / 30, 4: 80e3},
    }


@pytest.mark.parametrize("seed", range(10))
def test_drops_are_neighbours_with_more_than_three_percent_fewer_tokens(seed):
    """From a sequence of known factors; batch sizes that were not measured have no neighbours."""
    plot_rows, random = module("plot_rows"), np.random.default_rng(seed)
    factors = random.choice([1.2, 1.0, 0.975, 0.965, 0.5], size=64)
    measured = set(random.permutation(np.arange(1, 65))[:50].tolist())
    speeds = {n: 1e4 * tok_s for n, tok_s in enumerate(np.cumprod(factors), 1) if n in measured}
    falls = {n for n in measured if n - 1 in measured and factors[n - 1] < 0.97}
    drops = plot_rows.drops(speeds)
    assert set(drops) == falls != set()
    np.testing.assert_allclose(list(drops.values()), [1 - factors[n - 1] for n in drops])
    assert plot_rows.drops({1: 100.0, 2: 97.0, 3: 200.0, 5: 1.0}) == {}


def test_the_picture_of_batch_sizes_is_the_same_in_any_order_of_rows_and_marks_the_printed_drops(
    step_row, tmp_path
):
    speeds = {"synth:a": (100, 190, 150, 145), "b": (10, 20, 30, 29.2), "c": (5, 4, 3)}
    rows = [step_row(m, n, n * 1e6 / tok_s) for m, line in speeds.items() for n, tok_s in enumerate(line, 1)]
    pictures = []
    for order in (rows, rows[::-1]):
        given, picture = tmp_path / "rows.jsonl", tmp_path / "rows.svg"
        given.write_text("".join(json.dumps(row) + "\n" for row in order))
        path, *table = main("plot_rows", "-i", given, "-o", picture).splitlines()
        pictures.append(picture.read_bytes())
        assert path == str(picture) and table == [
            "| model | from | to | percent |",
            "|---|---|---|---|",
            "| a, 2 layers, after 128 tokens | 2: 190 tok/s | 3: 150 tok/s | -21.1 |",
            "| a, 2 layers, after 128 tokens | 3: 150 tok/s | 4: 145 tok/s | -3.3 |",
            "| c, 2 layers, after 128 tokens | 1: 5 tok/s | 2: 4 tok/s | -20.0 |",
            "| c, 2 layers, after 128 tokens | 2: 4 tok/s | 3: 3 tok/s | -25.0 |",
        ]
    assert pictures[0] == pictures[1]
    marks = re.findall(rb'<g id="PathCollection_\d+">.*?<g clip-path.*?</g>', pictures[0], re.DOTALL)
    assert [mark.count(b"<use") for mark in marks] == [2, 2]


@pytest.mark.parametrize(
    "text", ["", "no JSON", "[1]", '{"model": "a", "us": 1.0, "rows": 1, "op": "qkv"}', None]
)
def test_a_plot_of_batch_sizes_needs_rows_of_steps(text, step_row, tmp_path):
    profiled = json.dumps(step_row("a", 1, 1.0) | {"kernels": {}})  # None: only such rows
    (tmp_path / "other.jsonl").write_text(profiled if text is None else text)
    with pytest.raises(AssertionError, match=r"other\.jsonl: not rows of 1 to 64 by benchmarks/steps\.py"):
        main("plot_rows", "-i", tmp_path / "other.jsonl", "-o", tmp_path / "rows.svg")
    assert not (tmp_path / "rows.svg").exists()


def test_steps_write_what_generate_writes_and_the_definition_finds_where_another_text_parts():
    benchmark = module("kernels_vs_definition")
    prompt, new = [7, 3, 250, 11, 40], benchmark.NEW_TOKENS
    model = bj.load("synth:tiny-llama:q1_0", bj.RunConfig(impl="reference", context=96))
    size, first = len(prompt) + new + 3, np.array([len(prompt) - 1], np.int32)
    padding = [0] * (size - len(prompt))
    length = np.int32(len(prompt) + new - 1)
    cache = kv.empty(model.config, model.run, 1, size)
    step = lambda tokens, given, cache: benchmark.by_steps(  # noqa: E731
        model.params, cache, tokens, np.int32(given), length, model.config
    )
    written, scores, cache = step(jnp.array(prompt + padding), len(prompt), cache)
    answer = np.asarray(written)[len(prompt) :][:new]
    sampling = bj.SamplingParams(temperature=0)
    (want,) = bj.generate(model, [prompt], max_new_tokens=new, sampling=sampling, ignore_eos=True)
    assert answer.tolist() == want.tokens and len(set(want.tokens)) > 5

    exact = np.asarray(benchmark.at_once(model.params, np.asarray(written)[None], first, model.config))[0]
    np.testing.assert_allclose(scores, exact, atol=1e-4)
    assert benchmark.margin(exact, answer) is None
    again, read, _ = step(written, length, cache)  # every token given; what the cache held is forgotten
    np.testing.assert_array_equal(again, written)
    np.testing.assert_array_equal(read, scores)

    second = np.argsort(exact[9])[-2]  # the tenth token as the second likeliest
    parted = np.concatenate([answer[:9], [second], answer[10:]])
    gap = exact[9][answer[9]] - exact[9][second]
    assert gap > 0 and abs(benchmark.margin(exact, parted) - gap) < 1e-5


@pytest.mark.slow
def test_a_crowd_through_the_engine_is_beside_the_bench():
    options = ("-m", "synth:tiny-llama:q8_0", "--crowds", 2, "--new", 8, "-r", 1)
    _, row, free, same = map(json.loads, script("engine", "rows", "same", *options).splitlines())
    assert row["rows"] == 2 and row["host_ms"] > 0 and row["user_s"] > 0
    assert row["share_of_bench"] == row["engine_tok_s"] / row["bench_tok_s"][0]
    assert not free["reproducible"] and same["reproducible"] and same["same_tokens"]
    options = ("-m", "synth:tiny-llama:q8_0", "--rows", 4, "--sizes", "1,2", "--requests", 5, "--pages", 200)
    _, row = map(json.loads, script("engine", "trace", *options).splitlines())
    assert row["new_tok_s"] > 0


def test_devices_for_some_requests_a_minute_are_as_many_as_bear_them():
    """By rows of the H200: 90 % of what one bears, rounded up; what one bears is within the bounds."""
    simulate = module("simulate")
    results = ROOT / "benchmarks" / "results" / "nvidia-h200.jsonl"
    options = {"model": "synth:bonsai-8b:q4_k_m", "results": results, "also": ["batch256=23070"], "rows": 64}
    bounds = {"dispatch_ms": 2.0, "ttft": 1.0, "per_token": 0.05, "pages": 640, "requests": 80}
    asked = argparse.Namespace(**options, **bounds, a_minute=[10, 100000])
    _, most, few, many = simulate.need(asked)
    assert most["ttft_p95_s"] <= 1.0 and most["per_token_p95_s"] <= 0.05
    assert few["devices"] == 1 and few["busy"] < 0.2 < most["busy"]
    assert many["devices"] == -(-100000 // (0.9 * most["most_a_minute_of_a_device"]))


def test_what_a_user_waits_for_is_in_seconds():
    rows = [
        json.loads(line)
        for line in script("start", "-m", "synth:tiny-llama:q8_0", "-n", 8, "-b", 2).splitlines()
    ]
    assert [row["start"] for row in rows] == [1, 2]
    for row in rows:
        assert 0 < row["imported"] <= row["loaded"] <= row["first_piece"]
        assert {"silence", "other_length", "other_number", "warmup", "commit", "device", "jax"} <= row.keys()


def test_clients_of_a_server_are_beside_an_engine_and_another_server():
    from bonsai_jax import server as serving

    benchmark = module("server")
    asked = argparse.Namespace(clients=[3], prompt=8, new=6, repetitions=2)
    model = bj.load("synth:tiny-llama:q8_0", bj.RunConfig(context=16, batch_size=4))
    client = [sys.executable, ROOT / "benchmarks" / "stream_client.py"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    engine = bj.Engine(model, logprobs=benchmark.MOST_LOGPROBS, logit_biases=benchmark.BIASES)
    with serving.running(engine) as running, subprocess.Popen(client, **pipes) as process:
        place = benchmark.Place(running.url, argparse.Namespace(pid=os.getpid()))
        inside, clients = benchmark.InEngine(engine), benchmark.Clients(process)
        ours, other = benchmark.measured(3, asked, inside, clients, [place, place])
        process.stdin.close()
    assert (ours["impl"], ours["clients"], ours["new_tokens"]) == ("bonsai-jax", 3, 6)
    assert ours["share"] == ours["tok_s"] / ours["engine_tok_s"] > 0 and len(ours["tok_s_all"]) == 2
    assert 0 < ours["ttft_s"]["p50"] <= ours["ttft_s"]["p99"] and ours["cpu_us"] > 0 < ours["client_cpu"]
    assert other["impl"] == "llama.cpp" and other["ratio"] == ours["tok_s"] / other["tok_s"]


@pytest.mark.slow
def test_a_servers_process_is_measured_beside_llama_cpps():
    options = ("-m", "demo", "--beside-llamacpp", "demo", "--clients", 2, "-p", 16, "-n", 8, "-r", 1)
    ours, other = map(json.loads, script("server", *options).splitlines())
    assert ours["share"] > 0 and ours["between_s"]["p99"] > 0
    assert other["tok_s"] > 0 and other["ratio"] == ours["tok_s"] / other["tok_s"]


def test_rounded_scales_and_activations_have_an_error_in_the_story_model():
    """Of activations the larger one, the larger the more columns share a scale, but for 16 bits of what down
    reads; of scales a smaller one. Steps of a CPU have 32 columns, and better scales."""
    rounding = module("scale_rounding").Rounding
    used = (rounding(None), rounding(32), rounding(256), rounding(256, 16))
    rows = table(main("scale_rounding", TEXTS=4, TOKENS=12, ROUNDINGS=used))
    exact, of_32, of_256, down_16 = ([float(cell.split(" +- ")[0]) for cell in cells] for _, *cells in rows)
    assert exact[0] == 0 < exact[1] < of_32[0] < of_256[0] < 1e-2 and of_32[0] != of_32[1]
    assert 0 < down_16[0] < of_256[0]
    rows = table(main("scale_rounding", "--steps", "1,4", TEXTS=4, TOKENS=12))
    assert [row for row, *_ in rows] == ["1", "4"] and all(0.1 < float(ratio) < 2 for *_, ratio in rows)


def table(printed: str) -> list[list[str]]:
    """Cells of a table's rows, without its head."""
    return [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| ")][1:]


def test_scales_are_rounded_to_7_bits_of_the_largest_of_four():
    d, signs = np.float32([[3, 1, 2, 3.01, 0.5, 0.25]]), np.float32([[1, -1, -1, 1, 1, -1]])
    want = [round(127 * x / 3.01) * 3.01 / 127 for x in d[0, :4]] + [0.5, round(127 / 2) * 0.5 / 127]
    made = module("scale_rounding").rounded_scales(jnp.repeat(jnp.asarray(d * signs), 128, axis=1))
    np.testing.assert_allclose(made, np.repeat(signs * np.float32(want), 128, axis=1), rtol=1e-6)


def test_a_trace_names_what_ran_in_order_with_its_times(capsys):
    """On a trace of this CPU, whose threads stand for a GPU's streams, and on launches made up here."""
    benchmark = module("kernel_trace")
    test = bench.Test(bj.load("synth:tiny-llama:q8_0", bj.RunConfig(context=16)), "pp", 16)
    each = benchmark.traced(test, plane="CPU", line="")
    assert each == sorted(each) and each and all(launch.stop >= launch.start for launch in each)
    assert not benchmark.traced(test)  # no GPU
    known = [benchmark.Launch(*each) for each in [(0, 2, "a"), (3, 7, "b"), (7.5, 9.5, "a"), (10, 11, "c")]]
    whole, *sums, first, second = benchmark.report(known, units=2, most=2, stretch=2)
    assert whole.startswith("4.5 us")
    assert [line.split() for line in sums] == [
        ["a", "2.0", "us", "1.0", "of", "2.00"], ["b", "2.0", "us", "0.5", "of", "4.00"]
    ]  # fmt: skip
    assert first.split() == ["b", "4.00", "gap", "0.50"] and second.split() == ["a", "2.00", "gap", "0.50"]
    with pytest.raises(SystemExit):
        benchmark.main(["-m", "synth:tiny-llama:q8_0", "-p", "16"])
    assert "this is a CPU" in capsys.readouterr().err
