"""What every kind of model file becomes: metadata and named tensors of raw blocks."""

import dataclasses
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np


class CheckpointError(ValueError):
    """A model file that is broken, hostile or absent. Names the file, the field, the value and the limit."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor as it lies in a file, blocks undecoded.

    name     the file's own name for it
    format   name of its quantization format ("q1_0", "q4_k", "f32"): if supported, a file of
             pallas_kernels/formats
    shape    logical shape, row-major as in numpy: (rows, columns); blocks run along the columns
    data     uint8 [*shape[:-1], bytes of a row], a read-only view of the memory-mapped file
    """

    name: str
    format: str
    shape: tuple[int, ...]
    data: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def forget(self) -> None:
        """Give back the memory in which the system keeps this part of the file: it was read, and a process
        that holds a copy should not hold both. Whoever reads it again gets it from the file."""
        file = self.data
        while isinstance(file, np.ndarray | memoryview):
            file = file.base if isinstance(file, np.ndarray) else file.obj
        if not isinstance(file, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
            return
        begin = self.data.ctypes.data - np.frombuffer(file, np.uint8).ctypes.data
        first, last = -(-begin // mmap.PAGESIZE), (begin + self.nbytes) // mmap.PAGESIZE  # whole pages
        if first < last:
            file.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Tensors of one format and shape as one: the experts of a layer, which Hugging Face files hold one by
    one. They are copied together when `data` is read, each time.

    name   whose they are
    parts  at least one
    """

    name: str
    parts: tuple[Tensor, ...]

    @property
    def format(self) -> str:
        return self.parts[0].format

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.parts), *self.parts[0].shape

    @property
    def data(self) -> np.ndarray:
        """uint8 [parts, *shape[:-1], bytes of a row]"""
        return np.stack([part.data for part in self.parts])

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def forget(self) -> None:
        for part in self.parts:
            part.forget()


@dataclasses.dataclass(frozen=True)
class RandomTensor:
    """A tensor that is only described: seeded random weights with this mean and standard deviation.

    Whoever loads it draws the blocks, on the device that needs them. `nbytes` is what a file would hold.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    seed: int
    mean: float
    std: float
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model's file or files.

    source    what the user asked for, for messages
    naming    whose names tensors and metadata keys have: GGUF's ("blk.0.attn_q.weight",
              "qwen3.block_count") or Hugging Face's ("model.layers.0.self_attn.q_proj.weight",
              config.json's keys)
    metadata  GGUF key-value pairs (arrays as numpy arrays or lists of str), or the content of config.json
    tensors   by name, in file order
    folder    where tokenizer.json and its kin lie, for Hugging Face folders
    """

    source: str
    naming: Literal["gguf", "huggingface"]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor | RandomTensor]
    folder: Path | None = None
