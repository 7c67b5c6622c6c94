"""Feed-forward without a gate (Vaswani et al. 2017), which mixes the channels of each token.

x + W_down act(W_up n),  n = norm(x);   squared ReLU: act(u) = max(u, 0)^2 (So et al. 2021)
"""

import dataclasses

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from bonsai_jax.network.kinds.phases import Product, output_product
from bonsai_jax.network.kinds.place import Place, add_product
from bonsai_jax.weights.placement import Runs, even_runs
from bonsai_jax.weights.specs import Spec
from pallas_kernels import LayerStack, matmul, serializable
from pallas_kernels.activations import RELU_SQUARED, Activation

PRODUCTS = None  # fused launches compute gated feed-forwards only
SITES = ("hidden", "mlp")
ADAPTED = ("up", "down")  # matrices that adapters change (network/adapter.py)


@dataclasses.dataclass(frozen=True)
class PlainMlp:
    """A layer's feed-forward.

    ffn         width of its hidden vector
    activation  of up alone: the formula of pallas_kernels/activations.py with 1 for the other half
    constants   of the activation, for each layer that has these settings, in order; (): those of its own
    """

    ffn: int
    activation: Activation = RELU_SQUARED
    constants: tuple[tuple[float, ...], ...] = ()

    kind = "plain_mlp"

    def __post_init__(self):
        if self.ffn <= 0:
            raise ValueError(f"model config: ffn is {self.ffn}; it must be positive")

    def for_device(self, parts: int) -> "PlainMlp":
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
        Spec("up", "ffn_up.weight", "mlp.up_proj.weight", ("ffn", "hidden"), ("ffn", None)),
        Spec("down", "ffn_down.weight", "mlp.down_proj.weight", ("hidden", "ffn"), (None, "ffn")),
    )
}


@serializable
class Weights(struct.PyTreeNode):
    """Weights of the layers of a group."""

    norm: Float[Array, "L H"]
    up: LayerStack
    down: LayerStack


def block(x: Float[Array, "B T H"], place: Place, state: None, workspace):
    """A feed-forward and its residual: x; no state, and the workspace as it is."""
    hidden = place.tapped("hidden", _hidden(place, place.read(x)))
    return add_product(x, hidden, place.weights.down, place, "mlp", None), state, workspace


def phases(settings: PlainMlp) -> tuple[Product, Product]:
    """The parts of `block` that measure/profile.py times."""
    return Product("up", ("up",), _hidden), output_product("down", "down", settings.ffn)


def _hidden(place: Place, x: Float[Array, "B T H"]) -> Float[Array, "B T F"]:
    w, settings = place.weights, place.settings
    constants = tuple(jnp.array(settings.constants)[place.index]) if settings.constants else None
    y = matmul(x, w.up, place.index, **place.gamma(w.norm))
    return settings.activation(y, 1.0, constants=constants)
