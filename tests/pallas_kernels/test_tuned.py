"""Tuned tile sizes: who is asked first, what a broken file says, how a winner is found; and that sizes change
no result."""

import dataclasses
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import bonsai_jax as bj
from bonsai_jax.cli import app, options
from bonsai_jax.measure import profile, tune
from pallas_kernels import QTensor, dequantize, device, formats, tuned
from pallas_kernels.matmul.bit_mma import decode_b1 as bit_decode_b1
from pallas_kernels.matmul.bit_mma import decode_s8 as bit_decode_s8
from pallas_kernels.matmul.int_mma import decode as int_decode
from pallas_kernels.matmul.int_mma import decode_plan as int_decode_plan
from pallas_kernels.qtensor import tile
from tests.pallas_kernels.lockstep import lockstep

GPU = "NVIDIA Made Up 9000"
PROBLEM = tuned.Problem("int_decode", (("q4_k", 5120), ("q6_k", 1024)), 4096, 1, 8, 8)


class Planned(NamedTuple):
    warps: int
    depth: int
    blocks: int = 132


ANY = lambda warps=6, depth=99, blocks=132: Planned(warps, depth, blocks)  # noqa: E731


@pytest.fixture
def files(monkeypatch, tmp_path):
    """A GPU that nobody has, with a file in the package and one of the user's: (write the one, write the
    other)."""
    package = tmp_path / "package.json"
    monkeypatch.setattr(device, "gpu_name", lambda: GPU)
    monkeypatch.setattr(tuned, "package_file", lambda gpu: package)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    user = tuned.user_file(GPU)
    user.parent.mkdir(parents=True)
    tuned._entries.cache_clear()

    def writer(path):
        def write(settings=None, *, text=None, **content):
            entries = {str(PROBLEM): {"settings": settings, "us": 1.0}}
            path.write_text(text or json.dumps({"device": GPU, "entries": entries} | content))
            tuned._entries.cache_clear()

        return write

    yield writer(package), writer(user)
    tuned._entries.cache_clear()


def test_a_problem_has_one_name():
    assert str(PROBLEM) == "int_decode: q4_k 5120 + q6_k 1024 x 4096, 8 rows, 8 bits"
    gated = tuned.Problem("bit_decode_b1", (("q1_0", 12288),), 4096, 2, 1, 16)
    assert str(gated) == "bit_decode_b1: 2 of q1_0 12288 x 4096, 1 row, 16 bits"
    assert [tuned.named(str(problem)) for problem in (PROBLEM, gated)] == [PROBLEM, gated]
    assert tuned.named("int_decode: q4_k x 4096, 1 row, 8 bits") is None


def test_the_users_file_comes_before_the_packages(files):
    package, user = files
    assert tuned.settings(PROBLEM, ANY) == {}
    package({"warps": 8})
    assert tuned.settings(PROBLEM, ANY) == {"warps": 8}
    user({"warps": 12, "depth": 3})
    assert tuned.settings(PROBLEM, ANY) == {"warps": 12, "depth": 3}
    user({})
    assert tuned.settings(PROBLEM, ANY) == {}
    user(entries={})
    assert tuned.settings(PROBLEM, ANY) == {"warps": 8}


def test_inspect_shows_what_was_tuned_for_a_models_products(files):
    _, user = files
    mine = tuned.Problem("int_decode", (("q4_k", 512), ("q6_k", 256)), 256, 1, 8, 8)
    other = dataclasses.replace(mine, rows=2)
    entries = {str(problem): {"settings": {"warps": 8}} for problem in (PROBLEM, mine)}
    entries[str(other)] = {"settings": {"warps": 9}}
    user(entries=entries | {"a problem of another version": {"settings": {}}})
    done = CliRunner().invoke(app, ["inspect", "synth:tiny-qwen3:q4_k_m"])
    assert done.exit_code == 0, done.output
    assert f"tuned {mine}\n  -> warps 8: {tuned.user_file(GPU)}" in done.output
    assert (
        f"tuned {other}\n  -> not used: warps of 9 is none of 4, 8, 12, 16: {tuned.user_file(GPU)}"
        in done.output
    )
    assert done.output.count("tuned int_decode") == 2


