"""GGUF, the file format of llama.cpp: the writer. The reader, with a picture of the format, is gguf.py."""

import os
import shutil
import struct
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .checkpoint import CheckpointError, Streamed, Tensor
from .geometry import FORMAT_BY_ID, GEOMETRY, SHARED_LAYOUTS, tensor_nbytes
from .gguf import ARRAY, MAX_ALIGNMENT, SCALARS, STRING
from .writing import naming

VERSION = 3
MAX_TENSOR_NAME = 63  # bytes; llama.cpp keeps names in 64 with the closing zero

_TYPE_OF_DTYPE = {dtype: kind for kind, dtype in SCALARS.items()}
# Python ints have no width of their own: the first type that holds them. Arrays prefer i32, as llama.cpp
# does.
_INT, _INTS = ("<u4", "<i4", "<i8", "<u8"), ("<i4", "<u4", "<i8", "<u8")


def write_gguf(
    path: str | Path,
    metadata: Mapping[str, Any],
    tensors: Iterable[Tensor | Streamed],
    *,
    alignment: int = 32,
) -> None:
    """Write a GGUF file, version 3.

    Metadata types: str; bool; int -> u32, else i32, i64, u64, the first that holds it; float -> f32; numpy
    scalars and arrays keep their dtype. A list is an array of one type by the same rules, except that ints
    prefer i32; a list of lists, or a numpy array of more dimensions, is an array of arrays. `split.*` keys
    are left out and `general.alignment` is this call's, so that the metadata of an open checkpoint can be
    passed as it is.

    `tensors` may be a generator: each tensor is written as it comes, then released; a Streamed one is never
    whole in memory. The bytes go to temporary
    files in the same folder, and `path` appears, or is replaced, only once everything is written.
    Raises CheckpointError for a value, tensor or name that a GGUF file cannot hold, and OSErrors.
    """
    path = Path(path)
    if not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise CheckpointError(
            f"{path}: alignment is {alignment}; a power of two from 8 to {MAX_ALIGNMENT} is expected"
        )
    keys = _encode_metadata(path, metadata, alignment)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        # The header comes first and needs every tensor's shape, so the data goes to a second file until then.
        with naming(path), tempfile.TemporaryFile(dir=path.parent) as body, open(unfinished, "wb") as out:
            infos = _write_data(path, tensors, body, alignment)
            header = [b"GGUF", struct.pack("<IQQ", VERSION, len(infos), len(keys)), *keys, *infos]
            header = b"".join(header)
            out.write(header + bytes(-len(header) % alignment))
            body.seek(0)
            shutil.copyfileobj(body, out, 16 << 20)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _write_data(
    path: Path, tensors: Iterable[Tensor | Streamed], body: BinaryIO, alignment: int
) -> list[bytes]:
    """Writes every tensor's bytes, padded, and returns every tensor's entry in the header."""
    infos, names = [], set()
    for tensor in tensors:
        where = f"{path}: tensor {tensor.name!r}"
        if not isinstance(tensor, Tensor | Streamed):
            raise CheckpointError(f"{where} is a {type(tensor).__name__}; only a Tensor has bytes to write")
        if tensor.name in names:
            raise CheckpointError(f"{where} is given twice")
        names.add(tensor.name)
        name = tensor.name.encode()
        if not 1 <= len(name) <= MAX_TENSOR_NAME:
            raise CheckpointError(
                f"{where} has a name of {len(name)} bytes; 1 to {MAX_TENSOR_NAME} are allowed"
            )
        known = (*FORMAT_BY_ID.values(), *SHARED_LAYOUTS)
        if tensor.format not in known:
            raise CheckpointError(f"{where} has format {tensor.format!r}; known are {', '.join(known)}")
        geometry = GEOMETRY[tensor.format]
        if not 1 <= len(tensor.shape) <= 4 or min(tensor.shape) < 1 or tensor.shape[-1] % geometry.weights:
            raise CheckpointError(
                f"{where} has shape {tensor.shape}; 1 to 4 dimensions are allowed, none of them 0, "
                f"and rows of {tensor.format} are multiples of {geometry.weights}"
            )
        expected = (*tensor.shape[:-1], tensor.shape[-1] // geometry.weights * geometry.bytes)
        if isinstance(tensor, Tensor) and (tensor.data.dtype != np.uint8 or tensor.data.shape != expected):
            raise CheckpointError(
                f"{where} has data {tensor.data.dtype} {tensor.data.shape}; "
                f"{tensor.format} {tensor.shape} takes uint8 {expected}"
            )
        dims, begin = struct.pack(f"<I{len(expected)}Q", len(expected), *reversed(tensor.shape)), body.tell()
        infos.append(_string(name) + dims + struct.pack("<IQ", geometry.id, begin))
        for piece in tensor.pieces() if isinstance(tensor, Streamed) else (tensor.data,):
            body.write(np.ascontiguousarray(piece).data)
        if body.tell() - begin != (nbytes := tensor_nbytes(tensor.format, tensor.shape)):
            raise CheckpointError(f"{where} has pieces of {body.tell() - begin} bytes; it takes {nbytes}")
        body.write(bytes(-body.tell() % alignment))
    return infos


def _encode_metadata(path: Path, metadata: Mapping[str, Any], alignment: int) -> list[bytes]:
    pairs = {k: v for k, v in metadata.items() if k != "general.alignment" and not k.startswith("split.")}
    if alignment != 32:
        pairs["general.alignment"] = np.uint32(alignment)
    encoded = []
    for key, value in pairs.items():
        if not 1 <= len(key.encode()) < 1 << 16:
            raise CheckpointError(
                f"{path}: key {key[:80]!r} has {len(key.encode())} bytes; 1 to 65535 are allowed"
            )
        try:
            kind, raw = _encode(value)
        except (TypeError, OverflowError, UnicodeEncodeError) as e:
            raise CheckpointError(f"{path}: {key} cannot be written: {e}") from e
        encoded.append(_string(key.encode()) + struct.pack("<I", kind) + raw)
    return encoded


def _encode(value: Any) -> tuple[int, bytes]:
    """A value's type and bytes."""
    if isinstance(value, str):
        return STRING, _string(value.encode())
    if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim):
        return ARRAY, _encode_array(value)
    if isinstance(value, bool | int | float) and not isinstance(value, np.generic):
        value = np.array(value, _dtype([value], _INT))
    array = np.asarray(value)
    return _type_of(array), _little_endian(array)


