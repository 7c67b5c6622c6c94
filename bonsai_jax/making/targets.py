"""The tensors of a converted file, from the description of the other file: by the architecture's own table of
tensors (weights/specs.py), which has the names of both sides.

    (GGUF name, Hugging Face name, rows of a fused tensor, order of rows, values)  of each Spec and layer
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from bonsai_jax.config import ModelConfig
from bonsai_jax.making.streaming import Matrices, Order, converted, fused_pieces, matrices, positions
from bonsai_jax.network import kinds
from bonsai_jax.weights.read import vector_values
from bonsai_jax.weights.specs import Description, Source, Spec
from checkpoints import ByHead, Part, Streamed, Tensor
from checkpoints.geometry import GEOMETRY
from pallas_kernels import formats

FLOATS = ("f32", "f16", "bf16")
Naming = Literal["gguf", "huggingface"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What all tensors of a new file share.

    description  the old file's
    after        the model as the new file's metadata describes it; the old one differs in the order of rows
    naming       of the new file
    format       of matrices; None: as the old file has them, in a folder F16 where they are quantized
    progress     called with weights so far and in all
    experts_in   the one format of experts' matrices in a folder; None: any
    factors      by Spec.field: what a matrix is multiplied with
    done         weights so far, and in all
    """

    description: Description
    after: ModelConfig
    naming: Naming
    format: str | None
    progress: Callable[[int, int], None]
    experts_in: str | None = None
    factors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    done: list[int] = dataclasses.field(default_factory=lambda: [0, 0])

    def note(self, weights: int) -> None:
        self.done[0] += weights
        self.progress(*self.done)

    def counted(self, made: Sequence["Target"]) -> Sequence["Target"]:
        """The targets, whose weights are those in all."""
        self.done[1] = sum(math.prod(target.tensor.shape) * target.passes for target in made)
        return made

    @property
    def to_gguf(self) -> bool:
        return self.naming == "gguf"

    def matrix_format(self, spec: Spec, source: Source, columns: int) -> str:
        """In what format a matrix is written."""
        if self.to_gguf and spec.field == "router":
            return "f32"
        if self.experts_in is not None and spec.kind == "experts" and len(spec.shape) == 3:
            if not self.to_gguf and source.format != self.experts_in:
                raise NotImplementedError(
                    f"{self.description.source}: {source.name} is {source.format}; a folder of "
                    f"{self.after.architecture} has its experts in {self.experts_in}"
                )
            return source.format
        if source.format not in FLOATS and self.to_gguf:
            return source.format
        usual = source.format if source.format in FLOATS else "f16"
        format = self.format or usual
        return "f16" if columns % GEOMETRY[format].weights else format  # as llama.cpp's converter does it

    @functools.cached_property
    def usual(self) -> str:
        """The format of most matrices of a folder, which small arrays have too where it holds them."""
        sources = [(spec, t) for spec, t in self.description.sources if spec.is_matrix]
        each = [self.matrix_format(spec, t, t.shape[-1]) for spec, t in sources]
        return max(FLOATS, key=each.count)


@dataclasses.dataclass(frozen=True)
class Target:
    """A tensor of the new file.

    parts   tensors of the old file that it is made of
    before  their format
    passes  weights of the old file that each of its values is made of
    """

    tensor: Streamed
    parts: tuple[str, ...]
    before: str
    passes: int = 1


def targets(plan: Plan) -> list[Target]:
    """Every tensor of the new file, once, in the order of the table."""
    made: dict[str, Target] = {}
    fused: dict[str, list[tuple[Spec, int | None, Source]]] = defaultdict(list)
    for spec, by_layer in plan.description.tensors.items():
        if spec.name(plan.naming) is None:
            continue
        for layer, source in by_layer.items():
            if (whole := fused_name(plan, spec, layer, source)) is not None:
                fused[whole].append((spec, layer, source))
                made.setdefault(whole, Target(Streamed(whole, "", (), lambda: ()), (), ""))
                continue
            for target in _alone(plan, spec, layer, source):
                made.setdefault(target.tensor.name, target)
    whole = [_together(plan, name, fused[name]) if name in fused else own for name, own in made.items()]
    return [target for one in whole for target in _stored(plan, one)]


