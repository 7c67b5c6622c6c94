"""The load plan: for every matrix of a file its layout and its kernels.

    Description (names, formats, shapes) + RunConfig (+ mesh)  ->  resolve  ->  LoadPlan

Decided once, before a weight is read; kernels by pallas_kernels/selection.py. The plan has a record for each
array of Params, which `read.py` carries out and `inspect` prints. Nothing decides later: what a jitted
function runs is in the static fields of Params and KVCache. How the kernels of a decode step are launched
follows from the plan (network/schedules.py).
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from bonsai_jax.config import RunConfig
from bonsai_jax.weights import memory
from bonsai_jax.weights.drawing import Drawn
from bonsai_jax.weights.placement import ONE_DEVICE, Placement, Share, Whole
from bonsai_jax.weights.records import LoadPlan, Matrix, Member, Part, Piece, Stack, Vector
from bonsai_jax.weights.specs import Description, Source, Spec
from checkpoints import Folding
from pallas_kernels import Rotation, device, problems, selection
from pallas_kernels.precision import few_rows_bits
from pallas_kernels.rotation import flips_of
from pallas_kernels.tiles import TILE_ROWS

DEFAULT_CONTEXT = 4096
BEHIND_GATES = {"down", "shared_down"}  # fields of Params that read what a feed-forward's gate made


def plan(description: Description, run: RunConfig, placement: Placement = ONE_DEVICE) -> LoadPlan:
    """The plan for a file on the default device, or over a mesh. No weight is read.

    Raises NotImplementedError for an implementation that was named and cannot run, MemoryError where weights
    and cache do not fit, and ValueError for a context beyond the model's and for weights that the placement
    cannot split.
    """
    run = resolve(description, run, placement.parts)
    memory.check(description, run, placement.parts)
    own = planned(description, run, placement)
    if description.draft is not None:
        own = dataclasses.replace(own, draft=planned(description.draft, run, placement))
    if description.draft_model is not None:  # which may not have a schedule that was named for the model
        run = dataclasses.replace(run, schedule="auto")
        own = dataclasses.replace(own, draft_model=planned(description.draft_model, run, placement))
    return own


def resolve(description: Description, run: RunConfig, parts: int = 1) -> RunConfig:
    """The same RunConfig with every default filled in for this model and device, or for each of `parts`
    devices that share the weights. Errors as for `plan`."""
    most = description.config.context_length
    context = run.context or min(most, DEFAULT_CONTEXT)
    if context > most:
        raise ValueError(f"context is {context}, but the model was made for at most {most}")
    cache_dtype = run.cache_dtype or ("float32" if jax.default_backend() == "cpu" else "float16")
    given = run.batch_size
    run = dataclasses.replace(
        run, cache_dtype=cache_dtype, context=context, batch_size=given or memory.FEW_ROWS
    )
    verdicts = memory.explain_weights(description, run, parts)
    # pyrefly: ignore[bad-argument-type]
    run = dataclasses.replace(run, weights=next(verdict.kernel for verdict in verdicts if verdict.taken))
    return run if given else dataclasses.replace(run, batch_size=memory.batch_size(description, run, parts))


def planned(description: Description, run: RunConfig, placement: Placement = ONE_DEVICE) -> LoadPlan:
    """The plan for a resolved RunConfig, without its draft layer or draft model, and whatever it takes of
    memory."""
    groups, reads_tiles = _groups(description), _reads_tiles(description, run)
    members: dict[tuple[Spec, int | None], Member] = {}
    wholes: dict[tuple[Spec, int | None], Whole] = {}
    for group in groups:
        for spec, layer in itertools.product(group.specs, group.layers):
            t = description.tensors[spec][layer]
            wholes[spec, layer] = whole = Whole(spec, group.settings, t.shape)
            if spec.is_matrix:
                members[spec, layer] = m = _member(description, whole, t, run, placement, reads_tiles)
                how = (m.shape, m.format, m.stored, m.tiled, m.heads is not None)
                wholes[spec, layer] = Whole(spec, group.settings, *how)
    shares = placement.shares(description.config, wholes)
    members = {key: dataclasses.replace(member, share=shares[key]) for key, member in members.items()}

    stacks: list[Stack] = []
    vectors: list[Vector] = []
    for group in groups:
        vectors += _vectors(group, description, shares)
        matrices = {
            spec: [(members[spec, layer], description.tensors[spec][layer]) for layer in group.layers]
            for spec in group.specs
            if spec.is_matrix
        }
        stacks += _stacks(group, matrices, description.folding, run, placement)
    return LoadPlan(description, run, tuple(stacks), tuple(vectors), placement)


class _Group(NamedTuple):
    """A group of layers (ModelConfig.groups), by its kind and number, and the specs of tensors that the file
    has for it. Of kind None: the model's own tensors, which belong to no layer."""

    kind: str | None
    number: int
    settings: Any
    layers: tuple[int | None, ...]
    specs: list[Spec]