def test_where_there_is_no_gpu_no_file_is_read(files, monkeypatch):
    _, user = files
    user(text="broken")
    monkeypatch.setattr(device, "gpu_name", lambda: None)
    assert tuned.settings(PROBLEM, ANY) == {}


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ({"text": "{"}, "no readable JSON"),
        ({"text": "[]"}, "has no object"),
        ({"entries": [1]}, "has no object"),
        ({"device": "another GPU"}, "is of 'another GPU', but this is 'NVIDIA Made Up 9000'"),
        ({"settings": {"warps": "8"}}, "whole numbers"),
        ({"settings": {"warps": True}}, "whole numbers"),
        ({"entries": {str(PROBLEM): {"warps": 8}}}, "whole numbers"),
    ],
)
def test_a_broken_file_is_one_error_with_its_path_and_the_remedy(files, written, says):
    files[1](**written)
    with pytest.raises(ValueError, match=says) as error:
        tuned.settings(PROBLEM, ANY)
    assert str(tuned.user_file(GPU)) in str(error.value) and "bench --tune" in str(error.value)
    with pytest.raises(ValueError, match=says):
        tuned.write(tuned.user_file(GPU), GPU, {})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"warps": 8, "lanes": 3}, "int_decode has no 'lanes' to tune; it has warps, blocks, depth"),
        ({"warps": 7}, "warps of 7 is none of 4, 8, 12, 16"),
        ({"depth": 24}, None),  # no room: that is known when a product is
    ],
)
def test_settings_of_another_version_or_without_room_are_not_used(files, settings, says):
    files[0](settings)
    plan = lambda depth=1, **_: None if depth > 20 else depth  # noqa: E731
    assert tuned.settings(PROBLEM, plan) == {}
    assert tuned.refused("int_decode", settings) == says
    assert tuned.refused("int_decode", {"warps": 8, "depth": 3}) is None
    assert tuned.refused("a_kernel_to_come", {"warps": 8}) is not None


def test_writing_keeps_what_a_file_has(files):
    files[1]({"warps": 8})
    path = tuned.user_file(GPU)
    tuned.write(path, GPU, {"another": {"settings": {}, "us": 2.0}})
    assert tuned.read(path, GPU) == {str(PROBLEM): {"warps": 8}, "another": {}}
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert path.name == "nvidia-made-up-9000.json"


def test_the_packages_files_name_sizes_that_kernels_have():
    for path in tuned.package_file("").parent.glob("*.json"):
        gpu = json.loads(path.read_text())["device"]
        assert tuned.package_file(gpu) == path
        for name, settings in tuned.read(path, gpu).items():
            problem = tuned.named(name)
            assert problem is not None and str(problem) == name
            assert tuned.refused(problem.kernel, settings) is None


def test_a_trial_answers_first_and_notes_who_asks(files):
    files[0]({"warps": 8})
    other = tuned.Problem("bit_decode_b1", (("q1_0", 16),), 256, 1, 1, 8)
    with tuned.trial({PROBLEM: {"depth": 4}}) as asked:
        assert tuned.settings(PROBLEM, ANY) == {"depth": 4}
        assert tuned.settings(other, ANY) == {}
    assert {problem: of_it.settings for problem, of_it in asked.items()} == {PROBLEM: {"depth": 4}, other: {}}
    assert tuned.settings(PROBLEM, ANY) == {"warps": 8}


def timer(seconds, calls):
    """A Measure that knows how long settings take."""

    def measure(candidates):
        calls.append(list(candidates))
        return [seconds(settings) for settings in candidates]

    return measure


def searched(seconds, old=None, plan=ANY):
    calls = []
    asked = tuned.Asked(plan, old or {})
    return tune.search("qkv", PROBLEM, asked, timer(seconds, calls), launches=2), calls


def test_the_search_takes_the_fastest_of_each_stage():
    def seconds(s):
        t = 10 - (s.get("warps") == 12) - 2 * (s == {"warps": 12, "depth": 4})
        return [t, t, t]

    result, calls = searched(seconds)
    assert result.wins and result.best == {"warps": 12, "depth": 4} and result.old == {}
    assert (result.old_us, result.best_us) == (5e6, 3.5e6)
    assert all(s["warps"] == 12 for s in calls[1])  # depths of the best of the first stage
    assert calls[-1] == [{}, {"warps": 12, "depth": 4}]  # timed again, beside what was in use
    assert result.entry["settings"] == result.best and "| +30.0% | yes |" in tune.markdown(result)


