"""Tiny models of random weights, made from their metadata and from the tensors that their architecture lists.

Names and shapes come from the architecture's own list. That it is right shows when llama.cpp reads the files.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

import bonsai_jax as bj
from bonsai_jax.network import architectures, params
from bonsai_jax.weights import plan as load_plans
from bonsai_jax.weights.read import blocks
from bonsai_jax.weights.specs import Spec
from checkpoints import Checkpoint, RandomTensor, Tensor, open_checkpoint
from checkpoints.geometry import GEOMETRY, tensor_nbytes

VOCAB = 512


class _Embedding(dict):
    """The tensors of a file that has none yet, for a config that asks for the embedding's shape, or whether
    the file has one of those that are in it."""

    def __missing__(self, name: str) -> RandomTensor:
        return RandomTensor(name, "f32", (VOCAB, 1), 0, 0.0, 0.0, 0)


# The tensors of a file that has none yet, for a config that asks for the embedding's shape.
EMBEDDING = _Embedding()


def tiny_gguf(
    architecture: str,
    settings: Mapping[str, Any],
    format: str = "f32",
    *,
    without: Collection[str] = (),
    drawn: Mapping[str, tuple[float, float]] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    present: Collection[str] = (),
    more: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """A GGUF file of an architecture, with the tokenizer of the synthetic models.

    settings  its keys, without the architecture's name before them
    format    of its matrices; rows that its blocks do not divide are f32
    without   fields (Spec.field) that the file lacks
    drawn     mean and standard deviation by field, where the usual ones do not do: norms have 1 and 0.1,
              others 0 and 1 / sqrt(columns), so that they keep the variance of their input
    shapes    in the file, of fields that it has in more axes than their Spec says
    present   names of tensors that some files have, of those by which the config tells them apart
    more      keys that do not begin with the architecture's name
    """
    words = open_checkpoint("synth:tiny-llama:f32").metadata
    metadata = {
        "general.architecture": architecture,
        **(more or {}),
        **{f"{architecture}.{key}": value for key, value in settings.items()},
        **{key: value for key, value in words.items() if key.startswith("tokenizer.")},
    }
    module, tensors = architectures.get(architecture), {}
    config = module.config_from_gguf(metadata, _Embedding(dict.fromkeys(present)))
    # Such as an ffn_up that has the rows of gate too: files have no tensor for gate.
    fused = {spec.gguf for spec in module.TENSORS if spec.fused and spec.fused.gguf == spec.gguf}
    for spec in module.TENSORS:
        for layer in () if spec.field in without else spec.layers(config):
            name, shape = spec.gguf.format(layer), spec.sizes(config, layer)
            if spec.fused is not None and spec.fused.rows is not None and spec.fused.gguf in fused:
                rows = spec.fused.rows(spec.settings(config, layer))
                name, shape = spec.fused.gguf.format(layer), (rows.repeats * rows.size, *shape[1:])
            packed = spec.is_matrix and shape[-1] % GEOMETRY[format].weights == 0
            own = format if packed and spec.field not in ("router", "embed") else "f32"
            usual = (1.0, 0.1) if spec.field.endswith("norm") else (0.0, 1 / math.sqrt(shape[-1]))
            mean, std = (drawn or {}).get(spec.field, usual)
            shape = (shapes or {}).get(spec.field, shape)
            seed = zlib.crc32(name.encode())
            tensors[name] = RandomTensor(name, own, shape, seed, mean, std, tensor_nbytes(own, shape))
    return Checkpoint(f"a tiny {architecture}", "gguf", metadata, tensors)


def as_huggingface(
    checkpoint: Checkpoint,
    metadata: Mapping[str, Any],
    *,
    turned: bool = True,
    **original: Callable[[np.ndarray], np.ndarray],
) -> Checkpoint:
    """The folder that a GGUF file of f32 tensors was converted from.

    metadata  its config.json
    turned    whether the folder has queries and keys in halves where the file has neighbours
    original  by field (Spec.field), what makes the folder's values of the file's
    """
    module = architectures.get(checkpoint.metadata["general.architecture"])
    config = module.config_from_gguf(checkpoint.metadata, checkpoint.tensors)
    tensors = {}
    for spec in module.TENSORS:
        for layer in spec.layers(config):
            if (t := checkpoint.tensors.get(spec.gguf.format(layer))) is not None:
                values = np.asarray(blocks(t)).view(np.float32).reshape(t.shape)
                values = _halves(values, spec, spec.settings(config, layer)) if turned else values
                values = original.get(spec.field, np.ascontiguousarray)(values)
                own = str(spec.huggingface)
                if spec.fused is not None and spec.fused.gguf == spec.gguf:
                    own = str(spec.fused.huggingface)  # the file has no tensor of this one alone
                one_by_one = own.count("{}") == 2  # experts
                for number, part in enumerate(values if one_by_one else [values]):
                    name = own.format(layer, number)
                    tensors[name] = Tensor(name, "f32", part.shape, np.ascontiguousarray(part).view(np.uint8))
    return dataclasses.replace(checkpoint, naming="huggingface", metadata=dict(metadata), tensors=tensors)


def below_each_other(checkpoint: Checkpoint, whole: str, *parts: str) -> Checkpoint:
    """The file with one tensor in place of several, in which their rows lie below each other.

    whole, parts  how the names of the one and of the others end
    """
    tensors = dict(checkpoint.tensors)
    for first in [name for name in tensors if name.endswith(parts[0])]:
        prefix = first.removesuffix(parts[0])
        own = [tensors.pop(prefix + part) for part in parts]
        rows = -1 if len(own[0].shape) == 1 else -2
        w = np.concatenate([np.asarray(blocks(t)).view(np.float32).reshape(t.shape) for t in own], axis=rows)
        tensors[prefix + whole] = Tensor(prefix + whole, "f32", w.shape, w.view(np.uint8))
    return dataclasses.replace(checkpoint, tensors=tensors)


def logits(checkpoint: Checkpoint, ids: list[int], adapter: bj.Adapter | None = None) -> np.ndarray:
    """By the reference, without a tokenizer, which folders made here lack."""
    description = architectures.describe(checkpoint)
    plan = load_plans.planned(description, load_plans.resolve(description, bj.RunConfig(impl="reference")))
    tokens, lengths = jnp.array([ids]), jnp.array([len(ids)])
    weights = params.load(plan).replace(adapter=adapter)
    return np.asarray(bj.jitted.forward(weights, tokens, lengths, plan.config)[0][0])


def comparable(config: bj.ModelConfig) -> bj.ModelConfig:
    """Without names, and without the original context of a rope that is not scaled."""

    def settings(mixer):
        rope = getattr(mixer, "rope", None)
        if rope is None or rope.scaling != "none":
            return mixer
        return dataclasses.replace(mixer, rope=dataclasses.replace(rope, original_context=0))

    mixers = [settings(layer.mixer) for layer in config.layers]
    return dataclasses.replace(config.with_mixers(mixers), architecture="", skipped=())


def _halves(values: np.ndarray, spec: Spec, settings: Any) -> np.ndarray:
    """Rows of queries and keys in the order of Hugging Face files, whose rope turns a head's halves."""
    turned = spec.kind == "attention" and spec.field in ("q", "k", "q_bias", "k_bias")
    rope = settings.rope if turned else None
    if rope is None or not rope.interleaved:
        return values
    pairs = values.reshape(-1, settings.head_dim // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
