"""The benchmark runs the model's own forward, and its rows have the form that the record needs."""

import csv
import dataclasses
import io
import json
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.decoding import sampling, steps
from bonsai_jax.measure import bench
from bonsai_jax.network import cache as kv
from bonsai_jax.weights import memory
from tests.bonsai_jax.command_line import ROOT

KEYS = [
    *("date", "commit", "device", "driver", "jax", "impl", "model", "test"),
    *("tok_s", "tok_s_std", "gb_s", "ceiling_share", "data_parallel", "tensor_parallel", "tokens_per_step"),
]


@pytest.fixture(scope="module")
def model():
    return bj.load("synth:tiny-llama:q8_0", bj.RunConfig(context=256, batch_size=1, activation_bits=16))


@pytest.fixture(scope="module")
def rows(model):
    return list(bench.measure(model, [16, 0], [4], [0, 20], repetitions=2, sampled=[4]))


def test_row_keys_and_figures(rows):
    assert [row.test for row in rows] == ["pp16", "tg4", "gen4", "pp16@d20", "tg4@d20", "gen4@d20"]
    for row in rows:
        record = json.loads(bench.json_line(row))
        assert list(record) == KEYS
        assert record["model"] == "synth:tiny-llama:q8_0" and record["impl"] == "cpu:16"
        assert record["tok_s"] > 0 and record["gb_s"] > 0 and record["tok_s_std"] >= 0
        assert (record["ceiling_share"] is None) == row.test.startswith("pp")


def test_golden_markdown():
    row = bench.Row(
        *(
            "2026-01-01T00:00:00+00:00",
            "abc1234",
            "NVIDIA H200",
            "580.1",
            "0.11.2",
            "reference",
            "bonsai-8b",
            "tg128@d64",
        ),
        *(123.456, 1.5, 131.4, 0.0306),
    )
    assert bench.markdown_header() == (
        "| model | size | params | device | impl | test | t/s | GB/s | ceiling |\n"
        "| --- | --- | --- | --- | --- | --- | ---: | ---: | ---: |"
    )
    assert bench.markdown(row, 1_152_704_128, 8_188_548_096) == (
        "| bonsai-8b | 1.07 GiB | 8.19 B | NVIDIA H200 | reference | tg128@d64 | 123.46 ± 1.50 | 131.4 | 3% |"
    )
    assert "| - |" in bench.markdown(dataclasses.replace(row, ceiling_share=None), 1, 1)
    assert " | tg128@d64, 2.50 a step | " in bench.markdown(
        dataclasses.replace(row, tokens_per_step=2.5), 1, 1
    )


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_rows_name_the_commit_of_the_checkout():
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    assert bench.commit().removesuffix("-dirty") == head.stdout.strip()


def test_csv_has_the_same_columns(rows):
    (record,) = csv.DictReader(io.StringIO(bench.csv_header() + "\n" + bench.csv_line(rows[0])))
    assert list(record) == KEYS and record["test"] == "pp16"


def test_what_is_timed_is_the_models_forward(model):
    """pp gives the last token's logits; tg reads the same tokens one by one, and uses all their logits."""
    config = model.config
    ids = np.random.default_rng(0).integers(0, config.vocab_size, 24).astype(np.int32)
    expected = bj.logits(model, ids)
    fresh = kv.empty(config, model.run, 1, 64)
    _, cache = bench.last_logits(model.params, fresh, jnp.asarray(ids[None, :12]), config)
    got, cache = bench.last_logits(model.params, cache, jnp.asarray(ids[None, 12:]), config)
    np.testing.assert_allclose(got[0], expected[-1], atol=2e-4)
    assert cache.lengths[0] == 24

    total, cache = bench.read_one_by_one(
        model.params, kv.empty(config, model.run, 1, 64), jnp.asarray(ids[None]), 20, config
    )
    assert cache.lengths[0] == 20
    assert float(total[0]) == pytest.approx(expected[:20].max(-1).sum(), rel=1e-4)


def test_repetitions_start_from_the_same_depth(model):
    test = bench.Test(model, "tg", 4, depth=20)
    test.run()
    first = np.asarray(test.cache.states["attention"][0].k)
    test.run()
    assert test.cache.lengths[0] == 24
    np.testing.assert_array_equal(test.cache.states["attention"][0].k, first)


