"""Adapters in files: PEFT's folders, and llama.cpp's GGUF files."""

import dataclasses
import os
from pathlib import Path

from bonsai_jax import arguments
from bonsai_jax.adapters import contents as file_contents
from bonsai_jax.adapters import gguf, peft
from bonsai_jax.config import ModelConfig
from bonsai_jax.network.adapter import Adapter
from checkpoints import CheckpointError


def load_adapter(path: str | os.PathLike[str], config: ModelConfig, *, scale: float = 1.0) -> Adapter:
    """An adapter from a file: a folder of PEFT (adapter_config.json, adapter_model.safetensors), or
    llama.cpp's GGUF file.

    scale  what the adapter adds is multiplied by it, as by llama.cpp's --lora-scaled
    A and B are read as they are: float32, float16 or bfloat16; others become float32. Ranks and alphas may
    differ from matrix to matrix (rank_pattern, alpha_pattern). Rows of queries and keys are brought to the
    model's order, which in GGUF files of Llama and its relatives is another than in their folders.
    Raises checkpoints.CheckpointError for a file that is broken or of another model, NotImplementedError for
    DoRA, for trained biases, tokens or whole matrices, and for matrices that adapters cannot change (`lora`).
    """
    arguments.kind("path", path, (str, os.PathLike), "an adapter's folder or .gguf file")
    arguments.kind("config", config, ModelConfig, "model.config")
    scale, path = arguments.number("scale", scale), Path(path)
    if path.is_dir():
        own = peft.read(path)
    elif path.is_file():
        own = gguf.read(path, config)
    else:
        raise CheckpointError(
            f"{path}: no such file; an adapter is a folder with {peft.CONFIG}, or llama.cpp's .gguf file"
        )
    pairs = {n: dataclasses.replace(pair, scale=scale * pair.scale) for n, pair in own.pairs.items()}
    return file_contents.placed(dataclasses.replace(own, pairs=pairs), config)


def save_adapter(path: str | os.PathLike[str], adapter: Adapter, config: ModelConfig) -> None:
    """Write an adapter: llama.cpp's GGUF file where the path ends in .gguf, else a folder of PEFT.

    A and B keep their type. Matrices that files have in one, such as q, k and v of Phi-3, get one A and B, of
    the sum of their ranks. Raises NotImplementedError for a folder of an architecture whose folders have
    other numbers than its GGUF files (BitNet, Falcon-H1), and OSError where the file cannot be written.
    """
    arguments.kind("path", path, (str, os.PathLike), "an adapter's folder or .gguf file")
    arguments.kind("adapter", adapter, Adapter, "what bj.lora or bj.load_adapter returns")
    path = Path(path)
    naming = "gguf" if path.suffix == ".gguf" else "huggingface"
    content = file_contents.contents(str(path), naming, adapter, config)
    if not content.pairs:
        raise ValueError(f"{path}: the adapter changes no matrix of this model, so there is nothing to save")
    if naming == "gguf":
        gguf.write(path, content, config)
    else:
        peft.write(path, content)


def load_scaled(name: str, config: ModelConfig) -> Adapter:
    """The adapter of "FILE" or "FILE:SCALE". Errors as for `load_adapter`."""
    file, _, scale = name.rpartition(":")
    if file and not os.path.exists(name) and _is_number(scale):
        return load_adapter(file, config, scale=float(scale))
    return load_adapter(name, config)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
