"""Which tensors a file of an architecture must hold, and which half of which layer each belongs to."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bonsai_jax.config import Layer, ModelConfig
from bonsai_jax.weights import scales
from bonsai_jax.weights.drawing import Drawn
from bonsai_jax.weights.scales import Scaled
from checkpoints import (
    ByHead,
    Changed,
    Checkpoint,
    CheckpointError,
    Folding,
    Gathered,
    Microscaled,
    Part,
    RandomTensor,
    Tensor,
)
from pallas_kernels import formats

# How names begin in Hugging Face files of models that also see images, and in those of text models.
MULTIMODAL = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
Source = Tensor | Gathered | Microscaled | Part | ByHead | Changed | Drawn | Scaled
# Tensors of one spec: by layer; of a spec that belongs to no layer under None. Empty: the file lacks it.
Sources = Mapping[int | None, Source]


class Rows(NamedTuple):
    """Which rows of a fused tensor are a tensor's own: the tensor is `repeats` times `size` rows, and of each
    repeat those of each run, (start, stop), are taken (checkpoints.Part)."""

    repeats: int
    size: int
    runs: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Fused:
    """A tensor that a file may have in place of several, whose rows lie in it.

    gguf, huggingface  its name, as in Spec; None: there is none
    rows  (the layer's settings) -> Rows; None: all are this tensor's, which only has another name
    transposed  whether a tensor of three axes has its matrices the other way round
    """

    gguf: str | None
    huggingface: str | None
    rows: Callable[[Any], Rows] | None = None
    transposed: bool = False

    def name(self, naming: str) -> str | None:
        return self.gguf if naming == "gguf" else self.huggingface

    def under(self, gguf: str, huggingface: str) -> "Fused":
        """The same with prefixes on its names."""
        names = (self.gguf and gguf + self.gguf, self.huggingface and huggingface + self.huggingface)
        return Fused(*names, self.rows, self.transposed)


@dataclasses.dataclass(frozen=True)
class Spec:
    """A tensor of the file, and the array of Params that it becomes.

    field        name of the array: in the weights of its kind (network/kinds), or in Params
    gguf         tensor name in GGUF files; "{}" stands for the layer
    huggingface  tensor name in Hugging Face files; None where only GGUF has it. A second "{}" stands for the
                 expert
    shape        names of attributes of the kind's settings or of ModelConfig; two make a matrix, which may be
                 quantized, three a matrix for each expert
    axes         for each of these, the logical axis along which devices split it; (): no device splits it
    kind         the kind whose layers have it; None: no layer, it is one of the model's own
    joined       name of the array that several tensors with the same input share, rows below rows
    half_of      the other matrix of a gated product, which runs as one where formats agree
    optional     whether a file may lack it
    plain        whether it is a float32 array although it has two axes
    from_huggingface  makes GGUF's values of a Hugging Face file's; None: they are the same
    to_huggingface    its inverse
    gguf_shape, huggingface_shape  its shape in such files where these have other axes: names, as in `shape`,
                 and numbers
    fused        a tensor in which it may lie beside others
    """

    field: str
    gguf: str
    huggingface: str | None
    shape: tuple[str, ...]
    axes: tuple[str | None, ...] = ()
    kind: str | None = None
    joined: str | None = None
    half_of: str | None = None
    optional: bool = False
    plain: bool = False
    from_huggingface: Callable[[Any], Any] | None = None
    to_huggingface: Callable[[Any], Any] | None = None
    gguf_shape: tuple[str | int, ...] = ()
    huggingface_shape: tuple[str | int, ...] = ()
    fused: Fused | None = None

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) > 1 and not self.plain

    def matched_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a file's tensor, for comparison with `sizes`. A vector may lie in several axes, such
        as one for groups of heads, and what is plain may have axes of one."""
        if len(self.shape) == 1:
            return (math.prod(shape),)
        return tuple(size for size in shape if size > 1) if self.plain else shape

    @property
    def array(self) -> str:
        """Name of the array that it becomes, or becomes a part of."""
        return self.joined or self.field

    def layers(self, config: ModelConfig) -> tuple[int | None, ...]:
        """The layers that have it, those in which none of its sizes is 0; (None,) if it belongs to no
        layer."""
        layers = (None,) if self.kind is None else config.layers_with(self.kind)
        return tuple(n for n in layers if 0 not in self.sizes(config, n))

    def name(self, naming: str) -> str | None:
        return self.gguf if naming == "gguf" else self.huggingface

    def settings(self, config: ModelConfig, layer: int | None) -> Any:
        """The half of a layer that has it; None if it belongs to no layer."""
        if layer is None:
            return None
        return next(half for half in config.layers[layer].halves if half.kind == self.kind)

    def sizes(self, config: ModelConfig, layer: int | None) -> tuple[int, ...]:
        """The shape that the tensor must have."""
        return self._sizes(self.shape, config, layer)

    def stored_sizes(self, config: ModelConfig, layer: int | None, naming: str) -> tuple[int, ...]:
        """The shape that converters write."""
        own = self.gguf_shape if naming == "gguf" else self.huggingface_shape
        return self._sizes(own or self.shape, config, layer)

    def _sizes(self, names: tuple[str | int, ...], config: ModelConfig, layer: int | None) -> tuple[int, ...]:
        owners = (config,) if layer is None else (self.settings(config, layer), config)
        return tuple(
            name
            if isinstance(name, int)
            else next(getattr(owner, name) for owner in owners if hasattr(owner, name))
            for name in names
        )


def check_formats(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raises NotImplementedError for a tensor whose format has no file in pallas_kernels/formats."""
    known = formats.names()
    for name, t in checkpoint.tensors.items():
        if t.format not in known and not name.startswith(config.skipped):
            raise NotImplementedError(
                f"{checkpoint.source}: tensor {name}: format {t.format!r} is not supported; "
                f"supported: {', '.join(known)}"
            )


def match(checkpoint: Checkpoint, specs: Sequence[Spec], config: ModelConfig) -> dict[Spec, Sources]:
    """The tensors of each spec. Strict both ways.

    Raises CheckpointError for a tensor that is missing, has another shape, or has no place."""
    skipped = (*config.skipped, *([config.draft] if config.draft else []))
    tensors: dict[str, Source] = {
        text_name(name): Drawn(t) if isinstance(t, RandomTensor) else t
        for name, t in checkpoint.tensors.items()
        if not name.startswith(skipped)
    }
    named = {spec.gguf.format(n) for spec in specs for n in spec.layers(config)}
    tensors = scales.with_scales(checkpoint, tensors, named)
    matched: dict[Spec, Sources] = {}
    used: set[str] = set()  # a norm may serve two halves of a layer
    for spec in specs:
        pattern = spec.name(checkpoint.naming)
        layers = () if pattern is None else spec.layers(config)
        names = {layer: str(pattern).format(layer, "*") for layer in layers}
        for layer in layers:
            if whole := _part(checkpoint, tensors, spec, config, layer, names[layer]):
                used.add(whole)
            elif str(pattern).count("{}") == 2:
                _gather(checkpoint, tensors, str(pattern), layer, spec.sizes(config, layer)[0])
        if spec.optional and not any(name in tensors for name in names.values()):
            names = {}
        for layer, name in names.items():
            if name not in tensors:
                whole = None if spec.fused is None else spec.fused.name(checkpoint.naming)
                other = "" if whole is None else f" (or {whole.format(layer)}, with its rows)"
                raise CheckpointError(
                    f"{checkpoint.source}: tensor {name}{other} is missing; "
                    f"a {config.architecture} model of {config.num_layers} layers needs it"
                )
            expected, shape = spec.sizes(config, layer), tensors[name].shape
            if spec.matched_shape(shape) != spec.matched_shape(expected):
                raise CheckpointError(
                    f"{checkpoint.source}: tensor {name} has shape {shape}; "
                    f"the metadata asks for {expected} ({', '.join(spec.shape)})"
                )
        matched[spec] = {layer: tensors[name] for layer, name in names.items()}
        used.update(names.values())
    if unused := [name for name in tensors if name not in used]:
        listed = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
        raise CheckpointError(
            f"{checkpoint.source}: {config.architecture} has no place for tensor {listed}; "
            "running without it would give wrong text"
        )
    return matched


def text_tensor(tensors: Mapping[str, Any], name: str) -> Any:
    """The tensor that a text model has under this name, also in a file of a model that sees images too.
    Raises KeyError where there is none."""
    for own, tensor in tensors.items():
        if text_name(own) == name:
            return tensor
    raise KeyError(name)


def text_name(name: str) -> str:
    """As a text model's tensor is called."""
    start = next((start for start in MULTIMODAL if name.startswith(start)), "")
    return MULTIMODAL.get(start, "") + name.removeprefix(start)


def _part(
    checkpoint: Checkpoint, tensors: dict[str, Source], spec: Spec, config: ModelConfig, layer: Any, name: str
) -> str | None:
    """Adds the tensor of this name where the file has a fused one in its place, whose name is returned. The
    last of its tensors may have the same name: up, where gate lies before it."""
    whole = None if spec.fused is None else spec.fused.name(checkpoint.naming)
    whole = None if whole is None else whole.format(layer)
    if spec.fused is None or whole not in tensors or (name in tensors and name != whole):
        return None
    if spec.fused.rows is None:
        tensors[name] = tensors[whole]
        return whole
    rows, shape = spec.fused.rows(spec.settings(config, layer)), tensors[whole].shape
    axis = -2 if spec.is_matrix else -1
    if len(shape) < -axis or shape[axis] != rows.repeats * rows.size:
        raise CheckpointError(
            f"{checkpoint.source}: tensor {whole} has shape {shape}; the metadata asks for "
            f"{rows.repeats * rows.size} rows, some of which are {name}"
        )
    tensors[name] = Part(name, tensors[whole], rows.repeats, rows.runs, vector=not spec.is_matrix)
    if len(spec.shape) == 3 and len(shape) == 2:
        by_head = ByHead(name, tensors[name], rows.repeats, spec.fused.transposed)
        if by_head.transposed and formats.get(by_head.format).WEIGHTS > 1:
            raise NotImplementedError(
                f"{checkpoint.source}: tensor {whole} is {by_head.format}, and {name} is its transpose; "
                "supported: a folder of f32, f16 or bf16 weights, or a GGUF file"
            )
        tensors[name] = by_head
    return whole


def _gather(checkpoint: Checkpoint, tensors: dict[str, Source], pattern: str, layer: Any, count: int) -> None:
    """Replaces the tensors of a layer's experts by one. Raises CheckpointError for one that is missing or
    unlike the first."""
    parts: list[Tensor] = []
    for expert in range(count):
        name = pattern.format(layer, expert)
        part = tensors.pop(name, None)
        if not isinstance(part, Tensor):
            raise CheckpointError(
                f"{checkpoint.source}: tensor {name} is missing; a layer of {count} experts needs it"
            )
        parts.append(part)
        if (part.format, part.shape) != (parts[0].format, parts[0].shape):
            raise CheckpointError(
                f"{checkpoint.source}: tensor {name} is {part.format} {part.shape}, that of expert 0 "
                f"{parts[0].format} {parts[0].shape}; a layer's experts must be alike"
            )
    name = pattern.format(layer, "*")
    tensors[name] = Gathered(name, tuple(parts))


@dataclasses.dataclass(frozen=True)
class Description:
    """Everything that loading asks of a file, read once: no weight is read, and nothing is decided.

    source   what the user asked for
    naming   whose names and arrays the file has: "gguf" or "huggingface"
    config   the model
    tensors  of each spec
    folding  how Hadamard-folded matrices were rotated; None: none is folded
    draft    the draft layer as a model of one layer; None: it is not loaded
    draft_model  another file's, of the model that proposes tokens for this one; None: there is none
    skipped  the prefixes of ModelConfig.skipped that the file has tensors of
    """

    source: str
    naming: str
    config: ModelConfig
    tensors: Mapping[Spec, Sources]
    folding: Folding | None = None
    draft: "Description | None" = None
    draft_model: "Description | None" = None
    skipped: tuple[str, ...] = ()

    @property
    def sources(self) -> tuple[tuple[Spec, Source], ...]:
        """Every tensor, with its spec."""
        return tuple((spec, t) for spec, by_layer in self.tensors.items() for t in by_layer.values())

    @property
    def models(self) -> "tuple[Description, ...]":
        """The model and, where they are loaded, its draft layer and its draft model."""
        return (self, *(one for one in (self.draft, self.draft_model) if one is not None))


def describe(
    checkpoint: Checkpoint,
    specs: Sequence[Spec],
    config: ModelConfig,
    draft: Sequence[Spec] = (),
    fold: Folding | None = None,
) -> Description:
    """The description of a checkpoint whose architecture has these specs; `draft` are those of its draft
    layer, which is described where config.draft names it.

    Raises CheckpointError naming the tensor that is missing, has no place or the wrong shape, and
    NotImplementedError for a format without a file in pallas_kernels/formats."""
    check_formats(checkpoint, config)
    if _untied_without_head(checkpoint, specs):
        raise CheckpointError(
            f"{checkpoint.source}: tensor lm_head.weight is missing; config.json says that the embedding is "
            "not also the output matrix (tie_word_embeddings is false)"
        )
    names = checkpoint.tensors
    return Description(
        source=checkpoint.source,
        naming=checkpoint.naming,
        config=config,
        tensors=match(checkpoint, specs, config),
        folding=fold,
        draft=_draft(checkpoint, draft, config) if config.draft else None,
        skipped=tuple(start for start in config.skipped if any(name.startswith(start) for name in names)),
    )


def _untied_without_head(checkpoint: Checkpoint, specs: Sequence[Spec]) -> bool:
    if checkpoint.naming != "huggingface":
        return False
    text = checkpoint.metadata.get("text_config")
    tied = [part.get("tie_word_embeddings") for part in (text, checkpoint.metadata) if isinstance(part, dict)]
    says = next((value for value in tied if value is not None), None)
    heads = ("lm_head.weight", *(str(spec.huggingface) for spec in specs if spec.field == "head"))
    return says is False and not any(name.endswith(heads) for name in checkpoint.tensors)


def with_draft(checkpoint: Checkpoint, config: ModelConfig, fold: Folding | None = None) -> ModelConfig:
    """The same config with the draft layer (MTP) in use. Raises ValueError for a file that has none, and
    NotImplementedError for several, or one whose weights are folded."""
    marks = {"gguf": "nextn.eh_proj.weight", "huggingface": "fc.weight"}
    drafts = [start for start in config.skipped if start + marks[checkpoint.naming] in checkpoint.tensors]
    if not drafts:
        raise ValueError(f"{checkpoint.source}: it has no draft layer (MTP); leave draft and 'mtp' out")
    if len(drafts) > 1:
        raise NotImplementedError(f"{checkpoint.source}: it has {len(drafts)} draft layers; supported: one")
    if fold and any(name.startswith(drafts[0]) for name in fold.weights):
        raise NotImplementedError(
            f"{checkpoint.source}: weights of its draft layer are Hadamard-folded, which is not supported; "
            "leave draft and 'mtp' out"
        )
    rest = tuple(start for start in config.skipped if start != drafts[0])
    return dataclasses.replace(config, draft=drafts[0], skipped=rest)


def _draft(checkpoint: Checkpoint, specs: Sequence[Spec], config: ModelConfig) -> Description:
    """The draft layer, as if it were a model of one layer: attention and what mixes channels in the last
    layer."""
    prefix = str(config.draft)
    own = "blk.0." if checkpoint.naming == "gguf" else prefix
    tensors = {
        name.replace(prefix, own, 1): t for name, t in checkpoint.tensors.items() if name.startswith(prefix)
    }
    layer = Layer(config.attention, config.layers[-1].channels)
    alone = dataclasses.replace(config, layers=(layer,), skipped=(), draft=None)
    return describe(dataclasses.replace(checkpoint, tensors=tensors, metadata={}), specs, alone)
