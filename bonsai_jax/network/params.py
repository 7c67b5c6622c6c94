"""The weights of a model: for each kind of layer its own dataclass, and what belongs to no layer."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from bonsai_jax.config import ModelConfig
from bonsai_jax.network import kinds, rope, schedules
from bonsai_jax.network.adapter import Adapter
from bonsai_jax.network.layer_vectors import LayerVectors
from bonsai_jax.network.schedules import StepPlan
from bonsai_jax.weights.read import Fields, read
from bonsai_jax.weights.records import LoadPlan
from bonsai_jax.weights.specs import Spec
from pallas_kernels import QTensor, serializable
from pallas_kernels.qtensor import leaves

TABLE = ("vocab_size", "hidden")
EMBED = Spec("embed", "token_embd.weight", "model.embed_tokens.weight", TABLE, ("vocab", None))
FINAL_NORM = Spec("final_norm", "output_norm.weight", "model.norm.weight", ("hidden",))
HEAD = Spec("head", "output.weight", "lm_head.weight", TABLE, ("vocab", None), optional=True)
# Each Spec's axes name those of its own tensor; these are the model's other arrays.
AXES = {"embed": EMBED.axes, "head": HEAD.axes, "peers": ("rows", "devices", None, None)}


# Weights of layers by kind, layers["attention"][0].o: for each group of layers with equal settings
# (ModelConfig.groups) the kind's Weights, stacked over its layers. Kinds that no layer has are missing.
type Layers = dict[str, tuple[Any, ...]]


@serializable
class Draft(struct.PyTreeNode):
    """Weights of the draft layer (draft.py).

    layers       one layer, of attention and what mixes channels in the model's last layer
    join         of its two inputs: hidden x 2 hidden
    embed_norm, hidden_norm   of these
    norm         of its output; None: the model's own
    """

    layers: Layers
    join: QTensor
    embed_norm: Float[Array, "H"]
    hidden_norm: Float[Array, "H"]
    norm: Float[Array, "H"] | None = None


@serializable
class Params(struct.PyTreeNode):
    """A model's weights.

    layers    of each kind, by the kind's name: layers["attention"][0].o
    head      None where the embedding is the output matrix too (tied)
    rope_frequencies   radians per position of each pair, for each Rope of the model (rope.ropes)
    step      how a decode step is launched
    axis      the mesh axis over which matrices are split (weights/placement.py); None where a device has them
              whole. Split ones exist inside shard_map, and their static shapes are those of one device
    mesh      the devices that the arrays lie on (parallel.over_mesh); None: one device, or inside shard_map
    peers     where devices write into each other's memory for the sums of a decode step
              (pallas_kernels/all_reduce.py); None where they are jax.lax.psum
    draft     the draft layer, where it is loaded
    draft_model  the weights of the model that proposes tokens (draft_model.py), where there is one
    layer_vectors  of the vectors that tokens have for each layer; None: they have none
    adapter   low-rank changes beside the matrices of layers (docs/adapters.md); None: there are none. With
              it a decode step is one launch, or launched product by product (fused.beside_adapter)
    """

    embed: QTensor
    layers: Layers
    final_norm: Float[Array, "H"]
    head: QTensor | None
    rope_frequencies: tuple[Float[Array, "R"], ...]
    peers: Int[Array, "data model devices+2 2"] | None = None
    draft: Draft | None = None
    draft_model: "Params | None" = None
    layer_vectors: LayerVectors | None = None
    adapter: Adapter | None = None
    step: StepPlan = struct.field(pytree_node=False, default=StepPlan())
    axis: str | None = struct.field(pytree_node=False, default=None)
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)


def load(
    plan: LoadPlan, progress: Callable[[int, int], None] = lambda done, total: None, threads: int = 1
) -> Params:
    """Read every tensor of a plan onto the default device, or over the mesh for which it was made. Arguments
    as for weights/read.py."""
    return assembled(plan, read(plan, progress, threads))


def assembled(plan: LoadPlan, fields_read: list[Fields]) -> Params:
    """Params of the fields that `read` returns for a plan: those of the model, of its draft layer and of its
    draft model."""
    if plan.draft_model is not None:
        own = dataclasses.replace(plan, draft_model=None)
        draft_params = assembled(plan.draft_model, fields_read[-1:])
        return assembled(own, fields_read[:-1]).replace(draft_model=draft_params)
    placement, models = plan.placement, []
    for fields in fields_read:
        groups = fields["layers"].items()
        weights = {kind: tuple(kinds.get(kind).Weights(**group) for group in own) for kind, own in groups}
        models.append(fields | {"layers": weights})
    model, *draft = models
    frequencies = rope.model_frequencies(plan.config, plan.run.context, model)
    return Params(
        embed=model["embed"],
        layers=model["layers"],
        final_norm=model["final_norm"],
        head=model.get("head"),
        rope_frequencies=tuple(placement.put(value) for value in frequencies),
        peers=placement.peers(),
        draft=Draft(**draft[0]) if draft else None,
        layer_vectors=_layer_vectors(model),
        step=schedules.step_plan(plan),
        axis=placement.axis,
        mesh=placement.mesh,
    )


def _layer_vectors(fields: Fields) -> LayerVectors | None:
    if "vector_table" not in fields:
        return None
    return LayerVectors(fields["vector_table"], fields["vector_proj"], fields["vector_norm"])


def decode_bytes(params: Params, config: ModelConfig, rows: int = 1) -> int:
    """Weight bytes that one decode step of so many rows reads: all but the embedding's other rows, where the
    model is not tied, those of the layers' vectors, and the experts that no row uses (Experts.share_read)."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params.replace(draft_model=None)))
    total -= 0 if params.head is None else params.embed.nbytes
    total -= 0 if params.layer_vectors is None else params.layer_vectors.table.nbytes
    for group, weights in zip(config.groups("experts"), params.layers.get("experts", ()), strict=True):
        stored = sum(w.nbytes for w in leaves((weights.gate, weights.up, weights.down)))
        total -= round((1 - group.settings.share_read(rows)) * stored)
    return total
