"""Gated short convolution (LFM2), which mixes each token with the few before it.

    x + W_out (c * conv(b * u)),   [b; c; u] = W_in norm(x)

conv is a causal depthwise convolution (pallas_kernels/causal_conv.py). Over a mesh each device has some of
the channels.
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
from pallas_kernels import LayerStack, causal_conv, serializable
from pallas_kernels.zeros import zeros

PRODUCTS = None  # no fused launch computes it
SITES = ()  # only what it adds to x, "attention"
ADAPTED = ("inputs", "out")  # matrices that adapters change (network/adapter.py)


@dataclasses.dataclass(frozen=True)
class ShortConv:
    """Sizes of a layer's short convolution.

    width  channels of b, c and u
    conv   tokens that the convolution sees, the newest among them
    """

    width: int
    conv: int

    kind = "short_conv"

    def __post_init__(self):
        if self.width <= 0:
            raise ValueError(f"model config: a convolution of {self.width} channels; it must have some")
        if self.conv < 2:
            raise ValueError(f"model config: the convolution sees {self.conv} tokens; supported: from 2 on")

    @property
    def input_rows(self) -> int:
        """Outputs of W_in: b, c and u."""
        return 3 * self.width

    @property
    def output_width(self) -> int:
        """Inputs of W_out."""
        return self.width

    def for_device(self, parts: int) -> "ShortConv":
        return dataclasses.replace(self, width=self.width // parts)

    def runs(self, axis: str, parts: int) -> Runs:
        """Which part of a logical axis each device has.

        axis  "channels": one number for each; "inputs": the rows of W_in, each device's b, c and u
        """
        if axis == "channels":
            return even_runs(self.width, parts)
        run = self.width // parts
        starts = tuple(tuple(part * self.width + i * run for part in range(3)) for i in range(parts))
        return starts, (run, run, run)

    def refuses_split(self, parts: int) -> str | None:
        """Why `parts` devices cannot share its channels, or None."""
        return f"{self.width} channels do not split evenly" if self.width % parts else None

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
        return 4 * self.conv * self.width

    def bytes_read(self, run: RunConfig, depth: int) -> int:
        """Bytes that a decode step reads and writes."""
        return 2 * self.bytes_per_row(run)

    def operations(self, depth: int, tokens: int) -> int:
        """Operations for so many tokens, projections not counted."""
        return 2 * (self.conv + 1) * tokens * self.width

    def scratch_bytes(self, run: RunConfig) -> int:
        return 0

    def copied_bytes(self, run: RunConfig) -> int:
        """Bytes of one sequence that steps work on in a copy (State.taken)."""
        return self.bytes_per_row(run)


TENSORS = {
    spec.field: spec
    for spec in (
        Spec("norm", "attn_norm.weight", "operator_norm.weight", ("hidden",)),
        Spec("inputs", "shortconv.in_proj.weight", "conv.in_proj.weight", ("input_rows", "hidden"),
             ("inputs", None)),
        Spec("conv_weights", "shortconv.conv.weight", "conv.conv.weight", ("width", "conv"),
             ("channels", None), plain=True, huggingface_shape=("width", 1, "conv")),
        Spec("out", "shortconv.out_proj.weight", "conv.out_proj.weight", ("hidden", "width"),
             (None, "channels")),
    )
}  # fmt: skip


@serializable
class Weights(struct.PyTreeNode):
    """Weights of the layers of a group.

    inputs        makes b, c and u of the normed input
    conv_weights  of each channel, for the oldest token first
    """

    norm: Float[Array, "L H"]
    inputs: LayerStack
    conv_weights: Float[Array, "L C W"]
    out: LayerStack


@serializable
class State(states.State, struct.PyTreeNode):
    """What the layers of a group remember of each sequence. A sequence that reads its token at position 0
    starts from nothing, whatever is stored.

    tail   float32 [layers, rows, conv, channels]: b * u of the last tokens, that at position p in slot
           p % conv
    """

    tail: Float[Array, "L B W C"]
    impl: str = struct.field(pytree_node=False, default="reference")
    prefill_impl: str = struct.field(pytree_node=False, default="reference")


AXES = {"tail": ("layers", "rows", None, "channels")}


def empty(settings: ShortConv, layers: int, run: RunConfig, room: Room) -> State:
    """The state of sequences that have read nothing."""
    return State(zeros((layers, room.rows, settings.conv, settings.width), jnp.float32))


def block(x: Float[Array, "B T H"], place: Place, state: State, workspace):
    """A short convolution and its residual: x, the state and the workspace, which is attention's."""
    y, state, workspace = mix(_inputs(place, place.read(x)), place, state, workspace)
    return add_product(x, y, place.weights.out, place, "attention", None), state, workspace


def mix(bcu: Float[Array, "B T 3*C"], place: Place, state: State, workspace):
    """What the output projection reads, [B, T, C], the state and the workspace."""
    y, updated = _mixed(bcu, place, state)
    if place.updates is None:
        return y, updated, workspace
    place.updates["bcu"] = bcu
    return y, state, workspace


def replay(updates: Mapping[str, jax.Array], place: Place, state: State) -> State:
    """The state after tokens whose updates of each layer `mix` has put into place.updates."""
    return each_layer(lambda own, place, state: _mixed(own["bcu"], place, state)[1], updates, place, state)


def phases(settings: ShortConv) -> tuple[Product, Mixing, Product]:
    """The parts of `block` that measure/profile.py times."""
    return (
        Product("conv inputs", ("inputs",), _inputs),
        Mixing("short conv", settings.input_rows, mix),
        output_product("conv output", "out", settings.width),
    )


def _inputs(place: Place, x: Float[Array, "B T H"]) -> Float[Array, "B T 3*C"]:
    return joined_product(x, (place.weights.inputs,), place, place.weights.norm)


def _mixed(bcu: jax.Array, place: Place, state: State) -> tuple[Float[Array, "B T C"], State]:
    b, c, u = jnp.split(bcu, 3, axis=-1)
    y, tail = causal_conv(b * u, state.tail, place.positions, place.index, weights=place.weights.conv_weights)
    return c * y, state.replace(tail=tail)
