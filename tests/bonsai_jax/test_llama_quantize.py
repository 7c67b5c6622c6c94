"""Whole files beside those of llama.cpp's quantizer (llama_model_quantize), which the package cyllama has:

uv run --with cyllama==0.7.0 pytest -m slow tests/bonsai_jax/test_llama_quantize.py
"""

import ctypes
import importlib.util
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from bonsai_jax.making import Importance, quantize_file, recipes
from checkpoints import Checkpoint, open_checkpoint
from pallas_kernels import formats
from tests.bonsai_jax.test_oracle import as_file
from tests.pallas_kernels.test_encoders import ONE_RULE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("cyllama") is None, reason="needs cyllama"),
]

EQUAL = (
    "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q1_0", "q2_0", "tq1_0", "tq2_0", "mxfp4",
)  # fmt: skip
SEARCHED = (
    "q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k", "iq4_nl", "iq4_xs",
    "iq3_s", "iq3_m",
)  # fmt: skip
WITH_IMPORTANCE = (
    "q4_0", "q5_1", "q2_k_s", "q3_k_m", "q4_k_m", "q6_k", "iq4_nl", "iq4_xs", "iq3_m", "iq3_s", "iq3_xs",
    "iq3_xxs", "iq2_m", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s",
)  # fmt: skip
ARCHITECTURES = (
    "qwen3", "llama", "qwen3moe", "gemma3", "phi4", "qwen35", "qwen35moe", "qwen3next", "deepseek2",
    "gpt-oss", "glm4moe", "maple", "bitnet", "command-r", "glm4", "ernie4.5", "ernie4_5-moe",
)  # fmt: skip


class Entry(ctypes.Structure):
    """llama_model_imatrix_data; one without a name is the last."""

    _fields_ = (("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("size", ctypes.c_size_t))


def llama_quantize(
    source: Path, path: Path, format: str, columns: Mapping[str, np.ndarray] | None = None
) -> Checkpoint:
    """columns: an importance matrix, which cyllama cannot be given. Its address goes into the struct
    (llama_model_quantize_params) in the Python object, after its header and a pointer of Cython's."""
    from cyllama.llama import llama_cpp

    settings = llama_cpp.LlamaModelQuantizeParams()
    settings.ftype, settings.nthread = recipes.recipe(format).file_type, 1
    entries = (Entry * (len(columns or {}) + 1))()
    for entry, (name, values) in zip(entries, (columns or {}).items(), strict=False):
        entry.name, entry.data, entry.size = name.encode(), values.ctypes.data, values.size
    if columns:
        own = id(settings) + 24
        assert struct.unpack("iiii8xQ", ctypes.string_at(own, 32)) == (1, settings.ftype, 43, 43, 0)
        ctypes.c_void_p.from_address(own + 24).value = ctypes.addressof(entries)
    llama_cpp.model_quantize(str(source), str(path), settings)
    return open_checkpoint(path)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return as_file("synth:tiny-qwen3:f32", tmp_path_factory.mktemp("quantize") / "tiny.gguf")


@pytest.mark.parametrize("format", [*EQUAL, *SEARCHED])
def test_files_are_those_of_llama_quantize(format, original, tmp_path):
    """Keys, formats, and bytes but for searches, which add in another order. The codebooks of IQ3 have better
    points here (docs/quantize.md)."""
    quantize_file(original, tmp_path / "ours.gguf", format)
    ours, its = (
        open_checkpoint(tmp_path / "ours.gguf"),
        llama_quantize(original, tmp_path / "its.gguf", format),
    )
    assert repr(sorted(ours.metadata.items())) == repr(sorted(its.metadata.items()))
    assert {t.name: (t.format, t.shape) for t in ours.tensors.values()} == {
        t.name: (t.format, t.shape) for t in its.tensors.values()
    }
    source, errors = open_checkpoint(original), np.zeros(2)
    for name, tensor in its.tensors.items():
        own, other = (np.asarray(t.data).ravel().view(np.uint8) for t in (ours.tensors[name], tensor))
        if tensor.format in (*ONE_RULE, "f32", "f16", "bf16"):
            np.testing.assert_array_equal(own, other, err_msg=name)
            continue
        assert (own == other).mean() > 0.97 or tensor.format.startswith("iq3"), name
        x = np.asarray(source.tensors[name].data).view(np.float32).ravel()
        values = (
            formats.values(tensor.format, np.asarray(t.data)).ravel() for t in (ours.tensors[name], tensor)
        )
        errors += [np.square(y - x, dtype=np.float64).sum() for y in values]
    assert errors[0] <= 1.001 * errors[1]


@pytest.mark.parametrize("format", WITH_IMPORTANCE)
def test_an_importance_matrix_makes_the_same_mixes_and_errors_that_are_no_larger(format, original, tmp_path):
    """Squares of errors, weighted by the importance of their columns."""
    source, rng = open_checkpoint(original), np.random.default_rng(0)
    columns = {
        name: rng.lognormal(sigma=1.5, size=(1, t.shape[-1])).astype(np.float32)
        for name, t in source.tensors.items()
        if name.startswith("blk.") and len(t.shape) == 2
    }
    its = llama_quantize(original, tmp_path / "its.gguf", format, columns)
    quantize_file(original, tmp_path / "ours.gguf", format, importance=Importance("drawn", columns))
    ours, errors = open_checkpoint(tmp_path / "ours.gguf"), np.zeros(2)
    assert {t.name: t.format for t in ours.tensors.values()} == {
        t.name: t.format for t in its.tensors.values()
    }
    for name, tensor in its.tensors.items():
        if tensor.format != "f32":
            x = np.asarray(source.tensors[name].data).view(np.float32)
            values = (
                formats.values(tensor.format, np.asarray(file.tensors[name].data)) for file in (ours, its)
            )
            weights = columns.get(name, np.ones(1))
            errors += [(weights * np.square(y.reshape(x.shape) - x)).sum(dtype=np.float64) for y in values]
    assert errors[0] <= 1.001 * errors[1]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_mixes_are_those_of_llama_quantize(name, tmp_path):
    original = as_file(f"synth:tiny-{name}:f32", tmp_path / "tiny.gguf")
    for format in ("q2_k", "q3_k_m", "q3_k_l", "q4_k_m", "q5_k_s", "mxfp4", "tq1_0", "q8_0"):
        its = llama_quantize(original, tmp_path / "its.gguf", format)
        ours = recipes.formats_of(
            list(open_checkpoint(original).tensors.values()), its.metadata, recipes.recipe(format)
        )
        assert ours == {t.name: t.format for t in its.tensors.values()}, format
        (tmp_path / "its.gguf").unlink()


@pytest.mark.parametrize("format", ["iq3_xs", "iq3_xxs", "iq2_m", "iq2_xxs", "iq1_s"])
def test_both_refuse_formats_that_need_an_importance_matrix(format, original, tmp_path):
    with pytest.raises(RuntimeError, match="llama_model_quantize failed"):
        llama_quantize(original, tmp_path / "its.gguf", format)
    with pytest.raises(ValueError, match="needs an importance matrix"):
        quantize_file(original, tmp_path / "ours.gguf", format)
