"""GGUF, the file format of llama.cpp: the reader.

    magic "GGUF" | u32 version | u64 tensors | u64 keys
    keys     x  (string key, u32 type, value)
    tensors  x  (string name, u32 dims, u64 dim[dims], u32 type, u64 offset)
    padding to `general.alignment`
    data: each tensor at its offset, a multiple of the alignment

Files are not trusted: every number is checked against the bytes that the file has before it is used, and
MAX_HEADER bounds the cost of reading, whatever the file claims. Tensors are views of the memory map; nothing
is copied.
"""

import mmap
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .checkpoint import Checkpoint, CheckpointError, Tensor
from .geometry import FORMAT_BY_ID, GEOMETRY, SHARED_ID, SHARED_LAYOUTS, tensor_nbytes

MAX_HEADER = 64 << 20  # bytes of metadata and tensor list; the largest vocabularies come to about 20 MB
MAX_KEYS = MAX_TENSORS = 1 << 16
MAX_NAME = (1 << 16) - 1
MAX_DEPTH = 4  # of arrays within arrays
MAX_INNER = 1 << 16  # arrays within arrays, in a file: each costs 12 bytes there and some 400 here
MAX_ALIGNMENT = 1 << 20
MAX_PARTS = 1000

DAMAGED = "the file is cut or damaged: fetch it again"

# Metadata value types. Scalars are read by `struct`, arrays by numpy.
BOOL, STRING, ARRAY = 7, 8, 9
SCALARS = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    BOOL: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRUCTS = {kind: struct.Struct("<" + dtype.char) for kind, dtype in SCALARS.items() if kind not in (10, 11)}
_STRUCTS |= {10: struct.Struct("<Q"), 11: struct.Struct("<q")}
_U32, _U64 = _STRUCTS[4], _STRUCTS[10]

_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def open_gguf(path: str | Path) -> Checkpoint:
    """Open a GGUF file, version 2 or 3; opening any part of a split file opens all of it.

    Metadata: integers, floats, bools and strings become Python's, arrays read-only numpy views, arrays of
    strings list[str], arrays of arrays lists. The keys `split.*` are checked and then dropped, because the
    checkpoint has all parts.
    Tensor shapes are row-major, the reverse of the file's order.
    Raises CheckpointError, naming file, field, value and limit.
    """
    path = Path(path)
    parts = _open_parts(path)
    shared = _shared_layout(parts)
    names = FORMAT_BY_ID if shared is None else {**FORMAT_BY_ID, SHARED_ID: shared}
    tensors: dict[str, Tensor] = {}
    for part in parts:
        for info in part.infos:
            if info.name in tensors:
                raise _error(part.path, "tensor name", _short(info.name), "an earlier part has this tensor")
            tensors[info.name] = _tensor(part, info, names[info.type])
    metadata = {key: value for key, value in parts[0].metadata.items() if not key.startswith("split.")}
    return Checkpoint(source=str(path), naming="gguf", metadata=metadata, tensors=tensors)


