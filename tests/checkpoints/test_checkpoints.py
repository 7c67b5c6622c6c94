"""What a name stands for: paths and Hugging Face folders. For the Hub see test_hub.py."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints import Changed, CheckpointError, Tensor, open_checkpoint, write_gguf

BLOCKS = Tensor("t", "q8_0", (2, 64), np.arange(136, dtype=np.uint8).reshape(2, 68))


def gguf_file(path, name="m"):
    path.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(path, {"general.name": name}, [BLOCKS])
    return path


# ---- names and paths -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["no/such/path/m.gguf", "models/m.gguf", "m", "/", "a/b/c", "m.safetensors", "~/x y"]
)
def test_what_is_not_there_is_said_with_what_may_be(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(name, offline=True)


@pytest.mark.parametrize("name", ["", " ", b""])
def test_an_empty_name_is_not_the_working_folder(name, tmp_path, monkeypatch):
    gguf_file(tmp_path / "m.gguf")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"name is empty.*a model is a \.gguf file"):
        open_checkpoint(name)
    assert open_checkpoint(b"m.gguf").metadata["general.name"] == "m"


def test_a_path_that_exists_wins_over_a_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gguf_file(tmp_path / "user" / "repo", "local")
    assert open_checkpoint("user/repo").metadata["general.name"] == "local"


def test_a_folder_with_one_gguf_file_is_that_file_and_with_two_is_an_error(tmp_path):
    gguf_file(tmp_path / "a.gguf")
    np.testing.assert_array_equal(open_checkpoint(tmp_path).tensors["t"].data, BLOCKS.data)
    gguf_file(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"2 GGUF files: a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)


def test_the_home_folder_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    gguf_file(tmp_path / "m.gguf")
    assert "t" in open_checkpoint("~/m.gguf").tensors


# ---- Hugging Face folders --------------------------------------------------------------------------------

ARRAYS = {
    "model.a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "model.b": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
    "model.c": np.arange(5, dtype=np.float16),
}
FORMATS = {"model.a": "f32", "model.b": "bf16", "model.c": "f16"}


def folder(path, arrays=ARRAYS, config='{"model_type": "qwen3", "hidden_size": 4}'):
    (path / "config.json").write_text(config)
    safetensors.numpy.save_file(arrays, path / "model.safetensors", metadata={"format": "pt"})
    return path


def sharded(path):
    (path / "config.json").write_text('{"model_type": "qwen3"}')
    names = {"model.a": "model-00001-of-00002.safetensors", "model.b": "model-00001-of-00002.safetensors"}
    names["model.c"] = "model-00002-of-00002.safetensors"
    for shard in set(names.values()):
        part = {n: ARRAYS[n] for n in names if names[n] == shard}
        safetensors.numpy.save_file(part, path / shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return path, names


def check_arrays(checkpoint):
    assert checkpoint.naming == "huggingface" and set(checkpoint.tensors) == set(ARRAYS)
    for name, array in ARRAYS.items():
        tensor = checkpoint.tensors[name]
        assert (tensor.format, tensor.shape) == (FORMATS[name], array.shape)
        assert tensor.data.shape == (*array.shape[:-1], array.shape[-1] * array.itemsize)
        assert tensor.data.tobytes() == array.tobytes() and not tensor.data.flags.writeable


def test_a_single_file(tmp_path):
    got = open_checkpoint(folder(tmp_path))
    check_arrays(got)
    assert got.metadata == {"model_type": "qwen3", "hidden_size": 4} and got.folder == tmp_path


def test_shards_and_links_to_them(tmp_path):
    path, names = sharded(tmp_path)
    check_arrays(open_checkpoint(path))
    shard = path / names["model.c"]
    (tmp_path / "blobs").mkdir()
    shard.rename(tmp_path / "blobs" / "abc")  # as in the Hub's cache
    shard.symlink_to(tmp_path / "blobs" / "abc")
    check_arrays(open_checkpoint(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w | {"model.c": "../x.safetensors"},
            "'model.c' is '../x.safetensors'; a plain .safetensors name",
        ),
        (lambda w: w | {"model.c": "/etc/x.safetensors"}, "a plain .safetensors name"),
        (lambda w: w | {"model.c": "..\\x.safetensors"}, "a plain .safetensors name"),
        (lambda w: w | {"model.c": "passwd"}, "a plain .safetensors name"),
        (lambda w: w | {"model.c": 3}, "a plain .safetensors name"),
        (
            lambda w: w | {"model.c": "absent.safetensors"},
            "absent.safetensors: no such file; model.safetensors.index",
        ),
        (lambda w: w | {"model.d": w["model.c"]}, "has no tensor 'model.d'"),
        (
            lambda w: {k: v for k, v in w.items() if k != "model.b"},
            "holds 'model.b'; .* lists it in 'no file'",
        ),
        (lambda w: {}, "weight_map is {}"),
        (lambda w: [], "weight_map is "),
    ],
)
def test_a_false_index_is_refused(tmp_path, change, message):
    path, names = sharded(tmp_path)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": change(names)}))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def entry(dtype="F32", shape=(2, 2), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        ({"t": entry("I64")}, 16, "dtype of 't' is 'I64'; F32, F16, BF16"),
        ({"t": entry(["F32"])}, 16, "dtype of 't' is "),
        ({"t": entry(shape=(-2, -2))}, 16, r"shape of 't' is \[-2, -2\]"),
        ({"t": entry(shape=(2**32, 2**32))}, 16, "takes 73786976294838206464 bytes"),
        ({"t": entry(shape=())}, 16, r"\[\] takes 4 bytes"),
        ({"t": entry(shape=(0, 2), offsets=(0, 0))}, 16, "shape of 't'"),
        ({"t": entry(shape=(2, True))}, 16, "shape of 't'"),
        ({"t": entry(shape=(2.0, 2))}, 16, "shape of 't'"),
        ({"t": entry(offsets=(16, 0))}, 16, "data_offsets of 't'"),
        ({"t": entry(offsets=(0, 16, 32))}, 16, "data_offsets of 't'"),
        ({"t": entry(offsets=(0, 2**70))}, 16, "data_offsets of 't'"),
        ({"t": entry()}, 15, "within 15 is expected"),
        ({"t": entry()}, 17, "data is 17 bytes; the tensors of the header end at 16"),
        ({"t": entry(shape=(2, 3))}, 16, "takes 24 bytes"),
        ({"t": entry(), "u": entry(offsets=(8, 24))}, 24, "overlaps the tensor before, which ends at 16"),
        ({"t": entry(), "u": entry(offsets=(20, 36))}, 36, "leaves a gap"),
        ({"t": {"dtype": "F32"}}, 16, "entry of 't'"),
        ({"t": 3}, 16, "entry of 't' is 3"),
        ([], 16, r"JSON is \[\]; an object"),
        ('{"t": 1, "t": 2}', 16, "'t' is given twice"),
        ("{]", 16, "not JSON"),
        (b"\xff\xff", 16, "not JSON"),
        ("[" * 100_000, 16, "nested too deep|not JSON"),
        ('{"t": ' + "9" * 5000 + "}", 16, "not JSON"),
    ],
)
def test_a_false_header_is_refused(tmp_path, header, size, message):
    text = header if isinstance(header, str | bytes) else json.dumps(header)
    raw = text.encode() if isinstance(text, str) else text
    folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(size))
    with pytest.raises(CheckpointError, match=message) as error:
        open_checkpoint(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'model.safetensors'}: ") and len(str(error.value)) < 600


@pytest.mark.parametrize(
    "raw", [b"", b"\0" * 7, struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 3) + b"{}"]
)
def test_a_false_header_length_is_refused(tmp_path, raw):
    folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"file size is|header length is"):
        open_checkpoint(tmp_path)


def test_a_git_lfs_pointer_is_recognized(tmp_path):
    folder(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .* Git LFS pointer, .*git lfs pull"):
        open_checkpoint(tmp_path)


def test_a_folder_without_what_it_needs(tmp_path):
    with pytest.raises(CheckpointError, match=r"config.json: no such file"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no \.safetensors file; model\.safetensors, or"):
        open_checkpoint(tmp_path)
    folder(tmp_path, config="[1]")
    with pytest.raises(CheckpointError, match=r"config.json: JSON is \[1\]; an object"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="open its folder"):
        open_checkpoint(tmp_path / "model.safetensors")
    with open(tmp_path / "config.json", "wb") as f:
        f.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="over the limit"):
        open_checkpoint(tmp_path)


def test_every_truncation_of_a_safetensors_file_is_refused(tmp_path):
    folder(tmp_path)
    path = tmp_path / "model.safetensors"
    raw = path.read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    for size in range(len(raw)):
        path.write_bytes(raw[:size])
        # Once the header is complete, the error names the tensor that is cut.
        message = "data_offsets of 'model" if size >= length else "file size is|header length is"
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path)


@settings(
    max_examples=300,
    deadline=2000,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_mutations_of_a_safetensors_file(tmp_path, data):
    folder(tmp_path)
    path = tmp_path / "model.safetensors"
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        new = data.draw(
            st.sampled_from([b"", b"9", b"-", b"0", b"[", b"{", b'"', b",", b"\xff", b"null", b"1e9"])
        )
        raw[at : at + data.draw(st.integers(0, 3))] = new
    path.write_bytes(raw)
    try:
        got = open_checkpoint(tmp_path)
    except CheckpointError:
        return
    assert sum(t.data.nbytes for t in got.tensors.values()) <= len(raw)


def test_a_tensor_that_is_forgotten_leaves_memory_and_can_be_read_again(tmp_path):
    def resident() -> int:
        """Bytes of files that this process has in memory."""
        with open("/proc/self/status") as status:
            return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssFile:"))

    data = np.random.default_rng(0).integers(0, 256, (4096, 4096), dtype=np.uint8)
    tensors = [Tensor(name, "i8", data.shape, data) for name in ("a", "b")]
    write_gguf(tmp_path / "large.gguf", {"general.architecture": "llama"}, tensors)
    tensor = open_checkpoint(str(tmp_path / "large.gguf")).tensors["b"]
    np.testing.assert_array_equal(tensor.data, data)
    before = resident()
    tensor.forget()
    assert before - resident() > 0.9 * data.nbytes
    np.testing.assert_array_equal(tensor.data, data)


@pytest.mark.parametrize(
    ("format", "dtype"), [("f32", np.float32), ("f16", np.float16), ("bf16", ml_dtypes.bfloat16)]
)
def test_changed_values_are_rounded_to_the_tensor_s_format(format, dtype):
    values = np.random.default_rng(0).standard_normal((40, 6)).astype(dtype)
    whole = Tensor("w", format, values.shape, values.view(np.uint8))
    changed = Changed(whole, lambda w: w * np.float32(0.37))
    assert (changed.name, changed.format, changed.shape, changed.nbytes) == (
        "w",
        format,
        (40, 6),
        values.nbytes,
    )
    want = (values.astype(np.float32) * np.float32(0.37)).astype(dtype)
    np.testing.assert_array_equal(changed.data, want.view(np.uint8))


def test_packed_values_cannot_be_changed():
    whole = Tensor("w", "q8_0", (1, 32), np.zeros((1, 34), np.uint8))
    with pytest.raises(CheckpointError, match=r"tensor w: format is 'q8_0', .* supported: f32, f16, bf16"):
        Changed(whole, np.negative)


def test_a_scalar_is_a_vector_of_one_value(tmp_path):
    """As in folders of Apertus, which have an activation's constants."""
    safetensors.numpy.save_file({"beta": np.array(0.5, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "apertus"}')
    beta = open_checkpoint(tmp_path).tensors["beta"]
    assert beta.shape == (1,) and beta.data.view(np.float32).tolist() == [0.5]
