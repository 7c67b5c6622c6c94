"""Importance matrices: llama.cpp's files of them, and the files that are quantized by them."""

import json
import struct

import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.making import planned, quantize_file, read_importance, recipes
from checkpoints import CheckpointError, Tensor, open_checkpoint, write_gguf
from pallas_kernels import formats
from tests.bonsai_jax.command_line import run
from tests.bonsai_jax.test_oracle import as_file
from tests.bonsai_jax.test_quantize import METADATA, named
from tests.pallas_kernels import ggml_quantize

DOWN, EXPERTS, OTHER = (
    f"blk.{i}.{name}.weight" for i, name in enumerate(("ffn_down", "ffn_up_exps", "attn_q"))
)


def stored(name: str, x: np.ndarray) -> Tensor:
    x = np.ascontiguousarray(x, np.float32)
    return Tensor(name, "f32", x.shape, x.view(np.uint8))


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {DOWN: (6, 512), EXPERTS: (3, 4, 256), OTHER: (8, 256)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def model(weights, tmp_path_factory):
    path = tmp_path_factory.mktemp("importance") / "model.gguf"
    write_gguf(path, METADATA, [stored(name, x) for name, x in weights.items()])
    return path


@pytest.fixture(scope="module")
def means() -> dict[str, np.ndarray]:
    """Of two of three matrices; no token was sent to the second expert, whose columns are all alike then."""
    rng = np.random.default_rng(1)
    found = {DOWN: rng.lognormal(sigma=2, size=(1, 512)), EXPERTS: rng.lognormal(sigma=2, size=(3, 256))}
    found[EXPERTS][1] = 1
    return {name: x.astype(np.float32) for name, x in found.items()}


@pytest.fixture(scope="module")
def gguf_file(means, tmp_path_factory):
    """As llama-imatrix writes it."""
    path = tmp_path_factory.mktemp("importance") / "imatrix.gguf"
    metadata = {"general.type": "imatrix", "imatrix.datasets": ["calibration.txt"],
                "imatrix.chunk_count": 5, "imatrix.chunk_size": 512}  # fmt: skip
    tensors = []
    for name, mean in means.items():
        counts = np.full((len(mean), 1), 64.0)
        if name == EXPERTS:
            counts[1] = 0
        tensors += [stored(f"{name}.in_sum2", mean * counts), stored(f"{name}.counts", counts)]
    write_gguf(path, metadata, tensors)
    return path


@pytest.fixture(scope="module")
def legacy_file(means, tmp_path_factory):
    path = tmp_path_factory.mktemp("importance") / "imatrix.dat"
    parts = [struct.pack("<i", len(means))]
    for name, mean in means.items():
        parts += [struct.pack("<i", len(name)), name.encode(), struct.pack("<ii", 4, mean.size)]
        parts += [(mean * 4).astype("<f4").tobytes()]
    path.write_bytes(b"".join([*parts, struct.pack("<ii", 5, 15), b"calibration.txt"]))
    return path


def test_both_kinds_of_files_are_read(gguf_file, legacy_file, means):
    for path in (gguf_file, legacy_file):
        importance = read_importance(path)
        assert (importance.datasets, importance.chunks) == (("calibration.txt",), 5)
        for name, shape in ((DOWN, (6, 512)), (EXPERTS, (3, 4, 256))):
            np.testing.assert_array_equal(importance.matrix(name, shape), means[name])
        assert importance.matrix(OTHER, (8, 256)) is None


def test_blocks_are_those_of_ggml_with_the_same_importance(model, gguf_file, weights, means, tmp_path):
    new = tmp_path / "new.gguf"
    changes = quantize_file(model, new, "q4_k", pure=True, importance=gguf_file)
    assert {c.name: c.weighted for c in changes} == {DOWN: True, EXPERTS: True, OTHER: False}
    checkpoint = open_checkpoint(new)
    for name, x in weights.items():
        data = np.asarray(checkpoint.tensors[name].data)
        columns = means.get(name, [None])
        matrices = zip(x.reshape(len(columns), -1, x.shape[-1]), columns, strict=True)
        expected = np.concatenate([ggml_quantize.quantize(rows, "q4_k", own) for rows, own in matrices])
        assert (expected == data.reshape(expected.shape)).mean() > 0.98, name
    keys = {k: v for k, v in checkpoint.metadata.items() if k.startswith("quantize.imatrix.")}
    assert keys == {
        "quantize.imatrix.file": str(gguf_file), "quantize.imatrix.entries_count": 2,
        "quantize.imatrix.dataset": "calibration.txt", "quantize.imatrix.chunks_count": 5,
    }  # fmt: skip
    quantize_file(new, tmp_path / "plain.gguf", "q8_0", requantize=True)
    assert "quantize.imatrix.file" not in open_checkpoint(tmp_path / "plain.gguf").metadata


@pytest.mark.parametrize(
    ("name", "without", "given"),
    [("iq4_xs", "q5_k", "iq4_xs"), ("iq4_nl", "q5_k", "iq4_nl"), ("q4_0", "q4_0", "q4_1"),
     ("q5_0", "q5_0", "q5_1"), ("q4_k_s", "q5_k", "q5_k")],
)  # fmt: skip
def test_mixes_depend_on_it_as_llama_cpp_s_do(name, without, given):
    for weighted, expected in ((False, without), (True, given)):
        found = recipes.formats_of(named(32), METADATA, recipes.recipe(name), weighted=weighted)
        assert {found[f"blk.{i}.ffn_down.weight"] for i in range(4)} == {expected}
        assert found["blk.4.ffn_down.weight"] == recipes.recipe(name).base


def test_the_command_says_what_the_file_does_not_name(model, gguf_file, tmp_path):
    arguments = ("quantize", model, tmp_path / "new.gguf", "q4_k_s", "--imatrix", gguf_file)
    dry = run(*arguments, "--dry-run", "--json")
    assert dry.exit_code == 0, dry.stderr
    assert json.loads(dry.stdout)["tensors_weighted"] == 2
    done = run(*arguments)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[1:] == [
        f"{gguf_file} does not name 1 of 3 matrices, made without: {OTHER}"
    ]


def test_formats_that_need_it_are_refused_without(model, gguf_file, means, weights, tmp_path):
    new = tmp_path / "new.gguf"
    without = run("quantize", model, new, "iq2_xs", "--pure")
    assert without.exit_code == 1 and "\n" not in without.stderr.strip()
    assert f"{DOWN}: iq2_xs needs an importance matrix. Make one with `bonsai-jax imatrix`" in without.stderr
    with pytest.raises(ValueError, match=rf"{OTHER}, which .*imatrix\.gguf does not name: iq2_xs needs"):
        quantize_file(model, new, "iq2_xs", pure=True, importance=gguf_file)
    assert not new.exists()
    others = [("attn_q|exps", "q8_0")]
    quantize_file(model, new, "iq2_xs", pure=True, importance=gguf_file, tensor_formats=others)
    tensor = open_checkpoint(new).tensors[DOWN]
    found = formats.values("iq2_xs", np.asarray(tensor.data)).reshape(weights[DOWN].shape)
    away, (columns,) = np.square(found - weights[DOWN]), means[DOWN]
    assert (away * columns).mean() < 0.6 * away.mean() * columns.mean()


def test_files_that_do_not_fit_are_told(model, gguf_file, legacy_file, tmp_path):
    def check(path, problem):
        with pytest.raises(CheckpointError, match=problem):
            planned(model, "q4_k_s", importance=path)

    other = tmp_path / "other.gguf"
    write_gguf(
        other, {}, [stored(f"{DOWN}.in_sum2", np.ones((1, 256))), stored(f"{DOWN}.counts", np.ones((1, 1)))]
    )
    check(
        other, r"ffn_down\.weight has 256 numbers, but the model has 512 columns; take an importance matrix"
    )
    check(model, r"no tensor's name ends in \.in_sum2; an importance matrix is a file")
    check(tmp_path / "none.gguf", "none.gguf: cannot be read")
    (tmp_path / "cut.dat").write_bytes(legacy_file.read_bytes()[:700])
    check(tmp_path / "cut.dat", "ends early or is another kind of file")
    write_gguf(other, {}, [stored(f"{DOWN}.in_sum2", np.full((1, 512), np.nan)),
                           stored(f"{DOWN}.counts", np.ones((1, 1)))])  # fmt: skip
    check(other, "negative or not finite")
    refused = run("quantize", model, tmp_path / "new.gguf", "q4_k_s", "--imatrix", model)
    assert refused.exit_code == 1 and "\n" not in refused.stderr.strip()


def test_what_is_written_is_what_is_read(gguf_file, tmp_path):
    importance = read_importance(gguf_file)
    importance.write(tmp_path / "again.gguf")
    again = read_importance(tmp_path / "again.gguf")
    assert (again.datasets, again.chunks) == (importance.datasets, importance.chunks)
    for name, columns in importance.columns.items():
        np.testing.assert_allclose(again.columns[name], columns, rtol=1e-6)
        np.testing.assert_array_equal(again.counts[name], importance.counts[name])


def test_it_is_the_mean_square_of_what_matrices_are_multiplied_with():
    """Attention and experts against what taps read, in numpy; two texts of different lengths."""
    model = bj.load("synth:tiny-qwen3moe:f32", bj.RunConfig(impl="reference", cache_dtype="float32"))
    ids = np.random.default_rng(3).integers(0, 250, 24).tolist()
    texts = [ids[:14], ids[14:]]
    found = bj.importance(model, texts)
    taps = bj.Taps(("input", "middle", "z", "hidden", "experts"))
    (batch,) = bj.harvest(model, texts, taps)
    layers, mask = model.config.num_layers, batch.mask
    read = {
        name: np.asarray(x, np.float64)[:, mask] for name, x in batch.activations.items()
    }  # [L, tokens, ...]
    assert found.chunks == 2 and found.chunk_size == 14

    (attention,), (experts,) = model.params.layers["attention"], model.params.layers["experts"]

    def normed(x: np.ndarray, gamma) -> np.ndarray:
        root = np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + model.config.rms_norm_eps)
        return x / root * np.asarray(gamma)

    for i in range(layers):
        n, m = normed(read["input"][i], attention.norm[i]), normed(read["middle"][i], experts.norm[i])
        z = read["z"][i].reshape(24, -1)
        for name, x in (("attn_q", n), ("attn_k", n), ("attn_v", n), ("attn_output", z)):
            columns = found.columns[f"blk.{i}.{name}.weight"]
            np.testing.assert_allclose(columns, np.square(x).mean(axis=0)[None], rtol=1e-4)
            assert found.counts[f"blk.{i}.{name}.weight"] == [24]
        for name, x in (("ffn_gate_exps", m), ("ffn_up_exps", m), ("ffn_down_exps", read["hidden"][i])):
            name = f"blk.{i}.{name}.weight"
            for expert in range(len(found.columns[name])):
                at = read["experts"][i] == expert  # [tokens, used]
                own = x[at] if x.ndim == 3 else x[at.any(axis=1)]
                expected = np.square(own).mean(axis=0) if len(own) else np.ones(x.shape[-1])
                np.testing.assert_allclose(found.columns[name][expert], expected, rtol=1e-4)
                assert found.counts[name][expert] == len(own)


