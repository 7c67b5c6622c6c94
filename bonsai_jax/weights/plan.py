"""The load plan: for every matrix of a file its layout and its kernels.

    Description (names, formats, shapes) + RunConfig (+ mesh)  ->  resolve  ->  LoadPlan

Decided once, before a weight is read; kernels by pallas_kernels/selection.py. The plan has a record for each
array of Params, which `read.py` carries out and `inspect` prints. Nothing decides later: what a jitted
function runs is in the static fields of Params and KVCache. How the kernels of a decode step are launched
follows from the plan (network/schedules.py).
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import jax

from bonsai_jax.config import ModelConfig, RunConfig
from bonsai_jax.weights import memory
from bonsai_jax.weights.drawing import Drawn
from bonsai_jax.weights.placement import ONE_DEVICE, Placement, Share, Whole
from bonsai_jax.weights.specs import Description, Source, Spec
from pallas_kernels import Rotation, device, problems, selection
from pallas_kernels.qtensor import Products
from pallas_kernels.rotation import flips_of
from pallas_kernels.tiles import TILE_ROWS

DEFAULT_CONTEXT = 4096


@dataclasses.dataclass(frozen=True)
class Member:
    """How a matrix of the file becomes rows of one on a device: a static value, the same for layers that are
    made alike.

    field   of Spec
    format  the file's
    shape   (N, K)
    stored  format in which the device has it: the file's, or "f32" where it is dequantized at load
    tiled   whether kernels would read it in tiles, were it alone and whole
    drawn   whether the device draws its blocks (checkpoints/synth.py) or is given them: on a CPU drawing.py
            draws, in programs of few sizes
    share   what each device has of it, over a mesh that splits it; None: all
    folded  whether it is stored rotated (checkpoints/folding.py)
    heads   (repeats, k heads) of v heads that are brought for that from tiled order into grouped; None: they
            stay
    experts  for how many experts there is such a matrix; 0: there is one
    """

    field: str
    format: str
    shape: tuple[int, int]
    stored: str
    tiled: bool
    drawn: bool
    share: Share | None = None
    folded: bool = False
    heads: tuple[int, int] | None = None
    experts: int = 0

    @property
    def own_shape(self) -> tuple[int, int]:
        """(N, K) on each device."""
        return self.share.shape(self.shape) if self.share and not self.experts else self.shape

    @property
    def as_stored(self) -> tuple[str, bool]:
        """What members of one matrix have in common."""
        return self.stored, self.folded

    @property
    def given_whole(self) -> bool:
        """Whether each device is given, or draws, the whole matrix, and cuts out its own share."""
        return self.drawn or self.share is None or not self.share.whole_blocks


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One QTensor of Params: a matrix, or several with the same input and format, rows below rows.

    fields    of Spec
    problem   what the choice of its kernels depends on
    products  the kernels chosen
    experts   for how many experts of each layer there is one; 0: it is one matrix
    """

    fields: tuple[str, ...]
    problem: problems.Matmul
    products: Products
    experts: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.problem.n, self.problem.k


Part = tuple[Member, Source]  # a matrix of the file, and how it becomes rows of one on a device


@dataclasses.dataclass(frozen=True)
class Piece:
    """A matrix, or a stack of one of each of several layers, and all that reading it takes.

    matrix   what it becomes
    layers   of each layer the matrices of the file that lie below each other in it
    copied   whether the blocks of the file are copied as they are, into memory that XLA shares with numpy
    rotation of its inputs, numpy arrays; None: it is not folded
    """

    matrix: Matrix
    layers: tuple[tuple[Part, ...], ...]
    copied: bool
    rotation: Rotation | None

    @property
    def tensors(self) -> list[Source]:
        return [t for layer in self.layers for _, t in layer]


