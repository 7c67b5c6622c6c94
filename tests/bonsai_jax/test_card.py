"""Memory: how weights are stored where it is short, and errors whose remedies work."""

import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from unittest import mock

import jax
import pytest

import bonsai_jax as bj
from bonsai_jax import machine
from bonsai_jax.network import architectures
from bonsai_jax.weights import memory, specs
from bonsai_jax.weights import plan as load_plans
from bonsai_jax.weights.specs import Description
from checkpoints import open_checkpoint
from pallas_kernels import device as gpu
from tests.bonsai_jax.command_line import run as run_command

# The 8B model in GB: 8,188,548,096 weights in float32, its file, and a cache of 8 rows of 4,096 tokens, of 36
# layers of keys and values of 8 heads of 128 in float32.
DECODED, PACKED, CACHE = 4 * 8.188548096, 1.152704128, 8 * 4096 * 36 * 2 * 8 * 128 * 4 / 1e9
BIG = "synth:bonsai-8b:q1_0"
BYTES = "keep keys and values in 8 bits (cache_dtype='int8')"
KEEP = "keep the weights packed (weights='packed')"
STATES = "keep the states of delta nets in 16 bits (state_dtype='float16')"
EIGHT = {"batch_size": 8}
SMALLER = "use a smaller quantization of this model, or a smaller model"


@pytest.fixture
def with_memory(monkeypatch):
    """with_memory(total, free): a CPU of so many GB."""

    def set_memory(total, free=None):
        monkeypatch.setattr(machine, "device_memory", lambda: int(total * 1e9))
        monkeypatch.setattr(machine, "free_memory", lambda: int((total if free is None else free) * 1e9))

    return set_memory


def describe(source: str) -> Description:
    return architectures.describe(open_checkpoint(source))


def stored(source=BIG, parts=1, **run) -> str:
    """How weights are stored: "packed" or "decoded"."""
    return load_plans.resolve(describe(source), bj.RunConfig(**run), parts).weights


