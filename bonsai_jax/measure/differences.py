"""How far the weights of one model file are from another's, tensor by tensor.

Weights are dequantized and compared some million at a time, so that memory does not grow with the model.
"""

import concurrent.futures
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from bonsai_jax.measure.tensor_pairs import Pair, Side, pairs
from bonsai_jax.weights.read import vector_values
from bonsai_jax.weights.specs import Source
from checkpoints import Checkpoint, Gathered, open_checkpoint
from checkpoints.geometry import GEOMETRY, tensor_nbytes
from pallas_kernels import formats

PIECES = 1 << 17, 1 << 20  # weights that a program dequantizes
THREADS = 8  # at most; each holds a piece of both files, about 40 MB
Progress = Callable[[int, int], None]  # weights so far, and in all


@dataclasses.dataclass(frozen=True)
class Stored:
    """How a file stores a tensor."""

    format: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return tensor_nbytes(self.format, self.shape)

    @property
    def bits(self) -> float:
        """Bits a weight, scales included."""
        return 8 * self.nbytes / math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Difference:
    """A tensor of two files, A and B.

    a, b      how each stores it; None: the file lacks it
    reason    why weights were not compared; None: they were
    squares   sum of A's squared weights
    squared_difference  sum of (B - A)^2
    """

    name: str
    a: Stored | None
    b: Stored | None
    reason: str | None = None
    squares: float = 0.0
    squared_difference: float = 0.0

    @property
    def error(self) -> float | None:
        """The relative error, sqrt(sum (B - A)^2 / sum A^2), which has no unit; None: not compared."""
        return None if self.reason else relative_error([self])


def relative_error(differences: Sequence[Difference]) -> float:
    """That of all weights together that were compared: sqrt(sum (B - A)^2 / sum A^2). 0 where B has A's
    weights, infinity where only A's are all 0, NaN where there are weights that are no numbers, or none."""
    compared = [d for d in differences if d.reason is None]
    squared, squares = (sum(getattr(d, name) for d in compared) for name in ("squared_difference", "squares"))
    if not compared or not math.isfinite(squared + squares):
        return math.nan
    return 0.0 if squared == 0 else math.inf if squares == 0 else math.sqrt(squared / squares)


def compare_tensors(
    a: str | os.PathLike[str] | Checkpoint,
    b: str | os.PathLike[str] | Checkpoint,
    *,
    progress: Progress = lambda done, total: None,
) -> list[Difference]:
    """The relative error of B's weights against A's for each tensor, in the order of A; tensors that only B
    has come last.

        error = sqrt(sum (B - A)^2 / sum A^2)    weights as float32, differences and sums in float64

    a, b   GGUF files, Hugging Face folders, or other names that `open_checkpoint` takes. Tensors of a folder
           and of a GGUF file meet by the architecture's table, under the names and in the order of the GGUF
           file; both must have one architecture.
    Raises CheckpointError for a file that cannot be read, NotImplementedError for random weights, for a
    format that is not supported, and where a folder's tensors cannot be brought into a GGUF file's order.
    """
    opened = [name if isinstance(name, Checkpoint) else open_checkpoint(name) for name in (a, b)]
    matched = pairs(opened[0], opened[1])
    for pair in matched:
        for checkpoint, side in zip(opened, (pair.a, pair.b), strict=True):
            if pair.reason is None and side is not None and side.tensor.format not in formats.names():
                raise NotImplementedError(
                    f"{checkpoint.source}: {side.tensor.name} has format {side.tensor.format}, which is not "
                    "supported"
                )
    total = sum(_weights(pair) for pair in matched)
    done, differences = 0, []
    with concurrent.futures.ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        for pair in matched:
            differences.append(_difference(pair, pool))
            done += _weights(pair)
            progress(done, total)
    return differences


def _weights(pair: Pair) -> int:
    """How many of a pair are compared."""
    return 0 if pair.reason or pair.a is None else math.prod(pair.a.tensor.shape)


def _stored(side: Side | None) -> Stored | None:
    return None if side is None else Stored(side.tensor.format, side.tensor.shape)


def _difference(pair: Pair, pool: concurrent.futures.Executor) -> Difference:
    a, b = (_stored(side) for side in (pair.a, pair.b))
    if pair.reason or pair.a is None or pair.b is None:
        return Difference(pair.name, a, b, pair.reason)
    if pair.a.spec is not None and not pair.a.spec.is_matrix:
        sums = [_sums(_vector(pair.a), _vector(pair.b))]
    else:
        sums = [
            one
            for matrices in zip(_matrices(pair.a), _matrices(pair.b), strict=True)
            for one in _matrix_sums((pair.a, pair.b), matrices, pool)
        ]
    for side in (pair.a, pair.b):
        side.tensor.forget()
    squares, squared_difference = np.sum(sums, axis=0).tolist()
    return Difference(pair.name, a, b, None, squares, squared_difference)


def _sums(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """sum x^2, and sum (y - x)^2, of float32 arrays in float64."""
    x = x.astype(np.float64)
    difference = y - x
    return float(np.dot(x, x)), float(np.dot(difference, difference))


def _vector(side: Side) -> np.ndarray:
    """The values that a GGUF file has."""
    assert side.spec is not None
    values = vector_values(side.tensor, side.spec, side.naming).reshape(-1)
    return values if side.rows is None else values[side.rows]


def _matrices(side: Side) -> Iterator[np.ndarray]:
    """Blocks, uint8 [rows, bytes of a row], of a matrix, or of each expert's. A vector is one row."""
    tensor: Source = side.tensor
    if isinstance(tensor, Gathered):  # copied together only one by one
        yield from (np.asarray(part.data) for part in tensor.parts)
        return
    data = np.asarray(tensor.data)
    yield from data.reshape(math.prod(data.shape[:-2]), -1, data.shape[-1])


def _matrix_sums(
    sides: tuple[Side, Side], matrices: tuple[np.ndarray, np.ndarray], pool: concurrent.futures.Executor
) -> Iterator[tuple[float, float]]:
    """`_sums` of some rows at a time, as many as have PIECES[-1] weights."""
    each = max(1, PIECES[-1] // sides[0].tensor.shape[-1])

    def piece_sums(first: int) -> tuple[float, float]:
        rows = slice(first, first + each)
        x, y = (
            _dequantized(matrix[rows] if side.rows is None else matrix[side.rows[rows]], side.tensor.format)
            for side, matrix in zip(sides, matrices, strict=True)
        )
        return _sums(x, y)

    return pool.map(piece_sums, range(0, len(matrices[0]), each))


def _dequantized(raw: np.ndarray, format: str) -> np.ndarray:
    """Rows of blocks as float32 [weights], by a program of few sizes."""
    geometry = GEOMETRY[format]
    blocks = raw.reshape(-1, geometry.bytes)
    most = [piece // geometry.weights for piece in PIECES]
    size = next((count for count in most if count >= len(blocks)), len(blocks))
    padded = blocks if len(blocks) == size else np.pad(blocks, [(0, size - len(blocks)), (0, 0)])
    # Both files by one program, and the difference apart from it: fused, equal blocks might differ. On a CPU
    # also where there is a GPU, whose compilers fuse products and sums.
    with jax.default_device(jax.devices("cpu")[0]):
        values = np.asarray(_dequantize(padded, format))
    return values.reshape(-1)[: raw.size // geometry.bytes * geometry.weights]


@functools.partial(jax.jit, static_argnums=1)
def _dequantize(raw: jax.Array, format: str) -> jax.Array:
    return formats.get(format).dequantize(formats.unpack(format, raw))
