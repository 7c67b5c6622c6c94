"""The load plan: for every matrix of a file its layout and its kernels.

    Description (names, formats, shapes) + RunConfig (+ mesh)  ->  resolve  ->  LoadPlan

Decided once, before a weight is read, by pallas_kernels/selection.py. `read.py` carries it out, `inspect`
prints it, and nothing decides later: what a jitted function runs is in the static fields of Params and
KVCache. How the kernels of a decode step are launched follows from the plan (network/schedules.py).
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from bonsai_jax.config import ModelConfig, RunConfig
from bonsai_jax.weights import memory
from bonsai_jax.weights.placement import Matrix as SplitMatrix
from bonsai_jax.weights.placement import Placement, Share
from bonsai_jax.weights.specs import Description, Source, Sources, Spec
from checkpoints import Folding, RandomTensor
from pallas_kernels import device, problems, selection
from pallas_kernels.qtensor import Products
from pallas_kernels.tiles import TILE_ROWS

DEFAULT_CONTEXT = 4096


@dataclasses.dataclass(frozen=True)
class Member:
    """A matrix of the file on its way to a device.

    field   of Spec
    format  the file's
    shape   (N, K)
    drawn   whether the device draws its blocks (checkpoints/synth.py) or is given them: on a CPU drawing.py
            draws, in programs of few sizes
    stored  format in which the device has it: the file's, or "f32" where it is dequantized at load
    share   what each device has of it, over a mesh that splits it; None: all
    folded  whether it is stored rotated (checkpoints/folding.py)
    regrouped  whether, for that, its inputs are brought from tiled order of v heads into grouped
    experts  for how many experts there is such a matrix; 0: there is one
    """

    field: str
    format: str
    shape: tuple[int, int]
    drawn: bool
    stored: str
    share: Share | None
    folded: bool = False
    regrouped: bool = False
    experts: int = 0

    @property
    def own_shape(self) -> tuple[int, int]:
        """(N, K) on each device."""
        return self.share.shape(self.shape) if self.share and not self.experts else self.shape

    @property
    def as_stored(self) -> tuple[str, bool]:
        """What members of one matrix have in common."""
        return self.stored, self.folded


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


@dataclasses.dataclass(frozen=True)
class Stack:
    """One LayerStack of Params: a weight of every layer in a group, or several with the same input (q, k and
    v).

    kind, group  whose weights it is among (ModelConfig.groups)
    array    name of the array
    fields   of Spec
    numbers  of the layers
    members  of each layer, one for each field
    parts    for each combination of formats that layers have the matrices of a layer
    where    per layer (part, index within the part)
    joined   whether the array holds several stacks, because its members were not joined or not all of them
    """

    kind: str
    group: int
    array: str
    fields: tuple[str, ...]
    numbers: tuple[int, ...]
    members: tuple[tuple[Member, ...], ...]
    parts: tuple[tuple[Matrix, ...], ...]
    where: tuple[tuple[int, int], ...]
    joined: bool

    def layers(self, part: int) -> list[int]:
        """Indices of the layers whose weights are in a part."""
        return [layer for layer, (which, _) in enumerate(self.where) if which == part]

    def members_of(self, matrix: Matrix, layer: int) -> tuple[Member, ...]:
        return tuple(member for member in self.members[layer] if member.field in matrix.fields)


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """What `read` does.

    description  the file
    run       resolved: every default filled in for this model and device
    stacks    weights of layers
    matrices  weights that belong to no layer: embed, head
    placement how weights lie over several devices; None: one device
    draft     the plan of the draft layer, where it is loaded
    """

    description: Description
    run: RunConfig
    stacks: tuple[Stack, ...]
    matrices: tuple[tuple[Member, Matrix], ...]
    placement: Placement | None = None
    draft: "LoadPlan | None" = None

    @property
    def config(self) -> ModelConfig:
        return self.description.config

    @property
    def folding(self) -> Folding | None:
        return self.description.folding

    def kernel(self, matrix: Matrix, rows: int) -> str:
        """What multiplies so many rows with a matrix, or so many tokens with those of their experts."""
        chosen = selection.choose(self.experts_problem(matrix), rows) if matrix.experts else "tiles"
        return matrix.products.kernel(rows) if chosen == "tiles" else chosen

    def experts_problem(self, matrix: Matrix) -> problems.Experts:
        """The problem of a matrix that each expert has."""
        stored = {
            stack.array: [member.as_stored for layer in stack.members for member in layer]
            for stack in self.stacks
            if stack.members[0][0].experts
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
        for _, matrix in self.matrices:
            yield matrix, 1
        for stack in self.stacks:
            for part, matrices in enumerate(stack.parts):
                for matrix in matrices:
                    yield matrix, len(stack.layers(part)) * max(1, matrix.experts)


def plan(description: Description, run: RunConfig, placement: Placement | None = None) -> LoadPlan:
    """The plan for a file on the default device, or over a mesh. No weight is read.

    Raises NotImplementedError for an implementation that was named and cannot run, MemoryError where weights
    and cache do not fit, and ValueError for a context beyond the model's and for weights that the placement
    cannot split.
    """
    parts = placement.parts if placement else 1
    run = resolve(description, run, parts)
    memory.check(description, run, parts)
    draft = None
    if description.draft is not None:
        own = placement and dataclasses.replace(placement, config=description.draft.config)
        draft = planned(description.draft, dataclasses.replace(run, schedule="launches"), own)
    return dataclasses.replace(planned(description, run, placement), draft=draft)


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


def planned(description: Description, run: RunConfig, placement: Placement | None = None) -> LoadPlan:
    """The plan for a resolved RunConfig, without its draft layer and whatever it takes of memory."""
    config, stacks = description.config, []
    if placement:
        placement.check(list(_split_matrices(description, run)))
    for kind in config.kinds:
        specs = {spec.field: spec for spec in description.tensors if spec.kind == kind and spec.is_matrix}
        for number, group in enumerate(config.groups(kind)):
            members = {
                field: [
                    _member(spec, group.settings, sources[layer], run, placement, description.folding)
                    for layer in group.layers
                ]
                for field, spec in specs.items()
                if (sources := description.tensors[spec])
            }
            _check_regrouped(description, members, group.settings, placement)
            for array, fields in _stacked_fields(specs, members, run):
                joined = specs[fields[0]].joined is not None
                half = members.get(specs[fields[0]].half_of or "", [])
                parts, where = _parts([members[field] for field in fields], half, run)
                each = tuple(zip(*(members[field] for field in fields), strict=True))
                stacks.append(Stack(kind, number, array, fields, group.layers, each, parts, where, joined))
    matrices = []
    for spec, sources in description.tensors.items():
        if spec.kind is None and spec.is_matrix and sources:
            member = _member(spec, None, sources[None], run, placement, description.folding)
            matrices.append((member, _matrix((member,), run)))
    return LoadPlan(description, run, tuple(stacks), tuple(matrices), placement)


def _split_matrices(description: Description, run: RunConfig) -> Iterator[SplitMatrix]:
    """Every matrix, as the placement asks about it."""
    config = description.config
    for spec, sources in description.tensors.items():
        for layer, tensor in sources.items() if spec.is_matrix else ():
            settings = None
            if layer is not None:
                settings = next(half for half in config.layers[layer].halves if half.kind == spec.kind)
            member = _member(spec, settings, tensor, run, None, description.folding)
            tiled = _is_tiled(member, run)
            yield SplitMatrix(spec, settings, member.shape, member.stored, tiled, member.regrouped)


def _check_regrouped(
    description: Description, members: Mapping[str, Sequence[Member]], settings: Any, placement
) -> None:
    """Raise NotImplementedError for v heads that were folded in an order that devices cannot split."""
    if not (placement and placement.axis) or getattr(settings, "v_heads_tiled", None) is None:
        return
    if any(member.folded and not member.regrouped for member in members["out"]):
        raise NotImplementedError(
            f"{description.source}: prism.hadamard.gdn_v_grouped is False: v heads that were folded in tiled "
            "order are not split over devices; load it on one, or split rows only (data parallel)"
        )


def _stacked_fields(
    specs: Mapping[str, Spec], members: Mapping[str, Sequence[Member]], run: RunConfig
) -> list[tuple[str, tuple[str, ...]]]:
    """(array, fields of it that are joined) of every stack, in the order of the specs."""
    together: dict[str, list[str]] = {}
    for field in members:
        together.setdefault(specs[field].array, []).append(field)
    stacks = []
    for array, fields in together.items():
        join = len(fields) == 1 or _may_join([members[field] for field in fields], run)
        stacks += [(array, tuple(fields))] if join else [(array, (field,)) for field in fields]
    return stacks


def _member(
    spec: Spec, settings: Any, t: Source, run: RunConfig, placement: Placement | None, fold: Folding | None
) -> Member:
    *experts, n, k = t.shape
    stored = "f32" if run.weights == "decoded" else t.format
    folded = fold is not None and fold.folds(t.name)
    tiled_heads = getattr(settings, "v_heads_tiled", None) is not None and spec.field == "out"
    regrouped = fold is not None and folded and fold.v_grouped and tiled_heads
    drawn = isinstance(t, RandomTensor) and device.platform() != "cpu"
    count = math.prod(experts) if experts else 0
    whole = Member(spec.field, t.format, (n, k), drawn, stored, None, folded, regrouped, count)
    if placement is None:
        return whole
    share = placement.share(spec, settings, (n, k), _is_tiled(whole, run), regrouped)
    return dataclasses.replace(whole, share=share)


def _is_tiled(member: Member, run: RunConfig) -> bool:
    problem = problems.Matmul(device.platform(), member.stored, *member.shape, bits=run.activation_bits)
    return selection.products(problem, run.impl).tiled


def _may_join(members: Sequence[Sequence[Member]], run: RunConfig) -> bool:
    """Whether matrices can lie rows below rows: those of kernels must fill whole tiles, and folded ones have
    another input."""
    if any(len({m.folded for m in layer}) > 1 for layer in zip(*members, strict=True)):
        return False
    return not any(m.own_shape[0] % TILE_ROWS and _is_tiled(m, run) for field in members for m in field)


def _parts(
    members: Sequence[Sequence[Member]], other_half: Sequence[Member], run: RunConfig
) -> tuple[tuple[tuple[Matrix, ...], ...], tuple[tuple[int, int], ...]]:
    """Stack.parts and Stack.where for the members of each field."""
    by_layer = list(zip(*members, strict=True))
    layouts: dict[tuple, list[int]] = {}  # formats as stored -> layers
    for layer, row in enumerate(by_layer):
        layouts.setdefault(tuple(member.as_stored for member in row), []).append(layer)
    joined = [_runs(by_layer[layers[0]]) for layers in layouts.values()]
    mixed = sum(map(len, joined)) > 1
    halves = [
        bool(other_half) and all((other_half[layer].as_stored,) == layout for layer in layers)
        for layout, layers in layouts.items()
    ]
    parts = tuple(
        tuple(_matrix(run_of_members, run, mixed, matrices=1 + half) for run_of_members in row)
        for row, half in zip(joined, halves, strict=True)
    )
    where = {
        layer: (part, at) for part, layers in enumerate(layouts.values()) for at, layer in enumerate(layers)
    }
    return parts, tuple(where[layer] for layer in range(len(by_layer)))


def _runs(members: Sequence[Member]) -> list[tuple[Member, ...]]:
    """Neighbours that are stored in the same format."""
    return [tuple(run) for _, run in itertools.groupby(members, key=lambda member: member.as_stored)]


def _matrix(members: tuple[Member, ...], run: RunConfig, mixed: bool = False, matrices: int = 1) -> Matrix:
    problem = problems.Matmul(
        device.platform(),
        members[0].stored,
        sum(member.own_shape[0] for member in members),
        members[0].own_shape[1],
        matrices=matrices,
        bits=run.activation_bits,
        mixed=mixed,
    )
    fields = tuple(member.field for member in members)
    return Matrix(fields, problem, selection.products(problem, run.impl), members[0].experts)


def sources(plan: LoadPlan, spec_field: str, kind: str | None) -> Sources:
    """The tensors of a field."""
    return next(
        tensors
        for spec, tensors in plan.description.tensors.items()
        if (spec.kind, spec.field) == (kind, spec_field)
    )
