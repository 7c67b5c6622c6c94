"""Model architectures, one file each, named as the model type.

An architecture module defines

    MODELS                        names of models that have it, as in the README's table
    TENSORS                       a Spec for every tensor that a file of it has
    DRAFT                         the same for its draft layer, where it may have one
    config_from_gguf(metadata, tensors)         -> ModelConfig, from GGUF keys
    config_from_huggingface(metadata, tensors)  -> ModelConfig, from config.json
    M_ROPE                        whether llama.cpp asks for the sections of its rope
    EXPERTS_IN                    the format of experts' matrices in Hugging Face folders, where it is one
    tensors_from_huggingface(metadata, tensors) -> the tensors of a Hugging Face folder with the values that
                                  a GGUF file has, by name; where they are the same there is none

`get(name)` imports by file name, so a new file is a new architecture.
"""

import contextlib
import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np

from bonsai_jax.config import ModelConfig
from bonsai_jax.network import unsupported
from bonsai_jax.network.unsupported import Missing, UnsupportedArchitecture
from bonsai_jax.weights import keys, specs
from bonsai_jax.weights.metadata import short
from bonsai_jax.weights.specs import Description
from checkpoints import Checkpoint, CheckpointError, folding

# general.architecture of GGUF files, where it is not the name of the architecture's file.
GGUF_NAMES = {
    "ernie4_5-moe": "ernie4_5_moe",
    "minimax-m2": "minimax_m2",
    "falcon-h1": "falcon_h1",
    "command-r": "command_r",
    "gpt-oss": "gpt_oss",
    "hunyuan-dense": "hunyuan_dense",
    "hunyuan-moe": "hunyuan_moe",
    "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h",
}
# model_type of Hugging Face folders, where it is not that name, or not alone. Of several names of an
# architecture the first is what `convert` writes, unless CHOSEN says otherwise.
FOLDER_NAMES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen3_moe": "qwen3moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_moe": "qwen35moe",
    "qwen3_next": "qwen3next",
    "qwen2_moe": "qwen2moe",
    "glm4_moe": "glm4moe",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "cohere": "command_r",
    "ministral3": "mistral3",
    "hunyuan_v1_dense": "hunyuan_dense",
    "hunyuan_v1_moe": "hunyuan_moe",
    "lfm2_moe": "lfm2moe",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "granitemoehybrid": "granitehybrid",
    "bamba": "granitehybrid",
    "deepseek_v3": "deepseek2",
    "deepseek_v2": "deepseek2",
    "kimi_k2": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "mistral4": "deepseek2",
    "bailing_moe_v2": "bailingmoe2",
    "qwen2_vl_text": "qwen2vl",
    "qwen2_vl": "qwen2vl",
    "qwen2_5_vl": "qwen2vl",
    "qwen2_5_vl_text": "qwen2vl",
    "qwen3_vl_text": "qwen3vl",
    "qwen3_vl": "qwen3vl",
    "qwen3_vl_moe_text": "qwen3vlmoe",
    "qwen3_vl_moe": "qwen3vlmoe",
}
CHOSEN: dict[str, Callable[[ModelConfig], bool]] = {
    "nemotron_h_moe": lambda config: config.experts is not None,
    "olmo3": lambda config: any(layer.mixer.window is not None for layer in config.layers),
    "granitemoeshared": lambda config: config.experts is not None and config.experts.shared > 0,
    "deepseek_v2": lambda config: config.experts is None or config.experts.gating == "softmax",
}
ALIASES = {**GGUF_NAMES, **FOLDER_NAMES}

MOST_LAYERS = 10_000  # a list of the layers that a damaged file asks for could fill the memory
LONGEST_REASON = 400  # characters; a value of the file may be in it


