"""What comes after both halves of a layer: the token's vector for this layer, and a scale (Gemma 4).

    s (x + norm(W_proj gelu(W_gate x) * e)),   e: the token's vector for this layer (network/layer_vectors.py)

A layer may have one without the other.
"""

import dataclasses

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from bonsai_jax.network.kinds.phases import Product
from bonsai_jax.network.kinds.place import Place
from bonsai_jax.weights.placement import Runs
from bonsai_jax.weights.specs import Spec
from pallas_kernels import LayerStack, matmul, serializable
from pallas_kernels.activations import GELU_TANH

PRODUCTS = ()  # of this, fused launches compute the scale alone
FUSED = ("scale",)
SITES = ()


@dataclasses.dataclass(frozen=True)
class LayerOutput:
    """What comes after both halves of a layer.

    vector  width of a token's vector for the layer; 0: there is none
    """

    vector: int = 0

    kind = "layer_output"
    scales = 1  # numbers by which a layer's output is multiplied

    @property
    def vectors(self) -> int:
        """Vectors that a token has for the layer."""
        return 1 if self.vector else 0

    def for_device(self, parts: int) -> "LayerOutput":
        return self

    def runs(self, axis: str, parts: int) -> Runs:
        raise NotImplementedError("no axis of its arrays is split: each device has them whole")

    def refuses_split(self, parts: int) -> str | None:
        return None


TENSORS = {
    spec.field: spec
    for spec in (
        Spec("gate", "inp_gate.weight", "per_layer_input_gate.weight", ("vector", "hidden")),
        Spec("proj", "proj.weight", "per_layer_projection.weight", ("hidden", "vector")),
        Spec("post_norm", "post_norm.weight", "post_per_layer_input_norm.weight", ("vectors", "hidden"),
             plain=True, gguf_shape=("hidden",), huggingface_shape=("hidden",)),
        Spec("scale", "layer_output_scale.weight", "layer_scalar", ("scales",)),
    )
}  # fmt: skip


@serializable
class Weights(struct.PyTreeNode):
    """Weights of the layers of a group.

    gate, proj, post_norm  of a token's vector; all three or none
    scale   by which the stream is multiplied
    """

    gate: LayerStack | None = None
    proj: LayerStack | None = None
    post_norm: Float[Array, "L H"] | None = None
    scale: Float[Array, "L 1"] | None = None


def block(x: Float[Array, "B T H"], place: Place, state: None, workspace):
    """The layer's output: x; no state, and the workspace as it is."""
    w = place.weights
    if w.gate is not None:
        assert place.layer_vectors is not None
        own = place.layer_vectors[:, :, place.index]  # all layers have one: a layer's number is its index
        x = x + place.norm(_from_vector(place, x, own), w.post_norm)
    return (x if w.scale is None else x * w.scale[place.index]), state, workspace


def phases(settings: LayerOutput) -> tuple[Product, ...]:
    """The parts of `block` that measure/profile.py times."""

    def run(place: Place, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        return _from_vector(place, x, jnp.ones((*x.shape[:2], settings.vector)))

    return (Product("token's vector", ("gate", "proj"), run),) if settings.vector else ()


def _from_vector(place: Place, x: Float[Array, "B T H"], e: Float[Array, "B T P"]) -> Float[Array, "B T H"]:
    """W_proj gelu(W_gate x) * e."""
    gate = matmul(x, place.weights.gate, place.index)
    return matmul(GELU_TANH(gate, e), place.weights.proj, place.index)
