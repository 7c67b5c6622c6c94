"""Adapters in llama.cpp's GGUF files: general.type "adapter", adapter.type "lora".

    blk.0.attn_q.weight.lora_a   [rank, in]
    blk.0.attn_q.weight.lora_b   [out, rank]

scale = adapter.lora.alpha / rank; 1 where alpha is 0
"""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from bonsai_jax.adapters.contents import Contents, Pair
from bonsai_jax.config import ModelConfig
from bonsai_jax.network import architectures
from bonsai_jax.weights.metadata import short
from checkpoints import CheckpointError, Tensor, open_checkpoint, write_gguf
from pallas_kernels import dequantize, from_blocks

ALPHA = "adapter.lora.alpha"
_FORMATS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def read(path: Path, config: ModelConfig) -> Contents:
    """Raises CheckpointError for a file that is no adapter, is broken, or is of another architecture."""
    checkpoint = open_checkpoint(path)
    metadata = checkpoint.metadata
    kind = metadata.get("general.type")
    if not isinstance(kind, str) or kind != "adapter":
        raise CheckpointError(
            f"{path}: general.type is {short(kind)}, not 'adapter': this is a model; open it with bj.load"
        )
    if metadata.get("adapter.type") != "lora":
        raise NotImplementedError(
            f"{path}: adapter.type is {metadata.get('adapter.type')!r}; supported: lora"
        )
    if any(key.startswith("adapter.alora.") for key in metadata):
        raise NotImplementedError(f"{path}: activated LoRA (adapter.alora) is not supported; supported: lora")
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or architectures.get(name) is not architectures.get(config.architecture):
        raise CheckpointError(f"{path}: this adapter is of {name}, but the model is {config.architecture}")
    alpha = metadata.get(ALPHA, 0.0)
    if not isinstance(alpha, int | float):
        raise CheckpointError(f"{path}: {ALPHA} is {alpha!r}; a number is expected")
    halves: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in checkpoint.tensors.items():
        own, _, half = name.rpartition(".")
        if half not in ("lora_a", "lora_b") or not isinstance(tensor, Tensor):
            raise NotImplementedError(
                f"{path}: tensor {name} is not supported; supported: *.lora_a and *.lora_b"
            )
        halves.setdefault(own, {})[half] = _array(tensor)
    return Contents(str(path), "gguf", {n: _pair(path, n, h, alpha) for n, h in halves.items()})


def _array(tensor: Tensor) -> np.ndarray:
    """As it is in a file of floats; float32 of a packed format."""
    for dtype, format in _FORMATS.items():
        if tensor.format == format:
            return np.ascontiguousarray(tensor.data).view(jnp.dtype(dtype)).reshape(tensor.shape)
    return np.asarray(dequantize(from_blocks(jnp.asarray(tensor.data), tensor.format)))


def _pair(path: Path, name: str, halves: dict[str, np.ndarray], alpha: float) -> Pair:
    if halves.keys() != {"lora_a", "lora_b"} or any(half.ndim != 2 for half in halves.values()):
        raise CheckpointError(f"{path}: {name}: lora_a and lora_b are expected, both matrices")
    a, b = halves["lora_a"], halves["lora_b"]
    return Pair(a, b, alpha / a.shape[0] if alpha else 1.0)


def write(path: Path, contents: Contents, config: ModelConfig) -> None:
    """What llama.cpp's --lora reads. Scales that do not come of one alpha are in lora_b."""
    first = next(iter(contents.pairs.values()))
    alpha = np.float32(first.scale * first.rank or first.rank)  # 0 would mean a scale of 1
    tensors = []
    for name, pair in contents.pairs.items():
        own = float(alpha) / pair.rank
        b = pair.b if own == pair.scale else (pair.scale / own * pair.b).astype(pair.b.dtype)
        for half, array in (("lora_a", pair.a), ("lora_b", b)):
            data = np.ascontiguousarray(array)
            rows = data.view(np.uint8).reshape(*data.shape[:-1], -1)
            tensors.append(Tensor(f"{name}.{half}", _FORMATS[data.dtype.name], data.shape, rows))
    metadata = {
        "general.architecture": _architecture(config),
        "general.type": "adapter",
        "adapter.type": "lora",
        ALPHA: alpha,
    }
    write_gguf(path, metadata, tensors)


def _architecture(config: ModelConfig) -> str:
    """As GGUF files call it: "gpt-oss" of the module gpt_oss."""
    name = architectures.get(config.architecture).__name__.rpartition(".")[-1]
    dashed = (alias for alias in architectures.ALIASES if "-" in alias and alias.replace("-", "_") == name)
    return next(dashed, name)
