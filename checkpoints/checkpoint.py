"""The common form of all model files: metadata and named tensors of raw blocks."""

import dataclasses
import math
import mmap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np


class CheckpointError(ValueError):
    """A model file is damaged, hostile or missing. Names the file, the field, the value and the limit."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor as stored in a file: blocks, not dequantized.

    name     its name in the file
    format   name of its quantization format ("q1_0", "q4_k", "f32"); supported formats have a file in
             pallas_kernels/formats
    shape    logical shape, row-major as in numpy: (rows, columns); blocks run along the columns
    data     uint8 [*shape[:-1], bytes per row], a read-only view of the memory-mapped file
    """

    name: str
    format: str
    shape: tuple[int, ...]
    data: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def forget(self) -> None:
        """Release the pages of this part of the memory map, once the caller has its own copy. Reading `data`
        again reads the file again."""
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
class Streamed:
    """A tensor to be written whose bytes are made piece by piece, so that none of it need be in memory.

    name, format, shape  as in Tensor
    pieces               makes arrays of uint8, each C-contiguous, which are its bytes one after the other
    """

    name: str
    format: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Tensors of one format and shape as one: the experts of a layer, which Hugging Face files store
    separately. Each access to `data` copies them together.

    name   the name of the whole
    parts  one or more tensors
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
class Microscaled:
    """Weights in MXFP4 as Hugging Face files store them, in two tensors. Each access to `data` copies them
    together, as the blocks of GGUF files.

    name    the name of the whole
    blocks  u8 [*rows, blocks of a row, 16]: byte i has weight 2 i of a block in its low half, 2 i + 1 in its
            high half
    scales  u8 [*rows, blocks of a row]
    """

    name: str
    blocks: Tensor
    scales: Tensor
    format = "mxfp4"

    @property
    def shape(self) -> tuple[int, ...]:
        *rows, count = self.scales.shape
        return (*rows, count * 32)

    @property
    def data(self) -> np.ndarray:
        """uint8 [*shape[:-1], bytes of a row]: weights i and i + 16 of a block share a byte."""
        first, second = self.blocks.data[..., :8], self.blocks.data[..., 8:]
        out = np.empty((*self.scales.shape, 17), np.uint8)
        out[..., 0] = self.scales.data
        out[..., 1::2] = first & 15 | second << 4
        out[..., 2::2] = first >> 4 | second & 0xF0
        return out.reshape(*self.shape[:-1], -1)

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes + self.scales.nbytes

    def forget(self) -> None:
        self.blocks.forget()
        self.scales.forget()


