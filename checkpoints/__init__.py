"""Model files of all kinds as one value: metadata and named tensors of raw blocks.

    checkpoint = open_checkpoint("model.gguf")       # a GGUF file, split or whole
    checkpoint = open_checkpoint("folder")           # config.json and *.safetensors, or one GGUF file
    checkpoint = open_checkpoint("user/repo:Q1_0")   # from the Hugging Face Hub
    checkpoint = open_checkpoint("synth:bonsai-8b:q1_0")
    checkpoint = open_checkpoint("demo")             # SmolLM2, where its package is installed
    checkpoint = open_checkpoint("stories")          # a 1-bit model that continues stories, in this package
    checkpoint.metadata["general.architecture"], checkpoint.tensors["output_norm.weight"].data

It needs only numpy and the standard library, and huggingface_hub to fetch from the Hub.
"""

import os
from pathlib import Path

from . import demo, stories
from .checkpoint import (
    ByHead,
    Changed,
    Checkpoint,
    CheckpointError,
    Gathered,
    Microscaled,
    Part,
    RandomTensor,
    Streamed,
    Tensor,
)
from .folding import Folding, folding
from .gguf import open_gguf, part_paths
from .gguf_writer import write_gguf
from .hub import fetch, is_address, is_hub_name
from .safetensors import open_folder
from .safetensors_writer import write_folder
from .synth import open_synth

__all__ = [
    "ByHead",
    "Changed",
    "Checkpoint",
    "CheckpointError",
    "Folding",
    "Gathered",
    "Microscaled",
    "Part",
    "RandomTensor",
    "Streamed",
    "Tensor",
    "folding",
    "open_checkpoint",
    "write_folder",
    "write_gguf",
]

MODEL_KINDS = (
    'a model is a .gguf file, a Hugging Face folder, "user/repo:quant" on the Hub, "demo", '
    '"stories", or "synth:bonsai-8b:q1_0"'
)


def open_checkpoint(source: str | os.PathLike, *, offline: bool = False) -> Checkpoint:
    """Open a model: "synth:<model>:<format>[:seed]", a path, "user/repo[:quant]" on the Hub, "demo", or
    "stories".

    An address such as "https://huggingface.co/user/repo" or "hf.co/user/repo:quant" means "user/repo".
    An existing path takes precedence over a name on the Hub. `offline` uses only the cache of the Hub.
    Tensors of files are views of memory maps: opening reads the headers only.
    Raises CheckpointError, with the problem and what is expected, if the model cannot be opened.
    """
    name = os.fsdecode(source)
    if not name.strip():
        raise CheckpointError(f"the model's name is empty, {name!r}; {MODEL_KINDS}")
    if name.startswith("synth:"):
        return open_synth(name)
    path = os.path.expanduser(name)
    if name == demo.NAME and not os.path.exists(path):
        return _open_path(demo.demo_path())
    if name == stories.NAME and not os.path.exists(path):
        return _open_path(stories.PATH)
    is_file_name = name.endswith((".gguf", ".safetensors")) and ":" not in name and not is_address(name)
    if not os.path.exists(path) and not is_file_name and is_hub_name(name):
        return _open_path(fetch(name, offline=offline))
    return _open_path(Path(path))


def _open_path(path: Path) -> Checkpoint:
    if os.path.isdir(path):
        return _open_directory(path)
    if not os.path.isfile(path):
        what = "not a regular file" if os.path.exists(path) else "no such file"
        raise CheckpointError(f"{path}: {what}; {MODEL_KINDS}")
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path}: a safetensors file alone has no config; open its folder, {path.parent}"
        )
    return open_gguf(path)


def _open_directory(folder: Path) -> Checkpoint:
    if (folder / "config.json").exists() and any(folder.glob("*.safetensors")):
        return open_folder(folder)
    # The parts of a split file count as one.
    models = sorted({part_paths(path)[0] for path in folder.glob("*.gguf")})
    if len(models) > 1:
        names = ", ".join(path.name for path in models[:20])
        raise CheckpointError(f"{folder}: {len(models)} GGUF files: {names}; name one of them")
    return open_gguf(models[0]) if models else open_folder(folder)