@pytest.fixture
def without_kernels(monkeypatch):
    """A CPU's without the extra `cpu`."""
    find_spec = importlib.util.find_spec
    missing = lambda name, *rest: None if name == "llvmlite" else find_spec(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", missing)


def test_auto_is_packed_where_kernels_read_every_matrix(with_memory):
    with_memory(1000)
    assert stored() == stored("synth:bonsai-4b:q4_k_m") == "packed"
    assert stored("synth:tiny-llama:iq2_xs") == "packed" and stored(impl="reference") == "decoded"


def test_auto_is_decoded_where_it_fits_the_free_memory_of_a_cpu(with_memory, monkeypatch, without_kernels):
    enough = (DECODED + CACHE) / 0.9 + 0.01
    for free, expected in ((enough, "decoded"), (enough - 0.02, "packed"), (1, "packed")):
        with_memory(1000, free)
        assert stored() == expected
    with_memory(1000, enough - 0.02)
    for less in ({"batch_size": 7}, {"context": 2048}, {"cache_dtype": "bfloat16"}, {"parts": 2}):
        assert stored(**less) == "decoded"
    assert stored("synth:bonsai-4b:q1_0") == "decoded"
    assert stored(weights="decoded") == "decoded"
    with_memory(1000)
    assert stored(weights="packed") == "packed"
    with_memory(1000, 1)
    with mock.patch.object(jax, "process_count", lambda: 2):  # on machines alike, all must choose the same
        assert stored() == "decoded"
    with_memory(1000)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(gpu, "default", lambda: gpu.GPUS["sm_90"])
    assert stored() == "packed" and stored(weights="decoded") == "decoded"


def test_the_default_batch_size_takes_half_of_what_weights_leave(with_memory, monkeypatch):
    a_row = CACHE / 8
    resolve = lambda **run: load_plans.resolve(describe(BIG), bj.RunConfig(**run))  # noqa: E731
    for rows, free in ((1, 1), (1, 2.5), (2, 4.01), (2, 7.99), (4, 8.01), (16, 63.9), (32, 64.1), (32, 999)):
        with_memory(1000, PACKED + free * a_row)
        assert resolve().batch_size == rows, free
        assert resolve(batch_size=5).batch_size == 5
    with_memory(1000, PACKED + 4.01 * a_row)
    assert resolve(context=2048).batch_size == 4
    with_memory(1000)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(gpu, "default", lambda: gpu.GPUS["sm_90"])
    assert resolve().batch_size == 64


def test_free_memory_is_what_linux_says():
    meminfo = "MemTotal:  999 kB\nMemAvailable:   23 kB\nHugePages_Total: 0\n"
    with mock.patch("builtins.open", mock.mock_open(read_data=meminfo)):
        assert machine.free_memory() == 23 * 1024
    with mock.patch("builtins.open", side_effect=FileNotFoundError):  # another system
        assert machine.free_memory() == machine.device_memory()


@pytest.mark.parametrize(
    ("total", "run", "remedy"),
    [
        (DECODED - 1, {"weights": "decoded", **EIGHT}, KEEP),
        (DECODED + 1, {"weights": "decoded", **EIGHT}, f"{KEEP} or lower context"),
        (DECODED + 2, {"weights": "decoded", **EIGHT}, f"{KEEP} or lower batch_size or lower context"),
        (PACKED + 2, EIGHT, "lower batch_size or lower context"),
        (PACKED + 1, EIGHT, "lower context"),
        (PACKED + 2, {"batch_size": 10**4}, "lower batch_size"),
        (
            PACKED + 1,
            {"batch_size": 10**4},
            f"{BYTES} and lower batch_size or lower batch_size and lower context",
        ),
        (PACKED + 1, {"batch_size": 1}, f"{BYTES} or lower context"),
        (PACKED + 1, {"weights": "decoded", **EIGHT}, f"{KEEP} and lower context"),
        (PACKED, {}, SMALLER),
        (PACKED + 1, {}, f"{BYTES} or lower context"),
        (PACKED, {"weights": "decoded"}, SMALLER),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_helps(with_memory, total, run, remedy):
    with_memory(total)
    with pytest.raises(MemoryError) as refusal:
        bj.load(BIG, bj.RunConfig(**run))
    assert str(refusal.value).split("; ")[1] == remedy
    description = describe(BIG)
    for helpful in remedy.split(" or ") if remedy != SMALLER else ():
        smaller = {"weights": "packed"} if "packed" in helpful else {}
        smaller |= {"cache_dtype": "int8"} if "int8" in helpful else {}
        smaller |= {"batch_size": 1} if "batch_size" in helpful else {}
        smaller |= {"context": 64} if "context" in helpful else {}
        changed = dataclasses.replace(bj.RunConfig(**run), **smaller)
        memory.check(description, load_plans.resolve(description, changed))


def test_states_in_16_bits_are_named_where_they_help(with_memory):
    """Eight sequences of the 27B: 159 MB of states each, and pages of 64 tokens. Models without delta nets:
    above."""
    description, how = describe("synth:bonsai-27b:q1_0"), {"weights": "packed", "context": 64, **EIGHT}
    half = load_plans.resolve(description, bj.RunConfig(state_dtype="float16", **how))
    needed = sum(
        count(description.config, half) for count in (memory.cache_bytes, memory.scratch_bytes)
    ) + memory.weight_bytes(description, half)
    for total, run, remedy in (
        (needed + 1e6, {}, f"{STATES} or lower batch_size"),
        (needed - 1e6, {}, "lower batch_size"),
        (needed - 1e6, {"state_dtype": "float16"}, f"{BYTES} or lower batch_size"),
    ):
        with_memory(total / 1e9)
        with pytest.raises(MemoryError) as refusal:
            memory.check(description, load_plans.resolve(description, bj.RunConfig(**how, **run)))
        assert str(refusal.value).split("; ")[1] == remedy
    with_memory((needed + 1e6) / 1e9)
    memory.check(description, half)


def test_a_cache_of_bytes_needs_a_layer_in_float16_beside_it_on_a_gpu(with_memory):
    tokens, heads = 32 * 4096, 2 * 8
    caches = {"int8": 36 * heads * (128 + 2), "float16": 36 * heads * 128 * 2}
    scratch = {"int8": heads * 128 * 2, "float16": 0}
    description = describe(BIG)
    with mock.patch.object(gpu, "default", lambda: gpu.GPUS["sm_90"]):
        for dtype, cache in caches.items():
            run = load_plans.resolve(description, bj.RunConfig(cache_dtype=dtype, batch_size=32))
            needed = memory.weight_bytes(description, run) + tokens * (cache + scratch[dtype])
            with_memory((needed + 1e3) / 1e9)
            memory.check(description, run)
            with_memory((needed - 1e3) / 1e9)
            with pytest.raises(MemoryError) as refusal:
                memory.check(description, run)
            assert ("0.54 GB in which prefill reads it as float16" in str(refusal.value)) == (dtype == "int8")


def test_inspect_says_what_the_extra_would_give(with_memory, without_kernels):
    with_memory(48, 40)
    out = json.loads(run_command("inspect", BIG, "--json").stdout)
    reasons = {v["kernel"]: v["reason"] for v in out["weights"]}
    needs = "comes later: needs the package llvmlite: install the extra `cpu`"
    assert reasons["packed"] == f"{needs}, with which weights are {PACKED:.2f} GB, as in the file"


def test_generating_without_the_extra_says_so_in_a_line(without_kernels):
    out = run_command("generate", "Hello", "-m", "synth:tiny-llama:q8_0", "-n", "1", "--temp", "0")
    said, *_ = out.stderr.splitlines()
    assert (
        said.startswith("no kernels: weights are 0.01 GB where 0.00 would do") and "bonsai-jax[cpu]" in said
    )
    assert out.exit_code == 0


def test_generating_with_the_extra_says_nothing_of_it():
    out = run_command("generate", "Hello", "-m", "synth:tiny-llama:q8_0", "-n", "1", "--temp", "0")
    assert "no kernels" not in out.stderr and out.exit_code == 0


def test_inspect_says_how_weights_are_stored_and_why(with_memory):
    def choice(*arguments):
        out = json.loads(run_command("inspect", BIG, "--json", *arguments).stdout)
        (taken,) = (v["kernel"] for v in out["weights"] if v["taken"])
        assert taken == out["figures"]["weights on the device"]
        return taken, {v["kernel"]: v["reason"] for v in out["weights"]}

    with_memory(48, 40)
    reasons = {"decoded": "is slower than the kernels that read packed weights"}
    assert choice() == ("packed", reasons | {"packed": "as they lie in the file"})
    without = "--impl", "reference"
    with_memory(24, 20)
    sizes = "weights of 32.75 GB and a cache of 1.21 GB"  # the command line has one row
    reasons = {"decoded": f"{sizes} exceed nine tenths of the 20.00 GB that are free"}
    assert choice(*without) == ("packed", reasons | {"packed": "as they lie in the file"})
    asked = "decoded was asked for"
    assert choice("--weights", "decoded") == ("decoded", {"decoded": "asked for", "packed": asked})
    with_memory(48, 40)
    reasons = {"decoded": f"{sizes} fit into nine tenths of the 40.00 GB that are free"}
    assert choice(*without) == ("decoded", reasons | {"packed": "comes later: reference was asked for"})


BONSAI = re.compile(
    r"^\| ((?:Ternary-)?(Bonsai-.*)-(\w+)\.gguf) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", re.M
)


def test_the_docs_say_what_each_bonsai_file_needs():
    """As `inspect` does, for a GPU and a CPU; weights, and a row of 4,096 tokens."""
    rows = BONSAI.findall((Path(__file__).parents[2] / "docs/formats.md").read_text())
    assert len(rows) == 15
    usual = {"Q2_0": "q2_0_g128", "Q2_g64": "q2_0_g64"}
    for file, model, format, *said in rows:
        description, sizes = describe(f"synth:{model}:{usual.get(format, format)}"), []
        for platform, cache_dtype in (("sm_90", "float16"), ("cpu", "float32")):
            device = dataclasses.replace(gpu.GPUS["sm_90"], platform=platform)
            run = bj.RunConfig(weights="packed", batch_size=1, context=4096, cache_dtype=cache_dtype)
            with mock.patch.object(gpu, "default", lambda device=device: device):
                sizes += [memory.weight_bytes(description, run), memory.cache_bytes(description.config, run)]
        assert [f"{size / 1e9:.2f}" for size in sizes] == said, file


def test_base_3_is_stored_as_2_bits_where_kernels_read_tiles():
    description, run = describe("synth:tiny-qwen3:ptq1_0"), bj.RunConfig(weights="packed")
    tensors = [t for _, t in description.sources]
    in_file = sum(t.nbytes for t in tensors)
    assert memory.weight_bytes(description, run) == in_file
    with mock.patch.object(gpu, "default", lambda: gpu.GPUS["sm_90"]):
        on_device = memory.weight_bytes(description, run)
    ternary = sum(t.nbytes for t in tensors if t.format == "ptq1_0")
    assert on_device - in_file == ternary * 34 // 28 - ternary


def test_what_is_skipped_takes_no_memory():
    checkpoint, run = open_checkpoint("synth:tiny-qwen35:q8_0"), bj.RunConfig(weights="packed")
    config, tensors = architectures.config_of(checkpoint), architectures.get("qwen35").TENSORS
    shorter = dataclasses.replace(config, layers=config.layers[:3], skipped=("blk.3.",))
    whole, rest = (
        memory.weight_bytes(specs.describe(checkpoint, tensors, one), run) for one in (config, shorter)
    )
    less = sum(t.nbytes for name, t in checkpoint.tensors.items() if name.startswith("blk.3."))
    assert whole - rest == less > 0
