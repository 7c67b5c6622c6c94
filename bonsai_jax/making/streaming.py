"""Tensors of another file's names and arrangement, as pieces that are made while they are written.

    rows of the file's tensor  ->  in their new order  ->  in another format  ->  a piece of the new file

Memory holds a few million weights, and of matrices that lie in one another tensor the one.
"""

import concurrent.futures
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from bonsai_jax.making.quantizing import PIECES, encode_blocks
from bonsai_jax.weights.scales import Scaled
from bonsai_jax.weights.specs import Rows, Source
from checkpoints import CheckpointError, Gathered, Microscaled, Part, Tensor
from checkpoints.geometry import GEOMETRY
from pallas_kernels import formats

THREADS = 4
type Order = tuple[int, np.ndarray] | None  # (axis, which rows or columns)


@dataclasses.dataclass(frozen=True)
class Matrices:
    """Where a tensor's matrices come from, one or one for each expert.

    where    the file, for messages
    source   its tensor
    order    which of its rows (axis 0), or columns (axis 1), are those of the new one; None: all as they are
    factor   by which values are multiplied
    rows     which rows of the new tensor are these; None: all
    transposed  whether each matrix is turned over
    """

    where: str
    source: Source
    order: Order = None
    factor: float = 1.0
    rows: Rows | None = None
    transposed: bool = False

    def pieces(self, format: str, note: Callable[[int], None]) -> Iterator[np.ndarray]:
        """The bytes of all matrices in a format, uint8 arrays. note: called with weights so far."""
        for matrix in matrices(self.source):
            yield from self._matrix(matrix, format, note)

    def _matrix(self, matrix: Source, format: str, note: Callable[[int], None]) -> Iterator[np.ndarray]:
        data, columns = np.asarray(matrix.data), matrix.shape[-1]
        data = data.reshape(-1, data.shape[-1])
        axis, index = self.order if self.order is not None else (0, None)
        step = max(1, PIECES[-1] // columns)

        def piece(first: int) -> np.ndarray:
            rows = data[first : first + step]
            if index is not None and axis == 0:
                rows = data[index[first : first + step]]
            if index is not None and axis == 1:
                rows = self._columns(rows, matrix.format, index)
            return converted(self._scaled(rows, matrix.format), self._format(matrix), format, self._named())

        for rows in prefetched(piece, range(0, len(data), step)):
            yield rows
            note(len(rows) * columns)
            self.source.forget()

    def _named(self) -> str:
        return f"{self.where}: {self.source.name}"

    def _columns(self, rows: np.ndarray, format: str, index: np.ndarray) -> np.ndarray:
        geometry = GEOMETRY[format]
        if geometry.weights > 1:
            raise NotImplementedError(
                f"{self._named()} is {format}, and its columns have another order in the new file; take "
                "a file in F32, F16 or BF16"
            )
        by_column = rows.reshape(len(rows), -1, geometry.bytes)
        return np.ascontiguousarray(by_column[:, index]).reshape(len(rows), -1)

    def _format(self, matrix: Source) -> str:
        return matrix.format if self.factor == 1 else "f32"

    def _scaled(self, rows: np.ndarray, format: str) -> np.ndarray:
        if self.factor == 1:
            return rows
        values = formats.values(format, np.ascontiguousarray(rows)).reshape(len(rows), -1)
        return (values * np.float32(self.factor)).view(np.uint8)


def prefetched(make: Callable[[int], np.ndarray], items: Sequence[int]) -> Iterator[np.ndarray]:
    """make(item) for each, in order, a few of them made by threads while the caller writes one."""
    if len(items) == 1:
        yield make(items[0])
        return
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        waiting: deque[concurrent.futures.Future[np.ndarray]] = deque()
        for item in items:
            waiting.append(pool.submit(make, item))
            if len(waiting) > THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def matrices(source: Any) -> Iterator[Any]:
    """A tensor's matrices one by one: the tensor itself where it is one."""
    if len(source.shape) < 3:
        yield source
    elif isinstance(source, Gathered):
        yield from source.parts
    elif isinstance(source, Microscaled):
        for blocks, scales in zip(matrices(source.blocks), _rows(source.scales), strict=True):
            assert isinstance(blocks, Tensor)
            yield Microscaled(source.name, blocks, scales)
    elif isinstance(source, Scaled):
        for number, whole in enumerate(matrices(source.whole)):
            own = np.asarray(source.scale.data).reshape(-1, 4)
            own = own[number if len(own) > 1 else 0]
            yield Scaled(source.source, whole, Tensor(source.scale.name, "f32", (1,), own))
    elif isinstance(source, Part) and not source.vector:
        for whole in matrices(source.whole):
            yield dataclasses.replace(source, whole=whole)
    else:
        yield from _rows(source)


def _rows(source: Source) -> Iterator[Tensor]:
    """A tensor cut along its first axis."""
    for data in source.data:
        yield Tensor(source.name, source.format, source.shape[1:], data)


def fused_pieces(
    members: Sequence[Matrices], shape: tuple[int, ...], format: str, note: Callable[[int], None]
) -> Iterator[np.ndarray]:
    """The bytes of a tensor in which the rows of several lie, matrix by matrix. shape: its own."""
    count = shape[0] if len(shape) == 3 else 1
    width = shape[-1] // GEOMETRY[format].weights * GEOMETRY[format].bytes
    each = [_member(member, count, width, format, note) for member in members]
    for parts in zip(*each, strict=True):
        out = np.empty((shape[-2], width), np.uint8)
        for member, part in zip(members, parts, strict=True):
            assert member.rows is not None
            out[positions(member.rows)] = part
        yield out
    for member in members:
        member.source.forget()


def _member(
    member: Matrices, count: int, width: int, format: str, note: Callable[[int], None]
) -> Iterator[np.ndarray]:
    """The rows of each matrix of a member, uint8 [rows, width]."""
    parts = [member.source] if count == 1 else matrices(member.source)
    for part in parts:
        raw = [piece.reshape(-1) for own in matrices(part) for piece in member._matrix(own, format, note)]
        out = np.concatenate(raw)
        if member.transposed:  # of floats
            heads, rank, each = part.shape
            out = out.reshape(heads, rank, each, -1).swapaxes(1, 2)
        yield np.ascontiguousarray(out).reshape(-1, width)


def positions(rows: Rows) -> np.ndarray:
    """Which rows of the whole are a member's, in its order (checkpoints.Part)."""
    starts = np.arange(rows.repeats)[:, None] * rows.size
    return np.concatenate([(starts + np.arange(*run)).reshape(-1) for run in rows.runs])


def converted(rows: np.ndarray, before: str, after: str, name: str) -> np.ndarray:
    """Rows of blocks in another format, uint8 [rows, bytes]. Raises CheckpointError for weights that are no
    finite numbers, and for those beyond the range of F16."""
    if before == after:
        return rows
    size_in = GEOMETRY[before].bytes * max(1, GEOMETRY[after].weights // GEOMETRY[before].weights)
    blocks = np.ascontiguousarray(rows).reshape(-1, size_in)
    weights = size_in // GEOMETRY[before].bytes * GEOMETRY[before].weights
    # One of two sizes, so that few programs are compiled.
    each = next((n for piece in PIECES if (n := piece // weights) >= len(blocks)), PIECES[-1] // weights)
    out = []
    for first in range(0, len(blocks), each):
        piece = blocks[first : first + each]
        padded = piece if len(piece) == each else np.pad(piece, [(0, each - len(piece)), (0, 0)])
        with jax.default_device(jax.devices("cpu")[0]):
            made, finite = encode_blocks(padded, None, None, before, after)
        made = np.asarray(made)[: len(piece)]
        if not finite or (after == "f16" and not np.isfinite(made.view(np.float16)).all()):
            beyond = "larger than F16 holds: take bf16 or f32" if finite else "NaN or infinite"
            raise CheckpointError(f"{name} has weights that are {beyond}")
        out.append(made)
    return np.concatenate(out).reshape(len(rows), -1)
