"""A model file in another format, tensor by tensor:

    blocks of the file  ->  float32, some rows at a time  ->  blocks of the new format  ->  a new GGUF file

Memory holds one tensor of the new file, and a few million weights.
"""

import concurrent.futures
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bonsai_jax import arguments
from bonsai_jax.making import recipes
from bonsai_jax.making.importance import Importance, read_importance
from bonsai_jax.making.rotating import Fold
from bonsai_jax.making.rotating import fold as fold_of
from checkpoints import Checkpoint, CheckpointError, Tensor, open_checkpoint, write_gguf
from checkpoints.geometry import GEOMETRY, tensor_nbytes
from pallas_kernels import Rotation, formats, quantize

PIECES = 1 << 17, 1 << 21  # weights that a program encodes
VERSION = 2  # general.quantization_version of ggml's blocks
Progress = Callable[[int, int], None]  # weights so far, and in all


@dataclasses.dataclass(frozen=True)
class Change:
    """What becomes of a tensor. before, after: formats; weighted: whether by an importance matrix; rotated:
    whether its rows are (rotating.py)."""

    name: str
    shape: tuple[int, ...]
    before: str
    after: str
    weighted: bool = False
    rotated: bool = False

    @property
    def stays(self) -> bool:
        """Whether its bytes are those of the file."""
        return self.before == self.after and not self.rotated

    @property
    def searched(self) -> bool:
        """Whether an importance matrix makes a difference to it."""
        return self.before != self.after and hasattr(formats.get(self.after), "quantize_weighted")

    @property
    def needs_importance(self) -> bool:
        """Whether its format has no rule without an importance matrix, or one that loses too much."""
        return recipes.needs_importance(self.name, self.after) or not hasattr(
            formats.get(self.after), "quantize"
        )

    @property
    def weights(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes_before(self) -> int:
        return tensor_nbytes(self.before, self.shape)

    @property
    def nbytes_after(self) -> int:
        return tensor_nbytes("i8" if self.after == "u8" else self.after, self.shape)


def planned(
    source: str | os.PathLike[str] | Checkpoint,
    format: str,
    *,
    pure: bool = False,
    tensor_formats: Iterable[tuple[str, str]] = (),
    requantize: bool = False,
    importance: str | os.PathLike[str] | Importance | None = None,
    fold: int | None = None,
) -> list[Change]:
    """What `quantize_file` would do with each tensor, in the order of the file. Raises as it does."""
    checkpoint = _opened(source)
    recipe = recipes.recipe(format)
    tensors = _stored(checkpoint)
    known = _read(importance)
    after = recipes.formats_of(
        tensors, checkpoint.metadata, recipe, pure=pure, chosen=tensor_formats, weighted=known is not None
    )
    rotated = () if (folded := _folded(checkpoint, fold, known)) is None else folded.names
    changes = [Change(t.name, t.shape, t.format, after[t.name], rotated=t.name in rotated) for t in tensors]
    if known is not None:
        changes = [
            dataclasses.replace(c, weighted=c.searched and known.matrix(c.name, c.shape) is not None)
            for c in changes
        ]
    for change in changes:
        if change.stays:
            continue
        where = f"{checkpoint.source}: {change.name}"
        if not change.weighted and change.needs_importance:
            lacking = "" if known is None else f", which {known.source} does not name"
            raise ValueError(
                f"{where}{lacking}: {change.after} needs an importance matrix. Make one with `bonsai-jax "
                "imatrix` and give it: --imatrix FILE, importance=FILE"
            )
        if change.before not in formats.names():
            raise NotImplementedError(f"{where} has format {change.before}, which is not supported")
        if change.before not in recipes.FLOATS and not requantize:
            raise ValueError(
                f"{where} is {change.before} already; quantizing it again loses more than quantizing the "
                "original does. Take a file in F32, F16 or BF16, or allow it: --allow-requantize, "
                "requantize=True"
            )
    return changes


def quantize_file(
    source: str | os.PathLike[str] | Checkpoint,
    path: str | os.PathLike[str],
    format: str,
    *,
    pure: bool = False,
    tensor_formats: Iterable[tuple[str, str]] = (),
    requantize: bool = False,
    importance: str | os.PathLike[str] | Importance | None = None,
    fold: int | None = None,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> list[Change]:
    """Write a GGUF file with this model's weights in another format, and return what became of each tensor.

    source          a GGUF file, or any name that `open_checkpoint` takes and that is one
    path            of the new file; it appears when all is written
    format          a format or a mix of llama.cpp's: "q4_k_m", "q8_0", "q1_0", ... (`making.recipes.RECIPES`)
    pure            every matrix in the format itself, none in a better one
    tensor_formats  (regular expression, format) of tensors that get another one, the first that is found
                    counts
    requantize      take weights that are quantized already
    importance      a file of importance matrices (`bj.importance`, llama.cpp's llama-imatrix), or what
                    `making.read_importance` returns: errors of the matrices that it names are weighted by it
    fold            store matrices rotated, in blocks of so many inputs, a power of two (rotating.py): smaller
                    errors in formats of few bits. llama.cpp does not know such files
    overwrite       replace a file that is there
    Blocks are those of llama.cpp's own quantizer, with the same importance matrix: equal to the bit in
    formats with one rule, nearly so in those with a search (pallas_kernels/encoding.py, codebooks.py).
    Raises ValueError for a format that is not known, for one that needs an importance matrix without one, for
    a fold that does not fit the model, and for weights that are no finite numbers, NotImplementedError for a
    Hugging Face folder and a fold of an architecture that has none, CheckpointError for
    a file that cannot be read and for an importance matrix of another model, FileExistsError and other
    OSErrors for one that cannot be written.
    """
    checkpoint, path, known = _opened(source), Path(path), _read(importance)
    changes = planned(
        checkpoint,
        format,
        pure=pure,
        tensor_formats=tensor_formats,
        requantize=requantize,
        importance=known,
        fold=fold,
    )
    check_new(path, overwrite)
    folded = _folded(checkpoint, fold, known)
    metadata = quantized_metadata(checkpoint, format) | ({} if known is None else known.metadata)
    metadata |= {} if folded is None else folded.metadata
    write_gguf(path, metadata, _changed(checkpoint, changes, known, folded, progress))
    return changes


def quantized_metadata(checkpoint: Checkpoint, format: str) -> dict[str, Any]:
    """The metadata of this file when its weights have another format."""
    metadata = {**checkpoint.metadata, "general.quantization_version": np.uint32(VERSION)}
    metadata.pop("general.file_type", None)
    if (file_type := recipes.recipe(format).file_type) is not None:
        metadata["general.file_type"] = np.uint32(file_type)
    return {key: value for key, value in metadata.items() if not key.startswith("quantize.imatrix.")}


def check_new(path: Path, overwrite: bool) -> None:
    """Raise the OSError of a file that cannot be written, or may not be replaced."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}; make it first")
    if path.exists() and not overwrite:
        raise FileExistsError(
            f"{path} is there already; name another, or replace it: --overwrite, overwrite=True"
        )


def _folded(checkpoint: Checkpoint, block: int | None, known: Importance | None) -> Fold | None:
    if block is None:
        return None
    if known is not None:
        raise ValueError(
            f"{known.source}: an importance matrix is of inputs as they are, and fold mixes them; leave one "
            "of the two out"
        )
    return fold_of(checkpoint, arguments.whole("fold", block, 2))


def _read(importance: str | os.PathLike[str] | Importance | None) -> Importance | None:
    return (
        importance
        if importance is None or isinstance(importance, Importance)
        else read_importance(importance)
    )


def _opened(source: str | os.PathLike[str] | Checkpoint) -> Checkpoint:
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    if checkpoint.naming != "gguf":
        raise NotImplementedError(
            f"{checkpoint.source} is a Hugging Face folder; quantize reads GGUF files. Make one of it first: "
            "bonsai-jax convert, bj.convert"
        )
    return checkpoint


def _stored(checkpoint: Checkpoint) -> list[Tensor]:
    """The tensors of a file."""
    tensors = list(checkpoint.tensors.values())
    if not all(isinstance(t, Tensor) for t in tensors):
        raise NotImplementedError(f"{checkpoint.source} is no file: its weights are drawn when it is loaded")
    return [t for t in tensors if isinstance(t, Tensor)]


def _changed(
    checkpoint: Checkpoint,
    changes: list[Change],
    known: Importance | None,
    folded: Fold | None,
    progress: Progress,
) -> Iterator[Tensor]:
    """The tensors of the new file."""
    total, done = sum(change.weights for change in changes), 0
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for tensor, change in zip(_stored(checkpoint), changes, strict=True):
            if change.stays:
                yield tensor
            else:
                columns = known.matrix(change.name, change.shape) if known and change.weighted else None
                rotation = folded.rotation(change.shape[-1]) if folded and change.rotated else None
                yield _encoded(checkpoint.source, tensor, change.after, columns, rotation, pool)
            tensor.forget()
            done += change.weights
            progress(done, total)


def _encoded(
    source: str,
    tensor: Tensor,
    format: str,
    columns: np.ndarray | None,
    rotation: Rotation | None,
    pool: concurrent.futures.Executor,
) -> Tensor:
    """A tensor in another format. columns: its importance, float32 [matrices, K]; None: all are equal.
    rotation: of its rows; None: they stay."""
    before, after = GEOMETRY[tensor.format], GEOMETRY[format]
    # Pieces of a row whose blocks begin and end together in both formats; whole rows, where columns differ.
    alike = columns is None and rotation is None
    weights = math.lcm(before.weights, after.weights) if alike else tensor.shape[-1]
    size_in, size_out = (weights // g.weights * g.bytes for g in (before, after))
    blocks = np.asarray(tensor.data).reshape(-1, size_in)
    out = np.empty((*tensor.shape[:-1], tensor.shape[-1] // after.weights * after.bytes), np.uint8)
    written, pieces = out.reshape(-1, size_out), [max(1, piece // weights) for piece in PIECES]
    each = next((piece for piece in pieces if piece >= len(blocks)), pieces[-1])
    rows = max(1, len(blocks) if columns is None else len(blocks) // len(columns))  # of a matrix

    def encode(first: int) -> bool:
        piece = blocks[first : min(first + each, (first // rows + 1) * rows)]
        padded = piece if len(piece) == each else np.pad(piece, [(0, each - len(piece)), (0, 0)])
        own = None if columns is None else columns[first // rows]
        # ggml's rules hold to the bit on a CPU: compilers for GPUs fuse products and sums.
        with jax.default_device(jax.devices("cpu")[0]):
            made, finite = encode_blocks(padded, own, rotation, tensor.format, format)
        written[first : first + len(piece)] = np.asarray(made)[: len(piece)]
        return bool(finite)

    firsts = [row for matrix in range(0, len(blocks), rows) for row in range(matrix, matrix + rows, each)]
    if not all(pool.map(encode, firsts)):
        why = "has weights that are NaN or infinite; no format holds them"
        raise CheckpointError(f"{source}: {tensor.name} {why}")
    return Tensor(tensor.name, format, tensor.shape, out)


@functools.partial(jax.jit, static_argnums=(3, 4))
def encode_blocks(
    raw: jax.Array, columns: jax.Array | None, rotation: Rotation | None, before: str, after: str
) -> tuple[jax.Array, jax.Array]:
    """Blocks, uint8 [n, bytes], of one format as blocks of another, and whether all weights are finite."""
    x = formats.get(before).dequantize(formats.unpack(before, raw)).reshape(len(raw), -1)
    packed = quantize(x if rotation is None else rotation(x), after, columns)
    return formats.pack(after, packed.fields), jnp.isfinite(x).all()