@pytest.mark.parametrize(
    ("on_mesh", "flags", "options"),
    [
        (False, "", bench.ONE_GRAPH),
        (True, "", None),
        (False, f"--xla_gpu_autotune_level=0 {bench.ONE_BY_ONE}", None),  # steps.py --kernels
    ],
)
def test_loops_are_in_one_graph_as_an_engine_s_are(monkeypatch, on_mesh, flags, options):
    asked = []
    monkeypatch.setattr(bench.jitted, "donating", lambda *a, **k: asked.append(k["compiler_options"]))
    monkeypatch.setenv("XLA_FLAGS", flags)
    bench.as_dispatched.__wrapped__(bench.read_one_by_one, "cache", on_mesh)
    assert asked == [options]


def test_gen_is_what_generate_runs(model, monkeypatch):
    """With the default sampling: `generate_tokens` draws the same tokens behind a prompt whose first new
    token is the one that the test begins with."""
    drawn, dispatched = [], bench.as_dispatched
    decode = dispatched(steps.decode, "state", on_mesh=False)
    noted = lambda *a, **k: drawn.append(decode(*a, **k)) or drawn[-1]  # noqa: E731
    watched = lambda f, *rest: noted if f is steps.decode else dispatched(f, *rest)  # noqa: E731
    monkeypatch.setattr(bench, "as_dispatched", watched)
    test = bench.Test(model, "gen", 6, depth=20)
    for _ in range(2):
        test.run()
        assert test.state.cache.lengths[0] == 26 and test.state.remaining[0] == 0
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, 26)).astype(np.int32)
    state = bj.new_state(model, 1, 64, bj.SamplingParams(seed=0), 7, ignore_eos=True)
    state = bj.jitted.prefill(model.params, state, ids[:, :20], np.array([20], np.int32), model.config).state
    state = state.replace(
        tokens=jnp.asarray(ids[:, 20]),
        sampler=sampling.sampler(bj.SamplingParams(seed=0), 1, model.config.vocab_size),
    )
    want = decode(model.params, state, model.config, limit=6, size=6).tokens
    np.testing.assert_array_equal(drawn[-1].tokens, want)


def test_a_row_that_ends_early_has_no_speed(model):
    """Logits that are not finite end a row at once, which would look like a thousandfold speed."""
    broken = dataclasses.replace(
        model, params=model.params.replace(final_norm=model.params.final_norm * np.nan)
    )
    with pytest.raises(RuntimeError, match="gen4: a row drew 0 of 4 tokens"):
        bench.Test(broken, "gen", 4).run()


def test_gen_with_speculation_proposes_from_its_prompt_and_counts_steps(model):
    test = bench.Test(model, "gen", 12, depth=20, speculate="ngram")
    assert test.name == "gen12+ngram@d20"
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, 32))
    for _ in range(2):
        test.run()
        assert test.state.speculation.ids[0, :21].tolist() == ids[0, :21].tolist()
        assert test.state.cache.lengths[0] == 32 and 2 <= test.state.speculation.steps[0] <= 12
    row = test.row([100.0])
    assert row.tokens_per_step == 12 / int(test.state.speculation.steps[0])
    assert row.gb_s == pytest.approx(test.bytes_moved() * 100 / row.tokens_per_step / 1e9)


def test_bytes_per_step_count_the_cache(model):
    shallow, deep = (bench.Test(model, "tg", 4, depth).bytes_moved() for depth in (0, 40))
    assert deep - shallow == 40 * memory.bytes_per_token(model.config, model.run)


def test_a_batch_counts_the_tokens_of_all_its_rows(model, monkeypatch):
    monkeypatch.setattr(bench, "BATCH_TOKENS", 4)
    (row,) = bench.measure(model, (0,), (0,), (0,), 2, batches=(3,))
    assert row.test == "batch3" and row.ceiling_share is not None
    test = bench.Test(model, "tg", 4, depth=4, rows=3)
    test.run()
    np.testing.assert_array_equal(test.cache.lengths, [8, 8, 8])
    assert not np.array_equal(test.ids[0], test.ids[1])
    alone = bench.Test(model, "tg", 4, depth=4)
    cache_bytes = 6 * memory.bytes_per_token(model.config, model.run)
    assert test.bytes_moved() - alone.bytes_moved() == 2 * cache_bytes