def _encode_array(values: list | tuple | np.ndarray) -> bytes:
    if not isinstance(values, np.ndarray):
        if not len(values):
            raise TypeError("an empty list has no element type; pass an empty numpy array")
        if all(isinstance(v, bool | int | float) and not isinstance(v, np.generic) for v in values):
            values = np.array(values, _dtype(values, _INTS))
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind not in "UO":
        return struct.pack("<IQ", _type_of(values), len(values)) + _little_endian(values)
    items = [_encode(v) for v in values]
    kinds = {kind for kind, _ in items}
    if len(kinds) != 1:
        raise TypeError("a list needs elements of one type")
    return struct.pack("<IQ", *kinds, len(items)) + b"".join(raw for _, raw in items)


def _dtype(values: list | tuple, choices: tuple[str, ...]) -> str:
    """The GGUF type for Python numbers."""
    kinds = {type(v) for v in values}
    if kinds == {bool}:
        return "?"
    if bool in kinds:
        raise TypeError("a list of bools and numbers")
    if float in kinds:
        return "<f4"
    for dtype in choices:
        limits = np.iinfo(dtype)
        if limits.min <= min(values) and max(values) <= limits.max:
            return dtype
    raise OverflowError("an integer of more than 64 bits")


def _type_of(array: np.ndarray) -> int:
    kind = _TYPE_OF_DTYPE.get(array.dtype.newbyteorder("<"))
    if kind is None:
        raise TypeError(
            f"GGUF has no type for {array.dtype}; it has {', '.join(str(d) for d in _TYPE_OF_DTYPE)}"
        )
    return kind


def _little_endian(array: np.ndarray) -> bytes:
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


def _string(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw
