"""Machines with a GPU may lack the oracles' packages: `pytest -m gpu` must not even import the other
tests. Nor need others import those."""

import gc
import itertools
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

ON_GPUS = ("gpu", "multigpu")
XLA_FLAGS = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
XLA_FLAGS += " --xla_cpu_parallel_codegen_split_count=1"
FIRST = (
    *("test_parallel.py", "test_oracle.py"),
    # What forgets compiled programs (`optimized`, jax.clear_caches), before others have many.
    *("test_formats.py", "test_ops.py", "test_rope.py", "test_cache_layouts.py", "test_shared_memory.py"),
    *("test_engine.py", "test_oracle_lengths.py"),
    *("test_docs.py", "test_recipes.py", "test_decoding.py", "test_qwen35.py", "test_text.py"),
    *(
        "test_cli.py",
        "test_cpu.py",
        "test_server_limits.py",
        "test_server.py",
        "test_cli_figures.py",
        "test_params.py",
        "test_speculation.py",
    ),
    *("test_notebooks.py", "test_benchmarks.py"),
)


def pytest_configure(config):
    """Compiling is most of the tests' time. So xdist's workers and the processes that tests start share what
    they compiled, and XLA leaves out its optimizations, except for tests that ask for them (`optimized`).
    XLA's older emitters of fusions compile in half the newer ones' time, and a program in one part in a tenth
    less than in parts; these are a process's settings. What the environment says of any of these is left
    as it is (test_as_users_have_it.py); a folder for programs keeps them for the next run."""
    if sys.dont_write_bytecode:  # as in many containers, where every process would compile jax's sources anew
        folder = config.rootpath / ".pytest_cache" / "bytecode"
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(folder)
        sys.dont_write_bytecode = False
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background; processes inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.markexpr in ON_GPUS:
        _share_gpus(alone=config.option.markexpr == "gpu")
    if config.option.markexpr.startswith((*ON_GPUS, "aot")):
        return
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # a worker's or a nested pytest's is there already
        folder = tempfile.TemporaryDirectory(prefix="compiled-")
        config.add_cleanup(folder.cleanup)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    os.environ.setdefault("XLA_FLAGS", XLA_FLAGS)


def _share_gpus(alone: bool):
    """xdist's workers take memory as they need it, and, where each of them needs one GPU alone, those that
    CUDA_VISIBLE_DEVICES names in turn."""
    worker, gpus = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if worker is None:
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if gpus and alone:
        some = gpus.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = some[int(worker.removeprefix("gw")) % len(some)]


# Memory maps of a process, of the 65,530 that Linux allows. Every program that XLA
# compiles for a CPU has some, and where there are no more, its compiler crashes. Counting them takes some
# milliseconds.
MOST_MAPS, TESTS_BETWEEN = 30_000, 20
_tests = itertools.count(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """Forget compiled programs between tests where they are too many."""
    yield
    if next(_tests) % TESTS_BETWEEN == 0 or nextitem is None or nextitem.path != item.path:
        _forget_programs()


def _forget_programs() -> None:
    maps = Path("/proc/self/maps")
    if "jax" not in sys.modules or not maps.exists() or maps.read_bytes().count(b"\n") < MOST_MAPS:
        return
    import jax

    from bonsai_jax.engine import programs

    programs.compiled.clear()
    jax.clear_caches()
    gc.collect()


@pytest.hookimpl(trylast=True)  # when the tests that -m and -k leave out are gone
def pytest_collection_modifyitems(config, items):
    """The longest files first: each is one worker's, and the other must not wait for it at the end."""
    if any(item.get_closest_marker("unless_refused") for item in items):
        from tests.refused_cases import is_refused  # imports jax

        refused = [item for item in items if is_refused(item)]
        config.hook.pytest_deselected(items=refused)
        items[:] = [item for item in items if item not in refused]
    order = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_ignore_collect(collection_path, config):
    if collection_path.name.startswith("test_"):
        if config.option.markexpr in ON_GPUS:
            return collection_path.parent.name != "gpu"
        if "not gpu" in config.option.markexpr:
            return collection_path.parent.name == "gpu"
    return None


@pytest.fixture(scope="module")
def optimized():
    """XLA with its optimizations: for what is held against another implementation."""
    import jax  # here: some tests need none

    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()


@pytest.fixture(scope="session")
def compilers(tmp_path_factory):
    """Processes that compile for GPUs, which all aot tests share."""
    from tests.pallas_kernels.aot import Compilers

    made = Compilers(tmp_path_factory.mktemp("compilers"))
    yield made
    made.close()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub with one model, an empty cache, and no second try until a test says so."""
    import huggingface_hub
    from huggingface_hub import constants

    from checkpoints.hub import download
    from tests.checkpoints import hub_server

    for name in (
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "HF_TOKEN",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "home" / "token"))
    monkeypatch.setattr(download, "WAITS_S", ())
    with hub_server.serve({hub_server.MODEL: hub_server.BYTES, "README.md": b"read me"}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
        huggingface_hub.close_session()
