"""Which tensors of two model files belong together.

Files with one naming (two GGUF files, two Hugging Face folders) are compared by names. Of a folder and a GGUF
file the architecture's table (Spec.gguf, Spec.huggingface) says which tensors are the same, and how values
differ in form: rows of queries and keys lie in halves in a folder and as neighbours in Llama's GGUF files
(network/architectures/llama.py), a norm may lack the 1 that is added to it.
"""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Int

from bonsai_jax.network import architectures
from bonsai_jax.network.rope import Rope
from bonsai_jax.weights.specs import Description, Source, Spec
from checkpoints import Checkpoint, CheckpointError, Folding, RandomTensor, folding

# Kinds whose matrices have the same values in folders and GGUF files, but for the order of q and k.
KINDS = ("attention", "mlp", "plain_mlp", "experts")
ONLY_A, ONLY_B = "only in A", "only in B"
SHAPES, FOLDED = "shapes differ", "rotated differently"


@dataclasses.dataclass(frozen=True)
class Side:
    """A tensor of one of both files.

    tensor  as its file has it
    naming  that file's
    spec    what it is to its architecture; None: both files have one naming, and values are those stored
    rows    which of its rows comes first, second, ... in the other file; None: as they lie
    """

    tensor: Source
    naming: str
    spec: Spec | None = None
    rows: Int[np.ndarray, "N"] | None = None


@dataclasses.dataclass(frozen=True)
class Pair:
    """A tensor of two files; None: the file lacks it.

    name    in both files; of a folder and a GGUF file, that in GGUF files
    reason  why both cannot be compared; None: they can
    """

    name: str
    a: Side | None
    b: Side | None
    reason: str | None = None


def pairs(a: Checkpoint, b: Checkpoint) -> list[Pair]:
    """Every tensor of both files, in the order of A, or of the one that is a GGUF file where the other is a
    folder; those that only B has come last.

    Raises NotImplementedError for models whose weights are drawn when they are loaded, and for a folder and a
    GGUF file of an architecture that stores weights in two orders; CheckpointError for a folder and a GGUF
    file of two architectures, or one that is broken.
    """
    for checkpoint in (a, b):
        if any(isinstance(t, RandomTensor) for t in checkpoint.tensors.values()):
            raise NotImplementedError(
                f"{checkpoint.source} is no file: its weights are drawn when it is loaded; compare GGUF "
                "files or Hugging Face folders"
            )
    sides = [_by_name(a), _by_name(b)] if a.naming == b.naming else _by_spec(a, b)
    folds = folding(a), folding(b)
    return [
        _pair(name, sides[0].get(name), sides[1].get(name), folds)
        for name in {**sides[0], **sides[1]}  # in order, each once
    ]


def _pair(name: str, a: Side | None, b: Side | None, folds: tuple[Folding | None, Folding | None]) -> Pair:
    if a is None or b is None:
        return Pair(name, a, b, ONLY_A if b is None else ONLY_B)
    if _shape(a) != _shape(b):
        return Pair(name, a, b, SHAPES)
    same = _rotation(folds[0], a.tensor) == _rotation(folds[1], b.tensor)
    return Pair(name, a, b, None if same else FOLDED)


def _shape(side: Side) -> tuple[int, ...]:
    shape = side.tensor.shape
    return side.spec.matched_shape(shape) if side.spec else shape


def _rotation(fold: Folding | None, tensor: Source) -> Any:
    """How a tensor is Hadamard-folded, for comparison; None: it is not."""
    if fold is None or not fold.folds(tensor.name):
        return None
    signs = fold.signs.get(tensor.shape[-1])
    return fold.block, None if signs is None else signs.tobytes(), fold.v_grouped


def _by_name(checkpoint: Checkpoint) -> dict[str, Side]:
    return {
        name: Side(t, checkpoint.naming)
        for name, t in checkpoint.tensors.items()
        if not isinstance(t, RandomTensor)
    }


def _by_spec(a: Checkpoint, b: Checkpoint) -> list[dict[str, Side]]:
    """The tensors of each file by their names in GGUF files, in the order of the one that is a GGUF file.
    Of a tensor that holds several, one below the other, each is one."""
    described = [architectures.describe(a), architectures.describe(b)]
    names = [architectures.ALIASES.get(d.config.architecture, d.config.architecture) for d in described]
    if names[0] != names[1]:
        raise CheckpointError(
            f"{a.source} is a {names[0]} and {b.source} a {names[1]}: a Hugging Face folder and a GGUF file "
            "are compared if they have one architecture"
        )
    kinds = {spec.kind for d in described for spec in d.tensors if spec.kind and d.tensors[spec]}
    if other := sorted(kinds - {*KINDS}):
        raise NotImplementedError(
            f"{a.source} and {b.source}: a Hugging Face folder and a GGUF file of {names[0]} store "
            f"{', '.join(other).replace('_', ' ')} in two orders, which are not compared; make a GGUF file "
            "of the folder with bonsai-jax convert, or compare two folders"
        )
    gguf = a if a.naming == "gguf" else b
    order = {name: number for number, name in enumerate(gguf.tensors)}
    sides = []
    for own, other in (described, described[::-1]):
        by_name: dict[str, Side] = {}
        places: dict[str, int] = {}
        for spec, tensors in own.tensors.items():
            for layer, tensor in tensors.items():
                name = spec.gguf.format(layer)
                whole = str(spec.fused.gguf).format(layer) if spec.fused else name
                by_name[name] = Side(tensor, own.naming, spec, _order(own, other, spec, layer))
                places[name] = order.get(name, order.get(whole, len(order)))
        sides.append({name: by_name[name] for name in sorted(by_name, key=places.__getitem__)})
    return sides


def _order(own: Description, other: Description, spec: Spec, layer: int | None) -> np.ndarray | None:
    """Rows of a folder's queries and keys, in halves, in the order of GGUF files with an interleaved rope:

    row 2 i + j of a head is row j head_dim / 2 + i of the folder's
    """
    if own.naming == "gguf" or spec.kind != "attention" or spec.field not in ("q", "k", "q_bias", "k_bias"):
        return None
    settings = spec.settings(own.config, layer)
    if _interleaved(settings.rope) or not _interleaved(spec.settings(other.config, layer).rope):
        return None
    rows = np.arange(spec.sizes(own.config, layer)[0]).reshape(-1, 2, settings.head_dim // 2)
    return rows.swapaxes(1, 2).reshape(-1)


def _interleaved(rope: Rope | None) -> bool:
    return rope is not None and rope.interleaved
