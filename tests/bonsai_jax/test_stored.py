"""engine/stored.py: programs in files, which the next process runs."""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
import types

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import bonsai_jax as bj
from bonsai_jax.engine import programs, stand_in, stored
from pallas_kernels import selection
from pallas_kernels.problems import Matmul

ROOT = pathlib.Path(__file__).parents[2]
HOW = {"max_new_tokens": 6, "sampling": bj.SamplingParams(seed=3), "ignore_eos": True}

SCRIPT = """
import json, sys, jax
traced, loaded, compiled = [], [], []
lists = {"/jax/core/compile/jaxpr_trace_duration": traced}
lists |= {"/jax/core/compile/backend_compile_duration": compiled, "/bonsai_jax/load_program_duration": loaded}
listen = lambda event, s, fun_name="", **_: lists.get(event, []).append(fun_name)
jax.monitoring.register_event_duration_secs_listener(listen)
import bonsai_jax as bj
from bonsai_jax import compile_cache
if sys.argv[1] == "use":
    compile_cache.use_programs()
model = bj.load("synth:tiny-llama:q8_0", bj.RunConfig(context=256, page_size=16))
how = {"max_new_tokens": 6, "sampling": bj.SamplingParams(seed=3), "ignore_eos": True}
(output,) = bj.generate(model, [[5, 7, 9, 11]], **how)
print(json.dumps([output.tokens, traced, compiled, len(loaded)]))
"""


@functools.cache
def tiny() -> bj.Model:
    return bj.load("synth:tiny-llama:q8_0", bj.RunConfig(context=256, page_size=16))


def answer() -> list[int]:
    return bj.generate(tiny(), [[5, 7, 9, 11]], **HOW)[0].tokens