def names() -> list[str]:
    """Every architecture there is a file for."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


def get(name: str) -> ModuleType:
    """The module of an architecture.

    Raises UnsupportedArchitecture, a NotImplementedError, if there is none. The message names the nearest
    that runs and what that lacks, or lists those that run.
    """
    name = ALIASES.get(name, name)
    if name not in names():
        raise UnsupportedArchitecture(_not_supported(name, missing := unsupported.find(name)), missing)
    return importlib.import_module(f"{__name__}.{name}")


def stored_name(architecture: str, naming: str, config: ModelConfig) -> str:
    """What files call an architecture: general.architecture of GGUF files, model_type of folders."""
    names = GGUF_NAMES if naming == "gguf" else FOLDER_NAMES
    own = [name for name, target in names.items() if target == architecture] or [architecture]
    return next((name for name in own if name in CHOSEN and CHOSEN[name](config)), own[0])


def _not_supported(name: str, missing: Missing | None) -> str:
    if missing is None:
        return f"architecture {short(name)} is not supported; supported: {', '.join(names())}"
    lacks = ", ".join(missing.lacks)
    return (
        f"architecture {name!r} ({missing.models}) is not supported; "
        f"the nearest that runs is {missing.nearest}, which lacks: {lacks}"
    )


def describe(
    checkpoint: Checkpoint, *, draft: bool = False, draft_model: Checkpoint | None = None
) -> Description:
    """What a checkpoint is, from its metadata and the names and shapes of its tensors, never from its name.

    draft   with the draft layer (MTP), which is skipped else
    draft_model  the checkpoint of the model that proposes tokens, which is described beside it
    Raises NotImplementedError for an architecture without a file or a format without one, and CheckpointError
    for metadata that is absent or absurd and for a tensor that is missing, has no place or the wrong shape.
    """
    module = module_of(checkpoint)
    config = _config(checkpoint, module)
    if checkpoint.naming == "huggingface" and hasattr(module, "tensors_from_huggingface"):
        with _named_errors(checkpoint, module):
            tensors = module.tensors_from_huggingface(checkpoint.metadata, checkpoint.tensors)
        checkpoint = dataclasses.replace(checkpoint, tensors=tensors)
    fold = folding(checkpoint)
    config = specs.with_draft(checkpoint, config, fold) if draft else config
    if draft and not hasattr(module, "DRAFT"):
        raise NotImplementedError(
            f"{checkpoint.source}: the draft layer of {config.architecture} is not supported; leave draft "
            "and 'mtp' out"
        )
    described = specs.describe(checkpoint, module.TENSORS, config, getattr(module, "DRAFT", ()), fold)
    if draft_model is None:
        return described
    draft_description = describe(draft_model)
    config = dataclasses.replace(config, draft_model=draft_description.config)
    return dataclasses.replace(described, config=config, draft_model=draft_description)


def config_of(checkpoint: Checkpoint) -> ModelConfig:
    """The ModelConfig of a checkpoint alone; errors as for `describe`."""
    return _config(checkpoint, module_of(checkpoint))


def module_of(checkpoint: Checkpoint) -> ModuleType:
    """The module of a checkpoint's architecture. Raises as `describe`."""
    kind = checkpoint.metadata.get("general.type")
    if isinstance(kind, str) and kind == "adapter":
        raise CheckpointError(
            f"{checkpoint.source}: this is an adapter; load its model, and put the adapter beside it: "
            "--lora FILE, or bj.load(..., lora=FILE)"
        )
    key = "general.architecture" if checkpoint.naming == "gguf" else "model_type"
    name = checkpoint.metadata.get(key)
    if not isinstance(name, str):
        raise CheckpointError(
            f"{checkpoint.source}: {key} is {short(name)}; it must name the model's architecture"
        )
    try:
        return get(name)
    except UnsupportedArchitecture as error:
        raise UnsupportedArchitecture(f"{checkpoint.source}: {error}", error.missing) from error


def _config(checkpoint: Checkpoint, module: ModuleType) -> ModelConfig:
    from_file = module.config_from_gguf if checkpoint.naming == "gguf" else module.config_from_huggingface
    _check_layers(checkpoint)
    metadata, read = keys.recorded(checkpoint.metadata)
    with _named_errors(checkpoint, module):
        config = from_file(metadata, checkpoint.tensors)
    if unread := keys.unread(checkpoint.naming, checkpoint.metadata, read):
        listed = ", ".join(f"{key} ({short(value)})" for key, value in list(unread.items())[:5])
        more = f" and {len(unread) - 5} more" if len(unread) > 5 else ""
        raise NotImplementedError(
            f"{checkpoint.source}: {_name(module)} does not read the key {listed}{more} of the file's "
            "metadata; running without it could give wrong text"
        )
    return config


def _name(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[-1]


@contextlib.contextmanager
def _named_errors(checkpoint: Checkpoint, module: ModuleType) -> Iterator[None]:
    """Raises what an architecture says about a file as one line with the file's name."""
    try:
        yield
    except NotImplementedError as error:
        raise NotImplementedError(f"{checkpoint.source}: {_one_line(error)}") from error
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else _one_line(error)
        about = "" if isinstance(error, CheckpointError) else f"metadata of this {_name(module)} model: "
        raise CheckpointError(f"{checkpoint.source}: {about}{reason}") from error


def _check_layers(checkpoint: Checkpoint) -> None:
    metadata, names = checkpoint.metadata, ("num_hidden_layers", "num_layers", "num_nextn_predict_layers")
    if checkpoint.naming == "gguf":
        arch = metadata["general.architecture"]
        names = (f"{arch}.block_count", f"{arch}.nextn_predict_layers")
    parts = [part for part in (metadata, metadata.get("text_config")) if isinstance(part, dict)]
    for name, count in ((name, part.get(name)) for name in names for part in parts):
        if isinstance(count, int | float | np.number) and count > MOST_LAYERS:
            raise CheckpointError(
                f"{checkpoint.source}: {name} is {short(count)}; at most {MOST_LAYERS} layers are expected"
            )


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3] + "..."