@dataclasses.dataclass(frozen=True)
class Stack:
    """One LayerStack of Params: a weight of every layer in a group, or several with the same input (q, k and
    v). Or one QTensor, a matrix that belongs to no layer: embed, head.

    kind, group  whose weights it is among (ModelConfig.groups); None: it belongs to no layer
    array    name of the array
    fields   of Spec
    layers   of each layer its matrices of the file, one for each field
    parts    for each combination of formats that layers have the pieces of a layer, stacked over these layers
    where    per layer (part, index within the part)
    joined   whether the array holds several stacks, because its members were not joined or not all of them
    whole    whether it has all matrices of the array that the file has
    """

    kind: str | None
    group: int
    array: str
    fields: tuple[str, ...]
    layers: tuple[tuple[Part, ...], ...]
    parts: tuple[tuple[Piece, ...], ...]
    where: tuple[tuple[int, int], ...]
    joined: bool
    whole: bool

    @property
    def pieces(self) -> list[Piece]:
        """Of all parts."""
        return [piece for part in self.parts for piece in part]

    @property
    def members(self) -> list[Member]:
        """Of all layers."""
        return [member for layer in self.layers for member, _ in layer]


@dataclasses.dataclass(frozen=True)
class Vector:
    """One float32 array of Params: a norm, a bias or the like of every layer in a group, or of the model's
    own.

    kind, group  whose weights it is among; None: it belongs to no layer
    array     name of the array
    tensors   of each spec that lies in it, side by side, its tensors by layer
    shares    of each spec what a device has of it
    axes      logical axes of the array
    """

    kind: str | None
    group: int
    array: str
    tensors: tuple[tuple[Spec, tuple[Source, ...]], ...]
    shares: tuple[Share | None, ...]
    axes: tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """What `read` does: a record for each array of Params, which has all that reading it takes.

    description  the file
    run       resolved: every default filled in for this model and device
    stacks    matrices
    vectors   small arrays
    placement how weights lie over devices
    draft     the plan of the draft layer, where it is loaded
    """

    description: Description
    run: RunConfig
    stacks: tuple[Stack, ...]
    vectors: tuple[Vector, ...]
    placement: Placement = ONE_DEVICE
    draft: "LoadPlan | None" = None

    @property
    def config(self) -> ModelConfig:
        return self.description.config

    @property
    def models(self) -> "tuple[LoadPlan, ...]":
        """That of the model and, where it is loaded, that of its draft layer."""
        return (self,) if self.draft is None else (self, self.draft)

    def kernel(self, matrix: Matrix, rows: int) -> str:
        """What multiplies so many rows with a matrix, or so many tokens with those of their experts."""
        chosen = selection.choose(self.experts_problem(matrix), rows) if matrix.experts else "tiles"
        return matrix.products.kernel(rows) if chosen == "tiles" else chosen

    def experts_problem(self, matrix: Matrix) -> problems.Experts:
        """The problem of a matrix that each expert has."""
        stored = {
            stack.array: [member.as_stored for member in stack.members]
            for stack in self.stacks
            if stack.members[0].experts
        }
        kernels = {matrix.products.kernel(1) for matrix, _ in self.each() if matrix.experts}
        return problems.Experts(
            device.platform(),
            matrix.products.kernel(1),
            whole=stored["gate"] == stored["up"] and len(kernels) == 1,
            folded=any(folded for formats in stored.values() for _, folded in formats),
        )

    def each(self) -> Iterator[tuple[Matrix, int]]:
        """(matrix, number of them in all layers and experts) of every matrix."""
        for stack in self.stacks:
            for piece in stack.pieces:
                yield piece.matrix, len(piece.layers) * max(1, piece.matrix.experts)


def plan(description: Description, run: RunConfig, placement: Placement = ONE_DEVICE) -> LoadPlan:
    """The plan for a file on the default device, or over a mesh. No weight is read.

    Raises NotImplementedError for an implementation that was named and cannot run, MemoryError where weights
    and cache do not fit, and ValueError for a context beyond the model's and for weights that the placement
    cannot split.
    """
    run = resolve(description, run, placement.parts)
    memory.check(description, run, placement.parts)
    model, *draft = [planned(one, run, placement) for one in description.models]
    return dataclasses.replace(model, draft=draft[0]) if draft else model