def part_paths(path: str | Path) -> list[Path]:
    """All parts of the split file to which `path` belongs, by its name; [path] if it is not split."""
    path = Path(path)
    match = _PART_NAME.fullmatch(path.name)
    if not match:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= MAX_PARTS:
        raise _error(
            path,
            "file name",
            _short(path.name),
            f"parts are numbered from 1 to a count of at most {MAX_PARTS}",
        )
    return [path.with_name(f"{match['stem']}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]


class _Info(NamedTuple):
    """A tensor as the header describes it. `room`: bytes from its offset to the next tensor or the end."""

    name: str
    type: int
    shape: tuple[int, ...]
    offset: int
    room: int


class _Part(NamedTuple):
    path: Path
    alignment: int
    metadata: dict[str, Any]
    infos: list[_Info]
    data: np.ndarray  # uint8, from where offsets count to the end of the file


def _open_parts(path: Path) -> list[_Part]:
    """All parts of the split file to which `path` belongs, in order. Their names, counts and numbers
    agree."""
    paths = part_paths(path)
    for p in paths:
        if not p.is_file():
            raise CheckpointError(f"{p}: no such file; it is one of the {len(paths)} parts of {path.name}")
    parts = []
    for number, p in enumerate(paths):
        part = _open_part(p)
        parts.append(part)
        # Checked part by part, so that a wrong count is found before hundreds of files are opened.
        count = _split_key(part, "split.count", 1)
        if count != len(paths):
            raise _error(
                p,
                "split.count",
                count,
                f"by its name the file has {len(paths)} parts (NAME-00001-of-0000N.gguf)",
            )
        if (given := _split_key(part, "split.no", 0)) != number:
            raise _error(p, "split.no", given, f"by its name it is part {number}, counted from 0")
    total = sum(len(part.infos) for part in parts)
    if (claimed := _split_key(parts[0], "split.tensors.count", total)) != total:
        raise _error(path, "split.tensors.count", claimed, f"the {len(parts)} parts hold {total} tensors")
    return parts


def _split_key(part: _Part, key: str, default: int) -> int:
    value = part.metadata.get(key, default)
    if type(value) is not int:
        raise _error(part.path, key, _short(value), "an integer is expected")
    return value


def _open_part(path: Path) -> _Part:
    try:
        with open(path, "rb") as file:
            if file.seek(0, 2) < 24:
                raise _error(
                    path, "file size", f"{file.tell()} bytes", "a GGUF file starts with a header of 24"
                )
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read: {e.strerror}") from e
    header = _Header(path, buffer)
    magic = header.take(4, "magic")
    if magic != b"GGUF":
        hint = "; this is a Git LFS pointer, fetch the file itself (git lfs pull)" if magic == b"vers" else ""
        raise _error(path, "magic", magic, f"a GGUF file starts with b'GGUF'{hint}")
    version = header.unpack(_U32, "version")
    if version not in (2, 3):
        why = (
            "the file is big-endian; little-endian files are supported"
            if version & 0xFFFF == 0 and version
            else ""
        )
        raise _error(
            path,
            "version",
            version,
            why or "versions 2 and 3 are supported; convert it with llama.cpp's tools",
        )
    tensor_count = header.count("tensor count", MAX_TENSORS)
    key_count = header.count("key count", MAX_KEYS)

    metadata: dict[str, Any] = {}
    header.expect(key_count, 8 + 1 + 4 + 1, "key count")
    for i in range(key_count):
        key = header.name(f"key {i}")
        if key in metadata:
            raise _error(path, f"key {i}", _short(key), "an earlier key has this name")
        metadata[key] = header.value(header.unpack(_U32, f"type of {_short(key)}"), _short(key))

    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise _error(
            path, "general.alignment", _short(alignment), f"a power of two up to {MAX_ALIGNMENT} is expected"
        )

    header.expect(tensor_count, 8 + 1 + 4 + 8 + 4 + 8, "tensor count")
    infos = [header.tensor_info(i, alignment) for i in range(tensor_count)]
    names = set()
    for info in infos:
        if info.name in names:
            raise _error(path, "tensor name", _short(info.name), "an earlier tensor has this name")
        names.add(info.name)

    data = np.frombuffer(buffer, np.uint8)[_align(header.position, alignment) :]
    return _Part(path, alignment, metadata, _measure_room(infos, data.size), data)


class _Header:
    """Reads the header from the front. Every method checks that it reads nothing after `end`."""

    def __init__(self, path: Path, buffer: mmap.mmap):
        self.path = path
        self.buffer = buffer
        self.position = 0
        self.end = min(len(buffer), MAX_HEADER)
        self.inner = 0

    def need(self, size: int, field: str) -> None:
        if size > self.end - self.position:
            limit = (
                "the file ends"
                if self.end == len(self.buffer)
                else f"the limit of {MAX_HEADER} for a header comes"
            )
            raise _error(
                self.path,
                field,
                f"{size} bytes at {self.position}",
                f"{limit} after {self.end - self.position}",
            )

    def take(self, size: int, field: str) -> bytes:
        self.need(size, field)
        self.position += size
        return self.buffer[self.position - size : self.position]

    def unpack(self, form: struct.Struct, field: str) -> Any:
        self.need(form.size, field)
        (value,) = form.unpack_from(self.buffer, self.position)
        self.position += form.size
        return value

    def count(self, field: str, limit: int) -> int:
        value = self.unpack(_U64, field)
        if value > limit:
            raise _error(self.path, field, value, f"at most {limit} are supported")
        return value

    def expect(self, count: int, size: int, field: str) -> None:
        """`count` items follow, of at least `size` bytes each."""
        left = self.end - self.position
        if count > left // size:
            limit = f"each takes at least {size} bytes and {left} are left; {DAMAGED}"
            raise _error(self.path, field, count, limit)

    def string(self, field: str) -> str:
        return self.text(self.take(self.unpack(_U64, f"length of {field}"), field), field)

    def text(self, raw: bytes, field: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as e:
            raise _error(self.path, field, _short(raw), f"not UTF-8 at byte {e.start}") from e

    def name(self, field: str) -> str:
        length = self.unpack(_U64, f"length of {field}")
        if not 1 <= length <= MAX_NAME:
            raise _error(self.path, f"length of {field}", length, f"1 to {MAX_NAME} bytes are expected")
        return self.text(self.take(length, field), field)

    def value(self, kind: int, field: str, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string(field)
        if kind == ARRAY:
            return self.array(field, depth + 1)
        if kind not in SCALARS:
            raise _error(self.path, f"type of {field}", kind, "value types are 0 to 12")
        if kind == BOOL:
            return bool(self.boolean(1, field)[0])
        return self.unpack(_STRUCTS[kind], field)

    def array(self, field: str, depth: int) -> np.ndarray | list:
        if depth > MAX_DEPTH:
            raise _error(self.path, field, f"{depth} arrays deep", f"at most {MAX_DEPTH} are supported")
        kind = self.unpack(_U32, f"element type of {field}")
        count = self.unpack(_U64, f"length of {field}")
        if kind == STRING:
            return self.strings(count, field)
        if kind == ARRAY:
            self.expect(count, 12, f"length of {field}")
            self.inner += count
            if self.inner > MAX_INNER:
                limit = f"at most {MAX_INNER} arrays within arrays are supported in a file"
                raise _error(self.path, f"length of {field}", count, limit)
            return [self.array(f"{field}[{i}]", depth + 1) for i in range(count)]
        if kind not in SCALARS:
            raise _error(self.path, f"element type of {field}", kind, "value types are 0 to 12")
        dtype = SCALARS[kind]
        self.expect(count, dtype.itemsize, f"length of {field}")
        if kind == BOOL:
            return self.boolean(count, field)
        array = np.frombuffer(self.buffer, dtype, count, self.position)
        self.position += array.nbytes
        return array

    def boolean(self, count: int, field: str) -> np.ndarray:
        self.need(count, field)
        raw = np.frombuffer(self.buffer, np.uint8, count, self.position)
        if count and raw.max() > 1:
            raise _error(self.path, field, f"the bool {raw.max()}", "0 or 1 is expected")
        self.position += count
        return raw.view(bool)

    def strings(self, count: int, field: str) -> list[str]:
        """`string` in a loop of its own: a vocabulary and its merges are 300,000 strings."""
        self.expect(count, 8, f"length of {field}")
        buffer, position, end, unpack = self.buffer, self.position, self.end, _U64.unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                stop = position + 8
                if stop > end:
                    break
                stop += unpack(buffer, position)[0]
                if stop > end:
                    break
                strings.append(buffer[position + 8 : stop].decode())
                position = stop
        except UnicodeDecodeError as e:
            raise _error(
                self.path, f"{field}[{len(strings)}]", _short(e.object), f"not UTF-8 at byte {e.start}"
            ) from e
        self.position = position
        if len(strings) < count:
            self.string(f"{field}[{len(strings)}]")  # raises, with the reason
        return strings

    def tensor_info(self, i: int, alignment: int) -> _Info:
        """Tensor i of the header; its `room` is filled in later."""
        name = self.name(f"name of tensor {i}")
        short = _short(name)
        dims = self.unpack(_U32, f"dims of {short}")
        if not 1 <= dims <= 4:
            raise _error(self.path, f"dims of {short}", dims, "1 to 4 are supported")
        shape = tuple(self.unpack(_U64, f"shape of {short}") for _ in range(dims))[::-1]
        weights = 1
        for dim in shape:
            weights *= dim
        # 2**60 weights keep every byte count of any type inside 63 bits, where numpy and mmap count.
        if not 1 <= weights < 1 << 60:
            raise _error(self.path, f"shape of {short}", shape, "1 to 2**60 weights are expected")
        type_id = self.unpack(_U32, f"type of {short}")
        if type_id not in FORMAT_BY_ID and type_id != SHARED_ID:
            known = ", ".join(map(str, sorted({*FORMAT_BY_ID, SHARED_ID})))
            limit = f"known tensor types are {known} (checkpoints/geometry.py lists them)"
            raise _error(self.path, f"type of {short}", type_id, limit)
        offset = self.unpack(_U64, f"offset of {short}")
        if offset % alignment:
            raise _error(
                self.path,
                f"offset of {short}",
                offset,
                f"a multiple of the alignment {alignment} is expected",
            )
        return _Info(name, type_id, shape, offset, 0)


def _measure_room(infos: list[_Info], size: int) -> list[_Info]:
    """The same tensors, each with the bytes up to where the next one starts (none if both start together)."""
    order = sorted(range(len(infos)), key=lambda i: infos[i].offset)
    measured = infos.copy()
    stop = size
    for i in reversed(order):
        measured[i] = infos[i]._replace(room=min(stop, size) - infos[i].offset)
        stop = infos[i].offset
    return measured


def _tensor(part: _Part, info: _Info, format: str) -> Tensor:
    geometry = GEOMETRY[format]
    short = _short(info.name)
    columns = info.shape[-1]
    if columns % geometry.weights:
        raise _error(
            part.path, f"shape of {short}", info.shape, f"{format} rows are multiples of {geometry.weights}"
        )
    size = tensor_nbytes(format, info.shape)
    if size > info.room:
        limit = f"the next tensor starts, or the file ends, at {info.offset + info.room}; {DAMAGED}"
        raise _error(part.path, f"data of {short}", f"{size} bytes at {info.offset}", limit)
    data = part.data[info.offset : info.offset + size]
    row = columns // geometry.weights * geometry.bytes
    return Tensor(info.name, format, info.shape, data.reshape(*info.shape[:-1], row))


def _shared_layout(parts: list[_Part]) -> str | None:
    """The one of three layouts with id 42 that all these parts use; None if no tensor has this id.

    Room decides first. 128 weights take 36 bytes in groups of 64 and 34 in groups of 128, and writers place
    tensors back to back, padded to the alignment. So a layout that needs more room than any tensor has is
    out, and one that fills the room of all tensors, up to the padding, beats one that leaves gaps. (A tensor
    smaller than its padding fits both.) Among the remaining layouts the scales decide: in the place of the
    float16 d real files have finite, moderate numbers that are not negative, while codes read as float16 are
    negative or out of range in two blocks of three.
    """
    tensors = [(part, info) for part in parts for info in part.infos if info.type == SHARED_ID]
    if not tensors:
        return None
    fits, fills = [], []
    for layout in SHARED_LAYOUTS:
        if any(info.shape[-1] % GEOMETRY[layout].weights for _, info in tensors):
            continue
        sizes = [tensor_nbytes(layout, info.shape) for _, info in tensors]
        rooms = [info.room for _, info in tensors]
        if all(size <= room for size, room in zip(sizes, rooms, strict=True)):
            fits.append(layout)
            if all(
                room <= _align(s, part.alignment)
                for (part, _), s, room in zip(tensors, sizes, rooms, strict=True)
            ):
                fills.append(layout)
    part, info = tensors[0]
    if not fits:
        limit = f"none of {', '.join(SHARED_LAYOUTS)} divides the rows and fits the room of all of them"
        raise _error(
            part.path, f"type of {_short(info.name)} and the rest of type {SHARED_ID}", SHARED_ID, limit
        )
    plausible = {layout: _plausible_scales(layout, tensors) for layout in fills or fits}
    best = max(plausible, key=lambda layout: plausible[layout])
    if plausible[best] < 0.75:
        limit = (
            f"the scales are implausible as {', '.join(plausible)} (at best {plausible[best]:.0%} are sound)"
        )
        raise _error(part.path, f"type of {_short(info.name)}", SHARED_ID, limit)
    return best


def _plausible_scales(layout: str, tensors: list[tuple[_Part, _Info]]) -> float:
    """The share of plausible scales in a sample of at most 64 blocks from the middle of each of 16
    tensors."""
    size = GEOMETRY[layout].bytes
    place = size - 2 if layout == "tq2_0_g128" else 0
    plausible = []
    for part, info in tensors[:: max(1, len(tensors) // 16)][:16]:
        blocks = part.data[info.offset : info.offset + tensor_nbytes(layout, info.shape)].reshape(-1, size)
        middle = max(0, len(blocks) // 2 - 32)
        scales = blocks[middle : middle + 64, place : place + 2].copy().view("<f2").astype(np.float32)
        plausible.append(
            ((scales >= 2.0**-20) & (scales <= 64)) | (scales == 0)
        )  # false for NaN; 0: a block of zeros
    return float(np.concatenate(plausible).mean())


def _align(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _short(value: Any) -> str:
    """A value from the file for a message: quoted, so that control characters do no harm, and cut."""
    text = repr(value[:80] if isinstance(value, str | bytes) else value)
    return text if len(text) <= 100 else text[:100] + "..."


def _error(path: Path, field: str, value: Any, limit: str) -> CheckpointError:
    return CheckpointError(f"{path}: {field} is {value}; {limit}")