@pytest.fixture
def events():
    """Names of what happens in this process."""
    seen = []
    listen = lambda event, seconds, **_: seen.append(event)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of programs, and a process that has none."""
    monkeypatch.setattr(stored, "programs_folder", lambda: tmp_path / "programs")
    monkeypatch.setattr(programs, "compiled", {})
    # XLA must not read a program from jax's cache, where another test's process has stored it.
    monkeypatch.setitem(os.environ, "XLA_OF_THIS_TEST", str(tmp_path))
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield tmp_path / "programs"
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def test_a_second_process_neither_traces_nor_compiles_programs(tmp_path):
    runs = []
    for how in ("do not", "use", "use"):
        folder = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / how), "PYTHONPATH": str(ROOT)}
        environment = {**os.environ, **folder}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, how], env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout))
    unused, (first, traced, compiled, loaded), (second, *again) = runs
    assert {"prefill", "decode"} <= {*unused[1]} and unused[3] == 0
    assert unused[0] == first == second and len(first) == 6
    assert {"prefill", "decode"} <= {*traced} and loaded == 0
    assert {"jit(prefill)", "jit(decode)"} <= {*compiled}
    assert not {"prefill", "decode"} & {*again[0]} and again[2] == 2
    assert not {"jit(prefill)", "jit(decode)"} & {*again[1]}
    assert {*runs[1][1]} > {*runs[2][1]}


def test_a_file_that_is_not_whole_or_not_the_users_own_is_made_again(folder, events, monkeypatch):
    want = answer()
    files = sorted(folder.iterdir())
    assert len(files) == 2 and stored.LOADED not in events
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files) and folder.stat().st_mode & 0o077 == 0

    def again() -> tuple[int, int]:
        """Programs loaded and compiled by another start."""
        jax.clear_caches()  # of executables, which XLA cannot write once they have run
        programs.compiled.clear(), events.clear()
        assert answer() == want
        return events.count(stored.LOADED), len(list(folder.iterdir()))

    assert again() == (2, 2)
    whole = [path.read_bytes() for path in files]
    files[0].write_bytes(whole[0][:-1])
    files[1].write_bytes(whole[0])  # another program's
    assert again() == (0, 2) and again() == (2, 2)
    files[0].chmod(0o666)
    assert stored._read(files[0]) is None
    files[0].chmod(0o600)
    assert stored._read(files[0]) is not None
    elsewhere = folder.parent / "elsewhere"
    files[0].rename(elsewhere)
    files[0].symlink_to(elsewhere)
    assert stored._read(files[0]) is None
    owner = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    assert stored._read(files[1]) is None


def test_a_program_that_xla_cannot_load_is_named_and_made_again(folder, monkeypatch, capsys):
    want = answer()

    def refuse(*_, **__):
        raise RuntimeError("another driver")

    programs.compiled.clear()
    monkeypatch.setattr(stored.serialize_executable, "deserialize_and_load", refuse)
    assert answer() == want
    lines = capsys.readouterr().err.splitlines()
    lines = [line for line in lines if "compiling" not in line]
    assert len(lines) == 2
    assert all("cannot be loaded and is made again: another driver" in line for line in lines)
    assert all(str(folder) in line for line in lines)


def test_what_a_program_depends_on_is_in_its_key(monkeypatch):
    stores = pytest.MonkeyPatch()
    stores.setattr(stored, "programs_folder", lambda: None)  # as in a process that does not store programs
    assert stored.key("a program") is None
    stores.setattr(stored, "programs_folder", lambda: ROOT)
    key = lambda: stored.key("a program")  # noqa: E731
    plain = key()
    assert plain is not None and key() == plain != stored.key("another")
    assert stored.key(lambda: 0) is None  # its repr is an address
    with jax.default_matmul_precision("highest"):
        assert key() not in (plain, None)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_parallel_codegen_split_count=2")
    assert key() not in (plain, None)
    monkeypatch.undo()
    monkeypatch.setattr(stored, "versions", lambda: ("another jax",))
    assert key() not in (plain, None)
    monkeypatch.undo()
    own = dataclasses.replace(selection.get(Matmul, "reference"), name="a user's")
    selection.register(own)
    assert key() is None
    selection.unregister(own)
    assert key() == plain
    kind = types.ModuleType("bonsai_jax.network.kinds.a_users")
    kind.__file__ = "/elsewhere/a_users.py"
    monkeypatch.setitem(sys.modules, kind.__name__, kind)
    assert key() is None
    stores.undo()


def test_the_files_used_last_are_kept(folder, monkeypatch):
    folder.mkdir()
    for age in range(4):
        (folder / str(age)).write_bytes(bytes(10))
        os.utime(folder / str(age), (1000 - age, 1000 - age))
    monkeypatch.setattr(stored, "MOST_BYTES", 25)
    stored._shrink(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1"]


def test_a_program_compiled_under_another_precision_is_another(folder):
    """The threads that compile have no contexts of the caller's: it compiles itself."""
    answer()
    before = len(programs.compiled)
    with jax.default_matmul_precision("highest"):
        answer()
    settings = [dict(key[2])["jax_default_matmul_precision"] for key in programs.compiled]
    assert len(programs.compiled) == 2 * before and settings.count("highest") == before


def test_programs_over_a_mesh_are_stored(folder):
    """One device as a mesh: its programs have shardings by name."""
    model = bj.load("synth:tiny-llama:q8_0", bj.RunConfig(context=256, page_size=16), mesh=bj.make_mesh(1, 1))
    first = bj.generate(model, [[5, 7, 9, 11]], **HOW)[0].tokens
    assert len(list(folder.iterdir())) == 2
    programs.compiled.clear()
    np.testing.assert_array_equal(bj.generate(model, [[5, 7, 9, 11]], **HOW)[0].tokens, first)


@pytest.fixture
def compiled():
    """Names of functions that are compiled meanwhile."""
    names = []
    listen = lambda event, seconds, fun_name="", **_: names.append(  # noqa: E731
        fun_name if "backend_compile" in event else ""
    )
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def test_compile_ahead_makes_the_programs_that_generate_asks_for_once(compiled, monkeypatch):
    """Also from the shapes of a model whose weights are not read, and while generate already waits. The
    prefill stands in for a smaller one."""
    monkeypatch.setattr(stand_in, "MOST_S", 0.5)
    model = bj.load("synth:tiny-qwen3:q4_0", bj.RunConfig(context=128, page_size=16))
    shapes = model.shapes()
    assert model.loaded and not shapes.loaded
    bj.compile_ahead(shapes, [[5, 7, 9, 11]] * 3, max_new_tokens=6)
    outputs = bj.generate(model, [[5, 7, 9, 11]] * 3, max_new_tokens=6, sampling=bj.SamplingParams(0.0))
    assert compiled.count("jit(prefill)") == compiled.count("jit(decode)") == 1
    assert len({tuple(output.tokens) for output in outputs}) == 1


