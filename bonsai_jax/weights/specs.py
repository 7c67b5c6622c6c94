"""What an architecture's tensors are called and how large they are, and a file's, held against it."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

from bonsai_jax.config import Channels, Mixer, ModelConfig
from checkpoints import Checkpoint, CheckpointError, Gathered, RandomTensor, Tensor
from pallas_kernels import formats

OF_MANY_MODES = "model.language_model."  # what "model." is in Hugging Face files that see images too
Source = Tensor | Gathered | RandomTensor


@dataclasses.dataclass(frozen=True)
class Spec:
    """Where one field of Params comes from.

    field        attribute of Params, or of Layers where the names hold "{}", which stands for the layer;
                 those of JOINED, and bq, bk and bv, are joined
    gguf         tensor name in GGUF files
    huggingface  tensor name in Hugging Face files; None where only GGUF has it. A second "{}" stands for the
                 expert
    shape        names of ModelConfig attributes, dotted ones too; two of them make a matrix, which may be
                 quantized, three a matrix of each expert
    optional     whether a file may lack it
    kind         the mixer of tokens or of channels whose layers have it; None: all layers
    plain        whether it is a plain float32 array also with two axes
    from_huggingface  what makes it of a Hugging Face file's array; None: it is as in GGUF files
    """

    field: str
    gguf: str
    huggingface: str | None
    shape: tuple[str, ...]
    optional: bool = False
    kind: Mixer | Channels | None = None
    plain: bool = False
    from_huggingface: Callable[[Any], Any] | None = None

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) > 1 and not self.plain

    def layers(self, config: ModelConfig) -> Sequence[int] | None:
        """The layers that have it; None for what is no layer's."""
        if "{}" not in self.gguf:
            return None
        return range(config.num_layers) if self.kind is None else config.layers_of(self.kind)

    def name(self, naming: str) -> str | None:
        return self.gguf if naming == "gguf" else self.huggingface


def check_formats(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raises NotImplementedError for a tensor whose format has no file in pallas_kernels/formats."""
    known = formats.names()
    for name, t in checkpoint.tensors.items():
        if t.format not in known and not name.startswith(config.aside):
            raise NotImplementedError(
                f"{checkpoint.source}: tensor {name}: format {t.format!r} is not supported; "
                f"supported: {', '.join(known)}"
            )


def match(checkpoint: Checkpoint, specs: Sequence[Spec], config: ModelConfig) -> dict[Spec, list[Source]]:
    """Each spec's tensors, one per layer where it has layers; none for an absent optional one. Strict both
    ways.

    Raises CheckpointError for a tensor that is missing, has another shape, or has no place."""
    found, aside = {}, (*config.aside, *([config.draft] if config.draft else []))
    unused: dict[str, Source] = {
        name.replace(OF_MANY_MODES, "model.", 1) if name.startswith(OF_MANY_MODES) else name: t
        for name, t in checkpoint.tensors.items()
        if not name.startswith(aside)
    }
    for spec in specs:
        if (name := spec.name(checkpoint.naming)) is None:
            found[spec] = []
            continue
        layers = spec.layers(config)
        names = [name] if layers is None else [name.format(i, "*") for i in layers]
        if name.count("{}") == 2 and config.experts is not None:
            for layer in layers or ():
                _gather(checkpoint, unused, name, layer, config.experts.count)
        if spec.optional and not any(n in unused for n in names):
            found[spec] = []
            continue
        shape = tuple(operator.attrgetter(dimension)(config) for dimension in spec.shape)
        for n in names:
            if n not in unused:
                raise CheckpointError(
                    f"{checkpoint.source}: tensor {n} is missing; "
                    f"a {config.architecture} model of {config.num_layers} layers needs it"
                )
            held = unused[n].shape
            if (tuple(size for size in held if size > 1) if spec.plain else held) != shape:
                raise CheckpointError(
                    f"{checkpoint.source}: tensor {n} has shape {unused[n].shape}; "
                    f"the metadata asks for {shape} ({', '.join(spec.shape)})"
                )
        found[spec] = [unused.pop(n) for n in names]
    if unused:
        listed = ", ".join(list(unused)[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
        raise CheckpointError(
            f"{checkpoint.source}: {config.architecture} has no place for tensor {listed}; "
            "running without it would give wrong text"
        )
    return found


def _gather(checkpoint: Checkpoint, tensors: dict[str, Source], name: str, layer: int, count: int) -> None:
    """In place of a layer's experts, one by one, one tensor. Raises CheckpointError for one that is missing
    or other than the first."""
    parts: list[Tensor] = []
    for expert in range(count):
        one = tensors.pop(of_expert := name.format(layer, expert), None)
        if not isinstance(one, Tensor):
            raise CheckpointError(
                f"{checkpoint.source}: tensor {of_expert} is missing; a layer of {count} experts needs it"
            )
        parts.append(one)
        if (one.format, one.shape) != (parts[0].format, parts[0].shape):
            raise CheckpointError(
                f"{checkpoint.source}: tensor {of_expert} is {one.format} {one.shape}, that of expert 0 "
                f"{parts[0].format} {parts[0].shape}; a layer's experts must be alike"
            )
    whole = name.format(layer, "*")
    tensors[whole] = Gathered(whole, tuple(parts))
