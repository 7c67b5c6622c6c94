"""The weights that a load plan describes, read onto the device: repacked, and stacked by layer."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bonsai_jax.weights import drawing
from bonsai_jax.weights.placement import Placement, Share
from bonsai_jax.weights.plan import LoadPlan, Matrix, Member, Stack, sources
from bonsai_jax.weights.specs import Source, Spec
from checkpoints import RandomTensor
from pallas_kernels import LayerStack, QTensor, Rotation, device, formats, qtensor
from pallas_kernels.rotation import flips_of

# Arrays of the model by name, those of layers by kind: fields["layers"]["attention"][group]["o"].
Fields = dict[str, Any]


def read(plan: LoadPlan, progress: Callable[[int, int], None] = lambda done, total: None) -> Fields:
    """Every array of a plan, on the default device or over the mesh for which it was made.

    progress   called with bytes read so far and in all
    An optional array that the file lacks is None. Arrays that join several stacks (q, k and v) are tuples.
    """
    total, done = sum(t.nbytes for _, t in plan.description.each()), 0
    config = plan.config
    layers: dict[str, list[Fields]] = {kind: [{} for _ in config.groups(kind)] for kind in config.kinds}
    fields: Fields = {"layers": layers}

    def note(tensors: Sequence[Source], made: Any) -> None:
        nonlocal done
        jax.block_until_ready(made)
        for t in tensors:
            if not isinstance(t, RandomTensor):
                t.forget()
        done += sum(t.nbytes for t in tensors)
        progress(done, total)

    for member, matrix in plan.matrices:
        tensor = sources(plan, member.field, None)[None]
        if _as_in_file((member,), matrix, plan.placement):
            made = _copied([(tensor,)], matrix, stacked=False)
        else:
            blocks = (_source(member, tensor, plan.placement),)
            made = _make(blocks, matrix, (member,), plan.placement)
        fields[member.field] = made.replace(rotation=_rotation(plan, member, None))
        note([tensor], fields[member.field])
    for stack in plan.stacks:
        tensors = {field: sources(plan, field, stack.kind) for field in stack.fields}
        made = _stack(plan, stack, tensors)
        group = layers[stack.kind][stack.group]
        group[stack.array] = (*group.get(stack.array, ()), made) if stack.joined else made
        note([tensors[field][number] for field in stack.fields for number in stack.numbers], made)
    for (kind, array), specs in _arrays(plan).items():
        if kind is None:
            fields[array] = _vector(plan, specs[0])
            note([*sources(plan, specs[0].field, None).values()], fields[array])
            continue
        for group, own in zip(config.groups(kind), layers.get(kind, []), strict=True):
            present = [spec for spec in specs if plan.description.tensors[spec]]
            own[array] = _vectors(plan, present, group.settings, group.layers) if present else None
            read_tensors = [plan.description.tensors[spec][n] for spec in present for n in group.layers]
            note(read_tensors, own[array])
    return fields


def _arrays(plan: LoadPlan) -> dict[tuple[str | None, str], list[Spec]]:
    """By kind and name the specs of every small array, and of every matrix that the file lacks."""
    arrays: dict[tuple[str | None, str], list[Spec]] = {}
    for spec, tensors in plan.description.tensors.items():
        if not spec.is_matrix or not tensors:
            arrays.setdefault((spec.kind, spec.array), []).append(spec)
    return arrays


def blocks(tensor: Source) -> jax.Array:
    """A tensor's blocks as a file has them, uint8 [*shape[:-1], bytes of a row]; random ones are drawn."""
    return jnp.asarray(drawing.read(tensor).data)


def _vector(plan: LoadPlan, spec: Spec) -> jax.Array | None:
    """An array that belongs to no layer, float32 [*shape]; None if the file lacks it."""
    tensors = plan.description.tensors[spec]
    if not tensors:
        return None
    value = _values(tensors[None], spec, plan.description.naming)
    return plan.placement.vectors(np.asarray(value)) if plan.placement else jax.device_put(value)


def _vectors(plan: LoadPlan, specs: Sequence[Spec], settings: Any, numbers: Sequence[int]) -> jax.Array:
    """Norms, biases and the like: float32 [layers, *shape], those of several specs side by side."""
    stacked: list[Any] = []
    for spec in specs:
        tensors = plan.description.tensors[spec]
        values = [_values(tensors[number], spec, plan.description.naming) for number in numbers]
        stacked.append(_module(values).stack(values))
    if plan.placement is None:
        value = stacked[0] if len(stacked) == 1 else _module(stacked).concatenate(stacked, axis=1)
        return jax.device_put(value)
    shares = [plan.placement.share(spec, settings, spec.sizes(plan.config, numbers[0])) for spec in specs]
    axes = ("layers", *specs[0].axes)
    return plan.placement.stacked([np.asarray(value) for value in stacked], shares, axes)