def test_the_kernels_own_plan_can_win_back():
    result, _ = searched(lambda s: [1.0 if s == {} else 2.0] * 3, old={"warps": 8})
    assert result.wins and result.old == {"warps": 8} and result.best == {}


def test_what_wins_by_less_than_the_spread_does_not_win():
    result, _ = searched(lambda s: [10.0, 10.1, 9.9] if not s else [9.85, 9.9, 9.8])
    assert not result.wins and result.best_us < result.old_us and "| +1.5% | no |" in tune.markdown(result)
    assert not tune.wins([10.0, 10.1, 10.2], [9.7, 9.9, 10.1])
    assert tune.wins([10.0, 10.0, 10.0, 10.0, 50.0], [9.0, 9.0, 9.0, 9.0, 40.0])  # an interruption
    assert not tune.wins([10.0] * 5, [9.85] * 5)


def test_plans_that_are_the_same_are_timed_once_and_those_that_do_not_fit_never():
    plan = lambda warps=8, depth=9, **_: None if depth == 2 else Planned(warps, min(depth, 6))  # noqa: E731
    result, calls = searched(lambda s: [1.0] * 3, plan=plan)
    tried = [plan(**s) for call in calls[:-1] for s in call[1:]]
    assert len(tried) == len(set(tried)) == result.candidates and None not in tried and (8, 6) not in tried


def test_what_fails_is_counted_and_not_taken():
    result, _ = searched(lambda s: None if s.get("warps") == 16 else [1.0] * 3)
    assert not result.wins and result.failed == 1 and "(1 failed)" in tune.markdown(result)
    nothing, _ = searched(lambda s: None if s else [1.0] * 3)
    assert (
        nothing.best == nothing.old == {}
        and not nothing.wins
        and "| none | - | - | no |" in tune.markdown(nothing)
    )


def test_cpus_have_nothing_to_tune():
    model = bj.load("synth:tiny-qwen3:q4_k_m", bj.RunConfig(context=64))
    with pytest.raises(NotImplementedError, match="nothing to tune on cpu"):
        next(tune.tune(model))


def test_candidates_are_compiled_checked_and_timed(monkeypatch):
    """A product whose settings do what settings of a kernel must not: they are found out."""
    model = bj.load("synth:tiny-qwen3:q4_k_m", bj.RunConfig(context=64))
    plan = lambda warps=4, depth=0, blocks=0: None if depth or blocks else Planned(warps, depth)  # noqa: E731

    def product(params, state, layer, config):
        settings = tuned.settings(PROBLEM, plan)
        y = profile._qkv(params, state, layer, config)
        if settings.get("warps") == 16:
            raise ValueError("so many do not compile")
        return y * (1.001 if settings.get("warps") == 12 else 1.0)

    monkeypatch.setattr(profile, "PRODUCTS", {"qkv": product})
    monkeypatch.setattr(tune, "CHAIN_LAUNCHES", (2, 2))
    results = list(tune.tune(model, rows=(1, 2), repetitions=3))
    assert [result.problem for result in results] == [PROBLEM]  # asked for again by two rows: tuned once
    assert results[0].candidates == 3 and results[0].failed == 2
    assert results[0].best in ({}, {"warps": 8})


@pytest.mark.parametrize("wins", [True, False])
def test_the_command_writes_what_wins(files, monkeypatch, wins):
    other = dataclasses.replace(PROBLEM, rows=1)
    found = [
        tune.Result("qkv", PROBLEM, {}, {"depth": 4}, wins, 10.0, 8.0, 5, 0),
        tune.Result("qkv", other, {}, {"depth": 3}, False, 10.0, 9.9, 5, 0),
    ]
    monkeypatch.setattr(tune, "tune", lambda model, rows, repetitions: iter(found))
    monkeypatch.setattr(options, "compile_cache_off", lambda *_: None)
    done = CliRunner().invoke(app, ["bench", "-m", "synth:tiny-qwen3:q4_k_m", "--tune", "-b", "1,8"])
    assert done.exit_code == 0, done.output
    path = tuned.user_file(GPU)
    assert done.stdout.splitlines()[-1].startswith("1 written" if wins else "nothing wins")
    assert str(path) in done.stdout and done.stdout.count("| qkv |") == 2
    assert tuned.read(path, GPU) == ({str(PROBLEM): {"depth": 4}} if wins else {})
    assert tuned.settings(PROBLEM, ANY) == ({"depth": 4} if wins else {})


