"""The weights of a model, and how they are read: by a load plan, repacked and stacked by layer."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from bonsai_jax.config import ModelConfig
from bonsai_jax.weights import drawing
from bonsai_jax.weights.placement import AXES, Placement, Share
from bonsai_jax.weights.plan import LoadPlan, Matrix, Member, Stack, StepPlan, joined_name
from bonsai_jax.weights.specs import Source, Spec
from checkpoints import RandomTensor
from pallas_kernels import LayerStack, QTensor, Rotation, device, formats, qtensor, serializable
from pallas_kernels.qtensor import leaves
from pallas_kernels.rotation import flips_of


@serializable
class Layers(struct.PyTreeNode):
    """Weights of layers, each stacked over the layers of the kind that has it (ModelConfig.layers_of).
    Matrices are outputs x inputs; None where a model has none. Queries, keys and values are joined, in each
    layer those whose formats agree to one matrix (plan.JOINED), and so are the inputs of a delta net.

    attn_norm to k_norm     attention
    ffn_norm to w_down      the gated feed-forward, mlp
    delta_norm to delta_out  gated delta net (pallas_kernels/delta)
    experts_norm to expert_down  experts (pallas_kernels/experts), their matrices stacked over experts too
    """

    attn_norm: Float[Array, "L H"]
    wqkv: tuple[LayerStack, ...]
    wo: LayerStack
    ffn_norm: Float[Array, "L H"] | None = None
    w_gate: LayerStack | None = None
    w_up: LayerStack | None = None
    w_down: LayerStack | None = None
    bqkv: Float[Array, "L Q+2KV"] | None = None
    q_norm: Float[Array, "L D"] | None = None
    k_norm: Float[Array, "L D"] | None = None
    delta_norm: Float[Array, "L H"] | None = None
    delta_in: tuple[LayerStack, ...] = ()
    delta_gates: tuple[LayerStack, ...] = ()
    delta_conv: Float[Array, "L C W"] | None = None
    delta_dt: Float[Array, "L Hv"] | None = None
    delta_a: Float[Array, "L Hv"] | None = None
    delta_head_norm: Float[Array, "L V"] | None = None
    delta_out: LayerStack | None = None
    experts_norm: Float[Array, "L H"] | None = None
    router: LayerStack | None = None
    expert_gate: LayerStack | None = None
    expert_up: LayerStack | None = None
    expert_down: LayerStack | None = None


@serializable
class Draft(struct.PyTreeNode):
    """Weights of the draft layer (draft.py).

    layers       one layer, of attention and a gated feed-forward
    join         ahead of it: hidden x 2 hidden
    embed_norm, hidden_norm   of the two that are joined
    norm         behind it; None: the model's own
    """

    layers: Layers
    join: LayerStack
    embed_norm: Float[Array, "1 H"]
    hidden_norm: Float[Array, "1 H"]
    norm: Float[Array, "1 H"] | None = None


@serializable
class Params(struct.PyTreeNode):
    """A model's weights.

    head      None where the embedding is the output matrix too (tied)
    step      how a decode step is launched
    axis      the mesh axis over which matrices are split (placement.py); None where a device has them whole.
              Split ones exist inside shard_map, and their static shapes are those of one device
    mesh      the devices that the arrays lie on (parallel.over_mesh); None: one device, or inside shard_map
    peers     where devices write into each other's memory for the sums of a decode step
              (pallas_kernels/all_reduce.py); None where they are jax.lax.psum
    draft     the draft layer, where it is loaded
    """

    embed: QTensor
    layers: Layers
    final_norm: Float[Array, "H"]
    head: QTensor | None
    rope_frequencies: Float[Array, "R"]
    peers: Int[Array, "data model devices+2 2"] | None = None
    draft: Draft | None = None
    step: StepPlan = struct.field(pytree_node=False, default=StepPlan())
    axis: str | None = struct.field(pytree_node=False, default=None)
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)


def load(
    plan: LoadPlan,
    rope_frequencies: np.ndarray,
    placement: Placement | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Params:
    """Read every tensor of a plan onto the default device, or over the mesh for which it was made.

    rope_frequencies  float32 [rope_dim / 2] (layers.rope_frequencies)
    placement  how weights lie over many devices; each makes its share from its share of the blocks
    progress   called with bytes read so far and in all
    """
    fields = _fields(plan, placement, progress)
    # llama.cpp writes Llama 3's scaling of the frequencies as divisors, one per pair.
    if (divisors := fields.pop("rope_divisors", None)) is not None:
        rope_frequencies = rope_frequencies / divisors
    frequencies = np.asarray(rope_frequencies, np.float32)
    if placement:
        frequencies = placement.vectors("rope_frequencies", frequencies)
    else:
        frequencies = jax.device_put(frequencies)
    return Params(
        step=plan.step,
        axis=placement.axis if placement else None,
        mesh=placement.mesh if placement else None,
        peers=placement.peers() if placement else None,
        rope_frequencies=frequencies,
        **fields,
    )


def load_draft(plan: LoadPlan, placement: Placement | None = None) -> Draft:
    """The same for the plan of a draft layer (plan.of_draft)."""
    return Draft(**_fields(plan, placement, lambda done, total: None))


def _fields(
    plan: LoadPlan, placement: Placement | None, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """What a plan says, by field, those of layers together."""
    total, done = sum(t.nbytes for tensors in plan.tensors.values() for t in tensors), 0
    by_field = {spec.field: tensors for spec, tensors in plan.tensors.items()}
    fields: dict[str, Any] = {}
    joined: dict[str, list[LayerStack]] = {}

    def read(names: Sequence[str], made: Any) -> None:
        nonlocal done
        jax.block_until_ready(made)
        tensors = [t for name in names for t in by_field[name]]
        for t in tensors:
            if not isinstance(t, RandomTensor):
                t.forget()
        done += sum(t.nbytes for t in tensors)
        progress(done, total)

    for member, matrix in plan.matrices:
        (tensor,) = by_field[member.field]
        if _as_it_lies((member,), matrix, placement):
            made = _copied([(tensor,)], matrix, stacked=False)
        else:
            made = _make((_source(member, tensor, placement),), matrix, (member,), placement)
        fields[member.field] = made.replace(rotation=_rotation(plan, member, placement))
        read([member.field], fields[member.field])
    for stack in plan.stacks:
        stacked = _stack(plan, stack, by_field, placement)
        if (name := joined_name(stack.fields[0])) is not None:
            joined.setdefault(name, []).append(stacked)
        else:
            fields[stack.fields[0]] = stacked
        read(stack.fields, stacked)
    for spec, tensors in plan.tensors.items():
        if not spec.is_matrix:
            fields[spec.field] = _vectors(spec, tensors, plan, placement)
            read([spec.field], fields[spec.field])
        elif not tensors:
            fields[spec.field] = None
    if biases := [fields.pop(name) for name in ("bq", "bk", "bv") if name in fields]:
        fields["bqkv"] = (
            placement.biases([np.asarray(b) for b in biases])
            if placement
            else jax.device_put(_arrays(biases).concatenate(biases, axis=1))
        )
    layer_fields = {f.name for f in dataclasses.fields(Layers)}
    fields |= {name: tuple(stacks) for name, stacks in joined.items()}
    of_layers = {name: fields.pop(name) for name in [*fields] if name in layer_fields}
    return fields | {"layers": Layers(**of_layers)}


def decode_bytes(params: Params, config: ModelConfig, rows: int = 1) -> int:
    """Weight bytes that one decode step of so many rows reads: all but the embedding's other rows, where the
    model is not tied, and the experts that no row uses (ExpertsConfig.share_read)."""
    read = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    read -= 0 if params.head is None else params.embed.nbytes
    if (e := config.experts) is not None:
        of_experts = (params.layers.expert_gate, params.layers.expert_up, params.layers.expert_down)
        read -= round((1 - e.share_read(rows)) * sum(w.nbytes for w in leaves(of_experts)))
    return read


def blocks(tensor: Source) -> jax.Array:
    """A tensor's blocks as they stand in a file, uint8 [*shape[:-1], bytes of a row]; a random one's are
    drawn."""
    return jnp.asarray(drawing.read(tensor).data)


def _vectors(spec: Spec, tensors: Sequence[Source], plan: LoadPlan, placement: Placement | None):
    """Norms, biases and the like: float32 [layers, *shape], or [*shape] of what no layer has; None for
    none."""
    if not tensors:
        return None
    rows: list[Any] = [_values(t) for t in tensors]
    if plan.naming == "huggingface":
        rows = [row.reshape([size for size in row.shape if size > 1] or [1]) for row in rows]
        rows = [spec.from_huggingface(row) for row in rows] if spec.from_huggingface else rows
    vectors = _arrays(rows).stack(rows) if "{}" in spec.gguf else rows[0]
    if spec.field in ("bq", "bk", "bv", "rope_divisors"):  # what is made of them is placed
        return vectors
    if placement and "delta" in AXES.get(spec.field, ()):
        return placement.of_heads(spec.field, np.asarray(vectors))
    return placement.vectors(spec.field, np.asarray(vectors)) if placement else jax.device_put(vectors)


def _values(t: Source) -> Array | np.ndarray:
    """float32 [*shape]. By numpy, where the format's own code lets it: nothing is compiled."""
    fields = formats.views(t.format, drawing.read(t).data)
    return formats.get(t.format).dequantize(fields).reshape(t.shape)


