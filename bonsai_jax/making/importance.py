"""Importance matrices: for each column of a matrix, the mean square of the activations that it is multiplied
with.

llama.cpp's files of them, both kinds: GGUF (`general.type` "imatrix", with the sum of squares NAME.in_sum2
and the number of tokens NAME.counts of each matrix), and the older one without a header.
"""

import dataclasses
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints import CheckpointError, Tensor, open_checkpoint, write_gguf

EXPECTED = "an importance matrix is a file that `bonsai-jax imatrix` or llama.cpp's llama-imatrix has written"
SUMS, COUNTS = ".in_sum2", ".counts"


@dataclasses.dataclass(frozen=True)
class Importance:
    """The importance matrices of a model.

    source    the file
    columns   by tensor name, float32 [matrices, K]: one matrix, or each expert's
    counts    of the same matrices, float32 [matrices], the number of tokens; empty: the file does not say
    datasets  the texts that they are of
    chunks    pieces of text that were read; None: the file does not say
    chunk_size  tokens of a piece, at most
    """

    source: str
    columns: Mapping[str, np.ndarray]
    counts: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    datasets: tuple[str, ...] = ()
    chunks: int | None = None
    chunk_size: int = 512

    def matrix(self, name: str, shape: tuple[int, ...]) -> np.ndarray | None:
        """float32 [matrices, K] for a tensor of this shape; None where the file does not name it. Raises
        CheckpointError for other sizes."""
        columns = self.columns.get(name)
        if columns is None:
            return None
        expected = (math.prod(shape[:-2]), shape[-1])
        if columns.size != math.prod(expected):  # older files do not say how many experts there are
            matrices = "" if expected[0] == 1 else f"{expected[0]} matrices of "
            raise CheckpointError(
                f"{self.source}: {name} has {columns.size} numbers, but the model has {matrices}{shape[-1]} "
                "columns; take an importance matrix of this model"
            )
        return columns.reshape(expected)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it as a GGUF file that llama.cpp's llama-quantize reads."""
        metadata = {
            "general.type": "imatrix",
            "imatrix.datasets": list(self.datasets) or [self.source],
            "imatrix.chunk_count": np.uint32(self.chunks or 1),
            "imatrix.chunk_size": np.uint32(self.chunk_size),
        }
        tensors = []
        for name, columns in sorted(self.columns.items()):
            counts = self.counts.get(name, np.ones(len(columns), np.float32))[:, None]
            for ending, x in ((SUMS, columns * counts), (COUNTS, counts)):
                x = np.ascontiguousarray(x, np.float32)
                tensors.append(Tensor(name + ending, "f32", x.shape, x.view(np.uint8)))
        write_gguf(Path(path), metadata, tensors)

    @property
    def metadata(self) -> dict[str, Any]:
        """What llama.cpp writes about it into a quantized file."""
        keys: dict[str, Any] = {"file": self.source, "entries_count": np.uint32(len(self.columns))}
        if self.datasets:
            keys["dataset"] = self.datasets[0]
        if self.chunks is not None:
            keys["chunks_count"] = np.uint32(self.chunks)
        return {f"quantize.imatrix.{key}": value for key, value in keys.items()}


def read_importance(path: str | os.PathLike[str]) -> Importance:
    """Read a file of importance matrices. Raises CheckpointError for one that is none."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
            importance = _read_gguf(path) if magic == b"GGUF" else _read_legacy(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    for name, columns in importance.columns.items():
        if not (np.isfinite(columns).all() and (columns >= 0).all()):
            raise CheckpointError(
                f"{path}: {name} has an importance that is negative or not finite; {EXPECTED}"
            )
    return importance


def means(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """sums / counts. An expert that no token was sent to has the same importance everywhere."""
    return np.where(counts > 0, sums / np.where(counts > 0, counts, 1), 1).astype(np.float32)


def _read_gguf(path: Path) -> Importance:
    checkpoint = open_checkpoint(path)
    metadata, tensors = checkpoint.metadata, checkpoint.tensors
    columns, counted_by = {}, {}
    for name, tensor in tensors.items():
        if not name.endswith(SUMS):
            continue
        matrix = name.removesuffix(SUMS)
        if (counted := tensors.get(matrix + COUNTS)) is None:
            raise CheckpointError(f"{path}: {name} has no {COUNTS[1:]} beside it; {EXPECTED}")
        sums, counts = (_floats(path, t) for t in (tensor, counted))
        sums, counts = sums.reshape(-1, sums.shape[-1]), counts.reshape(-1, 1)
        if len(counts) not in (1, len(sums)):
            raise CheckpointError(
                f"{path}: {matrix} has {len(sums)} rows and {len(counts)} counts; {EXPECTED}"
            )
        columns[matrix], counted_by[matrix] = means(sums, counts), counts[:, 0]
    if not columns:
        raise CheckpointError(f"{path}: no tensor's name ends in {SUMS}; {EXPECTED}")
    chunks = metadata.get("imatrix.chunk_count")
    datasets = tuple(metadata.get("imatrix.datasets", ()))
    return Importance(str(path), columns, counted_by, datasets, chunks)


def _floats(path: Path, tensor: Any) -> np.ndarray:
    if not isinstance(tensor, Tensor) or tensor.format != "f32":
        raise CheckpointError(f"{path}: {tensor.name} is {tensor.format}, f32 is expected; {EXPECTED}")
    return np.asarray(tensor.data).view(np.float32).reshape(tensor.shape)


def _read_legacy(path: Path) -> Importance:
    """The number of entries; of each its name, a number of calls, and the values times calls. Newer files end
    with the number of chunks and the text's name. Experts follow each other without their number."""
    raw, position = path.read_bytes(), 0

    def take(size: int) -> bytes:
        nonlocal position
        if not 0 <= size <= len(raw) - position:
            raise CheckpointError(f"{path}: ends early or is another kind of file; {EXPECTED}")
        position += size
        return raw[position - size : position]

    def number() -> int:
        return struct.unpack("<i", take(4))[0]

    columns = {}
    for _ in range(number()):
        name, calls = take(number()).decode(errors="replace"), number()
        columns[name] = np.frombuffer(take(4 * number()), "<f4")[None] / np.float32(max(calls, 1))
    if not columns:
        raise CheckpointError(f"{path}: it has no entries; {EXPECTED}")
    if position == len(raw):
        return Importance(str(path), columns)
    chunks, text = number(), take(number())
    return Importance(str(path), columns, datasets=(text.decode(errors="replace"),), chunks=chunks)
