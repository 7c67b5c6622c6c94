"""Model architectures, one file each, named as the model type.

An architecture module defines

    TENSORS                       table of params.Spec: every tensor a file of it has
    config_from_gguf(metadata, tensors)         -> ModelConfig, from GGUF keys
    config_from_huggingface(metadata, tensors)  -> ModelConfig, from config.json
    forward(params, tokens, positions, cache, config, num_keys, taps, hold) -> (hidden, cache, what taps read)

`get(name)` imports by file name, so a new file is a new architecture.
"""

import importlib
import pkgutil
from types import ModuleType

from bonsai_jax.config import ModelConfig
from checkpoints import Checkpoint, CheckpointError

# Model types that are another architecture under their own name.
ALIASES = {"mistral": "llama", "qwen3_moe": "qwen3moe", "qwen3_5": "qwen35", "qwen3_5_text": "qwen35"}


def names() -> list[str]:
    """Every architecture there is a file for."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


def get(name: str) -> ModuleType:
    """The module of an architecture. Raises NotImplementedError, with the list, if there is none."""
    name = ALIASES.get(name, name)
    if name not in names():
        raise NotImplementedError(f"architecture {name!r} is not supported; supported: {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}")


def config_of(checkpoint: Checkpoint) -> ModelConfig:
    """ModelConfig of a checkpoint, from its metadata and the shapes of its tensors, never from its name.

    Raises NotImplementedError for an architecture without a file, CheckpointError for metadata that is absent
    or absurd.
    """
    key = "general.architecture" if checkpoint.naming == "gguf" else "model_type"
    name = checkpoint.metadata.get(key)
    if not isinstance(name, str):
        raise CheckpointError(
            f"{checkpoint.source}: {key} is {name!r}; it must name the model's architecture"
        )
    try:
        module = get(name)
    except NotImplementedError as error:
        raise NotImplementedError(f"{checkpoint.source}: {error}") from error
    read = module.config_from_gguf if checkpoint.naming == "gguf" else module.config_from_huggingface
    try:
        return read(checkpoint.metadata, checkpoint.tensors)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{checkpoint.source}: metadata of this {name} model: {reason}") from error