def product_of(format, N, K, rows, seed=0):
    """(x, QTensor tiled, what the product is in float64) with activations that 8 bits hold exactly."""
    group = formats.get(format).LANES.activation_group if format != "q1_0" else 128
    fields = formats.random_fields(
        format, jax.random.key(seed), (N, K // formats.get(format).WEIGHTS), 0.0, 0.05
    )
    w = QTensor(fields, format, (N, K))
    rng = np.random.default_rng(seed)
    x = rng.integers(-127, 128, (rows, K // group, group))
    x[..., 5] = 127
    x = (x / 1024.0).reshape(rows, K).astype(np.float32)
    return jnp.asarray(x), tile(w), x.astype(np.float64) @ np.asarray(dequantize(w), np.float64).T


@pytest.mark.parametrize(
    "settings",
    [{"warps": 12}, {"warps": 4, "depth": 2, "blocks": 8}, {"depth": 5, "blocks": 8}, {"blocks": 2}],
)
def test_int_gemv_computes_the_same_with_other_sizes(settings):
    x, w, want = product_of("q4_k", 160, 4096, 3)
    problem = tuned.Problem("int_decode", (("q4_k", 160),), 4096, 1, 3, 8)
    with tuned.trial({problem: settings}) as asked, lockstep(at_a_time=8):
        got = int_decode.run(x, (w,), None, None, None, 0.0, None)
    assert asked[problem].plan(**settings) != asked[problem].plan()
    assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize("settings", [{"warps": 4, "tiles": 3}, {"warps": 16, "tiles": 1}])
def test_bit_gemv_computes_the_same_with_other_sizes(settings):
    x, w, want = product_of("q1_0", 160, 1024, 3)
    problem = tuned.Problem("bit_decode_b1", (("q1_0", 160),), 1024, 1, 3, 8)
    with tuned.trial({problem: settings}) as asked, lockstep(at_a_time=8):
        got = bit_decode_b1.run(x, (w,), None, None, None, 0.0, None)
    assert asked[problem].plan(**settings) == tuple(settings.values()) != asked[problem].plan()
    assert np.linalg.norm(got - want) < 1e-6 * np.linalg.norm(want)


@pytest.mark.parametrize("settings", [{"warps": 4, "tiles": 2, "together": 1}, {"warps": 16}])
def test_bit_rows_computes_the_same_with_other_sizes(settings):
    x, w, want = product_of("q1_0", 160, 1024, 5)
    problem = tuned.Problem("bit_decode_s8", (("q1_0", 160),), 1024, 1, 5, 8)
    with tuned.trial({problem: settings}) as asked, lockstep(at_a_time=8):
        got = bit_decode_s8.run(x, (w,), None, None, None, 0.0, None)
    assert asked[problem].plan(**settings) != asked[problem].plan()
    assert np.linalg.norm(got - want) < 1e-6 * np.linalg.norm(want)


def test_sizes_that_do_not_fit_have_no_plan():
    assert bit_decode_b1.plan(256, 16, 1, 8, 16) == (8, 16)
    assert bit_decode_b1.plan(256, 16, 2, 8, 16) is None  # 64 loads of a lane
    assert bit_decode_b1.plan(4, 16, 1, 8, 5) is None  # more than there are
    words = {"words": jax.ShapeDtypeStruct((1, 256, 48, 4, 32, 4), jnp.int32)}
    fields = words | {"scales": jax.ShapeDtypeStruct((1, 256, 48, 32, 2), jnp.int32)}
    at_8_rows = {"formats_of": ("q4_k",), "activation_bits": 8, "shared": 220 * 1024}
    assert int_decode_plan.plan(((fields,),), 8, **at_8_rows, warps=8) is not None
    assert int_decode_plan.plan(((fields,),), 16, **at_8_rows, warps=16) is None
