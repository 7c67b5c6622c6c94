"""A Hugging Face folder as a GGUF file, and a GGUF file as a Hugging Face folder.

    metadata   key_search.py: of the keys there are, those that the architecture's own reader asks for, with
               values from which it makes the same ModelConfig
    tensors    targets.py: the architecture's own table has the names of both sides
    tokenizer  tokens/tokenizer_to_gguf.py, tokens/tokenizer_to_huggingface.py

Before a weight is written, the new file is described as loading it would: its names, shapes and settings are
those of the same model.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from bonsai_jax.config import ModelConfig
from bonsai_jax.making import checking, folder_keys, gguf_keys, key_search, stretched, transformers_keys
from bonsai_jax.making.quantizing import VERSION, Change, Progress, check_new
from bonsai_jax.making.targets import Plan, Target, array, scaled_copy, small_tensor, targets
from bonsai_jax.network import architectures
from bonsai_jax.tokens import tokenizer_to_gguf, tokenizer_to_huggingface
from bonsai_jax.weights import keys
from bonsai_jax.weights.specs import Description
from checkpoints import Checkpoint, CheckpointError, open_checkpoint, write_folder, write_gguf

FORMATS = ("auto", "f16", "bf16", "f32", "q8_0")
FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}  # general.file_type
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # of config.json
DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class Converted:
    """What `convert` wrote.

    naming   of the new file: "gguf" or "huggingface"
    architecture  its name there: general.architecture, or model_type
    changes  what became of each tensor, in the order of the new file
    skipped  how tensors begin that were left out: a draft layer, what sees images
    notes    what the new file cannot say, a sentence each
    """

    naming: str
    architecture: str
    changes: tuple[Change, ...]
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def convert(
    source: str | os.PathLike[str] | Checkpoint,
    path: str | os.PathLike[str],
    *,
    format: str = "auto",
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Write a Hugging Face folder as a GGUF file, or a GGUF file as a Hugging Face folder.

    source     a folder with config.json, *.safetensors and tokenizer.json, or a GGUF file; any name that
               `open_checkpoint` takes and that is one
    path       of the new file or folder; it appears when all is written
    format     of matrices: "f16", "bf16", "f32", in a GGUF file also "q8_0"; "auto": as the source has them,
               and F16 in place of quantized ones in a folder
    overwrite  replace what is there
    progress   called with weights so far and in all
    Raises NotImplementedError where the other side cannot say what the model is, CheckpointError for a source
    that cannot be read, ValueError for a tokenizer that cannot be read or written, FileExistsError and other
    OSErrors for a path that cannot be written.
    """
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}; one of {', '.join(FORMATS)} is expected")
    checkpoint, path = source if isinstance(source, Checkpoint) else open_checkpoint(source), Path(path)
    if not all(hasattr(t, "data") for t in checkpoint.tensors.values()):
        raise NotImplementedError(f"{checkpoint.source} is no file: its weights are drawn when it is loaded")
    chosen = None if format == "auto" else format
    if checkpoint.naming == "huggingface":
        check_new(path, overwrite)
        return _to_gguf(checkpoint, path, chosen, progress)
    if chosen == "q8_0":
        raise ValueError("format q8_0 is for GGUF files; a folder has f16, bf16 or f32")
    checking.check_new_folder(path, checkpoint.source, overwrite)
    return _to_folder(checkpoint, path, chosen, overwrite, progress)


