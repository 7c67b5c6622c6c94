"""What is known of a new file before a weight is written: whether it may be written, and that loading reads
it as the same model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from bonsai_jax.making.targets import Target
from checkpoints import Changed, Checkpoint, Tensor
from checkpoints.geometry import GEOMETRY
from checkpoints.safetensors import microscaled
from pallas_kernels import formats


def check_new_folder(path: Path, source: str, overwrite: bool) -> None:
    """Raise the OSError of a folder that cannot be written, or may not be replaced."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}; make it first")
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file, and a GGUF file becomes a folder; name another")
    if path.is_dir() and any(path.iterdir()):
        if not overwrite:
            raise FileExistsError(
                f"{path} is there already; name another, or replace it: --overwrite, overwrite=True"
            )
        if not (path / "config.json").is_file():
            raise FileExistsError(f"{path} has no config.json, so it is not a model's; name another")
        if Path(source).resolve().is_relative_to(path.resolve()):
            raise FileExistsError(f"{path} has {source} in it, which would be replaced too; name another")


def new(path: Path, naming: Any, metadata: Mapping[str, Any], made: Sequence[Target]) -> Checkpoint:
    """The new file as it will be, without weights."""
    tensors = {}
    for tensor in (target.tensor for target in made):
        geometry = GEOMETRY["i8" if tensor.format == "u8" else tensor.format]
        *rows, columns = tensor.shape or (1,)
        shape = (*rows, columns // geometry.weights * geometry.bytes)
        empty = np.broadcast_to(np.zeros(shape[-1], np.uint8), shape)
        tensors[tensor.name] = Tensor(tensor.name, tensor.format, tensor.shape, empty)
    joined = microscaled(tensors) if naming == "huggingface" else tensors
    return Checkpoint(str(path), naming, metadata, joined)


def check_unchanged(source: Checkpoint, module: ModuleType, new: Checkpoint, made: Sequence[Target]) -> None:
    """Where loading a folder changes weights (BitNet's), raise for a file whose weights would not come back
    as they are."""
    if not hasattr(module, "tensors_from_huggingface"):
        return
    changed = module.tensors_from_huggingface(new.metadata, new.tensors)
    for target in made:
        tensor = changed[target.tensor.name]
        if not isinstance(tensor, Changed):
            continue
        stored: Any = source.tensors[target.parts[0]]
        values = formats.values(stored.format, np.ascontiguousarray(stored.data)).reshape(stored.shape)
        if np.allclose(tensor.change(values), values, rtol=1e-6, atol=0):
            return  # a rule for all
        raise NotImplementedError(
            f"{source.source}: a folder of this architecture has the weights of its training, of which those "
            "of a GGUF file are made; they cannot be made of these"
        )