def test_compile_ahead_makes_the_programs_of_an_engine_once(compiled):
    model = bj.load("synth:tiny-qwen3:q4_0", bj.RunConfig(context=112, page_size=16))
    options = {"max_batch_size": 1, "prefill_tokens": 64, "context": 100}
    bj.Engine.compile_ahead(model.shapes(), **options)
    with bj.Engine(model, **options) as engine:
        engine.warmup()
        answer = engine.submit([5, 7, 9, 11], bj.SamplingParams(0.0), max_new_tokens=6).result()
    assert len(answer.tokens) == 6
    assert compiled.count("jit(decode)") == 1 and compiled.count("jit(prefill)") == 2
    with pytest.raises(ValueError, match="Engine: max_batch_size is 0"):
        bj.Engine.compile_ahead(model, max_batch_size=0)
    with pytest.raises(TypeError, match="max_rows"):
        bj.Engine.compile_ahead(model, max_rows=1)


def test_programs_are_traced_in_the_order_in_which_they_are_begun(monkeypatch):
    """Though the first one's thread is late."""
    model = bj.load("synth:tiny-qwen3:q4_0", bj.RunConfig(context=96, page_size=16))
    key, delays, traced = stored.key, iter([0.3]), []
    monkeypatch.setattr(stored, "key", lambda *parts: time.sleep(next(delays, 0)) or key(*parts))
    listen = lambda event, s, fun_name="", **_: traced.append(fun_name * ("jaxpr_trace" in event))  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        bj.compile_ahead(model, [[5, 7, 9, 11]], max_new_tokens=6)
        bj.generate(model, [[5, 7, 9, 11]], max_new_tokens=6)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert [name for name in traced if name in ("prefill", "decode")] == ["prefill", "decode"]


def test_a_turn_that_never_ends_holds_nobody_up(monkeypatch):
    """As where one process makes the same programs in two loops, and each waits for the other's."""
    model = bj.load("synth:tiny-qwen3:q4_0", bj.RunConfig(context=80, page_size=16))
    monkeypatch.setattr(programs, "TURN_S", 0.1)
    monkeypatch.setattr(programs, "_last_turn", threading.Event())
    began = time.perf_counter()
    bj.compile_ahead(model, [[5, 7, 9, 11]], max_new_tokens=6)
    assert len(bj.generate(model, [[5, 7, 9, 11]], max_new_tokens=6, ignore_eos=True)[0].tokens) == 6
    assert time.perf_counter() - began < 60


def test_compile_ahead_refuses_what_generate_refuses():
    with pytest.raises(ValueError, match="exceed the context of 256"):
        bj.compile_ahead(tiny(), "Hello", max_new_tokens=1000)
    with pytest.raises(TypeError, match="model"):
        bj.compile_ahead("demo")
    with pytest.raises(TypeError, match="on_shapes"):
        bj.load("synth:tiny-llama:q8_0", on_shapes=3)


LAPACK = """
import jax, jax.numpy as jnp, numpy as np
from bonsai_jax import compile_cache
from bonsai_jax.engine import stored
compile_cache.use_programs()
solve = jax.jit(lambda a, b: jax.scipy.linalg.solve_triangular(a, b, lower=True))
a, b = jnp.asarray(np.tril(np.ones((8, 8), "f4"))), jnp.arange(8, dtype=jnp.float32)
key = stored.key("solve") or exit("programs are not stored here")
program = stored.load(key, (a, b), jax.devices()[:1])
print("compiled" if program is None else "loaded", flush=True)
program = program or stored.compile(key, solve.lower(a, b), {})
print(np.asarray(program(a, b)).tolist())
"""


def test_a_program_that_calls_lapack_runs_in_the_next_process(tmp_path):
    """jax finds LAPACK's functions when it lowers a program, which the next process does not: programs of
    hybrid models on a CPU ended it by a segmentation fault."""
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    for expected in ("compiled", "loaded"):
        command = [sys.executable, "-c", LAPACK]
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=120)
        assert done.returncode == 0, done.stderr
        how, numbers = done.stdout.splitlines()
        assert how == expected
        assert json.loads(numbers) == [0.0] + [1.0] * 7