def _to_gguf(checkpoint: Checkpoint, path: Path, format: str | None, progress: Progress) -> Converted:
    description, module = architectures.describe(checkpoint), architectures.module_of(checkpoint)
    arch = architectures.stored_name(_name(module), "gguf", description.config)
    model, arrays, notes = stretched.ropes_as_gguf(description, module)
    shapes = _shapes(description, "gguf")
    prefixed = {f"{arch}.{key}": values for key, values in gguf_keys.offers(model).items()}
    offers = {"general.architecture": [arch], **prefixed, **gguf_keys.unprefixed(model)}
    if sections := _sections(
        checkpoint.metadata, model.attention.rope if hasattr(module, "M_ROPE") else None
    ):
        offers[f"{arch}.rope.dimension_sections"] = [np.array([*sections, 0][:4], np.int32)]

    def read(metadata: Mapping[str, Any]) -> ModelConfig:
        return _unscaled(key_search.in_order(module.config_from_gguf(metadata, shapes), model), model)

    chosen, looked_up = _search(checkpoint, offers, read, model, f"a GGUF file of {arch}")
    harmless = {f"{arch}.{key}" for key in keys.HARMLESS}
    metadata = {key: value for key, value in chosen.items() if key in looked_up | harmless}
    after = module.config_from_gguf(metadata, shapes)
    stretched.check_divided(checkpoint.source, description.config, after)
    factors = _factors(model, after)
    experts_in = getattr(module, "EXPERTS_IN", None)
    plan = Plan(description, after, "gguf", format, progress, experts_in, factors)
    made = targets(plan)
    if "head" in factors and not any(target.tensor.name == "output.weight" for target in made):
        made.append(scaled_copy(plan, "embed", "output.weight", factors["head"]))
    made += [array(plan, name, values) for name, values in arrays.items()]
    tokens = tokenizer_to_gguf.metadata(_folder(checkpoint), model.vocab_size, arch)
    metadata = _general(checkpoint, made) | metadata | tokens
    architectures.describe(checking.new(path, "gguf", metadata, made))
    write_gguf(path, metadata, (target.tensor for target in plan.counted(made)))
    return Converted("gguf", arch, _changes(made), description.skipped, notes)


def _to_folder(
    checkpoint: Checkpoint, path: Path, format: str | None, overwrite: bool, progress: Progress
) -> Converted:
    description, module = architectures.describe(checkpoint), architectures.module_of(checkpoint)
    if description.folding is not None:
        raise NotImplementedError(
            f"{checkpoint.source}: its weights are Hadamard-folded, which a Hugging Face folder cannot say"
        )
    model = stretched.ropes_as_folder(description)
    shapes = _shapes(description, "huggingface")
    model_type = architectures.stored_name(_name(module), "huggingface", model)
    offers = {"model_type": [model_type], **folder_keys.offers(model)}
    arrays = folder_keys.arrays(model)
    shapes |= {name: small_tensor(name, values) for name, values in arrays.items()}

    def read(metadata: Mapping[str, Any]) -> ModelConfig:
        return key_search.in_order(module.config_from_huggingface(metadata, shapes), model)

    chosen, looked_up = _search(checkpoint, offers, read, model, f"a Hugging Face folder of {model_type}")
    config = {key: _json_value(value) for key, value in chosen.items() if key in looked_up}
    name = f"{checkpoint.metadata['general.architecture']}.rope.dimension_sections"
    if np.any(sections := checkpoint.metadata.get(name, 0)):
        key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        usual = {"rope_type": "default", "mrope_section": np.asarray(sections)[:3].tolist()}
        config[key] = usual | (config.get(key) or {})
    after = module.config_from_huggingface(config, shapes)
    experts_in = getattr(module, "EXPERTS_IN", None)
    plan = Plan(description, after, "huggingface", format, progress, experts_in)
    made = targets(plan)
    made += [array(plan, name, values) for name, values in arrays.items()]
    files = tokenizer_to_huggingface.files(checkpoint.metadata)
    # transformers has ids of its own where a key is left out, which may lie beyond the vocabulary.
    ids = {key: files["generation_config.json"].get(key) for key in IDS}
    fields = {spec.field for spec, by_layer in description.tensors.items() if by_layer}
    config |= {"vocab_size": model.vocab_size, "tie_word_embeddings": "head" not in fields, **ids}
    if any(target.tensor.format == "u8" for target in made):
        config["quantization_config"] = {"quant_method": "mxfp4"}
    config |= {"torch_dtype": DTYPES[plan.usual]}
    beside = transformers_keys.keys(model, description, module)
    if (classes := transformers_keys.architectures(model_type)) is not None:
        beside = {"architectures": classes} | beside
    files["config.json"] = {"model_type": model_type, **beside, **config}
    new = checking.new(path, "huggingface", files["config.json"], made)
    architectures.describe(new)
    checking.check_unchanged(checkpoint, module, new, made)
    write_folder(path, files, [target.tensor for target in plan.counted(made)], overwrite=overwrite)
    return Converted("huggingface", model_type, _changes(made), description.skipped)