def _stored(plan: Plan, target: Target) -> list[Target]:
    """A folder's two tensors in place of one in MXFP4 (checkpoints.Microscaled)."""
    tensor = target.tensor
    if plan.to_gguf or tensor.format != "mxfp4":
        return [target]
    *rows, columns = tensor.shape

    def blocks() -> Iterator[np.ndarray]:
        for piece in tensor.pieces():
            quants = piece.reshape(-1, 17)[:, 1:]
            even, odd = quants[:, 0::2], quants[:, 1::2]
            yield np.concatenate([even & 15 | odd << 4, even >> 4 | odd & 0xF0], axis=1)

    def scales() -> Iterator[np.ndarray]:
        for piece in tensor.pieces():
            yield piece.reshape(-1, 17)[:, 0]

    shape = (*rows, columns // 32)
    return [
        Target(Streamed(f"{tensor.name}_blocks", "u8", (*shape, 16), blocks), target.parts, "mxfp4", 2),
        Target(Streamed(f"{tensor.name}_scales", "u8", shape, scales), target.parts, "mxfp4", 32),
    ]


def fused_name(plan: Plan, spec: Spec, layer: int | None, source: Source) -> str | None:
    """The tensor in which the new file has this one's rows beside others; None: it has one of its own.

    Folders have the fused one, unless the table has a name for each expert. GGUF files have it where there is
    no other name for all of its parts (gate and up in ffn_up), or where the folder has it too.
    """
    fused = spec.fused
    if fused is None or fused.rows is None or (name := fused.name(plan.naming)) is None:
        return None
    if plan.to_gguf:
        specs = plan.description.tensors
        needed = any(one.gguf == fused.gguf for one in specs)
        if not needed and (len(spec.shape) > 2 or not _is_part(source)):
            return None
    elif str(spec.huggingface).count("{}") > 1:
        return None
    return name.format(layer)


def _is_part(source: Source) -> bool:
    return isinstance(source, Part | ByHead)


def array(plan: Plan, name: str, values: np.ndarray) -> Target:
    """A small array of the new file that the old one says otherwise."""
    return Target(_whole(plan, small_tensor(name, values)), (), "f32")


def small_tensor(name: str, values: np.ndarray) -> Tensor:
    """A float32 array as a file has it."""
    rows = values.reshape(*values.shape[:-1], -1)  # a single value has no axis
    return Tensor(name, "f32", values.shape, rows.view(np.uint8))


def scaled_copy(plan: Plan, field: str, name: str, factor: float) -> Target:
    """One of the model's own matrices once more, multiplied."""
    spec, source = next((spec, t) for spec, t in plan.description.sources if spec.field == field)
    format = plan.matrix_format(spec, source, source.shape[-1])
    own = Matrices(plan.description.source, source, factor=factor)
    pieces = functools.partial(own.pieces, format, plan.note)
    return Target(Streamed(name, format, source.shape, pieces), (source.name,), source.format)


def _order(plan: Plan, spec: Spec, layer: int | None) -> Order:
    kind = None if spec.kind is None else kinds.get(spec.kind)
    if layer is None or not hasattr(kind, "order"):
        return None
    return kind.order(spec.field, plan.description.config, plan.after, layer)


def _alone(plan: Plan, spec: Spec, layer: int | None, source: Source) -> Iterator[Target]:
    name, sizes = str(spec.name(plan.naming)), spec.stored_sizes(plan.after, layer, plan.naming)
    order = _order(plan, spec, layer)
    if not spec.is_matrix:
        yield _vector(plan, spec, name.format(layer), sizes, source, order)
        return
    factor = plan.factors.get(spec.field, 1.0)
    format = plan.matrix_format(spec, source, sizes[-1])
    if name.count("{}") < 2:
        own = Matrices(plan.description.source, source, order, factor)
        pieces = functools.partial(own.pieces, format, plan.note)
        yield Target(Streamed(name.format(layer), format, sizes, pieces), (source.name,), source.format)
        return
    for expert, matrix in enumerate(matrices(source)):
        own = Matrices(plan.description.source, matrix, order, factor)
        pieces = functools.partial(own.pieces, format, plan.note)
        tensor = Streamed(name.format(layer, expert), format, sizes[1:], pieces)
        yield Target(tensor, (source.name,), source.format)


def _vector(
    plan: Plan, spec: Spec, name: str, sizes: tuple[int, ...], source: Source, order: Order
) -> Target:
    """A small array, made at once: float32 in GGUF files; in folders the matrices' format where that is
    exact."""
    values = _values(plan, spec, source, order)
    format = "f32" if plan.to_gguf else _exact(plan, spec, values)
    raw = _converted(values, format, sizes)
    return Target(_whole(plan, Tensor(name, format, sizes, raw)), (source.name,), source.format)


def _values(plan: Plan, spec: Spec, source: Source, order: Order) -> np.ndarray:
    """Of a small array, as the new file has them."""
    values = vector_values(source, spec, plan.description.naming)
    if order is not None:
        values = values[order[1]]
    if not plan.to_gguf and spec.to_huggingface is not None:
        values = np.asarray(spec.to_huggingface(values), np.float32)
    return np.ascontiguousarray(values, np.float32)


def _exact(plan: Plan, spec: Spec, values: np.ndarray) -> str:
    """The folder's usual format where it holds these values, or makes of them those of the GGUF file; else
    F32."""
    if plan.usual == "f16" and np.abs(values).max() > np.finfo(np.float16).max:
        return "f32"
    narrow = formats.values(plan.usual, _converted(values, plan.usual, values.shape))
    narrow = narrow.reshape(values.shape)
    as_gguf = spec.from_huggingface or (lambda x: x)
    return plan.usual if np.array_equal(as_gguf(narrow), as_gguf(values)) else "f32"


def _converted(values: np.ndarray, format: str, sizes: tuple[int, ...]) -> np.ndarray:
    rows = np.ascontiguousarray(values, np.float32).reshape(1, -1).view(np.uint8)
    raw = converted(rows, "f32", format, "an array")
    return raw.reshape(*sizes[:-1], -1)


def _whole(plan: Plan, tensor: Tensor) -> Streamed:
    def pieces() -> Iterator[np.ndarray]:
        plan.note(int(np.prod(tensor.shape)))
        yield tensor.data

    return Streamed(tensor.name, tensor.format, tensor.shape, pieces)


def _together(plan: Plan, name: str, members: list[tuple[Spec, int | None, Source]]) -> Target:
    """A tensor in which the rows of several lie."""
    where, parts = plan.description.source, tuple(source.name for _, _, source in members)
    spec, layer, source = members[0]
    settings = spec.settings(plan.after, layer)
    each = [(one, one.fused.rows(settings), t) for one, _, t in members if one.fused and one.fused.rows]
    size = each[0][1].repeats * each[0][1].size
    if not spec.is_matrix:
        shape = (*spec.sizes(plan.after, layer)[:-1], size)
        out = np.empty(shape, np.float32)
        for (one, rows, t), (_, number, _) in zip(each, members, strict=True):
            out[..., positions(rows)] = _values(plan, one, t, _order(plan, one, number))
        format = "f32" if plan.to_gguf else _exact(plan, spec, out)
        tensor = Tensor(name, format, shape, _converted(out, format, shape))
        return Target(_whole(plan, tensor), parts, source.format)
    sizes = spec.sizes(plan.after, layer)
    # Matrices of heads lie in a tensor of two axes (kv_b_proj), those of experts in one of three.
    flat = len(sizes) == 3 and spec.kind != "experts"
    columns = sizes[1] if spec.fused and spec.fused.transposed else sizes[-1]
    shape = (size, columns) if flat or len(sizes) == 2 else (sizes[0], size, columns)
    format = plan.matrix_format(spec, source, columns)
    own = [
        Matrices(
            where, t, _order(plan, one, number), rows=rows,
            transposed=bool(one.fused and one.fused.transposed),
        )
        for (one, rows, t), (_, number, _) in zip(each, members, strict=True)
    ]  # fmt: skip
    pieces: Any = functools.partial(fused_pieces, own, shape, format, plan.note)
    return Target(Streamed(name, format, shape, pieces), parts, source.format)