def _values(t: Source, spec: Spec, naming: str) -> Array | np.ndarray:
    """float32 [*shape]. By numpy, where the format's own code lets it: nothing is compiled."""
    fields = formats.views(t.format, drawing.read(t).data)
    values = formats.get(t.format).dequantize(fields).reshape(t.shape)
    if naming == "huggingface":
        values = values.reshape([size for size in values.shape if size > 1] or [1])
        values = spec.from_huggingface(values) if spec.from_huggingface else values
    return values


def _module(values: Sequence[Array | np.ndarray]):
    """The module that stacks these values: numpy for a file's."""
    return np if all(isinstance(x, np.ndarray) for x in values) else jnp


def _stack(plan: LoadPlan, stack: Stack, tensors: Mapping[str, Mapping[int | None, Source]]) -> LayerStack:
    """A stack of one weight. Each layer is written into its place in a donated array, so that at most one
    layer exists twice."""
    placement, parts = plan.placement, []
    for number, matrices in enumerate(stack.parts):
        pieces = []
        for matrix in matrices:
            piece, layers = None, stack.layers(number)
            by_layer = [(stack.numbers[layer], stack.members_of(matrix, layer)) for layer in layers]
            if all(_as_in_file(members, matrix, placement) for _, members in by_layer):
                each = [[tensors[m.field][layer] for m in members] for layer, members in by_layer]
                pieces.append(_copied(each, matrix))
                continue
            for index, (layer, members) in enumerate(by_layer):
                blocks = tuple(_source(m, tensors[m.field][layer], placement) for m in members)
                if piece is None:
                    make = functools.partial(_make, matrix=matrix, members=members, placement=placement)
                    piece = _zeros(jax.eval_shape(make, blocks), len(layers), members[0].share, placement)
                piece = _place(piece, blocks, index, matrix, members, placement)
            pieces.append(piece)  # pyrefly: ignore[bad-argument-type]
        rotations = [
            _rotation(plan, stack.members_of(matrix, stack.layers(number)[0])[0], stack)
            for matrix in matrices
        ]
        pieces = [piece.replace(rotation=r) for piece, r in zip(pieces, rotations, strict=True)]
        parts.append(pieces[0] if len(pieces) == 1 else qtensor.Rows(tuple(pieces)))
    return LayerStack(tuple(parts), stack.where)


def _as_in_file(members: Sequence[Member], matrix: Matrix, placement: Placement | None) -> bool:
    """Whether a matrix is stored as in the file, in memory that XLA shares with numpy."""
    same = all(not m.drawn and m.stored == m.format and not m.experts for m in members)
    return same and placement is None and not matrix.products.tiled and device.platform() == "cpu"


