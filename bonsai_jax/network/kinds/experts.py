"""Mixture of experts (Shazeer et al. 2017), which mixes the channels of each token (pallas_kernels/experts).

    x + sum of w_e W_down,e act(W_gate,e n, W_up,e n) over the chosen experts e,  n = norm(x)
    w, chosen = route(softmax(W_router n))

Over a mesh each device has some of the experts, whose part of the sum it adds. Padding chooses none.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from bonsai_jax.network.kinds.phases import Product
from bonsai_jax.network.kinds.place import Place, add, rounds
from bonsai_jax.weights.placement import Runs, even_runs
from bonsai_jax.weights.specs import Spec
from pallas_kernels import (
    LayerStack,
    experts_ffn,
    experts_gated,
    experts_matmul,
    matmul,
    route,
    serializable,
)
from pallas_kernels.activations import SILU, Activation

PRODUCTS = ("gate", "up", "down")  # arrays that fused launches multiply with (network/fused.py)
FUSED = ("count", "used", "ffn", "normalized", "activation", "norm", "router")
SITES = ("router", "experts", "expert_weights", "hidden", "mlp")


@dataclasses.dataclass(frozen=True)
class Experts:
    """A layer's experts.

    count       how many there are
    used        how many each token uses, the likeliest
    ffn         width of the hidden vector of each
    normalized  whether the weights of those used are divided by their sum
    activation  of gate and up (pallas_kernels/activations.py)
    """

    count: int
    used: int
    ffn: int
    normalized: bool = True
    activation: Activation = SILU

    kind = "experts"

    def __post_init__(self):
        if not 1 <= self.used <= self.count:
            raise ValueError(f"model config: {self.used} of {self.count} experts are used for a token")

    def for_device(self, parts: int) -> "Experts":
        return self  # a token chooses among all of them

    def runs(self, axis: str, parts: int) -> Runs:
        """Which experts each device has."""
        return even_runs(self.count, parts)

    def refuses_split(self, parts: int) -> str | None:
        """Why `parts` devices cannot share its experts, or None."""
        return f"{self.count} experts do not split evenly" if self.count % parts else None

    def share_read(self, tokens: int) -> float:
        """The share of a layer's experts that so many tokens use, were all equally likely."""
        return 1 - (1 - self.used / self.count) ** tokens


TENSORS = {
    spec.field: spec
    for spec in (
        Spec("norm", "ffn_norm.weight", "post_attention_layernorm.weight", ("hidden",)),
        Spec("router", "ffn_gate_inp.weight", "mlp.gate.weight", ("count", "hidden")),
        Spec("gate", "ffn_gate_exps.weight", "mlp.experts.{}.gate_proj.weight", ("count", "ffn", "hidden"),
             ("experts", None, None), half_of="up"),
        Spec("up", "ffn_up_exps.weight", "mlp.experts.{}.up_proj.weight", ("count", "ffn", "hidden"),
             ("experts", None, None), half_of="gate"),
        Spec("down", "ffn_down_exps.weight", "mlp.experts.{}.down_proj.weight", ("count", "hidden", "ffn"),
             ("experts", None, None)),
    )
}  # fmt: skip


@serializable
class Weights(struct.PyTreeNode):
    """Weights of the layers of a group; gate, up and down are stacked over experts too."""

    norm: Float[Array, "L H"]
    router: LayerStack
    gate: LayerStack
    up: LayerStack
    down: LayerStack


def block(x: Float[Array, "B T H"], place: Place, state: None, workspace):
    """A mixture of experts and its residual: x; no state, and the workspace as it is."""
    w, sizes = place.weights, place.settings
    n = place.norm(place.read(x), w.norm)
    router = place.tapped("router", jax.nn.softmax(matmul(n, w.router, place.index), axis=-1))
    weights, chosen = route(router, sizes.used, normalized=sizes.normalized)
    chosen = place.tapped("experts", chosen)
    weights = place.tapped("expert_weights", weights)
    own = place.positions[..., None] >= 0
    if place.axis is not None:
        count = sizes.count // jax.lax.axis_size(place.axis)
        chosen = chosen - jax.lax.axis_index(place.axis) * count
        own &= (chosen >= 0) & (chosen < count)
    chosen = jnp.where(own, chosen, -1)
    gate = {"activation": sizes.activation}
    if "hidden" in place.taps:
        hidden = place.tapped("hidden", experts_gated(n, w.gate, w.up, chosen, place.index, **gate))
        y = experts_matmul(hidden, w.down, chosen, weights, place.index)
    else:
        y = experts_ffn(n, w.gate, w.up, w.down, chosen, weights, place.index, **gate)
    return add(x, y, rounds(x, w.down), place, "mlp"), state, workspace


def phases(settings: Experts) -> tuple[Product, Product]:
    """The parts of `block` that measure/profile.py times."""

    def products(place: Place, x: Float[Array, "B T H"]):
        """Each token's experts are others than its neighbours', and than the layer's before."""
        token = jnp.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], 1)
        stride = max(1, settings.count // settings.used)
        chosen = (place.index + token + stride * jnp.arange(settings.used)) % settings.count
        weights = jnp.full(chosen.shape, 1 / settings.used)
        own, gate = place.weights, {"activation": settings.activation}
        hidden = experts_gated(x, own.gate, own.up, chosen, place.index, **gate)
        return experts_matmul(hidden, own.down, chosen, weights, place.index)

    return (
        Product("router", ("router",), lambda place, x: matmul(x, place.weights.router, place.index)),
        Product(
            "experts", ("gate", "up", "down"), products, share_read=settings.share_read, each=settings.used
        ),
    )