def _name(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[-1]


def _folder(checkpoint: Checkpoint) -> Path:
    if checkpoint.folder is None:
        raise CheckpointError(f"{checkpoint.source}: no folder, so no tokenizer.json")
    return checkpoint.folder


def _shapes(description: Description, naming: str) -> dict[str, Any]:
    """The tensors of the new file, as far as an architecture's reader of metadata asks for them."""
    return {
        str(name).format(layer, 0): SimpleNamespace(
            shape=spec.stored_sizes(description.config, layer, naming)
        )
        for spec, by_layer in description.tensors.items()
        if (name := spec.name(naming)) is not None
        for layer in by_layer
    }


def _sections(metadata: Mapping[str, Any], rope: Any) -> list[int] | None:
    """How many pairs of the rope are for the time, the height and the width of an image (M-RoPE). A text has
    one position in all of them, but llama.cpp asks for them: a third each where the folder does not say.

    rope  of an architecture that has sections; None: it has none
    """
    thirds = None if rope is None else [(rope.pairs + more) // 3 for more in (2, 1, 0)]
    text = metadata.get("text_config") or metadata
    ropes = (text.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    each = (rope.get("mrope_section") for rope in ropes)
    return next((sections for sections in each if isinstance(sections, list)), thirds)


def _search(
    checkpoint: Checkpoint,
    offers: key_search.Offers,
    read: Callable[[Mapping[str, Any]], ModelConfig],
    model: ModelConfig,
    what: str,
) -> tuple[dict[str, Any], set[str]]:
    result = key_search.find(offers, read, model)
    if isinstance(result, str):
        raise NotImplementedError(f"{checkpoint.source}: {what} cannot say what this model is: {result}")
    return result


def _unscaled(config: ModelConfig, model: ModelConfig) -> ModelConfig:
    """With the model's scales of embedding and logits where the file has none: they go into the weights."""
    if config.embedding_scale != 1 or config.logit_scale != 1:
        return config
    scales = {"embedding_scale": model.embedding_scale, "logit_scale": model.logit_scale}
    return dataclasses.replace(config, **scales)


def _factors(model: ModelConfig, after: ModelConfig) -> dict[str, float]:
    if after.embedding_scale != 1 or after.logit_scale != 1:
        return {}
    factors = {"embed": model.embedding_scale, "head": model.logit_scale}
    return {} if set(factors.values()) == {1.0} else factors


def _general(checkpoint: Checkpoint, made: Sequence[Target]) -> dict[str, Any]:
    """Keys about the file itself."""
    weights = dict.fromkeys(FILE_TYPES, 0)
    for tensor in (target.tensor for target in made):
        if tensor.format in weights and len(tensor.shape) > 1:
            weights[tensor.format] += int(np.prod(tensor.shape))
    name = checkpoint.metadata.get("_name_or_path")
    name = Path(name if isinstance(name, str) and name else checkpoint.source).name
    return {
        "general.type": "model",
        "general.name": name or "model",
        "general.file_type": np.uint32(FILE_TYPES[max(weights, key=lambda format: weights[format])]),
        "general.quantization_version": np.uint32(VERSION),
    }


def _json_value(value: Any) -> Any:
    """With numbers that were stored in 32 bits as people write them: 1e-05."""
    if isinstance(value, np.ndarray | np.generic):
        return _json_value(value.tolist())
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    return float(str(np.float32(value))) if isinstance(value, float) and np.float32(value) == value else value


def _changes(made: Sequence[Target]) -> tuple[Change, ...]:
    return tuple(
        Change(target.tensor.name, target.tensor.shape, target.before, target.tensor.format)
        for target in made
    )
