"""Mamba 2, which mixes tokens through a state of fixed size (pallas_kernels/mamba2.py).

    x + W_out mamba2(W_in norm(x))

Over a mesh each device has some groups of heads.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from bonsai_jax.config import RunConfig
from bonsai_jax.network.kinds import state as states
from bonsai_jax.network.kinds.phases import Mixing, Product, output_product
from bonsai_jax.network.kinds.place import Place, add_product, each_layer, joined_product
from bonsai_jax.network.kinds.state import Room
from bonsai_jax.weights.placement import Runs, even_runs
from bonsai_jax.weights.specs import Spec
from pallas_kernels import LayerStack, mamba2, serializable
from pallas_kernels.zeros import zeros

PRODUCTS = None  # no fused launch computes it
SITES = ()  # only what it adds to x, "attention"
ADAPTED = ("inputs", "out")  # matrices that adapters change (network/adapter.py)


@dataclasses.dataclass(frozen=True)
class Mamba2:
    """Sizes of a layer's Mamba 2.

    heads, head_dim  heads and the width of each
    groups           of heads; those of a group share B and C
    state            values of B and of C, for each group
    conv             tokens that the convolution sees, the newest among them
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    conv: int

    kind = "mamba2"

    def __post_init__(self):
        if min(self.heads, self.head_dim, self.groups, self.state) <= 0 or self.heads % self.groups:
            raise ValueError(
                f"model config: Mamba 2 of {self.heads} heads of {self.head_dim}, {self.groups} groups and a "
                f"state of {self.state}; each must be positive, and heads divide into groups"
            )
        if self.conv < 2:
            raise ValueError(f"model config: the convolution sees {self.conv} tokens; supported: from 2 on")

    @property
    def inner(self) -> int:
        """Width of z and of x: all heads."""
        return self.heads * self.head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state

    @property
    def group_width(self) -> int:
        """Width of the heads of a group."""
        return self.inner // self.groups

    @property
    def input_rows(self) -> int:
        """Outputs of W_in: z, x, B, C and the time steps."""
        return self.inner + self.conv_width + self.heads

    @property
    def output_width(self) -> int:
        """Inputs of W_out."""
        return self.inner

    def for_device(self, parts: int) -> "Mamba2":
        return dataclasses.replace(self, heads=self.heads // parts, groups=self.groups // parts)

    def runs(self, axis: str, parts: int) -> Runs:
        """Which part of a logical axis each device has: some groups with their heads.

        axis  "heads": one number for each; "inner": head_dim of them; "channels": those of the convolution;
              "inputs": the rows of W_in
        """
        x, bc = self.inner, self.groups * self.state
        widths = {
            "heads": (self.heads,),
            "inner": (x,),
            "channels": (x, bc, bc),
            "inputs": (x, x, bc, bc, self.heads),
        }[axis]
        if len(widths) == 1:
            return even_runs(widths[0], parts)
        counts = tuple(width // parts for width in widths)
        first = [sum(widths[:i]) for i in range(len(widths))]
        starts = tuple(
            tuple(start + part * run for start, run in zip(first, counts, strict=True))
            for part in range(parts)
        )
        return starts, counts

    def refuses_split(self, parts: int) -> str | None:
        """Why `parts` devices cannot share its groups, or None."""
        return f"{self.groups} groups of Mamba 2 do not split evenly" if self.groups % parts else None

    def problems(self, run: RunConfig) -> tuple[()]:
        return ()

    def impls(self, run: RunConfig) -> tuple[()]:
        return ()

    def kernels(self, run: RunConfig) -> tuple[str, str]:
        """XLA computes it everywhere."""
        return "reference", "reference"

    def bytes_per_token(self, run: RunConfig) -> int:
        return 0

    def bytes_per_row(self, run: RunConfig) -> int:
        """Bytes of one sequence's state, whatever it has read."""
        return 4 * (self.inner * self.state + self.conv * self.conv_width)

    def bytes_read(self, run: RunConfig, depth: int) -> int:
        """Bytes that a decode step reads and writes."""
        return 2 * self.bytes_per_row(run)

    def operations(self, depth: int, tokens: int) -> int:
        """Operations for so many tokens, projections not counted."""
        return 6 * tokens * self.inner * self.state

    def scratch_bytes(self, run: RunConfig) -> int:
        return 0

    def copied_bytes(self, run: RunConfig) -> int:
        """Bytes of one sequence that steps work on in a copy (State.taken)."""
        return self.bytes_per_row(run)


TENSORS = {
    spec.field: spec
    for spec in (
        Spec("norm", "attn_norm.weight", "input_layernorm.weight", ("hidden",)),
        Spec("inputs", "ssm_in.weight", "mamba.in_proj.weight", ("input_rows", "hidden"), ("inputs", None)),
        Spec("conv_weights", "ssm_conv1d.weight", "mamba.conv1d.weight", ("conv_width", "conv"),
             ("channels", None), plain=True, huggingface_shape=("conv_width", 1, "conv")),
        Spec("conv_bias", "ssm_conv1d.bias", "mamba.conv1d.bias", ("conv_width",), ("channels",)),
        Spec("dt", "ssm_dt.bias", "mamba.dt_bias", ("heads",), ("heads",)),
        Spec("decay", "ssm_a", "mamba.A_log", ("heads",), ("heads",),
             from_huggingface=lambda log: -jnp.exp(log), to_huggingface=lambda a: jnp.log(-a),
             gguf_shape=("heads", 1)),
        Spec("skip", "ssm_d", "mamba.D", ("heads",), ("heads",), gguf_shape=("heads", 1)),
        Spec("group_norm", "ssm_norm.weight", "mamba.norm.weight", ("inner",), ("inner",),
             gguf_shape=("groups", "group_width")),
        Spec("out", "ssm_out.weight", "mamba.out_proj.weight", ("hidden", "inner"), (None, "inner")),
    )
}  # fmt: skip


@serializable
class Weights(struct.PyTreeNode):
    """Weights of the layers of a group.

    inputs  makes z, x, B, C and the time steps of the normed input
    the others are as `pallas_kernels.mamba2` takes them
    """

    norm: Float[Array, "L H"]
    inputs: LayerStack
    conv_weights: Float[Array, "L C W"]
    dt: Float[Array, "L heads"]
    decay: Float[Array, "L heads"]
    skip: Float[Array, "L heads"]
    out: LayerStack
    conv_bias: Float[Array, "L C"] | None = None
    group_norm: Float[Array, "L inner"] | None = None


@serializable
class State(states.State, struct.PyTreeNode):
    """What the layers of a group remember of each sequence. A sequence that reads its token at position 0
    starts from nothing, whatever is stored.

    s      float32 [layers, rows, heads, head_dim, state]
    tail   float32 [layers, rows, conv, channels]: what the convolution sees, that at position p in slot
           p % conv
    """

    s: Float[Array, "L B H P N"]
    tail: Float[Array, "L B W C"]
    impl: str = struct.field(pytree_node=False, default="reference")
    prefill_impl: str = struct.field(pytree_node=False, default="reference")


AXES = {"s": ("layers", "rows", "heads"), "tail": ("layers", "rows", None, "channels")}


def empty(settings: Mamba2, layers: int, run: RunConfig, room: Room) -> State:
    """The state of sequences that have read nothing."""
    return State(
        zeros((layers, room.rows, settings.heads, settings.head_dim, settings.state), jnp.float32),
        zeros((layers, room.rows, settings.conv, settings.conv_width), jnp.float32),
    )


def block(x: Float[Array, "B T H"], place: Place, state: State, workspace):
    """Mamba 2 and its residual: x, the state and the workspace, which is attention's."""
    y, state, workspace = mix(_inputs(place, place.read(x)), place, state, workspace)
    return add_product(x, y, place.weights.out, place, "attention", None), state, workspace


def mix(projected: Float[Array, "B T I"], place: Place, state: State, workspace):
    """What the output projection reads, [B, T, inner], the state and the workspace."""
    y, updated = _mixed(projected, place, state)
    if place.updates is None:
        return y, updated, workspace
    place.updates["projected"] = projected
    return y, state, workspace


def replay(updates: Mapping[str, jax.Array], place: Place, state: State) -> State:
    """The state after tokens whose updates of each layer `mix` has put into place.updates."""
    return each_layer(
        lambda own, place, state: _mixed(own["projected"], place, state)[1], updates, place, state
    )


def phases(settings: Mamba2) -> tuple[Product, Mixing, Product]:
    """The parts of `block` that measure/profile.py times."""
    return (
        Product("mamba2 inputs", ("inputs",), _inputs),
        Mixing("mamba2", settings.input_rows, mix),
        output_product("mamba2 output", "out", settings.inner),
    )


def _inputs(place: Place, x: Float[Array, "B T H"]) -> Float[Array, "B T I"]:
    return joined_product(x, (place.weights.inputs,), place, place.weights.norm)


def _mixed(projected: jax.Array, place: Place, state: State) -> tuple[Float[Array, "B T inner"], State]:
    w, sizes = place.weights, place.settings
    groups = sizes.groups * w.decay.shape[-1] // sizes.heads  # that this device has
    y, s, tail = mamba2(
        projected, state.s, state.tail, place.positions, place.index, groups=groups,
        conv=w.conv_weights, conv_bias=w.conv_bias, decay=w.decay, dt=w.dt, skip=w.skip, norm=w.group_norm,
        eps=place.eps,
    )  # fmt: skip
    return y, state.replace(s=s, tail=tail)