def _groups(description: Description) -> list[_Group]:
    config, specs = description.config, collections.defaultdict(list)
    for spec, tensors in description.tensors.items():
        if tensors:
            specs[spec.kind].append(spec)
    groups = [_Group(None, 0, None, (None,), specs[None])]
    for kind in config.kinds:
        for number, group in enumerate(config.groups(kind)):
            own = [spec for spec in specs[kind] if group.layers[0] in description.tensors[spec]]
            groups.append(_Group(kind, number, group.settings, group.layers, own))
    return groups


def _reads_tiles(description: Description, run: RunConfig) -> dict[tuple[str, int, int], bool]:
    """Whether kernels would read a matrix (format as stored, N, K) in tiles, were it alone and whole."""
    tensors = [t for spec, t in description.sources if spec.is_matrix]
    matrices = {("f32" if run.weights == "decoded" else t.format, *t.shape[-2:]) for t in tensors}
    reads = {}
    for format, n, k in sorted(matrices):
        problem = problems.Matmul(device.platform(), format, n, k, bits=run.activation_bits)
        reads[format, n, k] = selection.products(problem, run.impl).tiled
    return reads


def _member(
    description: Description,
    whole: Whole,
    t: Source,
    run: RunConfig,
    placement: Placement,
    reads_tiles: Mapping[tuple[str, int, int], bool],
) -> Member:
    """How a matrix is loaded, but for its share. Raises NotImplementedError for v heads that were folded in
    an order that devices cannot split."""
    *experts, n, k = t.shape
    fold, stored = description.folding, "f32" if run.weights == "decoded" else t.format
    folded = fold is not None and fold.folds(t.name)
    grouped, field = fold is not None and fold.v_grouped, whole.spec.field
    heads = getattr(whole.settings, "v_heads_tiled", None) if folded and field == "out" else None
    if heads and placement.axis and not grouped:
        raise NotImplementedError(
            f"{description.source}: prism.hadamard.gdn_v_grouped is False: v heads that were folded in tiled "
            "order are not split over devices; load it on one, or split rows only (data parallel)"
        )
    return Member(
        field,
        t.format,
        (n, k),
        stored,
        reads_tiles[stored, n, k],
        drawn=isinstance(t, Drawn) and device.platform() != "cpu",
        folded=folded,
        heads=heads if grouped else None,
        experts=math.prod(experts) if experts else 0,
    )


def _vectors(
    group: _Group, description: Description, shares: Mapping[tuple[Spec, int | None], Share | None]
) -> Iterator[Vector]:
    """The small arrays of a group."""
    arrays: dict[str, list[Spec]] = {}
    for spec in group.specs:
        if not spec.is_matrix:
            arrays.setdefault(spec.array, []).append(spec)
    for array, specs in arrays.items():
        tensors = tuple((spec, tuple(description.tensors[spec][n] for n in group.layers)) for spec in specs)
        axes = specs[0].axes if group.kind is None else ("layers", *specs[0].axes)
        own = tuple(shares[spec, group.layers[0]] for spec in specs)
        yield Vector(group.kind, group.number, array, tensors, own, axes)


def _stacks(
    group: _Group,
    matrices: Mapping[Spec, Sequence[Part]],
    fold: Folding | None,
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
            parts, where = _parts(layers, halves[0] if halves else (), fold, run, placement)
            fields, whole = tuple(spec.field for spec in own), len(own) == len(specs)
            joined = own[0].joined is not None
            yield Stack(group.kind, group.number, array, fields, layers, parts, where, joined, whole)


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
    fold: Folding | None,
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
        parts.append(tuple(_piece(one, mixed, 1 + half, fold, run, placement) for one in below))
    where = {n: (part, at) for part, ns in enumerate(layouts.values()) for at, n in enumerate(ns)}
    return tuple(parts), tuple(where[n] for n in range(len(layers)))


def _piece(
    layers: tuple[tuple[Part, ...], ...],
    mixed: bool,
    matrices: int,
    fold: Folding | None,
    run: RunConfig,
    placement: Placement,
) -> Piece:
    members = [member for member, _ in layers[0]]
    first, platform, in_file = members[0], device.platform(), _is_as_in_file(layers)
    rows = sum(member.own_shape[0] for member in members)
    behind_gate = any(member.field in BEHIND_GATES for member in members)
    problem = problems.Matmul(
        platform,
        first.stored,
        rows,
        first.own_shape[1],
        matrices=matrices,
        bits=run.activation_bits,
        few_rows_bits=few_rows_bits(platform, first.stored, run.activation_bits) if behind_gate else None,
        mixed=mixed,
        folded=first.folded,
    )
    products = selection.products(problem, run.impl)
    matrix = Matrix(tuple(member.field for member in members), problem, products, first.experts)
    copied = in_file and platform == "cpu" and placement.mesh is None and not products.tiled
    rotation = None
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
