"""Formats that only this test has: CONTRIBUTING's recipe "Add a quantization format", carried out.

q6_g64 goes all the way: a line in checkpoints/geometry.py, its oracle, its expected blocks, a GGUF file, the
loaded model, the plan, `inspect`, the CPU kernel, and the GPU kernels in lockstep. q3_book combines what no
other format does (a codebook, signed bytes, groups of 16, minimums): kernels ask for its LANES alone.
"""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import bonsai_jax as bj
from checkpoints import CheckpointError, Tensor, geometry, open_checkpoint, write_gguf
from pallas_kernels import device, formats
from pallas_kernels.problems import Matmul
from pallas_kernels.qtensor import leaves
from pallas_kernels.selection import products
from tests.bonsai_jax.command_line import run
from tests.bonsai_jax.test_oracle import as_file
from tests.pallas_kernels import (
    expected_blocks,
    oracles,
    test_cpu,
    test_formats,
    test_gemm,
    test_lockstep,
    test_lockstep_dense,
    test_lockstep_int_gemm,
    test_random_fields,
    test_tiles,
)

FOLDER = Path(__file__).parent / "new_formats"
NEW = sorted(path.stem for path in FOLDER.glob("*.py"))
Q6 = geometry.Geometry(200, 64, 50)


@pytest.fixture(autouse=True)
def new_formats(tmp_path, monkeypatch):
    """Every step of the recipe, but for the documentation."""
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(FOLDER)])
    monkeypatch.setitem(geometry.GEOMETRY, "q6_g64", Q6)
    monkeypatch.setitem(geometry.FORMAT_BY_ID, Q6.id, "q6_g64")
    monkeypatch.setattr(expected_blocks, "FOLDER", tmp_path / "blocks")
    importlib.invalidate_caches()
    for name in NEW:
        expected_blocks.write(name)
    yield
    for name in NEW:
        sys.modules.pop(f"pallas_kernels.formats.{name}", None)
        vars(formats).pop(name, None)
    formats.get.cache_clear()


def test_the_recipe_s_errors_say_what_to_do(monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"python -m tests\.pallas_kernels\.expected_blocks q7"):
        expected_blocks.load("q7")
    monkeypatch.setattr(oracles, "__path__", [])
    with pytest.raises(
        LookupError, match=r"Write tests/pallas_kernels/oracles/q6_g64\.py.* 64 weights .* 50 b"
    ):
        oracles.dequantize("q6_g64", np.zeros((1, 50), np.uint8))
    monkeypatch.delitem(geometry.GEOMETRY, "q6_g64")
    with pytest.raises(AssertionError, match=r"checkpoints/geometry\.py.*64, 50"):
        test_formats.test_the_reader_of_files_sizes_blocks_the_same("q6_g64")
    with pytest.raises(CheckpointError, match=r"checkpoints/geometry\.py"):
        open_checkpoint("synth:tiny-llama:q6_g64")


@pytest.mark.parametrize("name", NEW)
def test_it_is_dequantized_as_its_oracle_says(name):
    test_formats.assert_decodes(name, expected_blocks.load(name).raw)
    test_formats.test_the_expected_weights_are_what_the_oracle_says(name)
    test_random_fields.test_random_fields(name)


def test_a_file_is_read_planned_inspected_and_run(tmp_path):
    """Its logits are those of the same model with the oracle's weights in float32."""
    path = as_file("synth:tiny-llama:q6_g64", tmp_path / "q6.gguf")
    test_formats.test_the_reader_of_files_sizes_blocks_the_same("q6_g64")
    checkpoint = open_checkpoint(path)
    assert checkpoint.tensors["blk.1.ffn_up.weight"].format == "q6_g64"
    exact = [
        Tensor(t.name, "f32", t.shape, oracles.dequantize("q6_g64", np.asarray(t.data)).view(np.uint8))
        if t.format == "q6_g64"
        else t
        for t in checkpoint.tensors.values()
    ]
    write_gguf(tmp_path / "f32.gguf", checkpoint.metadata, exact)
    ids, logits = np.arange(12)[None] + 40, []
    for file in (path, tmp_path / "f32.gguf"):
        model = bj.load(str(file), bj.RunConfig(activation_bits=16, batch_size=1))
        cache = bj.new_cache(model, 1, 32)
        logits.append(bj.jitted.extend(model.params, cache, ids, np.array([12]), model.config)[0])
        matrices = leaves(model.params.layers["attention"][0].o)
        assert {w.format for w in matrices} == {"q6_g64" if file == path else "f32"}
        assert file != path or all(w.products.kernel(1) == "cpu" for w in matrices)
    np.testing.assert_allclose(*map(np.asarray, logits), atol=2e-4)


@pytest.mark.parametrize(("platform", "kernels"), [("cpu", "cpu"), ("sm_90", "int_decode")])
def test_inspect_names_its_kernels(platform, kernels, monkeypatch):
    if platform != "cpu":
        monkeypatch.setattr(device, "default", lambda: device.GPUS[platform])
    done = run("inspect", "synth:tiny-llama:q6_g64", "--weights", "packed", "--json")
    assert done.exit_code == 0, done.output
    out = json.loads(done.stdout)
    assert out["tensors"][0]["format"] == "q6_g64"
    by_rows = [entry["kernels"] for entry in out["kernels"] if entry["what"] == "o"]
    assert [entry["1 row"] for entry in by_rows] == [kernels]


@pytest.mark.parametrize(("bits", "rows"), [(8, (1, 2, 5)), (16, (1,)), (8, (9,))])
def test_the_cpu_kernel(bits, rows):
    test_cpu.test_the_kernel_is_the_product("q6_g64", bits, rows)


def test_gpu_kernels_take_it():
    assert set(NEW) < set(formats.names("int"))
    for name in NEW:
        assert products(Matmul("sm_90", name, 64, 256)).kernels == (
            (8, "int_decode"),
            (None, "int_prefill_sm90"),
        )


@pytest.mark.parametrize("name", NEW)
def test_its_tiles_are_its_weights(name):
    test_tiles.test_tile_and_untile_keep_every_bit(name, 40, 768)
    test_tiles.test_rows_of_tiled_weights(name)
    test_tiles.test_what_lanes_read_is_the_weights(name)


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize(("rows", "kind", "bits"), [(1, "normed", 8), (3, "gated", 16), (8, "added", 8)])
def test_decode(rows, kind, bits, name):
    test_lockstep.test_the_kernel_in_lockstep_is_the_product([(name, 48)], 576, rows, kind, bits, 1)


@pytest.mark.parametrize("name", NEW)
def test_dequantize(name):
    test_lockstep_dense.test_what_it_decodes_is_the_definition_bit_for_bit(name, 40, 256, 1)


@pytest.mark.parametrize("matrices", [1, 2])
@pytest.mark.parametrize("name", NEW)
def test_prefill(name, matrices):
    order = "test_a_block_of_weights_is_the_definition_in_the_order_of_the_tensor_core"
    getattr(test_lockstep_int_gemm, order)(name, matrices)
    test_gemm.test_every_plan_fits_into_shared_memory(name, matrices, 2048, 6144)
