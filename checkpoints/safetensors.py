"""Hugging Face folders: config.json beside one or more safetensors files.

    u64 length | JSON of that length: {name: {"dtype", "shape", "data_offsets": [begin, end]}, ...} | data

This file reads the header itself, because the safetensors package returns numpy arrays, which have no
bfloat16, and a Tensor needs raw bytes. As in gguf.py, every number is checked before it is used, and data is
a view of the memory map.
"""

import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoint import Checkpoint, CheckpointError, Microscaled, Tensor

MAX_JSON = 16 << 20  # bytes of a header, an index or config.json
MAX_DIMS = 8
FORMATS = {"F32": ("f32", 4), "F16": ("f16", 2), "BF16": ("bf16", 2), "U8": ("u8", 1)}


def open_folder(folder: str | Path) -> Checkpoint:
    """Open a Hugging Face folder: config.json is the metadata, *.safetensors hold the tensors.

    Tensors are f32, f16 or bf16; two of bytes, NAME_blocks and NAME_scales, are one of mxfp4 (Microscaled).
    With model.safetensors.index.json, the shards must hold exactly what it lists.
    Raises CheckpointError, naming file, field, value and limit.
    """
    folder = Path(folder)
    config = folder / "config.json"
    metadata = _object(config, _read_json(config))
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        tensors = _read_file(single)
    elif index.is_file():
        tensors = _read_shards(index)
    else:
        files = sorted(folder.glob("*.safetensors"))
        if len(files) != 1:
            names = ", ".join(f.name for f in files[:20]) or "no .safetensors file"
            raise CheckpointError(
                f"{folder}: {names}; model.safetensors, or {index.name} with its shards, is expected"
            )
        tensors = _read_file(files[0])
    tensors = microscaled(tensors)
    return Checkpoint(
        source=str(folder), naming="huggingface", metadata=metadata, tensors=tensors, folder=folder
    )


def microscaled(tensors: dict[str, Tensor]) -> dict[str, Tensor | Microscaled]:
    """With one tensor in place of blocks and scales that belong together."""
    joined: dict[str, Tensor | Microscaled] = dict(tensors)
    for name, blocks in tensors.items():
        whole = name.removesuffix("_blocks")
        scales = tensors.get(f"{whole}_scales")
        if whole == name or scales is None or {blocks.format, scales.format} != {"u8"}:
            continue
        if blocks.shape == (*scales.shape, 16):
            del joined[name], joined[scales.name]
            joined[whole] = Microscaled(whole, blocks, scales)
    return joined


def _read_shards(index: Path) -> dict[str, Tensor]:
    weight_map = _object(index, _read_json(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index}: weight_map is {_short(weight_map)}; an object of tensor to file is expected"
        )
    # Plain names only: an index must not reach out of its folder. (A shard may be a link: the Hub's cache
    # uses them.)
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or set(shard) & set("/\\:\0"):
            raise CheckpointError(
                f"{index}: file of {_short(name)} is {_short(shard)}; a plain .safetensors name is expected"
            )
    tensors: dict[str, Tensor] = {}
    for shard in dict.fromkeys(weight_map.values()):
        if not (index.parent / shard).is_file():
            raise CheckpointError(f"{index.parent / shard}: no such file; {index.name} lists it")
        for name, tensor in _read_file(index.parent / shard).items():
            if weight_map.get(name) != shard:
                listed = _short(weight_map.get(name, "no file"))
                raise CheckpointError(
                    f"{index.parent / shard}: holds {_short(name)}; {index.name} lists it in {listed}"
                )
            tensors[name] = tensor
    for name in weight_map:
        if name not in tensors:
            raise CheckpointError(
                f"{index.parent / weight_map[name]}: has no tensor {_short(name)}; {index.name} lists it"
            )
    return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, in the order of their data."""
    try:
        with open(path, "rb") as file:
            if (size := file.seek(0, 2)) < 8:
                raise CheckpointError(
                    f"{path}: file size is {size} bytes; a safetensors file starts with 8 of length"
                )
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read: {e.strerror}") from e
    length = int.from_bytes(buffer[:8], "little")
    if not 2 <= length <= min(size - 8, MAX_JSON):
        limit = f"2 to {min(size - 8, MAX_JSON)} are possible ({size} bytes in the file, {MAX_JSON} at most)"
        hint = (
            "; this is a Git LFS pointer, fetch the file itself (git lfs pull)"
            if buffer[:4] == b"vers"
            else ""
        )
        raise CheckpointError(f"{path}: header length is {length}; {limit}{hint}")
    header = _object(path, _parse_json(path, buffer[8 : 8 + length]))
    header.pop("__metadata__", None)
    data = np.frombuffer(buffer, np.uint8)[8 + length :]
    spans = sorted((_span(path, name, entry, data.size), name) for name, entry in header.items())
    end = 0
    tensors = {}
    for (begin, stop), name in spans:
        if begin != end:
            kind = "overlaps the tensor before" if begin < end else "leaves a gap"
            raise CheckpointError(
                f"{path}: data_offsets of {_short(name)} is {[begin, stop]}; it {kind}, which ends at {end}"
            )
        end = stop
        format, itemsize = FORMATS[header[name]["dtype"]]
        shape = tuple(header[name]["shape"]) or (1,)  # a scalar is a vector of one value
        tensors[name] = Tensor(
            name, format, shape, data[begin:stop].reshape(*shape[:-1], shape[-1] * itemsize)
        )
    if end != data.size:
        raise CheckpointError(f"{path}: data is {data.size} bytes; the tensors of the header end at {end}")
    return tensors


def _span(path: Path, name: str, entry: Any, size: int) -> tuple[int, int]:
    """The begin and end of a tensor's data. Checks its entry in the header."""
    short = _short(name)
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{path}: entry of {short} is {_short(entry)}; dtype, shape and data_offsets are expected"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in FORMATS:
        raise CheckpointError(
            f"{path}: dtype of {short} is {_short(dtype)}; {', '.join(FORMATS)} are supported"
        )
    if not _counts(shape) or len(shape) > MAX_DIMS or min(shape, default=1) < 1:
        raise CheckpointError(
            f"{path}: shape of {short} is {_short(shape)}; at most {MAX_DIMS} dims of 1 or more are expected"
        )
    if not _counts(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size:
        raise CheckpointError(
            f"{path}: data_offsets of {short} is {_short(offsets)}; [begin, end] within {size} is expected"
        )
    nbytes = FORMATS[dtype][1]
    for dim in shape:
        nbytes *= dim
    if offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(
            f"{path}: data_offsets of {short} is {offsets}; {dtype} {_short(shape)} takes {nbytes} bytes"
        )
    return offsets[0], offsets[1]


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def _read_json(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_JSON + 1)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; a Hugging Face folder has one") from None
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read: {e.strerror}") from e
    if len(raw) > MAX_JSON:
        raise CheckpointError(f"{path}: file size is over the limit of {MAX_JSON} bytes")
    return _parse_json(path, raw)


def _parse_json(path: Path, raw: bytes) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise CheckpointError(f"{path}: {_short(twice)} is given twice; names are unique")
        return content

    try:
        return json.loads(raw.decode(), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError(f"{path}: JSON is nested too deep") from None
    except ValueError as e:  # JSON, UTF-8, or an integer of thousands of digits
        raise CheckpointError(f"{path}: not JSON: {_short(str(e))}") from None


def _object(path: Path, content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: JSON is {_short(content)}; an object is expected")
    return content


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."