def resolve(description: Description, run: RunConfig, parts: int = 1) -> RunConfig:
    """The same RunConfig with every default filled in for this model and device, or for each of `parts`
    devices that share the weights. Errors as for `plan`."""
    most = description.config.context_length
    context = run.context or min(most, DEFAULT_CONTEXT)
    if context > most:
        raise ValueError(f"context is {context}, but the model was made for at most {most}")
    cache_dtype = run.cache_dtype or ("float32" if jax.default_backend() == "cpu" else "float16")
    run = dataclasses.replace(run, cache_dtype=cache_dtype, context=context)
    verdicts = memory.explain_weights(description, run, parts)
    # pyrefly: ignore[bad-argument-type]
    return dataclasses.replace(run, weights=next(verdict.kernel for verdict in verdicts if verdict.taken))


def planned(description: Description, run: RunConfig, placement: Placement = ONE_DEVICE) -> LoadPlan:
    """The plan for a resolved RunConfig, without its draft layer and whatever it takes of memory."""
    config = description.config
    tensors = {
        (spec, layer): t for spec, by_layer in description.tensors.items() for layer, t in by_layer.items()
    }
    members = {key: _member(description, *key, run, placement) for key in tensors if key[0].is_matrix}
    wholes = {
        (spec, layer): Whole(spec, spec.settings(config, layer), spec.sizes(config, layer))
        for spec, layer in tensors
    }
    for key, m in members.items():
        wholes[key] = Whole(*wholes[key][:2], m.shape, m.format, m.stored, m.tiled, m.heads is not None)
    shares = placement.shares(config, wholes)
    members = {key: dataclasses.replace(member, share=shares[key]) for key, member in members.items()}

    groups = [(kind, i, group.layers) for kind in config.kinds for i, group in enumerate(config.groups(kind))]
    stacks: list[Stack] = []
    vectors: list[Vector] = []
    for kind, number, layers in [(None, 0, (None,)), *groups]:
        arrays: dict[str, list[Spec]] = {}
        for spec, by_layer in description.tensors.items():
            if spec.kind == kind and by_layer:
                arrays.setdefault(spec.array, []).append(spec)
        small = {array: specs for array, specs in arrays.items() if not specs[0].is_matrix}
        for array, specs in small.items():
            own = tuple((spec, tuple(tensors[spec, layer] for layer in layers)) for spec in specs)
            axes = specs[0].axes if kind is None else ("layers", *specs[0].axes)
            vectors.append(
                Vector(kind, number, array, own, tuple(shares[spec, layers[0]] for spec in specs), axes)
            )
        matrices = {
            spec: [(members[spec, layer], tensors[spec, layer]) for layer in layers]
            for array, specs in arrays.items()
            if array not in small
            for spec in specs
        }
        stacks += _stacks(kind, number, matrices, description, run, placement)
    return LoadPlan(description, run, tuple(stacks), tuple(vectors), placement)


def _member(
    description: Description, spec: Spec, layer: int | None, run: RunConfig, placement: Placement
) -> Member:
    """How a matrix is loaded, but for its share. Raises NotImplementedError for v heads that were folded in
    an order that devices cannot split."""
    t, fold = description.tensors[spec][layer], description.folding
    *experts, n, k = t.shape
    stored = "f32" if run.weights == "decoded" else t.format
    problem = problems.Matmul(device.platform(), stored, n, k, bits=run.activation_bits)
    folded = fold is not None and fold.folds(t.name)
    half = spec.settings(description.config, layer)
    tiled_heads = getattr(half, "v_heads_tiled", None) if folded and spec.field == "out" else None
    if tiled_heads and placement.axis and not (fold and fold.v_grouped):
        raise NotImplementedError(
            f"{description.source}: prism.hadamard.gdn_v_grouped is False: v heads that were folded in tiled "
            "order are not split over devices; load it on one, or split rows only (data parallel)"
        )
    return Member(
        spec.field,
        t.format,
        (n, k),
        stored,
        selection.products(problem, run.impl).tiled,
        drawn=isinstance(t, Drawn) and device.platform() != "cpu",
        folded=folded,
        heads=tiled_heads if fold and fold.v_grouped else None,
        experts=math.prod(experts) if experts else 0,
    )