def _arrays(values: Sequence[Array | np.ndarray]):
    """The module that joins them: numpy for a file's."""
    return np if all(isinstance(x, np.ndarray) for x in values) else jnp


def _stack(
    plan: LoadPlan,
    stack: Stack,
    tensors: Mapping[str, Sequence[Source]],
    placement: Placement | None,
) -> LayerStack:
    """Each layer is written into its place in a donated stack, so that no more than one layer exists
    twice."""
    parts: list[QTensor | qtensor.Rows] = []
    for number, matrices in enumerate(stack.parts):
        pieces = []
        for matrix in matrices:
            piece, layers = None, stack.layers(number)
            of_layers = [stack.members_of(matrix, layer) for layer in layers]
            if all(_as_it_lies(members, matrix, placement) for members in of_layers):
                each = zip(of_layers, layers, strict=True)
                pieces.append(_copied([[tensors[m.field][i] for m in of] for of, i in each], matrix))
                continue
            for index, (layer, members) in enumerate(zip(layers, of_layers, strict=True)):
                sources = tuple(_source(m, tensors[m.field][layer], placement) for m in members)
                if piece is None:
                    make = functools.partial(_make, matrix=matrix, members=members, placement=placement)
                    piece = _zeros(jax.eval_shape(make, sources), len(layers), members[0].share, placement)
                piece = _place(piece, sources, index, matrix, members, placement)
            pieces.append(piece)  # pyrefly: ignore[bad-argument-type]
        rotations = [
            _rotation(plan, stack.members_of(matrix, stack.layers(number)[0])[0], placement)
            for matrix in matrices
        ]
        pieces = [piece.replace(rotation=r) for piece, r in zip(pieces, rotations, strict=True)]
        parts.append(pieces[0] if len(pieces) == 1 else qtensor.Rows(tuple(pieces)))
    return LayerStack(tuple(parts), stack.where)