class Stored(Protocol):
    """What a file's tensor, or one made of several, has in common: see Tensor."""

    @property
    def name(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def data(self) -> np.ndarray: ...
    def forget(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Part:
    """Some rows of a tensor in which several matrices lie one below the other, or some values of several
    vectors in one.

    name     its name, which is not in the file
    whole    the tensor
    repeats  its rows are so many times as many
    runs     of each repeat the rows from start to stop: first those of one run in all repeats, then the next
    vector   whether its last axis has the rows
    """

    name: str
    whole: Stored
    repeats: int
    runs: tuple[tuple[int, int], ...]
    vector: bool = False

    @property
    def format(self) -> str:
        return self.whole.format

    @property
    def shape(self) -> tuple[int, ...]:
        rows = self.repeats * sum(stop - start for start, stop in self.runs)
        *lead, last = self.whole.shape
        return (*lead, rows) if self.vector else (*lead[:-1], rows, last)

    @property
    def data(self) -> np.ndarray:
        """uint8 [*shape[:-1], bytes of a row]"""
        data, shape = self.whole.data, self.whole.shape
        lead = shape[:-1] if self.vector else shape[:-2]
        each = data.reshape(*lead, self.repeats, shape[len(lead)] // self.repeats, -1)
        runs = [each[..., start:stop, :].reshape(*lead, -1, each.shape[-1]) for start, stop in self.runs]
        rows = runs[0] if len(runs) == 1 else np.concatenate(runs, axis=-2)
        return rows.reshape(*lead, -1) if self.vector else rows

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes * math.prod(self.shape) // math.prod(self.whole.shape)

    def forget(self) -> None:
        self.whole.forget()


@dataclasses.dataclass(frozen=True)
class ByHead:
    """Matrices of heads that lie below each other in one. Each access to `data` copies those that are
    transposed.

    name        its name, which is not in the file
    whole       the one matrix
    heads       its rows are those of so many
    transposed  whether each is turned over; of formats whose blocks have one weight
    """

    name: str
    whole: Stored
    heads: int
    transposed: bool

    @property
    def format(self) -> str:
        return self.whole.format

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.whole.shape
        each = rows // self.heads
        return (self.heads, columns, each) if self.transposed else (self.heads, each, columns)

    @property
    def data(self) -> np.ndarray:
        """uint8 [*shape[:-1], bytes of a row]"""
        rows, columns = self.whole.shape
        data = self.whole.data.reshape(self.heads, rows // self.heads, -1)
        if not self.transposed:
            return data
        weights = data.reshape(*data.shape[:2], columns, -1)
        return np.ascontiguousarray(weights.swapaxes(1, 2)).reshape(self.heads, columns, -1)

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes

    def forget(self) -> None:
        self.whole.forget()


@dataclasses.dataclass(frozen=True)
class Changed:
    """A tensor with other values than its file has, such as weights rounded to three values, or multiplied.
    Each access to `data` computes them.

    whole   the file's tensor, f32, f16 or bf16; the result has its format and is rounded to that
    change  float32 [*shape] -> float32 [*shape]
    """

    whole: Stored
    change: Callable[[np.ndarray], np.ndarray]

    def __post_init__(self):
        if self.whole.format not in _FLOATS:
            raise CheckpointError(
                f"tensor {self.name}: format is {self.whole.format!r}, and its values must be changed while "
                f"they are loaded; supported: {', '.join(_FLOATS)}"
            )

    @property
    def name(self) -> str:
        return self.whole.name

    @property
    def format(self) -> str:
        return self.whole.format

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape

    @property
    def data(self) -> np.ndarray:
        """uint8 [*shape[:-1], bytes of a row]"""
        dtype = _FLOATS[self.format]
        stored = np.ascontiguousarray(self.whole.data).view(dtype).reshape(self.shape)
        if self.format != "bf16":
            values = self.change(stored.astype(np.float32)).astype(dtype)
        else:  # the upper half of a float32, rounded to nearest even
            values = self.change((stored.astype(np.uint32) << 16).view(np.float32)).view(np.uint32)
            values = ((values + 0x7FFF + (values >> 16 & 1)) >> 16).astype(np.uint16)
        return values.view(np.uint8).reshape(*self.shape[:-1], -1)

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes

    def forget(self) -> None:
        self.whole.forget()


_FLOATS = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}  # numpy has no bfloat16


@dataclasses.dataclass(frozen=True)
class RandomTensor:
    """The description of a tensor of seeded random weights with this mean and standard deviation.

    Its blocks are drawn at load, on the device that needs them. `nbytes` is its size in a file.
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

    source    the name that the user gave, for messages
    naming    the naming scheme of tensors and metadata keys: GGUF's ("blk.0.attn_q.weight",
              "qwen3.block_count") or Hugging Face's ("model.layers.0.self_attn.q_proj.weight",
              config.json's keys)
    metadata  GGUF key-value pairs (arrays as numpy arrays or lists of str), or the content of config.json
    tensors   by name, in file order
    folder    the folder of tokenizer.json and its like, for Hugging Face folders
    """

    source: str
    naming: Literal["gguf", "huggingface"]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor | Microscaled | RandomTensor]
    folder: Path | None = None