def _copied(layers: Sequence[Sequence[Source]], matrix: Matrix, *, stacked: bool = True) -> QTensor:
    """A stack of matrices, each made of tensors that lie rows below rows: copied once, from the file's memory
    into XLA's, and nothing is compiled."""
    format = matrix.problem.format
    block = formats.get(format).BLOCK
    fields = {name: block.fields[name][0] for name in block.names}
    # One item per field of a block: numpy would copy byte by byte otherwise.
    items = np.dtype(
        {
            "names": list(fields),
            "formats": [f"V{dtype.itemsize}" for dtype in fields.values()],
            "offsets": [block.fields[name][1] for name in fields],
            "itemsize": block.itemsize,
        }
    )
    lead = (len(layers), matrix.shape[0], matrix.shape[1] // formats.get(format).WEIGHTS)
    room = {name: _room(lead, items[name]) for name in fields}
    for i, tensors in enumerate(layers):
        first = 0
        for t in map(drawing.read, tensors):
            data = t.data.view(items)
            for name in fields:
                room[name][i, first : first + t.shape[0]] = data[name]
            first += t.shape[0]
            t.forget()
    made = {name: room[name].view(dtype.base).reshape(*lead, *dtype.shape) for name, dtype in fields.items()}
    on_xla = functools.partial(jax.device_put, may_alias=True)
    on_device = {name: on_xla(field if stacked else field[0]) for name, field in made.items()}
    return QTensor(on_device, format, matrix.shape, products=matrix.products)


def _room(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialized array that XLA can use without a copy: it must begin at a multiple of 64 bytes."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    first = -memory.ctypes.data % 64
    return memory[first : first + size].view(dtype).reshape(shape)


def _rotation(plan: LoadPlan, member: Member, stack: Stack | None) -> Rotation | None:
    """The rotation of a matrix's inputs, of which a device may have a part; None where it is not folded."""
    if not member.folded or (fold := plan.folding) is None:
        return None
    placement = plan.placement
    split = placement if placement and member.share and member.share.axis == 1 else None
    signs, flips, heads = fold.signs.get(member.shape[1]), None, None
    if signs is not None:
        # A device that has a part of the inputs cuts out its own signs.
        arrays = [signs, flips_of(signs)]
        signs, flips = (
            placement.vectors(array, (None,)) if placement else jnp.asarray(array) for array in arrays
        )
    if member.regrouped and stack is not None:
        repeats, k_heads = plan.config.groups(stack.kind)[stack.group].settings.v_heads_tiled
        heads = repeats, k_heads // (split.parts if split else 1)
    return Rotation(signs, fold.block, heads, split.axis if split else None, flips)


def _source(member: Member, t: Source, placement: Placement | None):
    """The input of `_made`: the blocks of a matrix, or of its share where that is cut between blocks; for a
    random matrix the seed and moments that it is drawn from."""
    if member.drawn:
        assert isinstance(t, RandomTensor)
        return np.uint32(t.seed), np.float32(t.mean), np.float32(t.std)
    t = drawing.read(t)
    return placement.blocks(t, None if _is_cut_here(member) else member.share) if placement else t.data


def _is_cut_here(member: Member) -> bool:
    """Whether each device is given the whole matrix and cuts out its own share."""
    return member.drawn or member.share is None or not member.share.whole_blocks(member.format)


def _made(sources, matrix: Matrix, members: tuple[Member, ...]) -> QTensor:
    """On one device: its shares of the matrices in their stored form, rows below rows."""
    made = [_member(member, source) for member, source in zip(members, sources, strict=True)]
    fields = made[0].fields
    if len(made) > 1:
        fields = {name: jnp.concatenate([w.fields[name] for w in made]) for name in fields}
    w = QTensor(fields, made[0].format, matrix.shape)
    return (qtensor.tile(w) if matrix.products.tiled else w).replace(products=matrix.products)


def _member(member: Member, source) -> QTensor:
    if member.drawn:
        seed, mean, std = source
        n, k = member.shape
        lead = (*([member.experts] if member.experts else []), n, k // formats.get(member.format).WEIGHTS)
        fields = formats.random_fields(member.format, jax.random.key(seed), lead, mean, std)
        w = QTensor(fields, member.format, member.shape)
    else:
        w = qtensor.from_blocks(source, member.format)
    cut = member.share if _is_cut_here(member) else None
    early = cut and cut.whole_blocks(member.format)
    w = cut.own(w) if cut and early else w
    w = w if w.format == member.stored else qtensor.quantize(qtensor.dequantize(w), member.stored)
    return cut.own(w) if cut and not early else w


@functools.partial(jax.jit, static_argnames=("matrix", "members", "placement"))
def _make(sources, matrix: Matrix, members: tuple[Member, ...], placement: Placement | None) -> QTensor:
    make = functools.partial(_made, matrix=matrix, members=members)
    if placement is None:
        return make(sources)
    return placement.made(make, members[0].share, tuple(map(_is_cut_here, members)))(sources)


@functools.partial(jax.jit, static_argnames=("matrix", "members", "placement"), donate_argnums=0)
def _place(
    stack: QTensor, sources, index, matrix: Matrix, members: tuple[Member, ...], placement: Placement | None
) -> QTensor:
    make = functools.partial(_made, matrix=matrix, members=members)
    if placement is None:
        return jax.tree.map(lambda field, new: field.at[index].set(new), stack, make(sources))
    cut_here = tuple(map(_is_cut_here, members))
    return placement.placed(make, members[0].share, cut_here)(stack, sources, index)


def _zeros(one: QTensor, layers: int, share: Share | None, placement: Placement | None) -> QTensor:
    if placement:
        return placement.zeros(one, layers, share)
    return jax.tree.map(lambda field: jnp.zeros((layers, *field.shape), field.dtype), one)