def _as_it_lies(members: Sequence[Member], matrix: Matrix, placement: Placement | None) -> bool:
    """Whether it is stored as the file has it, in memory that is numpy's too."""
    same = all(not m.drawn and m.stored == m.format and not m.experts for m in members)
    return same and placement is None and not matrix.products.tiled and device.platform() == "cpu"


def _copied(layers: Sequence[Sequence[Source]], matrix: Matrix, *, stacked: bool = True) -> QTensor:
    """A stack of matrices, each of tensors below each other, from a file's memory into XLA's: once, and
    without anything compiled."""
    format = matrix.problem.format
    block = formats.get(format).BLOCK
    fields = {name: block.fields[name][0] for name in block.names}
    # A block's field at a time: numpy takes a byte of one at a time otherwise.
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
    of_jax = functools.partial(jax.device_put, may_alias=True)
    on_device = {name: of_jax(field if stacked else field[0]) for name, field in made.items()}
    return QTensor(on_device, format, matrix.shape, products=matrix.products)


def _room(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array where XLA reads it without a copy: it asks for multiples of 64 bytes."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    first = -memory.ctypes.data % 64
    return memory[first : first + size].view(dtype).reshape(shape)


def _rotation(plan: LoadPlan, member: Member, placement: Placement | None) -> Rotation | None:
    """Of the inputs of a matrix, of which a device may have a part; None where it is not folded."""
    if not member.folded or (fold := plan.folding) is None:
        return None
    split = placement if placement and member.share and member.share.axis == 1 else None
    signs, flips, heads = fold.signs.get(member.shape[1]), None, None
    if signs is not None:
        arrays = {"signs": signs, "flips": flips_of(signs)}
        signs, flips = (
            placement.vectors(name, of) if placement else jnp.asarray(of) for name, of in arrays.items()
        )
    if member.regrouped and plan.v_heads:
        repeats, k_heads = plan.v_heads
        heads = repeats, k_heads // (split.parts if split else 1)
    return Rotation(signs, fold.block, heads, split.axis if split else None, flips)


def _source(member: Member, t: Source, placement: Placement | None):
    """What `_made` makes a matrix of: its blocks (its share's, where that is cut at their borders), or what a
    random one is drawn from."""
    if member.drawn:
        assert isinstance(t, RandomTensor)
        return np.uint32(t.seed), np.float32(t.mean), np.float32(t.std)
    t = drawing.read(t)
    return placement.blocks(t, None if _is_cut_here(member) else member.share) if placement else t.data


def _is_cut_here(member: Member) -> bool:
    """Whether each device gets the whole matrix and cuts out its share."""
    return member.drawn or member.share is None or not member.share.whole_blocks(member.format)


def _made(sources, matrix: Matrix, members: tuple[Member, ...]) -> QTensor:
    """On one device: the matrices, each its share, as they are stored, rows below rows."""
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
    w = cut.of(w) if cut and early else w
    w = w if w.format == member.stored else qtensor.quantize(qtensor.dequantize(w), member.stored)
    return cut.of(w) if cut and not early else w


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
