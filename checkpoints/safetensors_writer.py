"""Hugging Face folders: the writer. The reader, with the format, is safetensors.py."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoint import CheckpointError, Streamed
from .geometry import tensor_nbytes
from .safetensors import FORMATS
from .writing import naming

DTYPES = {format: dtype for dtype, (format, _) in FORMATS.items()}
MOST_BYTES = 5_000_000_000  # of a file; more become several with an index, as transformers does it


def write_folder(
    folder: str | Path,
    files: Mapping[str, Any],
    tensors: Sequence[Streamed],
    *,
    most_bytes: int = MOST_BYTES,
    overwrite: bool = False,
) -> None:
    """Write a Hugging Face folder of tensors in f32, f16, bf16 or u8.

    files       what else is in it, by name: text, or an object that is written as JSON
    tensors     in their order in the files, each of at most `most_bytes` unless one alone has more
    overwrite   replace a folder that is there
    Everything is written to a folder beside it, which gets its name once it is complete. Raises
    CheckpointError for a tensor that a safetensors file cannot hold, and OSErrors.
    """
    folder = Path(folder).absolute()
    for tensor in tensors:
        if tensor.format not in DTYPES:
            known = ", ".join(DTYPES)
            raise CheckpointError(f"{folder}: tensor {tensor.name!r} is {tensor.format}; known are {known}")
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.unfinished")
    before = folder.with_name(f".{folder.name}.{os.getpid()}.before")
    try:
        with naming(folder):
            unfinished.mkdir()
            for name, content in files.items():
                text = (
                    content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False)
                )
                (unfinished / name).write_text(text, encoding="utf-8")
            _write_tensors(unfinished, tensors, most_bytes)
        if overwrite and folder.is_dir():
            os.replace(folder, before)
        os.replace(unfinished, folder)
    finally:
        if before.exists() and not folder.exists():
            os.replace(before, folder)
        shutil.rmtree(before, ignore_errors=True)
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_tensors(folder: Path, tensors: Sequence[Streamed], most_bytes: int) -> None:
    """One file, or several and their index."""
    sizes = {tensor.name: tensor_nbytes(_geometry(tensor), tensor.shape) for tensor in tensors}
    shards: list[list[Streamed]] = [[]]
    room = most_bytes
    for tensor in tensors:
        if shards[-1] and sizes[tensor.name] > room:
            shards.append([])
            room = most_bytes
        shards[-1].append(tensor)
        room -= sizes[tensor.name]
    if len(shards) == 1:
        _write_file(folder / "model.safetensors", shards[0], sizes)
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_file(folder / name, shard, sizes)
        weight_map |= {tensor.name: name for tensor in shard}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _geometry(tensor: Streamed) -> str:
    return "i8" if tensor.format == "u8" else tensor.format


def _write_file(path: Path, tensors: Sequence[Streamed], sizes: Mapping[str, int]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in tensors:
        end = begin + sizes[tensor.name]
        entry = {"dtype": DTYPES[tensor.format], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        header[tensor.name] = entry
        begin = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as out:
        out.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in tensors:
            start = out.tell()
            for piece in tensor.pieces():
                out.write(np.ascontiguousarray(piece).data)
            if out.tell() - start != sizes[tensor.name]:
                raise CheckpointError(
                    f"{path}: tensor {tensor.name!r} has pieces of {out.tell() - start} bytes; it takes "
                    f"{sizes[tensor.name]}"
                )