def test_the_command_names_every_matrix(tmp_path):
    source, path = as_file("synth:tiny-llama:f32", tmp_path / "model.gguf"), tmp_path / "imatrix.gguf"
    (tmp_path / "text.txt").write_text("a few words " * 20)
    where = ("-m", source, "-f", tmp_path / "text.txt", "-o", path)
    arguments = ("imatrix", *where, "-c", "32", "--chunks", "2")
    made = run(*arguments, "--json")
    assert made.exit_code == 0, made.stderr
    assert json.loads(made.stdout)["tokens"] == 64
    metadata = open_checkpoint(path).metadata
    assert metadata["imatrix.datasets"] == [str(tmp_path / "text.txt")]
    assert (metadata["imatrix.chunk_count"], metadata["imatrix.chunk_size"]) == (2, 32)
    changes = planned(source, "q4_k", importance=path)
    assert {c.name for c in changes if c.searched and not c.weighted} == {
        "token_embd.weight",
        "output.weight",
    }
    again = run(*arguments)
    assert again.exit_code == 1 and "--overwrite" in again.stderr


def test_models_and_texts_that_do_not_fit_are_told():
    model = bj.load("synth:tiny-qwen3:f32", bj.RunConfig(impl="reference"))
    with pytest.raises(ValueError, match="there are no texts"):
        bj.importance(model, [])
    with pytest.raises(TypeError, match="texts are a str"):
        bj.importance(model, "one text")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lacking"),
    [("bitnet", set()), ("qwen35", set()), ("qwen35moe", set()), ("gemma3", set()), ("gpt-oss", set()),
     ("deepseek2", {"attn_k_b", "attn_v_b"})],
)  # fmt: skip
def test_every_kind_of_layer_is_watched(name, lacking):
    """Latent attention's matrices of one head each have none."""
    name = f"synth:tiny-{name}:f32"
    model = bj.load(name, bj.RunConfig(impl="reference", cache_dtype="float32"))
    found = bj.importance(model, [list(range(9)), list(range(20))])
    tensors = [
        t for t in open_checkpoint(name).tensors.values() if recipes.is_matrix(t) and t.name[:3] == "blk"
    ]
    assert {t.name.split(".")[2] for t in tensors if t.name not in found.columns} == lacking
    for tensor in tensors:
        if (columns := found.matrix(tensor.name, tensor.shape)) is not None:
            assert columns.max() > 0 and found.counts[tensor.name].sum() % 29 == 0
