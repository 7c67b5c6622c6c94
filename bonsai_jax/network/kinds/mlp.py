"""Gated feed-forward (Shazeer 2020), which mixes the channels of each token.

x + norm(W_down norm(act(W_gate n, W_up n))),  n = norm(x);   SwiGLU: act(g, u) = silu(g) u
"""

import dataclasses

from flax import struct
from jaxtyping import Array, Float

from bonsai_jax.network.kinds.phases import Product, output_product
from bonsai_jax.network.kinds.place import Place, add_product
from bonsai_jax.weights.placement import Runs, even_runs
from bonsai_jax.weights.specs import Spec
from pallas_kernels import LayerStack, gated, serializable
from pallas_kernels.activations import SILU, Activation

PRODUCTS = ("gate", "up", "down")  # arrays that fused launches multiply with (network/fused.py)
FUSED = ("ffn", "activation", "norm", "post_norm")
SITES = ("hidden", "mlp")
ADAPTED = ("gate", "up", "down")  # matrices that adapters change (network/adapter.py)


@dataclasses.dataclass(frozen=True)
class Mlp:
    """A layer's feed-forward.

    ffn         width of its hidden vector
    activation  of gate and up (pallas_kernels/activations.py)
    """

    ffn: int
    activation: Activation = SILU

    kind = "mlp"

    def __post_init__(self):
        if self.ffn <= 0:
            raise ValueError(f"model config: ffn is {self.ffn}; it must be positive")

    def for_device(self, parts: int) -> "Mlp":
        return self  # nothing that is traced depends on its width

    def runs(self, axis: str, parts: int) -> Runs:
        """Which part of its hidden vector each device has."""
        return even_runs(self.ffn, parts)

    def refuses_split(self, parts: int) -> str | None:
        """Why `parts` devices cannot share its hidden vector, or None."""
        return f"a feed-forward of {self.ffn} does not split evenly" if self.ffn % parts else None


TENSORS = {
    spec.field: spec
    for spec in (
        Spec("norm", "ffn_norm.weight", "post_attention_layernorm.weight", ("hidden",)),
        Spec(
            "gate", "ffn_gate.weight", "mlp.gate_proj.weight", ("ffn", "hidden"), ("ffn", None), half_of="up"
        ),
        Spec("up", "ffn_up.weight", "mlp.up_proj.weight", ("ffn", "hidden"), ("ffn", None), half_of="gate"),
        Spec("down", "ffn_down.weight", "mlp.down_proj.weight", ("hidden", "ffn"), (None, "ffn")),
        Spec("sub_norm", "ffn_sub_norm.weight", "mlp.ffn_sub_norm.weight", ("ffn",), ("ffn",)),
        Spec("post_norm", "post_ffw_norm.weight", "post_feedforward_layernorm.weight", ("hidden",)),
    )
}


@serializable
class Weights(struct.PyTreeNode):
    """Weights of the layers of a group.

    norm       of the input; None: it is not normed
    sub_norm   of the hidden vector
    post_norm  of what the layer adds to x
    """

    gate: LayerStack
    up: LayerStack
    down: LayerStack
    norm: Float[Array, "L H"] | None = None
    sub_norm: Float[Array, "L F"] | None = None
    post_norm: Float[Array, "L H"] | None = None


def block(x: Float[Array, "B T H"], place: Place, state: None, workspace):
    """A gated feed-forward and its residual: x; no state, and the workspace as it is."""
    w = place.weights
    hidden = place.tapped("hidden", _hidden(place, place.read(x)))
    return add_product(x, hidden, w.down, place, "mlp", w.post_norm, w.sub_norm), state, workspace


def phases(settings: Mlp) -> tuple[Product, Product]:
    """The parts of `block` that measure/profile.py times."""
    return Product("gate and up", ("gate", "up"), _hidden), output_product("down", "down", settings.ffn)


def _hidden(place: Place, x: Float[Array, "B T H"]) -> Float[Array, "B T F"]:
    w, activation = place.weights, place.settings.activation
    return gated(x, w.gate, w.up, place.index, activation=activation, **place.gamma(w.norm))