def _stacks(
    kind: str | None,
    group: int,
    matrices: Mapping[Spec, Sequence[Part]],
    description: Description,
    run: RunConfig,
    placement: Placement,
) -> Iterator[Stack]:
    """The stacks of a group, for the matrices of each spec by layer, in the order of the specs."""
    arrays: dict[str, list[Spec]] = {}
    for spec in matrices:
        arrays.setdefault(spec.array, []).append(spec)
    for array, specs in arrays.items():
        joins = _may_join([matrices[spec] for spec in specs])
        for own in [specs] if joins else [[spec] for spec in specs]:
            layers = tuple(zip(*(matrices[spec] for spec in own), strict=True))
            halves = [matrices[spec] for spec in matrices if spec.field == own[0].half_of]
            parts, where = _parts(layers, halves[0] if halves else (), description, run, placement)
            fields, whole = tuple(spec.field for spec in own), len(own) == len(specs)
            joined = own[0].joined is not None
            yield Stack(kind, group, array, fields, layers, parts, where, joined, whole)


def _may_join(matrices: Sequence[Sequence[Part]]) -> bool:
    """Whether matrices can lie rows below rows: those of kernels must fill whole tiles, and folded ones have
    another input."""
    if any(len({member.folded for member, _ in layer}) > 1 for layer in zip(*matrices, strict=True)):
        return False
    members = (member for layers in matrices for member, _ in layers)
    return not any(member.tiled and member.own_shape[0] % TILE_ROWS for member in members)


def _parts(
    layers: Sequence[tuple[Part, ...]],
    other_half: Sequence[Part],
    description: Description,
    run: RunConfig,
    placement: Placement,
) -> tuple[tuple[tuple[Piece, ...], ...], tuple[tuple[int, int], ...]]:
    """Stack.parts and Stack.where; other_half: by layer the other matrix of a gated product, if it is one."""
    layouts: dict[tuple, list[int]] = {}  # formats as stored -> layers
    for number, layer in enumerate(layers):
        layouts.setdefault(tuple(member.as_stored for member, _ in layer), []).append(number)
    # In each layout neighbours of one format are one piece.
    runs = {
        layout: [tuple(run) for _, run in itertools.groupby(range(len(layout)), key=layout.__getitem__)]
        for layout in layouts
    }
    mixed = sum(map(len, runs.values())) > 1
    parts = []
    for layout, numbers in layouts.items():
        half = bool(other_half) and all((other_half[n][0].as_stored,) == layout for n in numbers)
        below = [tuple(tuple(layers[n][i] for i in run) for n in numbers) for run in runs[layout]]
        parts.append(tuple(_piece(one, mixed, 1 + half, description, run, placement) for one in below))
    where = {n: (part, at) for part, ns in enumerate(layouts.values()) for at, n in enumerate(ns)}
    return tuple(parts), tuple(where[n] for n in range(len(layers)))


def _piece(
    layers: tuple[tuple[Part, ...], ...],
    mixed: bool,
    matrices: int,
    description: Description,
    run: RunConfig,
    placement: Placement,
) -> Piece:
    members = [member for member, _ in layers[0]]
    first, platform, in_file = members[0], device.platform(), _is_as_in_file(layers)
    rows = sum(member.own_shape[0] for member in members)
    problem = problems.Matmul(
        platform,
        first.stored,
        rows,
        first.own_shape[1],
        matrices=matrices,
        bits=run.activation_bits,
        mixed=mixed,
    )
    products = selection.products(problem, run.impl)
    matrix = Matrix(tuple(member.field for member in members), problem, products, first.experts)
    copied = in_file and platform == "cpu" and placement.mesh is None and not products.tiled
    rotation, fold = None, description.folding
    if first.folded and fold is not None:
        # A device that has a part of the inputs has all signs, and cuts out its own.
        parts = placement.parts if first.share is not None and first.share.axis == 1 else 1
        signs = fold.signs.get(first.shape[1])
        flips = None if signs is None else flips_of(signs)
        heads = first.heads and (first.heads[0], first.heads[1] // parts)
        # pyrefly: ignore[bad-argument-type]  # numpy arrays, which `read` puts on devices
        rotation = Rotation(signs, fold.block, heads, placement.axis if parts > 1 else None, flips)
    return Piece(matrix, layers, copied, rotation)


def _is_as_in_file(layers: Sequence[Sequence[Part]]) -> bool:
    """Whether the device has matrices as they lie in the file."""
    members = [member for layer in layers for member, _ in layer]
    return all(not m.drawn and m.stored == m.format and not m.experts for m in members)
