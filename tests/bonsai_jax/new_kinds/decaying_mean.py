"""A decaying mean, which mixes tokens through a state of fixed size.

x + W_out s,  s <- s / 2 + W_in norm(x),  one token after another
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from bonsai_jax.config import RunConfig
from bonsai_jax.network.kinds import state as states
from bonsai_jax.network.kinds.phases import Mixing, Product, output_product
from bonsai_jax.network.kinds.place import Place, add_product, each_layer
from bonsai_jax.network.kinds.state import Room
from bonsai_jax.weights.placement import Runs, even_runs
from bonsai_jax.weights.specs import Spec
from pallas_kernels import LayerStack, matmul, serializable

PRODUCTS = None
SITES = ()


@dataclasses.dataclass(frozen=True)
class DecayingMean:
    width: int

    kind = "decaying_mean"

    @property
    def output_width(self) -> int:
        return self.width

    def for_device(self, parts: int) -> "DecayingMean":
        return DecayingMean(self.width // parts)

    def runs(self, axis: str, parts: int) -> Runs:
        return even_runs(self.width, parts)

    def refuses_split(self, parts: int) -> str | None:
        return f"a mean of {self.width} does not split evenly" if self.width % parts else None

    def problems(self, run: RunConfig) -> tuple[()]:
        return ()

    def impls(self, run: RunConfig) -> tuple[()]:
        return ()

    def kernels(self, run: RunConfig) -> tuple[str, str]:
        return "reference", "reference"

    def bytes_per_token(self, run: RunConfig) -> int:
        return 0

    def bytes_per_row(self, run: RunConfig) -> int:
        return 4 * self.width

    def bytes_read(self, run: RunConfig, depth: int) -> int:
        return 2 * self.bytes_per_row(run)

    def operations(self, depth: int, tokens: int) -> int:
        return 2 * tokens * self.width

    def scratch_bytes(self, run: RunConfig) -> int:
        return 0

    def copied_bytes(self, run: RunConfig) -> int:
        return self.bytes_per_row(run)


TENSORS = {
    spec.field: spec
    for spec in (
        Spec("norm", "attn_norm.weight", None, ("hidden",)),
        Spec("input", "mean_in.weight", None, ("width", "hidden"), ("width", None)),
        Spec("output", "mean_out.weight", None, ("hidden", "width"), (None, "width")),
    )
}


@serializable
class Weights(struct.PyTreeNode):
    norm: Float[Array, "L H"]
    input: LayerStack
    output: LayerStack


@serializable
class State(states.State, struct.PyTreeNode):
    s: Float[Array, "L B W"]
    impl: str = struct.field(pytree_node=False, default="reference")
    prefill_impl: str = struct.field(pytree_node=False, default="reference")


AXES = {"s": ("layers", "rows", "width")}


def empty(settings: DecayingMean, layers: int, run: RunConfig, room: Room) -> State:
    return State(jnp.zeros((layers, room.rows, settings.width)))


def block(x: Float[Array, "B T H"], place: Place, state: State, workspace):
    y, state, workspace = mix(_inputs(place, x), place, state, workspace)
    return add_product(x, y, place.weights.output, place, "attention", None), state, workspace


def mix(values: Float[Array, "B T W"], place: Place, state: State, workspace):
    y, after = _mixed(values, place, state)
    if place.updates is None:
        return y, after, workspace
    place.updates["values"] = values
    return y, state, workspace


def replay(updates, place: Place, state: State) -> State:
    return each_layer(lambda own, place, state: _mixed(own["values"], place, state)[1], updates, place, state)


def phases(settings: DecayingMean):
    return (
        Product("mean input", ("input",), _inputs),
        Mixing("mean", settings.width, mix),
        output_product("mean output", "output", settings.width),
    )


def _inputs(place: Place, x: Float[Array, "B T H"]) -> Float[Array, "B T W"]:
    return matmul(x, place.weights.input, place.index, **place.gamma(place.weights.norm))


def _mixed(values, place: Place, state: State):
    def token(s, inputs):
        value, position = inputs
        after = jnp.where(position == 0, 0.0, s / 2) + value
        s = jnp.where(position < 0, s, after)
        return s, s

    inputs = jnp.moveaxis(values, 1, 0), place.positions.T[..., None]
    s, each = jax.lax.scan(token, state.s[place.index], inputs)
    return jnp.moveaxis(each, 0, 1), state.replace(s=state.s.at[place.index].set(s))
